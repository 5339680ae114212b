"""Settings for sampling, as plain data."""

from __future__ import annotations

from dataclasses import dataclass

from mixedkv.engine.constrain.constraint_text import Constraint
from mixedkv.limits import RANGES


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
        repeat_penalty: penalty for the last 64 tokens, including the prompt's; 1 switches it off.
        frequency_penalty, presence_penalty: penalties for the answer's tokens, as OpenAI defines them.
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
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    seed: int = 0
    logit_bias: tuple[tuple[int, float], ...] = ()
    constraint: Constraint | None = None

    def __post_init__(self) -> None:
        for name, (low, high) in RANGES.items():
            value = getattr(self, name)
            if not low <= value <= high:  # nor NaN
                raise ValueError(f"{name}={value}: use {low} to {high}")

    @property
    def greedy(self) -> bool:
        """True if the likeliest token is always taken."""
        return self.temperature <= 0
