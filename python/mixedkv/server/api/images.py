"""Reads and encodes the images in the messages of a request."""

from __future__ import annotations

from collections.abc import Sequence

from mixedkv.images import PromptImage
from mixedkv.images.pixels import read_data_url
from mixedkv.server.api.chat_message import Message
from mixedkv.server.api_error import bad_request
from mixedkv.server.state import ServerState

_MOST = 64  # of a request


def read_images(server: ServerState, messages: Sequence[Message]) -> list[PromptImage]:
    """Return the images of all messages, in order. Not for the event loop, since encoding takes time.

    Raises:
        ApiError: 400, the model takes no images, or an image cannot be read.
    """
    urls = [(i, url) for i, message in enumerate(messages) for url in message.images]
    if not urls:
        return []
    if server.projector is None:
        raise bad_request(
            f"messages.{urls[0][0]}.content: the model {server.model_name!r} sees no images: serve it with "
            f"--mmproj, or leave them out",
            "messages",
        )
    if len(urls) > _MOST:
        raise bad_request(f"messages: {len(urls)} images are more than {_MOST}: leave some out", "messages")
    images = []
    for i, url in urls:
        try:
            images.append(server.projector.read(read_data_url(url)))
        except ValueError as error:
            raise bad_request(f"messages.{i}.content: image_url: {error}", "messages") from None
    return images
