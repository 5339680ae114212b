"""Images in prompts: read and encoded by llama.cpp's multimodal library, and evaluated in any sequence."""

from __future__ import annotations
