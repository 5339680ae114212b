"""Commands in a chat, which are for the program instead of the model: /help, /undo and others."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

from mixedkv.cli.chat_history import ChatHistory
from mixedkv.llama import Llama

_COMMAND = re.compile(r"/([a-z]+|\?)(?:\s+(.+))?", re.DOTALL)  # "/etc/hosts is empty, why?" is a question
_ENDS = ("bye", "exit", "quit")
_ALSO = {"?": "help"}
_HELP = {
    "bye": "/bye           end the chat, as Ctrl-D does; /exit and /quit too",
    "clear": "/clear         forget the questions and answers so far",
    "help": "/help          list the commands; /? too",
    "image": "/image FILE    ask the next question about an image",
    "kv": "/kv            show what the KV cache holds, and in which types",
    "save": "/save FILE     write the chat to FILE.md or FILE.json",
    "stats": "/stats         say what the last answer took",
    "system": "/system TEXT   set the system message; without TEXT, show it",
    "undo": "/undo          take back the last question and its answer",
}


class ChatCommands:
    """The commands of one chat.

    Args:
        llm: the model that answers.
        history: the chat's messages, which /undo and /system change.
        last: returns a line about the last answer, "" before the first.
        read: reads an image file, and raises what is wrong with it; None if the model sees no images.
    """

    def __init__(
        self,
        llm: Llama,
        history: ChatHistory,
        last: Callable[[], str],
        read: Callable[[str], object] | None = None,
    ) -> None:
        self._llm, self._history, self._last, self._read = llm, history, last, read
        self._images: list[str] = []

    def take_images(self) -> dict[str, list[str]]:
        """Return the images of the next question as a field of its message, and forget them."""
        images, self._images = self._images, []
        return {"images": images} if images else {}

    @staticmethod
    def ends(line: str) -> bool:
        """Return whether a line ends the chat."""
        return line.startswith("/") and line[1:] in _ENDS

    def run(self, line: str) -> str | None:
        """Carry out a command and return its output; None if the line is a question."""
        found = _COMMAND.fullmatch(line)
        if found is None:
            return None
        name, text = _ALSO.get(found[1], found[1]), (found[2] or "").strip()
        if name not in _HELP:
            return f"there is no command /{name}: " + ", ".join(f"/{each}" for each in _HELP)
        if text and name not in ("image", "save", "system"):
            return f"/{name} takes nothing behind it"
        command: Callable[[str], str] = getattr(self, f"_{name}")
        return command(text)

    def _help(self, _text: str) -> str:
        return "\n".join(_HELP.values())

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
        self._forget()
        return f"{len(messages) - len(kept)} messages are forgotten"

    def _undo(self, _text: str) -> str:
        messages = self._history.messages
        asked = [i for i, each in enumerate(messages) if each["role"] == "user"]
        if not asked:
            return "there is no question to take back"
        question = messages[asked[-1]]["content"]
        self._history.replace(messages[: asked[-1]])
        self._forget()  # the stored chat continues exactly; a live one that is cut would not
        return f"taken back: {_shortened(question)}"

    def _forget(self) -> None:
        if self._read is None:  # an engine's sequences begin anew by themselves
            self._llm.reset()


def _shortened(text: str, most: int = 60) -> str:
    line = " ".join(text.split())
    return line if len(line) <= most else line[: most - 3] + "..."
