"""Compares reuse with full evaluation, prompt by prompt."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import overload

import numpy as np

from mixedkv.chunks.chunk_cache import ChunkCache, Prompt
from mixedkv.chunks.chunk_reuse import ChunkReuse, Repair
from mixedkv.chunks.deviation import compare, follow
from mixedkv.chunks.repair import Method
from mixedkv.chunks.row_damage import all_rows, evaluate_donors, row_errors

_AS_STORED = Method(repair="none")


@dataclass(frozen=True, kw_only=True, slots=True)
class PromptCheck:
    """The result of comparing one prompt with reuse to a full evaluation.

    Args:
        reuse: the reuse of the prompt.
        kld: mean divergence over the tokens that follow, in nats.
        same_top1: share of these with the same likeliest token.
        first_diverging: index of the first of these with another likeliest token; None if all agree.
        worst_row: largest relative error of a head of a reused row in the first layer; 0 if none was reused.
        problem: what is wrong; "" if nothing is.
        damaged: positions whose rows are wrong.
    """

    reuse: ChunkReuse
    kld: float
    same_top1: float
    first_diverging: int | None
    worst_row: float
    problem: str
    damaged: tuple[int, ...] = ()

    @property
    def ok(self) -> bool:
        return not self.problem


@dataclass(frozen=True, slots=True)
class CorrectnessReport(Sequence[PromptCheck]):
    """The checks of several prompts, in order, and their averages.

    Args:
        checks: one for each prompt.
    """

    checks: tuple[PromptCheck, ...]

    @overload
    def __getitem__(self, at: int) -> PromptCheck: ...
    @overload
    def __getitem__(self, at: slice) -> tuple[PromptCheck, ...]: ...
    def __getitem__(self, at: int | slice) -> PromptCheck | tuple[PromptCheck, ...]:
        return self.checks[at]

    def __len__(self) -> int:
        return len(self.checks)

    @property
    def ok(self) -> bool:
        """True if no prompt has a problem."""
        return all(check.ok for check in self.checks)

    @property
    def kld(self) -> float:
        """Mean divergence over all prompts, in nats."""
        return float(np.mean([check.kld for check in self.checks])) if self.checks else 0.0

    @property
    def same_top1(self) -> float:
        """Share of all compared tokens with the same likeliest token."""
        return float(np.mean([check.same_top1 for check in self.checks])) if self.checks else 1.0

    @property
    def reuse_ratio(self) -> float:
        """Mean share of the prompts' tokens that was not evaluated."""
        return float(np.mean([check.reuse.reuse_ratio for check in self.checks])) if self.checks else 0.0

    def __str__(self) -> str:
        lines = [
            f"prompt {i}: {check.problem or 'ok'}; {check.reuse.reuse_ratio:.0%} reused, "
            f"KLD {check.kld:.2g}, {check.same_top1:.0%} of first choices the same"
            for i, check in enumerate(self.checks)
        ]
        return "\n".join(lines)


def verify_correctness(
    cache: ChunkCache,
    prompts: Sequence[Prompt],
    method: Method | Repair | None = None,
    *,
    n_gen: int = 8,
    max_kld: float | None = None,
    tenant: str = "",
) -> CorrectnessReport:
    """Evaluate each prompt fully and with reuse, and compare.

    Args:
        cache: the cache to verify.
        prompts: texts or token ids.
        method: how seams are repaired, a `Method` or the name of a repair; None is the cache's own.
        n_gen: number of tokens after each prompt to compare; they are those that full evaluation chooses.
        max_kld: mean divergence above which a prompt has a problem; None for no limit.
        tenant: whose KV is reused.

    Raises:
        ContextLengthError: a prompt with its n_gen tokens does not fit the context.
    """
    return CorrectnessReport(
        tuple(_check(cache, prompt, method, n_gen, max_kld, tenant) for prompt in prompts)
    )


def _check(
    cache: ChunkCache,
    prompt: Prompt,
    method: Method | Repair | None,
    n_gen: int,
    max_kld: float | None,
    tenant: str,
) -> PromptCheck:
    llm = cache.llm
    cache.prefill(prompt, reuse="exact", tenant=tenant)
    full = all_rows(llm)
    tokens, exact = follow(llm, n_gen)
    llm.kv.remove(0)  # drop live rows, so that reuse starts from the store
    reuse = cache.prefill(prompt, tenant=tenant, method=method)
    _, other = follow(llm, n_gen, tokens)
    llm.kv.remove(0)
    cache.prefill(prompt, tenant=tenant, method=_AS_STORED)  # a repair would have moved the rows it keeps
    found, at = all_rows(llm), np.flatnonzero(cache.kept)
    again = evaluate_donors(llm, cache.placed, len(cache.kept)) if len(at) else {}
    errors = row_errors(llm, found, full, again, at)
    deviations = [compare(a, b) for a, b in zip(exact, other, strict=True)]
    kld = float(np.mean([each.kld for each in deviations]))
    differing = [i for i, each in enumerate(deviations) if not each.same_top1]
    problem = errors.problem(at)
    if not problem and not np.isfinite(kld):
        problem = "the distribution is not finite"
    if not problem and max_kld is not None and kld > max_kld:
        problem = f"the answer deviates by {kld:.3g} nats, more than {max_kld:g}"
    return PromptCheck(
        reuse=reuse,
        kld=kld,
        same_top1=1 - len(differing) / n_gen,
        first_diverging=differing[0] if differing else None,
        worst_row=errors.worst_first,
        problem=problem,
        damaged=tuple(at[errors.damaged].tolist()),
    )
