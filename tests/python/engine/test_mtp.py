"""Drafts of a model's own MTP layer: from tokens and hidden states that belong together."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mixedkv import Llama
from mixedkv.engine import Engine
from mixedkv.engine.draft.mtp_head import MtpHead
from mixedkv.engine.draft.speculation import StepTime
from mixedkv.engine.jobs.job import Job
from mixedkv.engine.sample.sampler import logits_row
from mixedkv.errors import UnsupportedModelError
from mixedkv.model.footprint import footprint, model_shape
from mixedkv.model.gguf_file import read_model_file
from support.models.mtp_models import FIRST, Reads, after, write_counting_model

pytestmark = pytest.mark.full

WINDOWS_FOR_ALL = True  # F16 rows for every sequence, whatever they take

Models = Callable[..., Path]

MIXED = "mixed:threshold=64,group=16"


@pytest.fixture(autouse=True)
def _drafts_cost_little(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever else this machine does."""
    monkeypatch.setattr(StepTime, "line", lambda _: (1.0, 0.01))


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    folder = tmp_path_factory.mktemp("mtp")

    def model(reads: Reads, kind: str = "glm4moe") -> Path:
        path = folder / f"{kind}-{reads}.gguf"
        return path if path.exists() else write_counting_model(path, reads, kind)

    return model


@contextmanager
def engine(path: Path, kv: str = "f16", parallel: int = 4, **options: Any) -> Iterator[Engine]:
    options = {"n_ctx": 2048, "n_batch": 64, "load_mtp": True, **options}
    with (
        Llama(path, kv=kv, n_seq_max=9, kv_unified=True, n_threads=1, verbose=False, **options) as llm,
        Engine(llm, parallel=parallel, speculation="mtp") as engine,
    ):
        yield engine


def prompt(first: int, n: int) -> list[int]:
    return [after(FIRST, first + 7 * i) for i in range(n)]


def ask(engine: Engine, prompts: list[list[int]], **options: Any) -> list[Any]:
    """The jobs of all answers, which run at a time and are checked."""
    options = {"max_tokens": 40, "temperature": 0, "speculation": None, **options}
    answers = [engine.submit(tokens, **options) for tokens in prompts]
    for tokens, answer in zip(prompts, answers, strict=True):
        answer.result()
        expected = [after(tokens[-1], 1 + i) for i in range(options["max_tokens"])]
        assert list(answer.job.tokens) == tokens + expected
    return [answer.job for answer in answers]


def drafted(engine: Engine, prompts: list[list[int]], **options: Any) -> tuple[int, int]:
    """How many tokens the layer drafted for all of these, and how many of them were right."""
    head = engine.speculation._model
    assert isinstance(head, MtpHead)
    draft, counts = head.draft, [0, 0]

    def watched(expected: list[tuple[Job, int]]) -> list[list[int]]:
        made = draft(expected)
        for (job, _), tokens in zip(expected, made, strict=True):
            right = [after(job.tokens[-1], 1 + i) for i in range(len(tokens))]
            counts[0] += len(tokens)
            counts[1] += sum(a == b for a, b in zip(tokens, right, strict=True))
        return made

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(head, "draft", watched)
        ask(engine, prompts, **options)
    return counts[0], counts[1]


@pytest.mark.parametrize("kv", ["f16", MIXED])
@pytest.mark.parametrize("reads", ["token", "state"])
def test_tokens_and_states_belong_together(models: Models, reads: Reads, kv: str) -> None:
    with engine(models(reads), kv) as it:
        for n in (1, 2, 17, 200):  # in one step, and in several
            n_drafted, n_right = drafted(it, [prompt(n, n)])
            assert n_right == n_drafted >= 20
        n_drafted, n_right = drafted(it, [prompt(i, 20 + 50 * i) for i in range(4)])  # at a time
        assert n_right == n_drafted >= 60


@pytest.mark.parametrize("reads", ["token", "state"])
def test_a_later_turn_goes_on(models: Models, reads: Reads) -> None:
    """Its prompt has rows already, of which no states are known."""
    with engine(models(reads), MIXED) as it:
        (job,) = ask(it, [prompt(3, 150)])
        later = [*job.tokens, *prompt(50, 30)]
        n_drafted, n_right = drafted(it, [later])
        assert n_right == n_drafted >= 20
        shorter = later[:100] + prompt(9, 11)  # from what another answer has
        n_drafted, n_right = drafted(it, [shorter])
        assert n_right == n_drafted >= 20
        n_drafted, n_right = drafted(it, [shorter])  # the very same
        assert n_right == n_drafted >= 20


@pytest.mark.parametrize("reads", ["token", "state"])
def test_latent_attention(models: Models, reads: Reads) -> None:
    with engine(models(reads, "deepseek2")) as it:
        n_drafted, n_right = drafted(it, [prompt(i, 20 + 50 * i) for i in range(4)])
        assert n_right == n_drafted >= 60


