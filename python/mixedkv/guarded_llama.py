"""A `llama_cpp.Llama` that several threads may call, and close while others are in a call."""

from __future__ import annotations

import sys
from abc import abstractmethod
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import llama_cpp
import numpy as np

from mixedkv import _core
from mixedkv.errors import ContextBusyError, NotFiniteError, StoppedError
from mixedkv.kv.cache import KVCache
from mixedkv.native import llama_cpp as _llama_cpp
from mixedkv.native.context_lock import ContextGate, present
from mixedkv.tokens import common_prefix

_T = TypeVar("_T")


def _is_finite(made: Any) -> bool:
    """Return whether all numbers of vectors are finite; they may be in lists of lists."""
    if made and isinstance(made[0], list):
        return all(map(_is_finite, made))
    return bool(np.isfinite(made).all())


_SHORT_STEP = 8  # tokens: a step that ends sooner than a copy of recurrent states is worth


class GuardedLlama(_llama_cpp.SampledLlama):
    """Lets several threads use a `Llama`. llama.cpp itself takes one thread at a time, and two end the
    process.

    - What needs the vocabulary or a size only (`tokenize`, `detokenize`, `n_ctx`, `token_eos`, ...) runs on
      any thread at any time.
    - What evaluates, samples or begins anew (`eval`, `generate`, `create_completion`,
      `create_chat_completion`, `embed`, `sample`, `reset`) waits until no other thread uses the context. A
      stream holds the context for one token at a time. Whatever another thread, or the reader itself,
      evaluates or removes between two tokens of a stream takes its place: its next token raises
      ContextBusyError.
    - What moves or reads rows (`save_state`, `load_state` and `kv`) raises ContextBusyError while another
      thread uses the context.
    - While an `Engine` uses it, what evaluates or loads a state raises ContextBusyError on every thread, that
      of the engine too.
    - After `close` all of them raise ClosedError.

    Attributes such as `n_tokens`, `input_ids` and `scores` are not guarded.
    """

    busy: ContextGate
    _interrupt: _core.Interrupt | None
    _threads: _core.Threads | None
    _has_states: bool
    _n_turns: int

    @property
    @abstractmethod
    def kv(self) -> KVCache:
        """The live cache: its contents and the settings that can be changed."""

    def _guard(self) -> None:
        """Begin, before the base class does."""
        self.busy = ContextGate()
        self._interrupt = self._threads = None
        self._n_turns = 0

    def _open_gate(self) -> None:
        """Let threads in: the context is there."""
        address = _llama_cpp.address(_llama_cpp.context(self))
        self.busy.open(address)
        self._interrupt = _core.Interrupt(address)
        self._has_states = _llama_cpp.is_recurrent(self) or _llama_cpp.is_hybrid(self)
        self._interrupt.watch(not self._has_states)
        self._threads = _core.Threads(address)

    # --- any thread at any time ---

    n_ctx = present(llama_cpp.Llama.n_ctx)
    n_embd = present(llama_cpp.Llama.n_embd)
    n_vocab = present(llama_cpp.Llama.n_vocab)
    tokenize = present(llama_cpp.Llama.tokenize)
    detokenize = present(llama_cpp.Llama.detokenize)

    def tokenizer(self) -> llama_cpp.llama_tokenizer.LlamaTokenizer:
        """Return the tokenizer of the model's file."""
        with self.busy.pin():
            return _llama_cpp.ModelTokenizer(self)

    token_eos = present(llama_cpp.Llama.token_eos)
    token_bos = present(llama_cpp.Llama.token_bos)
    token_nl = present(llama_cpp.Llama.token_nl)
    pooling_type = present(llama_cpp.Llama.pooling_type)

    @property
    def ctx(self) -> Any:
        return _llama_cpp.context(self)

    @property
    def model(self) -> Any:
        return _llama_cpp.model(self)

    # --- one thread at a time ---

    def sample(self, *args: Any, idx: int | None = None, **kwargs: Any) -> Any:
        """Sample as the base class does, and raise what a logits processor raises.

        Raises:
            ValueError: there are no logits of this token: nothing was evaluated since a state was loaded, or
                it is not the last one and logits_all is False. llama.cpp would end the process.
        """
        with self.busy.acquire():
            last = -1 if idx is None else idx - self.n_tokens
            if not self.n_tokens:
                raise ValueError("sample: no token was evaluated: give at least one first, as the prompt")
            if not llama_cpp.llama_get_logits_ith(self.ctx, last):
                raise ValueError(
                    f"sample: there are no logits of token {self.n_tokens + last}: evaluate it first, with "
                    f"logits_all=True if others follow it"
                )
            token = super().sample(*args, **{**kwargs, "idx": idx})
            self.processors.check()
            return token

    def reset(self) -> None:
        with self._evaluating("reset"):
            super().reset()  # type: ignore[no-untyped-call]

    def embed(
        self,
        input: str | list[str],
        normalize: bool = False,
        truncate: bool = True,
        return_count: bool = False,
    ) -> Any:
        """Embed as the base class does. Where nothing is pooled it is given one text at a time: it reads the
        vectors of all but the first of a batch from the wrong place.

        Raises:
            NotFiniteError: numbers of a vector are NaN or infinite.
        """
        with self._evaluating("embed"):
            made = self._embed(input, normalize, truncate, return_count)
            self.kv.take_not_finite()  # vectors tell by themselves
            if not _is_finite(made[0] if return_count else made):
                self.kv.clear_unused()
                raise NotFiniteError("the model's vectors of this text")
            return made

    def _embed(self, input: str | list[str], normalize: bool, truncate: bool, return_count: bool) -> Any:
        base = super().embed
        if (
            isinstance(input, str)
            or llama_cpp.llama_pooling_type(self.ctx) != llama_cpp.LLAMA_POOLING_TYPE_NONE
        ):
            return base(input, normalize, truncate, return_count)
        made = [base(text, normalize, truncate, True) for text in input]
        vectors = [vector for vector, _ in made]
        return (vectors, sum(n for _, n in made)) if return_count else vectors

    def generate(self, tokens: Sequence[int], *args: Any, **kwargs: Any) -> Any:
        return self.in_turns(self._generate(tokens, *args, **kwargs))

    def _generate(self, tokens: Sequence[int], *args: Any, **kwargs: Any) -> Generator[int, Any, None]:
        """Generate as the base class does, from the tokens that are there with all that the next one reads:
        it takes all those for granted which are the same.
        """
        if kwargs.get("reset", args[6] if len(args) > 6 else True):
            n = common_prefix(self.input_ids[: self.n_tokens], np.asarray(tokens, np.intc))
            has_logits = n == len(tokens) == self.n_tokens and not self._requires_eval
            n = min(n, len(tokens) - 1)
            if n > 0 and not has_logits and (cut := self.kv.longest_cut(0, n)) < n:
                self.n_tokens = cut
        _llama_cpp.free_sampler(self)
        yield from super().generate(tokens, *args, **kwargs)

    def create_completion(self, *args: Any, **kwargs: Any) -> Any:
        with self.busy.acquire():
            made = super().create_completion(*args, **kwargs)
        return self.in_turns(made) if isinstance(made, Generator) else made

    def in_turns(self, steps: Generator[_T, Any, None]) -> Generator[_T, Any, None]:
        """Yield what `steps` yields, and hold the context for one step at a time.

        Raises:
            ContextBusyError: something else was evaluated between two steps, or tokens were removed.
        """
        turn, sent = None, None
        try:
            while True:
                with self.busy.acquire():
                    if turn not in (None, (self._n_turns, self.n_tokens)):
                        raise ContextBusyError(
                            "another answer was begun on this Llama, or its tokens were removed: read a "
                            "stream to its end or close it before that, or use an Engine"
                        )
                    try:
                        item = steps.send(sent)
                    except StopIteration:
                        return
                    turn = self._n_turns, self.n_tokens
                sent = yield item
        finally:
            steps.close()

    def save_state(self) -> llama_cpp.LlamaState:
        """Save the state as the base class does."""
        with self.busy.acquire("save_state"):
            return super().save_state()

    def load_state(self, state: llama_cpp.LlamaState) -> None:
        """Load a state as the base class does. Nothing is known of how it was computed: see
        `KVCache.exact_tokens`. A state that is refused leaves an empty cache and n_tokens 0.

        Raises:
            RuntimeError: llama.cpp refuses the state, or its rows are damaged.
            ContextBusyError: another thread uses the context, or an engine uses this `Llama`: on whatever
                thread a state is loaded, it replaces the rows of all answers.
        """
        self.busy.check_own("load_state")
        with self.busy.acquire("load_state"), self._evaluating("load_state"):
            if not isinstance(state, llama_cpp.LlamaState):
                raise TypeError(f"state={state!r}: use what save_state returned")
            self.kv.limit_exact(0)
            input_ids = self.input_ids
            try:
                super().load_state(state)
                self._check_rows()
            except BaseException:
                self.kv.clear()
                self.input_ids = input_ids
                raise

    def _check_rows(self) -> None:
        try:
            _core.check_rows(_llama_cpp.address(self.ctx))
        except ValueError as error:
            raise RuntimeError(f"load_state: the state is damaged: {error}") from error

    @contextmanager
    def _evaluating(self, what: str) -> Iterator[None]:
        """Guard a block that changes sequence 0.

        Raises:
            ContextBusyError: an engine uses this `Llama`.
            StoppedError: `interrupt` was called.
            ClosedError: `close` was called.
        """
        self.busy.check_own(what)
        with self.busy.acquire():
            self.busy.check_own(what)  # an engine may have begun while this waited
            self._n_turns += 1
            self.busy.check_open()
            try:
                yield
            except RuntimeError as error:
                self._check_interrupt(error)
                raise

    @contextmanager
    def turn(self, what: str) -> Iterator[int]:
        """Evaluate otherwise than by `eval` while inside. Yield the number of evaluations before this one:
        where it is that of the caller's last turn, nothing was evaluated in between.

        Args:
            what: name of the caller, for an error.

        Raises:
            ContextBusyError, StoppedError, ClosedError: as `eval`.
        """
        with self.busy.acquire():
            before = self._n_turns
            with self._evaluating(what):
                yield before

    @property
    def n_turns(self) -> int:
        """Number of evaluations so far, including those of `turn`."""
        return self._n_turns

    def watch(self, n_tokens: int) -> None:
        """Let Ctrl-C and `interrupt` stop the evaluation of `n_tokens` tokens half-way.

        A few tokens of a model with recurrent layers are stopped before they begin instead: to take back half
        a step, their states would have to be copied before each one, megabytes for a token.
        """
        if self._interrupt is None or not self._has_states:
            return
        self._interrupt.watch(n_tokens > _SHORT_STEP)
        if n_tokens <= _SHORT_STEP:
            self._check_interrupt()

    def _check_interrupt(self, error: Exception | None = None) -> None:
        """Raise what ended an evaluation, if that was not llama.cpp: Ctrl-C, `interrupt` or `close`."""
        if self._interrupt is None or not self._interrupt.take():
            return
        self.busy.check_open()
        raise StoppedError("the evaluation was stopped by Llama.interrupt") from error

    def interrupt(self, requested: bool = True) -> None:
        """Stop the evaluation that runs, or else the next one: its call raises StoppedError. False takes that
        back. Any thread may call it, and so may the handler of a signal.
        """
        if self._interrupt is not None:
            (self._interrupt.ask if requested else self._interrupt.clear)()

    def lend(self, lent: bool) -> None:
        """Say whether an engine uses the context: all else that evaluates is then refused."""
        self.busy.lend(lent)

    # --- the end ---

    def at_close(self, function: Callable[[], object]) -> None:
        """Have `close` call a function before it frees the context and the model; the last one first."""
        self.busy.at_close(function)

    def close(self) -> None:
        """Free the context and the model. Can be called again, and on an object whose making failed.

        An evaluation that another thread runs is stopped, and raises ClosedError there; so does all that is
        called later. Engines on this `Llama` are closed first.

        Raises:
            RuntimeError: this thread is in a call of this `Llama`.
        """
        if getattr(self, "_kv", None) is not None:
            self.busy.close(self.interrupt, self._free)

    def _free(self) -> None:
        if self._threads is not None:
            self._threads.close()
        _llama_cpp.close(self)

    def __del__(self) -> None:
        busy = getattr(self, "busy", None)
        # daemon threads stop where they are when Python ends, inside as well
        if busy is not None and (not sys.is_finalizing() or busy.is_empty):
            self.close()
