"""Prompts with images: evaluated as llama.cpp's own library does it, and shared and stored as others are."""

from __future__ import annotations

import queue
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mixedkv import Llama
from mixedkv.chunks.gate import last_logits
from mixedkv.engine import Chat
from mixedkv.engine.chat.tokenizer import Tokenizer
from mixedkv.engine.connectors.store_connector import StoreConnector
from mixedkv.engine.engine import Engine
from mixedkv.engine.jobs.job import Done, Job
from mixedkv.engine.sample.sampling import Sampling
from mixedkv.engine.schedule.request import Request
from mixedkv.errors import ContextLengthError, UnsupportedModelError
from mixedkv.images.projector import Projector
from mixedkv.images.prompt_image import PromptImage
from mixedkv.prompts.part import MARK
from mixedkv.store import KVStore
from support.cache.harness import rel_rms
from support.models.images import BEFORE, BEHIND, KINDS, logits_of_library, png
from support.models.zoo.projector import write_projector
from support.servers.server import end_of

pytestmark = [pytest.mark.full, pytest.mark.by_model]

WINDOWS_FOR_ALL = True  # F16 rows for every sequence, whatever they take

MIXED = "mixed:threshold=32,group=16"


class Seeing:
    """An engine on a model of the zoo with its projector."""

    def __init__(self, path: Path, folder: Path, kv: str, store: Path | None = None, **options: Any) -> None:
        shape = {"n_ctx": 512, "n_batch": 64, "n_seq_max": 4, "kv_unified": True, "n_threads": 1}
        self.llm = Llama(path, kv=kv, verbose=False, **{**shape, **options})
        self.mmproj = write_projector(KINDS[path.stem], self.llm.n_embd(), folder)
        self.projector = Projector(self.llm, self.mmproj, 1)
        connector = StoreConnector(KVStore(store)) if store is not None else None
        tokenizer = Tokenizer(self.llm, chat_format="chatml")
        self.engine = Engine(self.llm, parallel=2, connector=connector, tokenizer=tokenizer)

    def __enter__(self) -> Seeing:
        return self

    def __exit__(self, *_: object) -> None:
        self.engine.close()
        self.llm.close()

    def tokens(self, *parts: str | PromptImage) -> list[int]:
        out: list[int] = []
        for part in parts:
            is_text = isinstance(part, str)
            out += self.engine.tokenizer.tokenize(part, start=False) if is_text else part.tokens  # type: ignore
        return out

    def start(self, *parts: str | PromptImage, max_tokens: int = 1, **options: Any) -> tuple[Job, Any]:
        events: queue.Queue[Any] = queue.Queue()
        images = [part for part in parts if isinstance(part, PromptImage)]
        request = Request(
            prompt=self.tokens(*parts),
            max_tokens=max_tokens,
            sampling=Sampling(temperature=0),
            parts=[part for image in images for part in image.parts],
            **options,
        )
        (job,) = self.engine.prepare([request])
        job.deliver = events.put
        self.engine.submit_jobs([job])
        return job, events

    def ask(self, *parts: str | PromptImage, **options: Any) -> tuple[Job, Done]:
        job, events = self.start(*parts, **options)
        return job, end_of(events)

    def logits(self) -> np.ndarray:
        return self.engine.call(lambda: last_logits(self.llm)).result()


@pytest.fixture
def seeing(zoo_path: Callable[[str], Path], tmp_path: Path) -> Iterator[Callable[..., Seeing]]:
    opened: list[Seeing] = []

    def open_(name: str, kv: str = MIXED, **options: Any) -> Seeing:
        opened.append(Seeing(zoo_path(name), tmp_path, kv, **options))
        return opened[-1]

    yield open_
    for each in opened:
        each.__exit__(None, None, None)


def test_a_chat_with_an_image_is_submitted(seeing: Callable[..., Seeing]) -> None:
    case = seeing("llama-128")
    image = case.projector.read(png())
    chat = Chat(messages=[{"role": "user", "content": f"{MARK}What do you see?"}], images=[image])
    answer = case.engine.submit(chat, max_tokens=4, temperature=0)
    assert answer.result().reason == "length"
    assert answer.job.n_prompt > len(image.tokens)


@pytest.mark.parametrize("kv", ["f16", "q8_0", MIXED])
@pytest.mark.parametrize("name", KINDS)
def test_as_the_library_evaluates_it(
    seeing: Callable[..., Seeing], zoo_path: Callable[[str], Path], name: str, kv: str
) -> None:
    case = seeing(name, kv)
    job, _ = case.ask(BEFORE, case.projector.read(png()), BEHIND)
    got = case.logits()
    assert job.n_evaluated == job.n_prompt
    alone = Llama(zoo_path(name), kv=kv, n_ctx=512, n_threads=1, verbose=False)
    with alone:
        want = logits_of_library(alone, case.mmproj, png())
        other = logits_of_library(alone, case.mmproj, png(1)) if kv == "f16" else None
    assert rel_rms(got, want) < (0.05 if kv == MIXED else 0.02)  # where batches are cut differently
    if other is not None:
        assert rel_rms(other, want) > 0.01  # the image matters


