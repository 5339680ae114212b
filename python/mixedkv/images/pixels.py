"""Image files to pixels. They come from anybody, so a kept library in Python reads them, with limits."""

from __future__ import annotations

import base64
import binascii
import io
import re
from typing import Any

import numpy as np
import numpy.typing as npt

Pixels = npt.NDArray[np.uint8]

_MAX_PIXELS = 1 << 25
_MAX_RATIO = 100  # of its sides
_FORMATS = ("PNG", "JPEG", "WEBP", "GIF")
_DATA_URL = re.compile(r"data:image/[a-z.+-]{1,40};base64,", re.IGNORECASE)


def read_data_url(url: str) -> bytes:
    """Return the bytes of the file in a data: URL.

    Raises:
        ValueError: it is another kind of URL, or not in Base64.
    """
    match = _DATA_URL.match(url)
    if match is None:
        raise ValueError(
            "give the image itself, as data:image/png;base64,...: this server fetches nothing from elsewhere"
        )
    try:
        return base64.b64decode(url[match.end() :], validate=True)
    except (binascii.Error, ValueError):
        raise ValueError("what follows data:image/...;base64, is no Base64") from None


def n_pixels(data: bytes) -> int:
    """Return how many pixels an image file has, which its head says; 0 if it is no image."""
    from PIL import Image

    try:
        with Image.open(io.BytesIO(data), formats=_FORMATS) as image:
            return int(image.size[0] * image.size[1])
    except Exception:  # `read_pixels` says what is wrong
        return 0


def read_pixels(data: bytes) -> Pixels:
    """Read an image file: uint8 [height, width, 3], upright, what is transparent is white.

    Raises:
        ValueError: it is no image, or too large.
        ModuleNotFoundError: Pillow is not installed.
    """
    from PIL import Image, ImageOps

    try:
        with Image.open(io.BytesIO(data), formats=_FORMATS) as image:
            _check_size(*image.size)
            upright: Any = ImageOps.exif_transpose(image)
            if upright.has_transparency_data:
                layer = upright.convert("RGBA")
                upright = Image.alpha_composite(Image.new("RGBA", layer.size, "white"), layer)
            return np.ascontiguousarray(upright.convert("RGB"))
    except _TooLargeError as error:
        raise ValueError(str(error)) from None
    except Exception:  # whatever a decoder meets in what is not what it says
        raise ValueError(f"it cannot be read: use {', '.join(_FORMATS[:-1])} or {_FORMATS[-1]}") from None


def pixels_in_bytes(_: dict[str, Any], data: bytes) -> tuple[dict[str, Any], bytes]:
    """Read an image file as `read_pixels` does, in a process for such tasks."""
    pixels = read_pixels(data)
    return {"shape": pixels.shape}, pixels.tobytes()


class _TooLargeError(ValueError):
    pass


def _check_size(width: int, height: int) -> None:
    if width * height > _MAX_PIXELS or max(width, height) > _MAX_RATIO * min(width, height):
        raise _TooLargeError(
            f"{width} x {height} pixels: at most {_MAX_PIXELS} are taken, and one side at most "
            f"{_MAX_RATIO} times the other: make it smaller"
        )
