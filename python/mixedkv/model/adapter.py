"""LoRA adapters: what a file asks for that is not done."""

from __future__ import annotations

import contextlib
import os

from mixedkv.errors import InvalidModelFileError, UnsupportedModelError
from mixedkv.model.gguf_file import read_model_file

_INVOCATION = "adapter.alora.invocation_tokens"


def check_adapter(path: str | os.PathLike[str]) -> None:
    """Refuse an activated LoRA (aLoRA), which acts on the tokens behind certain ones only: an adapter here
    acts on all.

    Raises:
        UnsupportedModelError: it is one.
    """
    with contextlib.suppress(InvalidModelFileError):  # what loads it says so
        if tokens := read_model_file(path).metadata.get(_INVOCATION):
            raise UnsupportedModelError(
                f"lora: {os.fsdecode(path)} is an activated LoRA (aLoRA), which acts only behind its "
                f"invocation tokens {tokens}; here an adapter acts on all tokens, and the answers would be "
                f"others. Use a plain LoRA adapter of the model"
            )