@pytest.mark.parametrize("name", ["llama-128", "qwen2vl"])
def test_the_same_image_is_evaluated_once(seeing: Callable[..., Seeing], name: str) -> None:
    case = seeing(name, "f16")
    image, other = case.projector.read(png()), case.projector.read(png(1))
    case.ask(BEFORE, image, BEHIND)
    again, _ = case.ask(BEFORE, image, " Is it red?")
    in_front = len(case.tokens(BEFORE))
    assert again.exact
    assert again.n_cached == in_front + len(image.tokens) + 1  # and a blank
    elsewhere, _ = case.ask(BEFORE, other, BEHIND)
    start = image.tokens.index(next(token for token in image.tokens if token < 0))
    assert elsewhere.n_cached == in_front + start


@pytest.mark.parametrize("name", KINDS)
def test_from_the_store_after_a_restart(seeing: Callable[..., Seeing], tmp_path: Path, name: str) -> None:
    case = seeing(name, store=tmp_path / "store")
    image = case.projector.read(png())
    parts = (BEFORE, image, BEHIND, " And then tell me what else there is.")
    case.ask(*parts)
    want = case.logits()
    case.engine.close()
    later = seeing(name, store=tmp_path / "store")
    job, _ = later.ask(*parts)
    assert job.cached_tier in ("ram", "disk")
    assert job.n_cached == job.n_prompt - 1
    assert rel_rms(later.logits(), want) < 0.02


def test_beside_other_answers(seeing: Callable[..., Seeing]) -> None:
    case = seeing("gemma3", "f16")
    image = case.projector.read(png())
    alone, end = case.ask(BEFORE, image, BEHIND, max_tokens=8, reuse=False)
    _, talking = case.start("Tell me a story, a long one.", max_tokens=60)
    beside, other = case.ask(BEFORE, image, BEHIND, max_tokens=8, reuse=False)
    assert other.text == end.text
    assert beside.tokens == alone.tokens
    assert end_of(talking)


def test_several_images_and_one_twice(seeing: Callable[..., Seeing]) -> None:
    case = seeing("qwen2vl", "f16")
    one, two = case.projector.read(png()), case.projector.read(png(1, 80, 20))
    assert case.projector.read(png()) is one
    job, _ = case.ask(BEFORE, one, two, one, BEHIND)
    assert len(job.parts) == 3
    assert job.n_evaluated == job.n_prompt


def test_an_image_that_does_not_fit(seeing: Callable[..., Seeing]) -> None:
    case = seeing("llama-128", "f16", n_ctx=256)
    image = case.projector.read(png())
    with pytest.raises(ContextLengthError):
        case.ask(*[image] * 20, BEHIND)


def test_room_is_made_for_an_image(seeing: Callable[..., Seeing]) -> None:
    """Idle prefixes go, and a running answer gives way."""
    case = seeing("llama-128", "f16", n_ctx=256)
    _, talking = case.start("Tell me a story.", max_tokens=200, ignore_end=True)
    for seed in range(6):
        job, _ = case.ask(BEFORE, *[case.projector.read(png(seed))] * 5, BEHIND)
        assert job.evaluated
    assert end_of(talking).reason == "length"


def test_ids_without_their_image(seeing: Callable[..., Seeing]) -> None:
    case = seeing("llama-128", "f16")
    image, other = case.projector.read(png()), case.projector.read(png(1))
    tokens = case.tokens(BEFORE, image)
    for prompt, parts in (([*tokens, 5], other.parts), (tokens, image.parts)):
        with pytest.raises(ValueError, match="of a part that is not given, or ends with a part"):
            Job(Request(prompt=prompt, max_tokens=1, parts=parts))


def test_a_projector_of_another_model(
    seeing: Callable[..., Seeing], zoo_path: Callable[[str], Path], tmp_path: Path
) -> None:
    case = seeing("llama-128", "f16")
    for wrong in (write_projector("mlp", 128, tmp_path), zoo_path("llama-128")):
        with pytest.raises(UnsupportedModelError, match="image encoder"):
            Projector(case.llm, wrong)


@pytest.mark.parametrize("shape", [(1, 1), (1, 90), (90, 1), (3, 200), (700, 30)])
@pytest.mark.parametrize("name", KINDS)
def test_odd_sizes(seeing: Callable[..., Seeing], name: str, shape: tuple[int, int]) -> None:
    case = seeing(name, "f16")
    job, _ = case.ask(BEFORE, case.projector.read(png(0, *shape)), BEHIND)
    assert job.evaluated
