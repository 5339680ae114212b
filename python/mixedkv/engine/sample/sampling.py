"""Settings for sampling, as plain data."""

from __future__ import annotations

import math
from dataclasses import dataclass
from numbers import Real

from mixedkv.constrain.constraint_text import Constraint
from mixedkv.limits import RANGES, SAMPLERS, check_sampling


@dataclass(frozen=True, kw_only=True, slots=True)
class Sampling:
    """Settings of how tokens are chosen.

    Attributes:
        temperature: 0 takes the likeliest token.
        top_k, top_p, min_p, typical_p, top_n_sigma: 0, 1, 0, 1 and -1 or 0 switch them off.
        xtc_probability, xtc_threshold: how often, and above which probability, the likeliest tokens are left
            out (XTC); probability 0 switches it off.
        dynatemp_range, dynatemp_exponent: the temperature is within this range around `temperature`, by the
            entropy of the choice; range 0 switches it off.
        dry_multiplier, dry_base, dry_allowed_length, dry_penalty_last_n, dry_sequence_breakers: penalty for
            tokens that continue a repetition (DRY); multiplier 0 switches it off, and -1 for penalty_last_n
            looks at the whole context. It covers the answer and the last 64 tokens of the prompt.
        mirostat, mirostat_tau, mirostat_eta: version 1 or 2, in place of all samplers but temperature and
            penalties; 0 switches it off.
        adaptive_target, adaptive_decay: prefer tokens near a target probability; a target below 0 switches it
            off.
        repeat_penalty: penalty for the last `repeat_last_n` tokens, with the prompt's; 1 switches it off.
        repeat_last_n: 0 switches the penalty off, and -1 looks at the whole context.
        frequency_penalty, presence_penalty: penalties for the answer's tokens, as OpenAI defines them.
        samplers: which samplers choose, in this order, as llama.cpp names them; those left out do nothing.
            None for all of them, in llama.cpp's order. Mirostat has an order of its own.
        seed: seed of the random choice.
        logit_bias: pairs of a token id and a number to add to its logit.
        constraint: constraint that the answer must follow.

    Raises:
        ValueError: a number is out of its range; the message names it.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    typical_p: float = 1.0
    top_n_sigma: float = -1.0
    xtc_probability: float = 0.0
    xtc_threshold: float = 0.1
    dynatemp_range: float = 0.0
    dynatemp_exponent: float = 1.0
    dry_multiplier: float = 0.0
    dry_base: float = 1.75
    dry_allowed_length: int = 2
    dry_penalty_last_n: int = -1
    dry_sequence_breakers: tuple[str, ...] = ("\n", ":", '"', "*")
    mirostat: int = 0
    mirostat_tau: float = 5.0
    mirostat_eta: float = 0.1
    adaptive_target: float = -1.0
    adaptive_decay: float = 0.9
    repeat_penalty: float = 1.0
    repeat_last_n: int = 64  # llama.cpp's
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    samplers: tuple[str, ...] | None = None
    seed: int = 0
    logit_bias: tuple[tuple[int, float], ...] = ()
    constraint: Constraint | None = None

    def __post_init__(self) -> None:
        for name in RANGES:
            check_sampling(name, getattr(self, name))
        if not isinstance(self.logit_bias, tuple) or not all(map(_is_bias, self.logit_bias)):
            raise ValueError(
                f"logit_bias={self.logit_bias!r:.80}: use pairs of a token id and a number; -inf is never"
            )
        if unknown := [name for name in self.samplers or () if name not in SAMPLERS]:
            raise ValueError(f"samplers: {unknown[0]!r:.40} is none, there are {', '.join(SAMPLERS)}")

    @property
    def greedy(self) -> bool:
        """True if the likeliest token is always taken."""
        return self.temperature <= 0 and (self.samplers is None or "temperature" in self.samplers)

    @property
    def penalises_repeats(self) -> bool:
        """True if `repeat_penalty` has an effect."""
        return self.repeat_penalty != 1.0 and self.repeat_last_n != 0


def _is_bias(pair: object) -> bool:
    if not isinstance(pair, tuple) or len(pair) != 2 or isinstance(pair[1], bool):
        return False
    return isinstance(pair[1], Real) and not math.isnan(pair[1])
