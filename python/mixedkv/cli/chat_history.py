"""The messages of a chat in the terminal, kept in a file."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from mixedkv.atomic_write import write_atomically

_MESSAGES = "messages.jsonl"


class ChatHistory:
    """The messages, in a file for their owner only: one line each.

    Raises:
        ValueError: the file is none of ours.
    """

    def __init__(self, folder: Path | None, new: bool) -> None:
        self.folder = folder
        self.messages: list[dict[str, Any]] = []
        if folder is None:
            return
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        if new:
            self._file.unlink(missing_ok=True)
        elif self._file.exists():
            self.messages = [self._message(line) for line in self._file.read_text("utf-8").splitlines()]

    @property
    def _file(self) -> Path:
        assert self.folder is not None
        return self.folder / _MESSAGES

    def _message(self, line: str) -> dict[str, Any]:
        try:
            message = json.loads(line)
            if isinstance(message["role"], str) and isinstance(message["content"], str):
                return dict(message)
        except (ValueError, TypeError, KeyError, RecursionError):
            pass
        raise ValueError(f"{self._file}: a line of it is not a message: begin anew with --new")

    def add(self, *messages: dict[str, Any]) -> None:
        """A turn is written in one go: a crash leaves it out or in."""
        self.messages += messages
        if self.folder is None:
            return
        data = "".join(json.dumps(message) + "\n" for message in messages).encode()
        file = os.open(self._file, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        try:
            os.write(file, data)
        finally:
            os.close(file)

    def replace(self, messages: list[dict[str, Any]]) -> None:
        """Keep these messages in place of all there were."""
        self.messages = messages
        if self.folder is not None:
            text = "".join(json.dumps(message) + "\n" for message in messages)
            write_atomically(self._file, text, mode=0o600)
