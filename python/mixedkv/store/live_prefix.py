"""Starts a prompt in sequence 0 of a `Llama` from the longest prefix that is live there or stored."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import numpy as np
import numpy.typing as npt

from mixedkv.errors import UnsupportedModelError
from mixedkv.store.identity import Identity
from mixedkv.store.results import Match
from mixedkv.tokens import common_prefix

if TYPE_CHECKING:
    from mixedkv.llama import Llama
    from mixedkv.store.store import KVStore

Source = Literal["live", "ram", "disk", "remote", "none"]


@dataclass(frozen=True, kw_only=True, slots=True)
class PrefixReuse:
    """Counts what was reused for one prompt.

    Args:
        n_tokens: tokens at the beginning of the prompt that were not evaluated.
        source: where these came from; "live" is the cache itself.
        exact: the cache continues like one that evaluated this prompt from its first token. False if a mixed
            cache was cut and lacks recent F16 rows, for all tokens evaluated after such a cut as long as they
            are live, and if tokens in the middle were dropped.
        match: the match of the prompt in the store.
        reason: why stored KV was not used; "" otherwise.
    """

    n_tokens: int = 0
    source: Source = "none"
    exact: bool = True
    match: Match | None = None
    reason: str = ""


def reuse_prefix(
    llm: Llama,
    store: KVStore,
    identity: Identity,
    tokens: Sequence[int] | npt.NDArray[np.int32],
    *,
    n_plain: int,
    exact_live: bool,
    exact_stored: bool,
) -> PrefixReuse:
    """Set sequence 0 to the longest prefix of these tokens that is live or stored.

    At least the last token is left to be evaluated: sampling needs its logits.

    Args:
        llm: the `Llama` whose sequence it is.
        store: store to look in as well.
        identity: identity of the `Llama` and the tenant.
        tokens: the prompt.
        n_plain: number of live tokens before which none was dropped.
        exact_live: use live rows only if the prompt then continues exactly.
        exact_stored: the same for stored rows.
    """
    wanted = np.asarray(tokens, np.intc)[:-1]
    n_live = _live_prefix(llm, n_plain, wanted)
    exact = not n_live or (n_live <= llm.kv.exact_tokens and llm.kv.holds(0, n_live))
    if exact_live and not exact:
        n_live, exact = 0, True
    match = store.find(identity, wanted, exact_only=exact_stored) if len(wanted) else None
    reason = ""
    if match is not None and (match.n_tokens, match.exact) > (n_live, exact):
        restored = store.restore(llm, wanted, identity=identity, exact_only=exact_stored)
        if restored.hit:
            return PrefixReuse(
                n_tokens=restored.n_tokens,
                source=restored.tier,
                exact=restored.exact,
                match=match,
                reason=restored.reason,
            )
        reason = restored.reason
        n_live = min(n_live, llm.n_tokens)  # a restore that was refused leaves nothing
    n_live = _cut(llm, n_live)
    return PrefixReuse(
        n_tokens=n_live,
        source="live" if n_live else "none",
        exact=exact or not n_live,
        match=match,
        reason=reason,
    )


def _live_prefix(llm: Llama, n_plain: int, wanted: npt.NDArray[np.intc]) -> int:
    return llm.kv.longest_cut(0, common_prefix(llm.input_ids[:n_plain], wanted))


def _cut(llm: Llama, n: int) -> int:
    """Remove all from position n on; return n, or 0 if the memory cannot be cut there."""
    try:
        llm.kv.remove(0, n)
    except UnsupportedModelError:
        llm.kv.remove(0)
    return llm.n_tokens
