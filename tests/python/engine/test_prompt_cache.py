"""Prompts that begin alike are evaluated as far as they are new: in the context, and from the store."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from mixedkv.bundled.corpus import make_recall
from mixedkv.engine import PromptCache
from mixedkv.store import KVStore
from support.engine.conversations import open_llama

pytestmark = pytest.mark.full

RECALL = make_recall(3, 40)
OPTIONS: dict[str, Any] = {"max_tokens": 24, "temperature": 0}


SHAPE: dict[str, Any] = {"n_ctx": 4096, "n_seq_max": 8, "kv_unified": True}


def test_what_was_warmed_is_not_evaluated_again() -> None:
    document = RECALL.text
    with open_llama(**SHAPE) as llm, PromptCache(llm) as cache:
        warmed = cache.warm(document)
        assert (warmed.evaluated, warmed.text, warmed.tokens) == (warmed.prompt_tokens, "", ())
        answer = cache.generate(document + " The end is", **OPTIONS)
        assert answer.exact
        assert answer.tier == "context"
        assert answer.kv_reuse_ratio > 0.9
        assert 0 < answer.ttft_ms <= answer.total_ms
        assert 0 < len(answer.tokens) <= 24
        alone = cache.generate(document + " The end is", reuse=False, **OPTIONS)
        assert alone.kv_reuse_ratio == 0
        assert alone.text == answer.text


def test_a_batch_shares_what_its_prompts_have_in_common() -> None:
    with open_llama(**SHAPE) as llm, PromptCache(llm) as cache:
        cache.warm(RECALL.text)
        answers = cache.generate_batch([f"{RECALL.text} {i}. The" for i in range(3)], **OPTIONS)
        assert len(answers) == 3
        assert all(answer.kv_reuse_ratio > 0.9 for answer in answers)


def test_another_process_goes_on_from_the_store(tmp_path: Path) -> None:
    with open_llama(**SHAPE) as llm:
        with PromptCache(llm, KVStore(tmp_path)) as cache:
            first = cache.generate(RECALL.messages, **OPTIONS)
        with PromptCache(llm, KVStore(tmp_path)) as cache:  # the context is empty again
            second = cache.generate(RECALL.messages, **OPTIONS)
    assert first.kv_reuse_ratio == 0
    assert (second.tier, second.text) == ("disk", first.text)
    assert second.kv_reuse_ratio > 0.9


def test_a_wrong_prompt_of_a_batch_answers_none() -> None:
    with open_llama(**SHAPE) as llm, PromptCache(llm) as cache:
        with pytest.raises(ValueError, match="shorten"):
            cache.generate_batch(["The", "The " * 5000], **OPTIONS)
        assert cache.generate("The", **OPTIONS).tokens
