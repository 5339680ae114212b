"""Images in prompts: read and encoded by llama.cpp's multimodal library, and evaluated in any sequence."""

from __future__ import annotations

from mixedkv.images.picture import MARK, Picture, PromptImage, place
from mixedkv.images.projector import Projector

__all__ = ["MARK", "Picture", "Projector", "PromptImage", "place"]
