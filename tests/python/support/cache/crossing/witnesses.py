"""Faults that were there, as the shortest plans that find them."""

from __future__ import annotations

from support.cache.crossing.crossing_run import EIGHT
from support.cache.crossing.plans import Step
from support.cache.crossing.subject import Setup

_STREAMED = Setup(family="deep", kv=EIGHT, streamed=True)
_SLIDING = Setup(family="gemma3", kv=EIGHT, n_batch=256)
_MOVED: tuple[Step, ...] = (("eval", 0, 40, 2), ("shift", 0, 4, 0.3))

WITNESSES: dict[str, tuple[Setup, tuple[Step, ...]]] = {
    "a fill takes the streamed layers away": (_STREAMED, (("fill", 0, 40, 1, 0),)),
    "so does a reused passage": (_STREAMED, (("passage", 0), ("end", 0))),
    "a signal commits a streamed step": (
        _STREAMED,
        tuple(("signal", 0, 100, delay) for delay in (0.002, 0.005, 0.01, 0.02)),
    ),
    "a hybrid model goes on from a half-updated state": (
        Setup(family="lfm2", kv=EIGHT, n_ubatch=64),
        (("abort", 0, 40, 25, 0), ("eval", 0, 20, 3)),
    ),
    "last_layer computes all layers": (Setup(family="llama-64", kv=EIGHT), (("early", 0, 40, 0),)),
    "a copied prefix loses its sliding window": (_SLIDING, (("copy", 0, 1), ("eval", 0, 250, 5))),
    "a state of this context is refused": (
        Setup(family="gemma3", kv=EIGHT, n_ubatch=64),
        (
            ("eval", 0, 70, 9),
            ("eval", 1, 40, 3),
            ("take_state", 1),
            ("end", 1),
            ("eval", 0, 250, 5),
            ("give_state", 1),
        ),
    ),
    "a state is saved as if a pending shift had been done": (
        Setup(family="llama-64"),
        (*_MOVED, ("save",), ("load", 1)),
    ),
    "an aborted step ends a pending shift": (
        Setup(family="llama-64", kv=EIGHT),
        (*_MOVED, ("abort", 0, 10, 8, 0), ("eval", 0, 10, 3)),
    ),
    "a step that failed leaves its first micro-batches": (
        Setup(family="llama-64"),
        (("abort", 0, 40, 100, 0),),
    ),
    "keep() leaves sequences of other streams": (
        Setup(family="llama-64", unified=False),
        (("eval", 2, 20, 1), ("keep", 1)),
    ),
    "rows of a reused passage leave and come back as exact": (
        Setup(family="llama-64", kv=EIGHT),
        (("passage", 0), ("block", 0, 0, 0.41)),
    ),
}
