"""Errors that a caller may want to tell from a plain ValueError."""

from __future__ import annotations


class UnsupportedModelError(ValueError):
    """The model, or the way its context is set up, cannot have the cache that was asked for."""


class InvalidModelFileError(ValueError):
    """The file is not a GGUF model that can be loaded: not GGUF, truncated, or damaged."""
