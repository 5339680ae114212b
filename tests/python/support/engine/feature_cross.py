"""Two features at a time on an engine: what it answers, beside an engine without the silent ones."""

from __future__ import annotations

import queue
import re
import warnings
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import llama_cpp
import numpy as np

from mixedkv import Llama
from mixedkv.constrain.constraint_text import Constraint
from mixedkv.engine import ChunkConnector, Engine, StoreConnector
from mixedkv.engine.batch.vector_job import VectorJob
from mixedkv.engine.embed.embedding_context import EmbeddingContext, InputSpan
from mixedkv.engine.jobs.drafter import Drafter
from mixedkv.engine.jobs.job import Job
from mixedkv.engine.sample.sampling import Sampling
from mixedkv.engine.schedule.request import Request
from mixedkv.images.projector import Projector
from mixedkv.model.gguf_file import n_layers, read_model_file
from mixedkv.store import KVStore
from mixedkv_split.export import export
from support.cache.crossing.subject import model_file
from support.cache.harness import prompt
from support.models import zoo
from support.models.adapters import write_adapter
from support.models.images import KINDS as PROJECTORS
from support.models.images import png
from support.models.zoo.projector import write_projector
from support.patience import PATIENCE
from support.servers.served_models import FLIP
from support.servers.server import end_of


@dataclass(frozen=True)
class Feature:
    """
    Args:
        what: in a line, for the page.
        group: of its group a context has one at most.
        silent: answers are those without it.
    """

    what: str
    group: str = ""
    silent: bool = False


FEATURES: dict[str, Feature] = {
    "uniform": Feature('`kv="q8_0"`', "cache"),
    "mixed": Feature('`kv="mixed"`', "cache"),
    "sparse": Feature('`kv="mixed:sparse=eps:0.2"`'),
    "sliding": Feature("a model with sliding windows (Gemma 4)", "model"),
    "hybrid": Feature("attention and recurrent layers (LFM2)", "model"),
    "recurrent": Feature("recurrent layers only (Mamba)", "model"),
    "latent": Feature("latent attention (DeepSeek-V2)", "model"),
    "mrope": Feature("M-RoPE (Qwen2-VL)", "model"),
    "streaming": Feature("`stream_layers`", silent=True),
    "lora": Feature("`lora_path`"),
    "split": Feature("the body of a split model"),
    "images": Feature("images in prompts"),
    "store": Feature("`StoreConnector`: KV that outlives the context", silent=True),
    "sessions": Feature("KV that is kept under a session's name", silent=True),
    "chunks": Feature('`ChunkConnector`, `reuse="chunks"`'),
    "drafts": Feature('`speculation="prompt-lookup"`', silent=True),
    "constraint": Feature("answers that follow a JSON schema or a regular expression"),
    "slide": Feature('`overflow="slide"`'),
    "states": Feature("`save_state` and `load_state` between two answers", silent=True),
    "embeddings": Feature("an embedding context on the same model", silent=True),
}
MODELS = {
    "sliding": "gemma4",
    "hybrid": "lfm2",
    "recurrent": "mamba",
    "latent": "deepseek2",
    "mrope": "qwen2vl",
}
NEVER = 2, 0, 1  # tokens that would end an answer
PATTERN = "[ab]{3}c[de]{2,9}"


NO_EFFECT = {
    "chunks": "no passage is reused",
    "store": "nothing is restored",
    "sessions": "nothing is restored",
    "slide": "it does not slide",
    "drafts": "nothing is drafted",
}


@dataclass
class Said:
    """
    Args:
        ids: of the answer, up to the first token that was not chosen by a margin.
        logits: of the first one.
        exact: as the job says.
    """

    ids: list[int]
    logits: np.ndarray
    exact: bool
    text: str

    def same(self, other: Said) -> bool:
        n = min(len(self.ids), len(other.ids))
        return self.ids[:n] == other.ids[:n] and self.distance(other) < FLIP

    def distance(self, other: Said) -> float:
        return float(np.abs(self.logits - other.logits).max() / other.logits.std())


class Guesses(Drafter):
    """The same three tokens again and again: what is drafted is nearly always wrong."""

    def __init__(self) -> None:
        super().__init__()

    def draft(self, most: int, certain: object = ()) -> tuple[list[int], float]:
        return [7, 8, 9][: max(0, most)], 0.98

    def take(self, token: int) -> None:
        pass


