"""Chooses the next token, by `Draw` or llama.cpp's samplers, one chain per answer, and scores prompts."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import llama_cpp
import numpy as np
import numpy.typing as npt

from mixedkv.constrain.constraint import Mask, Matcher
from mixedkv.engine.sample.draw import Draw
from mixedkv.engine.sample.sampling import Sampling
from mixedkv.tokens import Tokens

_DRY_LAST_N = 64  # tokens of the prompt that DRY looks at
_MIROSTAT_M = 100  # llama.cpp's, of version 1
_TOP = np.dtype([("token", np.int32), ("logprob", np.float64)])
_CANDIDATE = np.dtype([("id", np.int32), ("logit", np.float32), ("p", np.float32)])
_LEFT = np.dtype([("id", np.int32), ("logit", np.float64), ("p", np.float64)])


@dataclass(frozen=True, slots=True, eq=False)
class TokenLogprob:
    """The chosen token and the likeliest ones, with log probabilities (natural) in the model's own
    distribution.

    `top` is an array with the fields "token" and "logprob": it takes a tenth of the memory of tuples.
    """

    token: int
    logprob: float
    top: npt.NDArray[np.void]


class Sampler:
    """The choice of one answer's tokens. It can be made on any thread and is used by one at a time.

    Args:
        matcher: matcher of `sampling.constraint`, used by this answer alone.
        keeps: `left` returns what the latest choice was made from.
    """

    def __init__(
        self,
        vocab: Any,
        sampling: Sampling,
        n_ctx: int,
        matcher: Matcher | None = None,
        *,
        keeps: bool = False,
    ) -> None:
        self._n_vocab = int(llama_cpp.llama_vocab_n_tokens(vocab))
        self.greedy = sampling.greedy  # the same logits always give the same token
        # samplers that look at the prompt's last tokens, and at how many
        self._on_prompt: list[tuple[Any, int]] = []
        self._matcher = matcher
        self._draw = Draw(sampling) if Draw.serves(sampling) and not keeps else None
        self._keeps, self._left = keeps, np.empty(0, _CANDIDATE)
        self._chain = None
        if self._draw is None:
            self._chain = llama_cpp.llama_sampler_chain_init(llama_cpp.llama_sampler_chain_default_params())
            for part in self._parts(vocab, sampling, n_ctx):
                llama_cpp.llama_sampler_chain_add(self._chain, part)

    def _parts(self, vocab: Any, sampling: Sampling, n_ctx: int) -> Iterable[Any]:
        """Yield the samplers in llama.cpp's order."""
        if sampling.logit_bias:
            yield _bias(self._n_vocab, sampling.logit_bias)
        if sampling.samplers is not None and not sampling.mirostat:
            for name in sampling.samplers:
                yield from self._named(name, vocab, sampling, n_ctx)
            yield _draw(sampling, adapts="adaptive_p" in sampling.samplers)
            return
        yield from self._penalties(sampling, n_ctx)
        if sampling.dry_multiplier > 0:
            yield self._dry(vocab, sampling, n_ctx)
        if sampling.temperature <= 0:
            yield llama_cpp.llama_sampler_init_greedy()
        elif sampling.mirostat:
            yield from self._mirostat(sampling)
        else:
            for cut in _CUTS.values():
                yield from cut(sampling)
            yield _temperature(sampling)
            yield _draw(sampling)

    def _named(self, name: str, vocab: Any, sampling: Sampling, n_ctx: int) -> Iterable[Any]:
        """Yield the sampler of this name, if it does anything."""
        if name == "penalties":
            yield from self._penalties(sampling, n_ctx)
        elif name == "dry" and sampling.dry_multiplier > 0:
            yield self._dry(vocab, sampling, n_ctx)
        elif name == "temperature":
            yield _temperature(sampling)
        elif name == "infill":
            yield llama_cpp.llama_sampler_init_infill(vocab)
        elif name in _CUTS:
            yield from _CUTS[name](sampling)

    def _dry(self, vocab: Any, sampling: Sampling, n_ctx: int) -> Any:
        part = _dry(vocab, sampling, n_ctx)
        self._on_prompt.append((part, _DRY_LAST_N))
        return part

    def _penalties(self, sampling: Sampling, n_ctx: int) -> Iterable[Any]:
        if sampling.penalises_repeats:
            n = n_ctx if sampling.repeat_last_n < 0 else min(sampling.repeat_last_n, n_ctx)
            repeats = llama_cpp.llama_sampler_init_penalties(
                self._n_vocab, n, sampling.repeat_penalty, 0.0, 0.0
            )
            self._on_prompt.append((repeats, n))
            yield repeats
        if sampling.frequency_penalty or sampling.presence_penalty:
            yield llama_cpp.llama_sampler_init_penalties(
                self._n_vocab, n_ctx, 1.0, sampling.frequency_penalty, sampling.presence_penalty
            )

    def _mirostat(self, sampling: Sampling) -> Iterable[Any]:
        yield llama_cpp.llama_sampler_init_temp(sampling.temperature)
        tau, eta = sampling.mirostat_tau, sampling.mirostat_eta
        if sampling.mirostat == 1:
            yield llama_cpp.llama_sampler_init_mirostat(self._n_vocab, sampling.seed, tau, eta, _MIROSTAT_M)
        else:
            yield llama_cpp.llama_sampler_init_mirostat_v2(sampling.seed, tau, eta)

    @property
    def constrained(self) -> bool:
        return self._matcher is not None

    def certain(self) -> list[int]:
        """Return the tokens that the constraint forces: see `Matcher.certain`."""
        return self._matcher.certain() if self._matcher is not None else []

    def possible_tokens(self, drafts: Sequence[int]) -> Mask | None:
        """Return the tokens that the next choice, and those behind drafts, can fall on under the constraint.
        None for any: draws and penalties look at all logits.
        """
        if self._matcher is None or self._draw is None or not self.greedy:
            return None
        return self._matcher.ahead(drafts)

    def left(self, token: int, n_top: int) -> TokenLogprob:
        """Return the log probability of the token that was just chosen, and of the likeliest ones, among
        those that the samplers left. That of a token that was forced is 0.
        """
        rows = self._left[self._left["p"] > 0].astype(_LEFT)
        rows = rows[np.argsort(-rows["p"], kind="stable")]
        found = rows["p"][rows["id"] == token]
        top = np.empty(min(n_top, len(rows)), _TOP)
        top["token"], top["logprob"] = (
            rows["id"][: len(top)],
            np.log(rows["p"][: len(top)].astype(np.float64)),
        )
        return TokenLogprob(token, float(np.log(found[0])) if len(found) else 0.0, top)

    def close(self) -> None:
        self._matcher, self._on_prompt = None, []
        chain, self._chain = getattr(self, "_chain", None), None
        if chain is not None:
            llama_cpp.llama_sampler_free(chain)

    def __del__(self) -> None:
        self.close()

    @property
    def n_prompt(self) -> int:
        """The number of the prompt's last tokens that it looks at."""
        return max((n for _, n in self._on_prompt), default=0)

    def accept_prompt(self, tokens: Iterable[int]) -> None:
        """Show the end of the prompt to the samplers that penalise repetitions; call once."""
        latest = list(tokens) if self._on_prompt else []
        for part, n in self._on_prompt:
            for token in latest[-n:]:
                llama_cpp.llama_sampler_accept(part, token)

    def sample(
        self,
        context: Any,
        index: int,
        *,
        free: bool = False,
        also: int = -1,
        never: npt.NDArray[np.int32] | None = None,
    ) -> int:
        """Choose from the logits of the batch's token `index` and remember the choice; see `choose`."""
        native = self._chain is not None and not self._keeps
        if native and (free or self._matcher is None) and never is None:
            return int(llama_cpp.llama_sampler_sample(self._chain, context, index))
        return self.choose(logits_row(context, index, self._n_vocab), free=free, also=also, never=never)

    def choose(
        self,
        logits: npt.NDArray[np.float32],
        *,
        free: bool = False,
        also: int = -1,
        never: npt.NDArray[np.int32] | None = None,
    ) -> int:
        """Choose from logits of all tokens, [n_vocab], and remember the choice.

        Args:
            free: the constraint does not apply yet.
            also: a further token that may be chosen besides those that the constraint allows.
            never: tokens that may not be chosen, unless the constraint allows no others.

        Raises:
            DeadEndError: the constraint allows no token.
        """
        matcher = None if free else self._matcher
        if never is not None:
            logits = logits.copy()
            logits[never] = -np.inf
        token = self._choose(logits)
        if matcher is not None and token != also:
            token = self._allowed(matcher, logits, token, also)
        self.accept(token)
        return token

    def hold_to(self, matcher: Matcher) -> None:
        """Constrain the answer from here on."""
        self._matcher = matcher

    def accept(self, token: int) -> None:
        """Add a token to the samplers' history."""
        if self._chain is not None:
            llama_cpp.llama_sampler_accept(self._chain, token)

    def _allowed(self, matcher: Matcher, logits: npt.NDArray[np.float32], token: int, also: int) -> int:
        """Return the choice if the constraint allows it, otherwise a choice among the allowed tokens.

        Checking one token takes at most 20 microseconds, checking a whole vocabulary up to 15 ms.
        """
        if logits[token] == -np.inf or not matcher.allows(token):
            tokens = matcher.allowed()
            if also >= 0:
                tokens = np.append(tokens, np.int32(also))
            only_end = np.isneginf(logits[tokens]).all()
            token = int(tokens[0]) if only_end else self._choose(logits, tokens)
        if token != also:
            matcher.accept(token)
        return token

    def _choose(self, logits: npt.NDArray[np.float32], tokens: npt.NDArray[np.int32] | None = None) -> int:
        """Choose from all tokens or some."""
        if self._draw is None:
            candidates = _Candidates(logits, tokens)
            llama_cpp.llama_sampler_apply(self._chain, candidates.pointer)
            if self._keeps:
                self._left = candidates.left(self.greedy)
            return candidates.selected
        return self._draw.choose(logits) if tokens is None else int(tokens[self._draw.choose(logits[tokens])])


