"""Evaluates prompts whose passages were computed in other prompts."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, get_args

import numpy as np
import numpy.typing as npt

from mixedkv.chunks.chunk_reuse import ChunkReuse, DonorUse, Repair
from mixedkv.chunks.donors import Segment
from mixedkv.chunks.drift import DamagedRowsError
from mixedkv.chunks.gate import Deviation, Waiting, compare, last_logits
from mixedkv.chunks.passages import Passages, check_method
from mixedkv.chunks.repair import Method, method_of
from mixedkv.chunks.stitch import Rows, Stitch
from mixedkv.errors import ContextLengthError
from mixedkv.llama import Llama
from mixedkv.start.lone import LoneSequence
from mixedkv.start.sequences import Reuse
from mixedkv.store import Identity, KVStore, Saved
from mixedkv.tokens import Tokens, as_tokens

_LOG = logging.getLogger("mixedkv.chunks")

Prompt = str | npt.ArrayLike


@dataclass(frozen=True, kw_only=True, slots=True)
class ChunkStats:
    """Counts of a `ChunkCache`: prompts, tokens reused and evaluated, checks.

    Args:
        n_prompts, n_tokens: prompts that were asked for, and their tokens.
        n_cached_exact, n_cached_approximate, n_evaluated: sums of those in `ChunkReuse`.
        n_checked: requests that were also evaluated exactly, as a check.
        n_waiting: requests that wait for a check.
        kld_mean, same_top1: averages of the latest checks; None before the first.
        off: why chunks are not reused any more; "" while they are.
    """

    n_prompts: int
    n_tokens: int
    n_cached_exact: int
    n_cached_approximate: int
    n_evaluated: int
    n_checked: int
    n_waiting: int
    kld_mean: float | None
    same_top1: float | None
    off: str


class ChunkCache:
    """Fills sequence 0 of a `Llama` with a prompt and evaluates as few of its tokens as possible.

    The longest stored prefix of the prompt is restored exactly. Passages after it that the store has from
    other prompts are moved into place, some of their tokens are evaluated again in the true context, and the
    result says that it is approximate. Use it on the thread that decodes.

    >>> cache = ChunkCache(llm, store)
    >>> cache.warm(documents)
    >>> reuse = cache.prefill(prompt)  # llm goes on from here: llm.sample(), llm.generate(...)

    Args:
        llm: the `Llama`; docs/passages.md lists supported models and settings.
        store: the store that rows come from; approximate rows are never stored.
        **options: of `ChunkOptions`: repair, ratio, chunk_size, max_kld, check, ...

    Raises:
        UnsupportedModelError: rows of this model cannot be moved, or the method needs another cache.
        ValueError: a setting is out of range.
    """

    def __init__(self, llm: Llama, store: KVStore, **options: Any) -> None:
        self.llm, self._store = llm, store
        self._passages = Passages(llm, store, **options)
        self.method, self._gate = self._passages.method, self._passages.gate
        self.placed: tuple[Segment, ...] = ()  # passages of the last prompt
        self.kept: npt.NDArray[np.bool_] = np.zeros(0, np.bool_)  # which of its rows come from a donor
        self._totals = dict.fromkeys(("prompts", "tokens", "exact", "approximate", "evaluated"), 0)

    # --- prompts ---

    def prefill(
        self,
        prompt: Prompt,
        *,
        tenant: str = "",
        reuse: Reuse = "chunks",
        method: Method | Repair | None = None,
    ) -> ChunkReuse:
        """Fill sequence 0 with exactly these tokens, and compute the logits of the last one.

        Args:
            prompt: text or token ids; text gets the model's BOS, and special tokens in it are parsed.
            tenant: whose KV is reused.
            reuse: "exact" uses only rows that equal an evaluation; "prefix" also uses the longest stored
                prefix, whose recent rows may be less precise, see `Match.exact`; "chunks" also uses passages
                of other prompts.
            method: how seams are repaired, a `Method` or the name of a repair; None uses the cache's method.

        Raises:
            ContextLengthError: the prompt is empty or does not fit the context.
            UnsupportedModelError: the method needs another cache.
            ValueError: `reuse` is unknown, or the tenant's name is refused.
        """
        begin = time.perf_counter()
        if reuse not in get_args(Reuse):
            raise ValueError(f"reuse={reuse!r}: use one of {', '.join(get_args(Reuse))}")
        repair = method_of(method, self.method)
        if method is not None:
            check_method(self.llm, repair)
        tokens = self._tokens(prompt)
        identity = Identity.of(self.llm, tenant=tenant)
        sequence = LoneSequence(self.llm, self._store, identity, "chunks", untouched=False)
        try:
            done = self._prefill_checked(tokens, sequence, reuse, repair)
        except BaseException:
            self.llm.kv.remove(0)  # leave nothing half done
            raise
        sequence.leave()
        done = replace(done, seconds=time.perf_counter() - begin)
        self._count(done)
        if not done.exact and done.n_cached_approximate and self._gate.wants():
            self._gate.add(Waiting(tokens, last_logits(self.llm), tenant))
        return done

    def warm(self, documents: Sequence[Prompt], *, tenant: str = "", before: Prompt = "") -> list[Saved]:
        """Evaluate documents and store them, so that prompts find them.

        Args:
            documents: texts or token ids.
            tenant: the tenant they are stored for.
            before: text to put before each document, such as a system prompt. Best is the text that prompts
                will have there. The default is none, not even BOS.

        Raises:
            ContextLengthError: a document is empty, or does not fit the context.
        """
        head = self._tokens(before, bos=True) if _is_given(before) else np.empty(0, np.int32)
        parts = [self._tokens(document, bos=False) for document in documents]  # check all of them first
        saved = []
        for part in parts:
            tokens = np.concatenate([head, part])
            self._check_length(tokens)
            self.prefill(tokens, tenant=tenant, reuse="exact")
            saved.append(self._store.save(self.llm, tenant=tenant))
        return saved

    def refresh(self, tenant: str = "") -> None:
        """Index the entries that were stored since the last prompt, so that the next prompt need not."""
        self._passages.refresh(Identity.of(self.llm, tenant=tenant))

    # --- the gate ---

    def check_pending(self) -> Deviation | None:
        """Check one of the sampled requests by evaluating it exactly. Return None if there is none. Call it
        in idle time.

        Sequence 0 then holds that prompt.
        """
        waiting = self._gate.take()
        if waiting is None:
            return None
        # nobody goes on from what is not left
        LoneSequence(self.llm, self._store, Identity.of(self.llm), "check", untouched=True)
        self.llm.eval(waiting.tokens.tolist())
        deviation = compare(last_logits(self.llm), waiting.logits)
        self._gate.note(deviation)
        return deviation

    def stats(self) -> ChunkStats:
        """Return counts since the cache was made."""
        gate, totals = self._gate, self._totals
        return ChunkStats(
            n_prompts=totals["prompts"],
            n_tokens=totals["tokens"],
            n_cached_exact=totals["exact"],
            n_cached_approximate=totals["approximate"],
            n_evaluated=totals["evaluated"],
            n_checked=gate.n_checked,
            n_waiting=gate.n_waiting,
            kld_mean=gate.kld_mean,
            same_top1=gate.same_top1,
            off=gate.closed,
        )

    # --- steps ---

    def _prefill_checked(
        self, tokens: Tokens, sequence: LoneSequence, reuse: Reuse, method: Method
    ) -> ChunkReuse:
        """Evaluate the prompt without reuse if a donor's rows turn out not to be those of its tokens."""
        try:
            return self._prefill(tokens, sequence, reuse, method)
        except DamagedRowsError as error:
            _LOG.warning("a prompt is evaluated: %s", error)
            self.llm.kv.remove(0)
            return replace(self._prefill(tokens, sequence, "exact", method), reason=str(error))

    def _prefill(self, tokens: Tokens, sequence: LoneSequence, reuse: Reuse, method: Method) -> ChunkReuse:
        llm = self.llm
        prefix = sequence.start(tokens, exact_live=True, exact_stored=reuse != "prefix")
        n_cached, prefix_exact = prefix.n_tokens, prefix.exact
        rows: Rows = []
        if reuse == "chunks":
            rows = self._passages.find(tokens, sequence.identity, n_cached)
        n_exact = rows[0][0].begin if rows else len(tokens)
        if n_cached < n_exact:
            llm.eval(tokens[n_cached:n_exact].tolist())
        n_evaluated, kept = n_exact - n_cached, np.zeros(len(tokens), np.bool_)
        self.placed = tuple(segment for segment, _ in rows)
        if rows:
            stitch = Stitch(llm, tokens, rows, n_exact, method)
            while stitch.advance(llm.n_batch):
                pass
            llm.kv.assume(tokens[:-1], n_exact if prefix_exact else 0)
            llm.eval(tokens[-1:].tolist())
            kept, n_evaluated = stitch.kept, n_evaluated + stitch.n_evaluated + 1
        self.kept = kept
        return ChunkReuse(
            exact=prefix_exact and not rows,
            n_tokens=len(tokens),
            n_cached_exact=n_cached,
            n_cached_approximate=int(kept.sum()),
            n_exact=n_exact if prefix_exact else 0,
            n_new=len(tokens) - n_cached - sum(len(segment) for segment, _ in rows),
            n_evaluated=n_evaluated,
            method=method.repair if rows else "none",
            ratio=method.share_of(len(tokens)) if rows else 0.0,
            donors=tuple(_use(segment) for segment, _ in rows),
            seconds=0.0,
            reason=self._gate.closed if reuse == "chunks" else "",
        )

    def _tokens(self, prompt: Prompt, bos: bool = True) -> Tokens:
        if isinstance(prompt, str):
            ids = self.llm.tokenize(prompt.encode(), add_bos=bos, special=True) if prompt else []
            tokens = np.array(ids, np.int32)
        else:
            tokens = as_tokens(prompt)
        self._check_length(tokens)
        if tokens.min() < 0 or tokens.max() >= self.llm.n_vocab():
            raise ValueError(f"prompt: token ids are from 0 to {self.llm.n_vocab() - 1}")
        return tokens

    def _check_length(self, tokens: Tokens) -> None:
        n_ctx = self.llm.kv.stats().n_ctx
        if not len(tokens):
            raise ContextLengthError("the prompt or document is empty")
        if len(tokens) > n_ctx:
            raise ContextLengthError(f"{len(tokens)} tokens do not fit the context of {n_ctx}")

    def _count(self, done: ChunkReuse) -> None:
        for name, n in (
            ("prompts", 1),
            ("tokens", done.n_tokens),
            ("exact", done.n_cached_exact),
            ("approximate", done.n_cached_approximate),
            ("evaluated", done.n_evaluated),
        ):
            self._totals[name] += n


def _use(segment: Segment) -> DonorUse:
    link = next(link for link in segment.source.links if link.end > segment.at)
    return DonorUse(
        begin=segment.begin, end=segment.end, entry=link.entry, at=segment.at, common_left=segment.common_left
    )


def _is_given(prompt: Prompt) -> bool:
    return prompt != "" if isinstance(prompt, str) else bool(np.size(np.asarray(prompt)))
