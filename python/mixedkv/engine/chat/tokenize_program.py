"""Tokenizes a text with the vocabulary of a model's file, in a process that can be ended.

`work/program.py` loads this file by its path.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numpy as np

from mixedkv import Llama
from mixedkv.engine.chat.text_tokenizer import TextTokenizer
from mixedkv.prompts import content_marks
from mixedkv.prompts.content_marks import ContentTokens


@lru_cache(maxsize=2)
def _tokenizer(model: str, content_tokens: ContentTokens) -> TextTokenizer:
    return TextTokenizer(Llama(model, vocab_only=True, verbose=False, content_tokens=content_tokens))


def tokenized(fields: dict[str, Any], data: bytes) -> tuple[dict[str, Any], bytes]:
    """Return the tokens of a text in UTF-8, as int32."""
    content_marks.begin_with(fields["first_mark"])
    tokenizer = _tokenizer(fields["model"], fields["content_tokens"])
    tokens = tokenizer.here(data.decode("utf-8"), start=fields["start"], special=fields["special"])
    return {}, np.array(tokens, np.int32).tobytes()