class Bench:
    """An engine with some features."""

    def __init__(self, features: frozenset[str], folder: Path, stack: ExitStack) -> None:
        self.has, self.folder = features, folder
        self.used: set[str] = set()  # of what could have had no effect
        name = next((MODELS[each] for each in features if each in MODELS), "deep")
        path = model_file(name, folder)
        options: dict[str, Any] = {
            "n_ctx": 256 if "slide" in features else 1024,
            "n_batch": 64,
            "n_ubatch": 32,
        }
        if "drafts" in features and features & {"hybrid", "recurrent"}:
            options["n_rs_seq"] = 4
        if "split" in features:
            path, head = folder / f"{name}-body.gguf", folder / f"{name}-head.gguf"
            if not path.exists():
                export(folder / f"{name}.gguf", head, path)
        if "lora" in features:
            options["lora_path"] = str(write_adapter(folder / f"{name}.lora", path, 1, size=0.3))
        if "streaming" in features:
            options |= {"stream_layers": n_layers(read_model_file(path)), "memory": "8GiB"}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            self.llm = stack.enter_context(
                Llama(path, kv=_kv(features), n_seq_max=4, kv_unified=True, n_threads=1, n_threads_batch=1,
                      swa_full="chunks" in features or "slide" in features, verbose=False, **options)
            )  # fmt: skip
            connector: Any = None
            if "chunks" in features:
                connector = ChunkConnector(
                    KVStore(None), chunk_size=32, repair="seam", check=0.0, max_kld=99.0
                )
            elif features & {"store", "sessions"}:
                connector = StoreConnector(KVStore(None))
            self.connector = connector
            self.engine = stack.enter_context(Engine(self.llm, parallel=2, connector=connector))
        self.projector = None
        if "images" in features:
            kind = PROJECTORS.get(name, "mlp")
            self.projector = Projector(self.llm, write_projector(kind, self.llm.n_embd(), folder), 1)
        self.embedder = None
        if "embeddings" in features:
            self.embedder = EmbeddingContext(self.llm, read_model_file(path), n_ctx=256)

    def run(self) -> list[Said]:
        """Three prompts: one, one that begins as it does, and one that has nothing to do with them."""
        one, more, other = prompt(150, seed=3), prompt(20, seed=4), prompt(60, seed=6)
        if "slide" in self.has:
            one = prompt(300, seed=3)
        said = [self.ask(one), self.ask([*one, *more])]
        self._forget()
        if "chunks" in self.has:
            self.ask([*prompt(40, seed=9), *one[:150], *more], reuse="chunks")
        return [*said, self.ask(other), self.ask(one)]

    def ask(self, tokens: list[int], **options: Any) -> Said:
        if "split" in self.has:
            return self._hidden(tokens)
        sampling: dict[str, Any] = {"temperature": 0, "logit_bias": tuple((token, -100.0) for token in NEVER)}
        if "constraint" in self.has:
            sampling = {"temperature": 0, "constraint": Constraint("regex", PATTERN)}
        if self.projector is not None:
            image = self.projector.read(png())
            tokens = [*tokens[:10], *image.tokens, *tokens[10:]]
            options["parts"] = image.parts
        if "slide" in self.has:
            options["overflow"] = "slide"
        if "sessions" in self.has:
            options["session"] = "s"
        events: queue.Queue[Any] = queue.Queue()
        request = Request(
            prompt=tokens, max_tokens=6, sampling=Sampling(**sampling), n_logprobs=zoo.N_VOCAB, **options
        )
        (job,) = self.engine.prepare([request])
        job.deliver = events.put
        if "drafts" in self.has and not self.engine.speculation.why_off:
            job.answer.drafter = Guesses()
        self.engine.submit_jobs([job])
        done = end_of(events)
        self._note(job)
        self._between(tokens)
        return _said(job, done)

    def _note(self, job: Job) -> None:
        """What had an effect on an answer."""
        if job.n_approximate:
            self.used.add("chunks")
        if job.cached_tier in ("ram", "disk"):
            self.used |= {"store", "sessions"}
        if job.dropped_tokens is not None:
            self.used.add("slide")
        if job.answer.drafter is not None and job.answer.drafter.n_drafted:
            self.used.add("drafts")

    def _hidden(self, tokens: list[int]) -> Said:
        """Of a model without vocabulary: it takes vectors and gives some."""
        if self.has & {"constraint", "drafts", "slide", "images", "sessions", "chunks"}:
            self.engine.submit(tokens)  # says why not
        rng = np.random.default_rng(len(tokens))
        vectors = rng.standard_normal((len(tokens), self.engine.width)).astype(np.float32)
        events: queue.Queue[Any] = queue.Queue()
        job = VectorJob([1000 * len(tokens) + i for i in range(len(tokens))], vectors, 1, deliver=events.put)
        self.engine.submit_jobs([job])
        end_of(events)
        self._between(tokens)
        return Said([], job.hidden[0], bool(job.exact), "")

    def _between(self, tokens: list[int]) -> None:
        """What happens between two answers."""
        if "states" in self.has:
            state = self.engine.call(self.llm.save_state).result(PATIENCE)
            self.engine.call(lambda: self._load(state)).result(PATIENCE)
        if self.embedder is not None:
            piece = InputSpan([token for token in tokens if token >= 0][:30], 0, True)
            first, again = (
                self.engine.call(lambda: self.embedder.evaluate([piece])).result(PATIENCE)
                for _ in range(2)  # type: ignore[union-attr]
            )
            assert np.allclose(first, again, atol=1e-4), "the same text has another vector"

    def _load(self, state: llama_cpp.LlamaState) -> None:
        """On the engine's thread, which knows that nothing else evaluates: users are refused meanwhile."""
        self.llm.lend(False)
        try:
            self.llm.load_state(state)
        finally:
            self.llm.lend(True)

    def _forget(self) -> None:
        """Nothing is left in the context: what comes back comes from the store."""
        if self.connector is not None:
            self.connector.flush()
        self.engine.call(lambda: [None for _ in iter(self.engine.pool.evict, False)]).result(PATIENCE)


