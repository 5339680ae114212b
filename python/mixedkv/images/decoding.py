"""Decodes image files, large ones in a process that can be ended."""

from __future__ import annotations

import numpy as np

from mixedkv.images import pixels
from mixedkv.images.pixels import Pixels, n_pixels, read_pixels
from mixedkv.work.current import current
from mixedkv.work.processes import Task, processes

_SMALL_IMAGE = 1 << 18  # decoded where it is asked for, in a few milliseconds
_DECODE = Task(pixels.__file__, "pixels_in_bytes", seconds=10.0, n_bytes=1 << 30)


def decoded(file: bytes) -> Pixels:
    """Read an image file in a process that can be ended, unless it is small.

    Raises:
        ValueError: it is no image, or takes too much time or memory.
    """
    current().check()  # many take long, and so may the encoder
    if n_pixels(file) <= _SMALL_IMAGE:
        return read_pixels(file)
    fields, data = processes.call(_DECODE, {}, file)
    found: Pixels = np.frombuffer(data, np.uint8).reshape(fields["shape"])
    return found
