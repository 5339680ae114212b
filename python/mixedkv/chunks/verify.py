"""Reuse beside full evaluation, prompt by prompt: is it right, and how far off is it?

Rows in another context are other rows, except in the first layer, where they depend on the token and its
position
alone: there they must be the same up to quantisation. What a damaged row, a wrong turn or a shift by a token
does shows there, however little it does to the answer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from mixedkv.chunks.chunk_cache import ChunkCache, Prompt
from mixedkv.chunks.chunk_reuse import ChunkReuse
from mixedkv.chunks.deviation import compare, follow
from mixedkv.chunks.repair import Method
from mixedkv.llama import Llama

_FIRST_LAYER = 0.2  # relative error at most; Q4_0 rows, turned, have 0.11
_OTHER_LAYERS = 2.0  # context changes a row by its own size at most; damage by orders of magnitude

Rows = dict[tuple[int, str], npt.NDArray[np.float32]]  # by layer and "K" or "V", [n_tokens, width]


@dataclass(frozen=True, kw_only=True, slots=True)
class PromptCheck:
    """
    Args:
        reuse: what was reused.
        kld: mean divergence over the tokens that follow, in nats.
        same_top1: share of these with the same likeliest token.
        first_diverging: which of them is the first that has another one, None if all agree.
        worst_row: largest relative error of a reused row in the first layer, 0 where none was reused.
        problem: what is wrong, "" if nothing is.
    """

    reuse: ChunkReuse
    kld: float
    same_top1: float
    first_diverging: int | None
    worst_row: float
    problem: str

    @property
    def ok(self) -> bool:
        return not self.problem


def verify_correctness(
    cache: ChunkCache,
    prompts: Sequence[Prompt],
    method: Method | None = None,
    *,
    n_gen: int = 8,
    max_kld: float | None = None,
    tenant: str = "",
) -> list[PromptCheck]:
    """Evaluate each prompt fully and with reuse, and compare.

    Args:
        cache: what reuses.
        prompts: texts or token ids.
        method: how seams are repaired; None is the cache's own.
        n_gen: tokens after each prompt that are compared, those that full evaluation chooses.
        max_kld: mean divergence that is a problem; None leaves that to the caller.
        tenant: whose KV is reused.

    Raises:
        ContextLengthError: a prompt with its n_gen tokens does not fit the context.
    """
    return [_check(cache, prompt, method, n_gen, max_kld, tenant) for prompt in prompts]


def _check(
    cache: ChunkCache, prompt: Prompt, method: Method | None, n_gen: int, max_kld: float | None, tenant: str
) -> PromptCheck:
    llm = cache.llm
    cache.prefill(prompt, reuse="exact", tenant=tenant)
    rows = _rows(llm)
    tokens, exact = follow(llm, n_gen)
    llm.kv.remove(0)  # nothing live: reuse starts from the store
    reuse = cache.prefill(prompt, tenant=tenant, method=method)
    worst, problem = _compare_rows(rows, _rows(llm), reuse)
    _, other = follow(llm, n_gen, tokens)
    deviations = [compare(a, b) for a, b in zip(exact, other, strict=True)]
    kld = float(np.mean([each.kld for each in deviations]))
    differing = [i for i, each in enumerate(deviations) if not each.same_top1]
    if not problem and not np.isfinite(kld):
        problem = "the distribution is not finite"
    if not problem and max_kld is not None and kld > max_kld:
        problem = f"the answer deviates by {kld:.3g} nats, more than {max_kld:g}"
    return PromptCheck(
        reuse=reuse,
        kld=kld,
        same_top1=1 - len(differing) / n_gen,
        first_diverging=differing[0] if differing else None,
        worst_row=worst,
        problem=problem,
    )


def _rows(llm: Llama) -> Rows:
    found: Rows = {}
    for layer in llm.kv.stats(by_layer=True).layers or ():
        view = llm.kv.layer(layer.il)
        for which, rows in (("K", view.k(basis="model")), ("V", view.v(basis="model"))):
            found[layer.il, which] = rows.reshape(len(rows), -1)
    return found


def _compare_rows(exact: Rows, other: Rows, reuse: ChunkReuse) -> tuple[float, str]:
    """The worst row of the first layer, and the first problem there is."""
    reused = np.array([at for donor in reuse.donors for at in range(donor.begin, donor.end)], np.int64)
    first = min(il for il, _ in exact)
    worst, problem = 0.0, ""
    for (il, which), rows in sorted(exact.items()) if len(reused) else ():
        with np.errstate(invalid="ignore", over="ignore"):
            want, have = rows[reused], other[il, which][reused]
            errors = np.linalg.norm(have - want, axis=1) / np.maximum(np.linalg.norm(want, axis=1), 1e-9)
        errors = np.nan_to_num(errors, nan=np.inf)
        worst = max(worst, float(errors.max())) if il == first else worst
        if not problem and errors.max() > (_FIRST_LAYER if il == first else _OTHER_LAYERS):
            at = reused[int(errors.argmax())]
            problem = (
                f"{which} of position {at} in layer {il} is off by {errors.max():.2g} of its size: it is "
                f"damaged, was turned to another position, or is another token's"
            )
    return worst, problem