@pytest.mark.parametrize("kv", ["f16", MIXED])
@pytest.mark.parametrize("reads", ["token", "state"])
def test_a_hybrid_model(models: Models, reads: Reads, kv: str) -> None:
    """Gated delta nets, of whose states there are snapshots, and M-RoPE."""
    with engine(models(reads, "qwen35"), kv, n_rs_seq=8) as it:
        for prompts in ([prompt(3, 90)], [prompt(i, 20 + 10 * i) for i in range(4)]):
            n_drafted, n_right = drafted(it, prompts)
            assert n_right == n_drafted >= 20


@pytest.mark.parametrize("kind", ["glm4moe", "qwen35"])
def test_the_cache_is_that_of_the_layers_before(models: Models, kind: str) -> None:
    """As `footprint` says, and with rows that go from one `Llama` to another."""
    path, tokens = models("token", kind), prompt(3, 200)
    shape = model_shape(read_model_file(path))
    options: dict[str, Any] = {"kv": MIXED, "n_ctx": 512, "n_threads": 1, "verbose": False}
    with Llama(path, load_mtp=True, **options) as one, Llama(path, **options) as other:
        one.eval(tokens)
        other.kv.load(one.kv.export(tokens=tokens))
        logits = []
        for llm in (one, other):
            stats = llm.kv.stats(by_layer=True)
            assert [layer.il for layer in stats.layers or ()] == [layer.il for layer in shape.layers]
            assert stats.bytes_cold + stats.bytes_hot == footprint(shape, llm.kv.config, 512).bytes
            llm.eval([after(tokens[-1])])
            logits.append(logits_row(llm.ctx, -1, llm.n_vocab()).copy())
        assert np.array_equal(*logits)
        with pytest.raises(ValueError, match="the model has"):
            Llama(path, **{**options, "kv": f"mixed:layers={shape.n_layer}:q8_0"})


def test_a_layer_that_is_wrong_is_given_up(models: Models, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(StepTime, "line", lambda _: (1.0, 0.2))
    with engine(models("nothing")) as it:
        n_drafted, n_right = drafted(it, [prompt(3, 20)], max_tokens=200)
        assert n_right == 0
        assert n_drafted < 60


def test_an_answer_can_do_without(models: Models) -> None:
    with engine(models("token")) as it:
        assert drafted(it, [prompt(3, 20)], speculation="off") == (0, 0)
        assert drafted(it, [prompt(4, 20)])[1] >= 20


def test_when_cells_run_out(models: Models) -> None:
    """Old sequences of the layer make room, and so do the model's."""
    with engine(models("state"), n_ctx=256, n_batch=64) as it:
        for first in range(8):
            n_drafted, n_right = drafted(it, [prompt(first, 120), prompt(first + 90, 40)], max_tokens=20)
            assert n_right == n_drafted
        n_drafted, n_right = drafted(it, [prompt(77, 30)])
        assert n_right == n_drafted >= 20


def test_kept_with_the_text_when_the_middle_is_dropped(models: Models) -> None:
    with engine(models("token"), n_ctx=256, n_batch=64) as it:
        answer = it.submit(prompt(3, 200), max_tokens=300, temperature=0, overflow="slide")
        answer.result()
        assert answer.job.n_answer == 300
        assert it.speculation.n_accepted == it.speculation.n_drafted > 150


def test_engines_one_after_the_other(models: Models) -> None:
    """Each has a context of its own for the layer, freed with it."""
    options: dict[str, Any] = {"n_ctx": 512, "n_seq_max": 5, "kv_unified": True, "verbose": False}
    with Llama(models("state"), kv="f16", load_mtp=True, **options) as llm:
        for mode in ("mtp", "off", "mtp"):
            with Engine(llm, parallel=2, speculation=mode) as it:
                ask(it, [prompt(3, 30)])
                assert (it.speculation.n_accepted > 20) == (mode == "mtp")


def test_what_it_needs(models: Models, zoo_path: Callable[[str], Path]) -> None:
    with pytest.raises(UnsupportedModelError, match="load_mtp"):
        Llama(zoo_path("llama-64"), load_mtp=True, verbose=False)
    with pytest.raises(ValueError, match="load_mtp=True"), engine(models("token"), load_mtp=False):
        pass
    options: dict[str, Any] = {"n_ctx": 512, "n_seq_max": 5, "kv_unified": True, "verbose": False}
    with Llama(models("token"), load_mtp=True, **options) as llm:
        with pytest.raises(ValueError, match="leave draft_model out"):
            Engine(llm, parallel=2, speculation="mtp", draft_model=llm)
        with Engine(llm, parallel=2) as it, pytest.raises(ValueError, match="must be set on the engine"):
            it.submit("a", speculation="mtp")