class _Candidates:
    """A llama_token_data_array in NumPy's memory, of all tokens or some."""

    def __init__(self, logits: npt.NDArray[np.float32], tokens: npt.NDArray[np.int32] | None = None) -> None:
        n = len(logits) if tokens is None else len(tokens)
        self.rows = np.empty(n, _CANDIDATE)
        self.rows["id"] = np.arange(n, dtype=np.int32) if tokens is None else tokens
        self.rows["logit"] = logits if tokens is None else logits[tokens]
        self.rows["p"] = 0
        self._array = llama_cpp.llama_token_data_array(
            data=self.rows.ctypes.data_as(llama_cpp.llama_token_data_p), size=n, selected=-1, sorted=False
        )
        self.pointer = ctypes.pointer(self._array)

    def left(self, greedy: bool) -> npt.NDArray[np.void]:
        """Return the candidates that are left with their probabilities; of a greedy choice the chosen one."""
        if greedy:
            chosen: npt.NDArray[np.void] = self.rows[self.rows["id"] == self.selected].copy()
            chosen["p"] = 1
            return chosen
        left: npt.NDArray[np.void] = self.rows[: self._array.size].copy()
        return left

    @property
    def selected(self) -> int:
        return int(self._array.data[self._array.selected].id)


def logits_row(context: Any, index: int, n_vocab: int) -> npt.NDArray[np.float32]:
    """Return the logits of the batch's token `index`, a view that the next decode overwrites."""
    return np.ctypeslib.as_array(llama_cpp.llama_get_logits_ith(context, index), (n_vocab,))


