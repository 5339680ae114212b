"""The messages of a chat in the terminal, kept in a file."""

from __future__ import annotations

import base64
import json
import os
from pathlib import Path
from typing import Any

from mixedkv.atomic_write import write_atomically
from mixedkv.store.encryption import Cipher, PlainCipher
from mixedkv.store.entry_row import EntryError

_MESSAGES = "messages.jsonl"


class ChatHistory:
    """The messages, in a file that only its owner can read, one line each.

    Args:
        folder: folder of the file; None keeps nothing.
        new: forget the messages in the file.
        cipher: encrypts each line, if it has a key; plain lines of the file are then encrypted too.

    Raises:
        ValueError: the file is not one of chat messages, or is encrypted with another key.
    """

    def __init__(self, folder: Path | None, new: bool, cipher: Cipher | None = None) -> None:
        self.folder, self._cipher = folder, cipher or PlainCipher()
        self.encrypted_now = False  # it was plain text before it was opened with a key
        self.messages: list[dict[str, Any]] = []
        if folder is None:
            return
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        if new:
            self._file.unlink(missing_ok=True)
        elif self._file.exists():
            lines = self._file.read_text("utf-8").splitlines()
            self.messages = [self._message(i, line) for i, line in enumerate(lines)]
            if self._cipher.key_id and any('"role"' in line for line in lines):
                self.encrypted_now = True
                self.replace(self.messages)

    @property
    def _file(self) -> Path:
        assert self.folder is not None
        return self.folder / _MESSAGES

    def _message(self, i: int, line: str) -> dict[str, Any]:
        try:
            message = json.loads(line)
            if "sealed" in message:
                message = json.loads(self._unseal(i, base64.b64decode(message["sealed"])))
            if isinstance(message["role"], str) and isinstance(message["content"], str):
                return dict(message)
        except EntryError as error:
            raise ValueError(f"{self._file}: line {i + 1}: {error.args[0]}") from None
        except (ValueError, TypeError, KeyError, RecursionError):
            pass
        raise ValueError(f"{self._file}: a line of it is not a message: begin anew with --new")

    def _unseal(self, i: int, data: bytes) -> bytes:
        if not self._cipher.key_id:
            raise EntryError("key", "it is encrypted: give the key with --key")
        return self._cipher.unseal_alone(data, _context(i))

    def _line(self, i: int, message: dict[str, Any]) -> str:
        text = json.dumps(message)
        if self._cipher.key_id:
            sealed = self._cipher.seal_alone(text.encode(), _context(i))
            text = json.dumps({"sealed": base64.b64encode(sealed).decode()})
        return text + "\n"

    def add(self, *messages: dict[str, Any]) -> None:
        """Add the messages of a turn, in one write, so that a crash keeps all of them or none."""
        begin = len(self.messages)
        self.messages += messages
        if self.folder is None:
            return
        data = "".join(self._line(i, message) for i, message in enumerate(messages, begin)).encode()
        file = os.open(self._file, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        try:
            os.write(file, data)
        finally:
            os.close(file)

    def replace(self, messages: list[dict[str, Any]]) -> None:
        """Replace all messages by these."""
        self.messages = messages
        if self.folder is not None:
            text = "".join(self._line(i, message) for i, message in enumerate(messages))
            write_atomically(self._file, text, mode=0o600)


def _context(i: int) -> bytes:
    """Return the encryption context of a line: its number, so that lines cannot be reordered."""
    return f"chat message {i}".encode()
