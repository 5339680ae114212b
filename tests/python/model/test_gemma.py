"""What is promised of a cache, once each on Gemma 3: prompts are longer than its windows of 512 tokens."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import llama_cpp
import numpy as np
import pytest

from mixedkv import Llama
from mixedkv.chunks import verify_correctness
from mixedkv.chunks.donors import DonorIndex
from mixedkv.engine import Engine, PromptCache, StoreConnector
from mixedkv.errors import UnsupportedModelError
from mixedkv.kv.block import KVBlock, LayerRows
from mixedkv.store import KVStore
from mixedkv_bench.harness.real_text import read_real_text
from mixedkv_split.client import SplitClient
from mixedkv_split.export import export
from mixedkv_split.head import Head
from support.servers import split_servers

pytestmark = [pytest.mark.nightly, pytest.mark.needs("real model")]

N_PROMPT = 700
OPTIONS: dict[str, Any] = {"kv": "mixed", "n_threads": 1, "n_threads_batch": 1, "verbose": False}


def texts(kind: str = "prose") -> Iterator[str]:
    text = read_real_text(kind).text
    for begin in range(10_000, len(text), 10_000):
        yield text[begin : begin + 10_000]


def tokens_of(llm: Llama, n: int = N_PROMPT) -> list[int]:
    return list(llm.tokenize(next(texts()).encode())[:n])


def next_logits(llm: Llama) -> np.ndarray:
    llm.eval([100])
    return np.ctypeslib.as_array(llama_cpp.llama_get_logits_ith(llm.ctx, -1), (llm.n_vocab(),)).copy()


def test_a_state_brings_back_the_same_bits(real_model_gemma_q4: Path) -> None:
    with Llama(real_model_gemma_q4, n_ctx=1024, **OPTIONS) as llm:
        llm.eval(tokens_of(llm))
        state = llm.save_state()
        first = next_logits(llm)
        llm.reset()
        llm.eval(tokens_of(llm)[:100])
        llm.load_state(state)
        assert np.array_equal(next_logits(llm), first)


def test_a_session_goes_on_from_the_store(real_model_gemma_q4: Path, tmp_path: Path) -> None:
    answers, cached = [], []
    for _ in range(2):
        with (
            Llama(real_model_gemma_q4, n_ctx=2048, n_seq_max=4, kv_unified=True, **OPTIONS) as llm,
            KVStore(tmp_path / "store") as store,
            Engine(llm, parallel=2, connector=StoreConnector(store)) as engine,
        ):
            answer = engine.submit(tokens_of(llm), max_tokens=16, temperature=0)
            answers.append(answer.text)
            cached.append(answer.job.n_cached)
    assert answers[0] == answers[1]
    assert cached[0] == 0
    assert cached[1] > 0.9 * N_PROMPT


def test_drafts_change_no_answer(real_model_gemma_q4: Path) -> None:
    """Of text that repeats itself, so that there is something to look up. Several tokens at once may be
    summed in another order: where two are about equally likely, an answer may part (decision 049).
    """
    with (
        Llama(real_model_gemma_q4, n_ctx=2048, n_seq_max=4, kv_unified=True, **OPTIONS) as llm,
        Engine(llm, parallel=2) as engine,
    ):
        tokens = tokens_of(llm, 300)
        prompt = [*tokens, *tokens[:250], *tokens[:60]]
        plain, drafted = (
            engine.submit(
                prompt, max_tokens=48, temperature=0, speculation=mode, reuse=False, n_logprobs=2
            ).result()
            for mode in ("off", "prompt-lookup")
        )
    pairs = list(zip(plain.logprobs, drafted.logprobs, strict=False))
    first = next((one for one, other in pairs if one.token != other.token), None)
    if first is not None:
        assert abs(np.subtract(*first.top["logprob"])) < 0.5
    else:
        assert drafted.text == plain.text


def test_streamed_layers_give_the_same_bits(real_model_gemma_q4: Path) -> None:
    found = []
    for options in ({"stream_mode": "resident"}, {"stream_layers": 6, "stream_mode": "prefetch"}):
        with Llama(real_model_gemma_q4, n_ctx=1024, **OPTIONS, **options) as llm:
            llm.eval(tokens_of(llm))
            found.append(next_logits(llm))
    assert np.array_equal(*found)


def test_both_halves_answer_as_the_whole_does(real_model_gemma_q4: Path, tmp_path: Path) -> None:
    parts = split_servers.split(real_model_gemma_q4, tmp_path)
    with Llama(real_model_gemma_q4, n_ctx=1024, **OPTIONS) as llm:
        prompt = tokens_of(llm)
        alone = split_servers.local_tokens(llm, prompt, 16)
    with (
        Head(parts.head, n_threads=1) as head,
        split_servers.running(parts.body, kv="mixed", n_ctx=1024) as server,
        SplitClient(head, server.address) as client,
        client.session() as session,
    ):
        assert list(session.generate_tokens(prompt, max_tokens=16, temperature=0)) == alone


def test_a_cloak_is_refused(real_model_gemma_q4: Path, tmp_path: Path) -> None:
    """Its norms behind attention and the feed-forward part are not turned along."""
    with pytest.raises(UnsupportedModelError, match=r"cannot be cloaked: what blk\.0\.\w+ does|norm"):
        export(real_model_gemma_q4, tmp_path / "head.gguf", tmp_path / "body.gguf", cloak=7)


@pytest.mark.parametrize("damaged", [False, True])
def test_passages_are_reused_and_checked(
    real_model_gemma_q4: Path, monkeypatch: pytest.MonkeyPatch, damaged: bool
) -> None:
    """Also where the scale of 32 elements of V of one row is a quarter too large, in a layer that slides."""
    read = DonorIndex.read

    def spoilt(layer: LayerRows) -> LayerRows:
        if layer.il != 13:
            return layer
        rows = layer.v.copy()
        rows[40, :2] = (rows[40, :2].view(np.float16) * np.float16(1.25)).view(np.uint8)
        return replace(layer, v=rows)

    def planted(self: DonorIndex, *place: Any) -> list[KVBlock] | None:
        first, *others = read(self, *place) or []
        groups = tuple(replace(group, layers=tuple(map(spoilt, group.layers))) for group in first.groups)
        return [replace(first, groups=groups), *others]

    options = {**OPTIONS, "kv": "mixed:cold=q8_0", "swa_full": True}
    first, second = (text[:1200] for _, text in zip(range(2), texts("code"), strict=False))
    with Llama(real_model_gemma_q4, n_ctx=1024, **options) as llm, KVStore(None) as store:
        cache = PromptCache(llm, store, reuse="chunks", repair="query", check=0.0)
        cache.warm([first, second])
        if damaged:
            monkeypatch.setattr(DonorIndex, "read", planted)
        report = verify_correctness(cache, [f"Two files.\n\n{second}\n\n{first}\n\nIn short:"], n_gen=2)
    print(report)
    assert report.ok is not damaged, str(report)
    assert len(report[0].damaged) == 2 * damaged  # one of each passage
    assert report.reuse_ratio > 0.3