def _kv(features: frozenset[str]) -> str:
    kv = "mixed:cold=q8_0,threshold=32,group=16" if features & {"mixed", "sparse"} else "f16"
    if "uniform" in features:
        kv = "q8_0"
    if "sparse" in features:
        kv += (":" if kv == "q8_0" else ",") + "sparse=eps:0.2"
    return kv


def _said(job: Job, done: Any) -> Said:
    tops = [each.top for each in done.logprobs]
    logits = np.zeros(zoo.N_VOCAB)
    for token, value in tops[0].tolist() if tops else ():
        logits[token] = max(value, -50.0)
    ids = []
    for token, top in zip(job.tokens[job.n_prompt :].tolist(), tops, strict=False):
        best = np.sort(top["logprob"])[-2:]
        if best[1] - best[0] < 2 * FLIP * max(logits.std(), 1e-6):
            break
        ids.append(token)
    return Said(ids, logits, bool(job.exact), done.text)


def said_by(features: frozenset[str], folder: Path) -> tuple[list[Said], set[str]]:
    """What is answered, and what of the features had no effect. Raises what refuses the combination."""
    with ExitStack() as stack:
        bench = Bench(features, folder, stack)
        said = bench.run()
        return said, set(features & {"chunks", "store", "sessions", "slide", "drafts"}) - bench.used


class Table:
    """What becomes of each pair; engines that are compared with are run once."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._plain: dict[frozenset[str], list[Said]] = {}

    def cell(self, a: str, b: str) -> str:
        """ "" where both work together, else why they do not; AssertionError where they say they do."""
        if FEATURES[a].group and FEATURES[a].group == FEATURES[b].group:
            return f"a context has one {FEATURES[a].group}"
        both = frozenset({a, b})
        try:
            said, idle = said_by(both, self.folder)
        except (ValueError, LookupError, NotImplementedError) as error:
            return _reason(str(error))
        plain = frozenset(each for each in both if not FEATURES[each].silent and each != "chunks")
        self._compare(both, said, self._said_plainly(plain))
        return " and ".join(NO_EFFECT[each] for each in sorted(idle))

    def _said_plainly(self, plain: frozenset[str]) -> list[Said]:
        """By an engine without what must not matter."""
        if plain not in self._plain:
            self._plain[plain] = said_by(plain, self.folder)[0]
        return self._plain[plain]

    def _compare(self, both: frozenset[str], said: list[Said], plain: list[Said]) -> None:
        for i, (mine, other) in enumerate(zip(said, plain, strict=True)):
            if "constraint" in both:
                assert re.fullmatch(PATTERN, mine.text) or re.match("[abcde]*$", mine.text), mine.text
            if mine.exact and other.exact:
                assert mine.same(other), (
                    f"{sorted(both)}: answer {i} is {mine.ids}, alone {other.ids}; "
                    f"its logits are {mine.distance(other):.2g} off"
                )


def _reason(error: str) -> str:
    """An error without what is this model's own."""
    error = re.sub(r"/\S*/", "", re.sub(r"(layer|architecture) '?[\w.-]+'?", r"\1 ...", error))
    return re.sub(r"[\w-]+\.gguf (cannot be split: )\w+", r"this model \1...", error)


def pairs() -> Iterator[tuple[str, str]]:
    names = list(FEATURES)
    for i, a in enumerate(names):
        for b in names[:i]:
            yield a, b
