"""Models that give vectors or scores in place of text, as their files say."""

from __future__ import annotations

from mixedkv.model.gguf_file import ModelFile

_RANK = 4  # of llama_pooling_type


def ranks(file: ModelFile) -> bool:
    """Return whether a model only ranks: it scores how well two texts go together."""
    return int(file.get("pooling_type", 0)) == _RANK


def only_embeds(file: ModelFile) -> bool:
    """Return whether a model cannot generate text, as its attention is not causal or it only ranks."""
    kind = file.architecture
    is_encoder = "bert" in kind or kind == "gemma-embedding" or file.get("attention.causal", True) is False
    return is_encoder or ranks(file)