def logprob_of(logits: npt.NDArray[np.float32], token: int, n_top: int) -> TokenLogprob:
    """Return the log probability of a token in the model's own distribution, before any sampler."""
    row = logits.astype(np.float64)
    row -= row.max()
    row -= np.log(np.exp(row).sum())
    top = np.empty(min(n_top, len(row)), _TOP)
    if n_top:
        best = np.argpartition(-row, len(top) - 1)[: len(top)]
        best = best[np.argsort(-row[best], kind="stable")]
        top["token"], top["logprob"] = best, row[best]
    return TokenLogprob(token, float(row[token]), top)


def _xtc(sampling: Sampling) -> Any:
    return llama_cpp.llama_sampler_init_xtc(
        sampling.xtc_probability, sampling.xtc_threshold, 1, sampling.seed
    )


def _where(is_on: bool, make: Callable[[], Any]) -> list[Any]:
    return [make()] if is_on else []


# The truncation samplers by name, in llama.cpp's order; each makes its sampler where it is on.
_CUTS: dict[str, Callable[[Sampling], list[Any]]] = {
    "top_n_sigma": lambda s: _where(
        s.top_n_sigma > 0, lambda: llama_cpp.llama_sampler_init_top_n_sigma(s.top_n_sigma)
    ),
    "top_k": lambda s: _where(s.top_k > 0, lambda: llama_cpp.llama_sampler_init_top_k(s.top_k)),
    "typ_p": lambda s: _where(s.typical_p < 1, lambda: llama_cpp.llama_sampler_init_typical(s.typical_p, 1)),
    "top_p": lambda s: _where(s.top_p < 1, lambda: llama_cpp.llama_sampler_init_top_p(s.top_p, 1)),
    "min_p": lambda s: _where(s.min_p > 0, lambda: llama_cpp.llama_sampler_init_min_p(s.min_p, 1)),
    "xtc": lambda s: _where(s.xtc_probability > 0, lambda: _xtc(s)),
}


