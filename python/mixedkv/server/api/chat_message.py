"""A message of a chat: OpenAI's fields, and our own."""

from __future__ import annotations

from functools import partial
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, model_validator

from mixedkv.images.picture import MARK
from mixedkv.server.api.fields import (
    LIST,
    MAX_MESSAGES,
    MAX_TOOLS,
    TEXT,
    TEXT_OR_LIST,
    FewMessages,
    Id,
    Model,
    Name,
    Text,
)
from mixedkv.server.unknown_fields import IGNORED

_IMAGES = ("image", "image_url", "input_image")
_MEDIA = ("image", "audio", "video", "file", "document")


def _check(content: Any, taken: tuple[str, ...]) -> Any:
    for part in content if isinstance(content, list) else ():
        kind = part.get("type") if isinstance(part, dict) else None
        if not isinstance(kind, str) or kind in taken:
            continue
        if kind.removeprefix("input_").startswith(_MEDIA):
            what = "texts and images only (no audio or files)" if taken else "texts only"
            raise ValueError(f"{kind[:40]}: this server takes {what} here: leave it out")
    return content


TextOnly = BeforeValidator(partial(_check, taken=()))
TextOrImages = BeforeValidator(partial(_check, taken=_IMAGES))


class TextPart(Model):
    type: Literal["text", "input_text", "output_text"]
    text: Text


class ImageURL(Model):
    url: Text
    detail: Name | None = Field(None, description=IGNORED)


class ImagePart(Model):
    type: Literal["image_url"]
    image_url: ImageURL


Part = Annotated[TextPart | ImagePart, Field(discriminator="type")]


class CalledFunction(Model):
    name: Name
    arguments: Text


class ToolCall(Model):
    id: Annotated[Name, Field(min_length=1)]
    type: Literal["function"] = "function"
    function: CalledFunction


class Message(Model):
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Annotated[
        Annotated[Annotated[Text, TEXT] | Annotated[list[Part], Field(fail_fast=True), LIST], TEXT_OR_LIST]
        | None,
        TextOrImages,
    ] = None
    name: Name | None = None
    refusal: Text | None = None
    message_id: Id | None = None
    # fields of answers that clients may send back in the next turn
    reasoning_content: Text | None = None
    audio: None = None
    function_call: None = None
    tool_calls: Annotated[list[ToolCall], Field(max_length=MAX_TOOLS, fail_fast=True)] | None = None
    tool_call_id: Name | None = Field(None, description="Of role tool: the call that it answers.")
    annotations: Annotated[list[Any], Field(max_length=0)] | None = None

    @property
    def text(self) -> str:
        """The message's text, with `images.MARK` in the place of each image."""
        if isinstance(self.content, list):
            return "".join(part.text if isinstance(part, TextPart) else MARK for part in self.content)
        return self.content or ""

    @property
    def images(self) -> list[str]:
        """The URLs of the message's images."""
        parts = self.content if isinstance(self.content, list) else ()
        return [part.image_url.url for part in parts if isinstance(part, ImagePart)]

    @model_validator(mode="after")
    def _only_users_show_images(self) -> Message:
        if self.role != "user" and self.images:
            raise ValueError(f"content: an image in a message of role {self.role}: send it as user")
        return self


Messages = Annotated[list[Message], Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True), FewMessages]
