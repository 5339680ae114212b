"""The messages of a chat in the terminal, kept in a file, and commands for the program instead of the model:
/help, /undo and others.
"""

from __future__ import annotations

import base64
import json
import os
import re
from argparse import ArgumentTypeError
from collections.abc import Callable
from pathlib import Path
from typing import Any

from mixedkv.atomic_write import write_atomically
from mixedkv.cli.model import settable
from mixedkv.llama import Llama
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
        """Return a line of the chat's file: message `i` as JSON, encrypted if there is a key."""
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


_COMMAND = re.compile(r"/([a-z]+|\?)(?:\s+(.+))?", re.DOTALL)  # "/etc/hosts is empty, why?" is a question
_ENDS = ("bye", "exit", "quit")
_ENDS_BARE = ("exit", "quit")  # as in a shell, without the slash
_ALSO = {"?": "help", "retry": "regenerate"}
_MARK = '"""'
_HELP = {
    "bye": "/bye           end the chat, as Ctrl-D does; exit and quit too, with or without the slash",
    "clear": "/clear         forget the questions and answers so far",
    "help": "/help          list the commands; /? too",
    "image": "/image FILE    ask the next question about an image",
    "kv": "/kv            show what the KV cache holds, and in which types",
    "regenerate": "/regenerate    answer the last question again",
    "save": "/save FILE     write the chat to FILE.md or FILE.json",
    "set": "/set NAME X    set an option of the sampling, such as temperature; without NAME, list them",
    "stats": "/stats         say what the last answer took",
    "system": "/system TEXT   set the system message; without TEXT, show it",
    "undo": "/undo          take back the last question and its answer",
}
_HELP_END = f"{_MARK}            begins and ends a question of several lines"


class SeveralLines:
    """Joins the lines from one that begins with three quotation marks to one that ends with them."""

    def __init__(self) -> None:
        self._lines: list[str] = []
        self.is_open = False

    def add(self, line: str) -> str | None:
        """Return a whole question; None while its end is missing."""
        if not self.is_open:
            if not line.startswith(_MARK):
                return line
            line = line.removeprefix(_MARK)
            self._lines, self.is_open = [], True
        end = line.rstrip().endswith(_MARK)
        self._lines.append(line.rstrip().removesuffix(_MARK) if end else line)
        if not end:
            return None
        self.is_open = False
        return "\n".join(self._lines).strip()

    def drop(self) -> None:
        """Forget a question that has no end."""
        self.is_open = False