def _temperature(sampling: Sampling) -> Any:
    return llama_cpp.llama_sampler_init_temp_ext(
        sampling.temperature, sampling.dynatemp_range, sampling.dynatemp_exponent
    )


def _draw(sampling: Sampling, *, adapts: bool = True) -> Any:
    """Return the sampler that picks the token."""
    if adapts and sampling.adaptive_target >= 0:
        return llama_cpp.llama_sampler_init_adaptive_p(
            sampling.adaptive_target, sampling.adaptive_decay, sampling.seed
        )
    return llama_cpp.llama_sampler_init_dist(sampling.seed)


def _dry(vocab: Any, sampling: Sampling, n_ctx: int) -> Any:
    breakers = [text.encode("utf-8") for text in sampling.dry_sequence_breakers]
    return llama_cpp.llama_sampler_init_dry(
        vocab,
        sampling.dry_multiplier,
        sampling.dry_base,
        sampling.dry_allowed_length,
        n_ctx if sampling.dry_penalty_last_n < 0 else min(sampling.dry_penalty_last_n, n_ctx),
        (ctypes.c_char_p * len(breakers))(*breakers),
        len(breakers),
    )


def _bias(n_vocab: int, logit_bias: tuple[tuple[int, float], ...]) -> Any:
    array = (llama_cpp.llama_logit_bias * len(logit_bias))()
    for entry, (token, bias) in zip(array, logit_bias, strict=True):
        entry.token, entry.bias = token, bias
    return llama_cpp.llama_sampler_init_logit_bias(n_vocab, len(logit_bias), array)


_MAX_LOGITS = 1 << 24  # logits that llama.cpp may hold for one step: 64 MB


class PromptLogprobs:
    """Log probabilities of one prompt, gathered as it is evaluated from its first token on.

    Args:
        prompt: token ids.
        n_top: how many of the likeliest tokens to return at each position.

    Attributes:
        most: maximum number of tokens in one step.
        found: the log probabilities of the tokens from the second one on, each with the token's rank by
            probability, from 1.
    """

    def __init__(self, prompt: Sequence[int] | Tokens, n_top: int, n_vocab: int) -> None:
        self._prompt, self._n_top, self._n_vocab = np.asarray(prompt).tolist(), n_top, n_vocab
        self.most = max(1, _MAX_LOGITS // n_vocab)
        self.found: list[tuple[TokenLogprob, int]] = []

    def wants(self, p0: int) -> bool:
        """Return whether log probabilities of positions from `p0` on are still missing."""
        return p0 < len(self._prompt) - 1

    def take(self, context: Any, index: int, p0: int, n: int) -> None:
        """Read the logits of the prompt's positions p0 to p0 + n, which are in the batch from `index` on.
        Known positions are skipped, since a job that lost its rows evaluates them again.
        """
        for p in range(max(p0, len(self.found)), min(p0 + n, len(self._prompt) - 1)):
            row, token = logits_row(context, index + p - p0, self._n_vocab), self._prompt[p + 1]
            logprob = logprob_of(row, token, self._n_top)
            if np.isnan(logprob.logprob):  # evaluated again, or the job ends
                return
            self.found.append((logprob, int((row > row[token]).sum()) + 1))
