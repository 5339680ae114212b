"""Reads the images of a chat in the terminal, whose messages name files."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from mixedkv.images.projector import Projector
from mixedkv.images.prompt_image import PromptImage
from mixedkv.llama import Llama
from mixedkv.prompts.part import MARK

Message = Mapping[str, Any]


class ChatImages:
    """Reads the images of messages: a message may have `images`, paths of files.

    Args:
        encoder: file of the model's image encoder.

    Raises:
        ValueError: the encoder is of another model, or Pillow is not installed.
    """

    def __init__(self, llm: Llama, encoder: Path) -> None:
        self._projector = Projector(llm, encoder)

    def read(self, path: str) -> PromptImage:
        """Encode an image file.

        Raises:
            ValueError, OSError: it cannot be read, or is no image.
        """
        data = Path(path).expanduser().read_bytes()
        try:
            return self._projector.read(data)
        except ValueError as error:
            raise ValueError(f"{path}: {error}") from None

    def of(self, messages: Sequence[Message]) -> tuple[list[Message], list[PromptImage]]:
        """Return the messages with marks in place of their images, and the images."""
        images = [self.read(path) for message in messages for path in message.get("images", ())]
        return [_marked(message) for message in messages], images


def _marked(message: Message) -> Message:
    kept = {name: value for name, value in message.items() if name != "images"}
    return {**kept, "content": MARK * len(message.get("images", ())) + message["content"]}