class ChatCommands:
    """The commands of one chat.

    Args:
        llm: the model that answers.
        history: the chat's messages, which /undo and /system change.
        last: returns a line about the last answer, "" before the first.
        read: reads an image file, and raises what is wrong with it; None if the model sees no images.
        options: those of the next answers, which /set changes.
    """

    def __init__(
        self,
        llm: Llama,
        history: ChatHistory,
        last: Callable[[], str],
        read: Callable[[str], object] | None = None,
        options: dict[str, Any] | None = None,
    ) -> None:
        self._llm, self._history, self._last, self._read = llm, history, last, read
        self._options = {} if options is None else options
        self._images: list[str] = []

    def take_images(self) -> dict[str, list[str]]:
        """Return the images of the next question as a field of its message, and forget them."""
        images, self._images = self._images, []
        return {"images": images} if images else {}

    @staticmethod
    def ends(line: str) -> bool:
        """Return whether a line ends the chat."""
        return line in _ENDS_BARE or (line.startswith("/") and line[1:] in _ENDS)

    def again(self, line: str) -> tuple[list[dict[str, Any]], dict[str, Any]] | None:
        """Return the messages before the last question, and the question, if a line asks for its answer
        again.
        """
        found = _COMMAND.fullmatch(line)
        if found is None or found[2] or _ALSO.get(found[1], found[1]) != "regenerate":
            return None
        messages = self._history.messages
        questions = [i for i, each in enumerate(messages) if each["role"] == "user"]
        return (messages[: questions[-1]], messages[questions[-1]]) if questions else None

    def run(self, line: str) -> str | None:
        """Carry out a command and return its output; None if the line is a question."""
        found = _COMMAND.fullmatch(line)
        if found is None:
            return None
        name, text = _ALSO.get(found[1], found[1]), (found[2] or "").strip()
        if name not in _HELP:
            return f"there is no command /{name}: " + ", ".join(f"/{each}" for each in _HELP)
        if text and name not in ("image", "save", "set", "system"):
            return f"/{name} takes nothing behind it"
        command: Callable[[str], str] = getattr(self, f"_{name}")
        return command(text)

    def _help(self, _text: str) -> str:
        return "\n".join([*_HELP.values(), _HELP_END])

    def _regenerate(self, _text: str) -> str:
        return "there is no question to answer again"

    def _set(self, text: str) -> str:
        """Set an option as the command line has it; Ollama's `/set parameter NAME X` is the same."""
        name, _, value = text.removeprefix("parameter ").strip().partition(" ")
        name = name.removeprefix("--").replace("-", "_")
        if name == "system":
            return self._system(value.strip().strip('"'))
        if not name:
            return "\n".join(f"{each} {value}" for each, value in sorted(self._options.items()))
        try:
            name, read = settable(name)
            if not value:
                return f"{name} is {self._options.get(name, 'not set')}: /set {name} VALUE changes it"
            self._options[name] = read(value.strip())
        except (ValueError, ArgumentTypeError) as error:
            return f"not set: {error}"
        return f"{name} is {self._options[name]}"

    def _kv(self, _text: str) -> str:
        return str(self._llm.kv.stats())

    def _stats(self, _text: str) -> str:
        return self._last() or "nothing was answered yet"

    def _image(self, text: str) -> str:
        if self._read is None:
            return "this model sees no images: start the chat with its encoder, --mmproj FILE"
        path = str(Path(text).expanduser().absolute())
        try:
            self._read(path)
        except OSError as error:
            return f"not taken: {path}: {error.strerror}"
        except ValueError as error:
            return f"not taken: {error}"
        self._images.append(path)
        return f"the next question is about {path}"

    def _save(self, text: str) -> str:
        path = Path(text).expanduser()
        if path.suffix not in (".md", ".json"):
            return "/save wants a file that ends in .md or .json"
        messages = [{key: each[key] for key in ("role", "content")} for each in self._history.messages]
        if path.suffix == ".json":
            written = json.dumps(messages, indent=2, ensure_ascii=False) + "\n"
        else:
            written = "\n".join(f"## {each['role']}\n\n{each['content']}\n" for each in messages)
        try:
            with path.open("x", encoding="utf-8") as file:
                file.write(written)
        except FileExistsError:
            return f"{path} exists: give another name"
        except OSError as error:
            return f"not saved: {error}"
        return f"{len(messages)} messages are in {path}"

    def _system(self, text: str) -> str:
        messages = self._history.messages
        now = messages[0]["content"] if messages and messages[0]["role"] == "system" else ""
        if not text:
            return f"system message: {now}" if now else "there is no system message: /system TEXT sets one"
        rest = messages[1:] if now else messages
        self._history.replace([{"role": "system", "content": text}, *rest])
        return "the system message is set: the next question evaluates the chat anew"

    def _clear(self, _text: str) -> str:
        messages = self._history.messages
        kept = [each for each in messages[:1] if each["role"] == "system"]
        self._history.replace(kept)
        return f"{len(messages) - len(kept)} messages are forgotten"

    def _undo(self, _text: str) -> str:
        messages = self._history.messages
        questions = [i for i, each in enumerate(messages) if each["role"] == "user"]
        if not questions:
            return "there is no question to take back"
        question = messages[questions[-1]]["content"]
        self._history.replace(messages[: questions[-1]])
        return f"taken back: {_shortened(question)}"


def _shortened(text: str, most: int = 60) -> str:
    line = " ".join(text.split())
    return line if len(line) <= most else line[: most - 3] + "..."
