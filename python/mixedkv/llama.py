"""`llama_cpp.Llama` with a choice of KV cache."""

from __future__ import annotations

import inspect
import logging
import os
import warnings
import weakref
from collections.abc import Callable, Sequence
from functools import cached_property
from itertools import islice
from typing import TYPE_CHECKING, Any, Literal, cast, overload

import llama_cpp
from llama_cpp.llama_tokenizer import LlamaTokenizer

from mixedkv import _core
from mixedkv.chat_options import chat_arguments
from mixedkv.chat_prompt import ChatPrompt, marked_chat, tokens_of_marked
from mixedkv.config import KVSetting
from mixedkv.errors import (
    ClosedError,
    ContextLengthError,
    EngineError,
    MissingRowsError,
    ModelReadError,
    StoppedError,
    UnsupportedModelError,
)
from mixedkv.guarded_llama import GuardedLlama
from mixedkv.kv.cache import KVCache
from mixedkv.load_checks import check_loaded, reason_of, surprises
from mixedkv.load_plan import LoadArguments, LoadPlan, find_path
from mixedkv.model.fit import Beside, Fit
from mixedkv.native import llama_cpp as _llama_cpp
from mixedkv.native.large_pages import move_to_large_pages
from mixedkv.native.llama_arguments import check_names, completion_options
from mixedkv.native.next_context import next_context
from mixedkv.native.templates import readable
from mixedkv.prompts import long_text
from mixedkv.prompts.content_marks import ContentMarks, ContentTokens, may_have_marks, special_tokens
from mixedkv.streaming.layer_choice import StreamLayers
from mixedkv.streaming.streaming import Mode, Streaming
from mixedkv.tokens import check_tokens

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from typing_extensions import Self, Unpack

    from mixedkv.llama_options import ChatOptions, CompletionOptions, LlamaOptions

log = logging.getLogger("mixedkv")

_COMPLETION = inspect.signature(llama_cpp.Llama.create_completion)

NO_VOCABULARY = "this model has no vocabulary, so it takes no text: the body of a split model needs its head"


class Llama(GuardedLlama):
    """A `llama_cpp.Llama` whose KV cache is chosen by `kv`. All else is as in the base class.

    Several threads may call it and take turns, see `GuardedLlama`; `close` waits for running calls.

    Args:
        model_path: a GGUF file (the first part of a split model), or a name that `-m` takes: "smollm2",
            "hf:OWNER/REPO:FILE".
        kv: a spec such as "mixed" (the default), "mixed:cold=q8_0,threshold=256,group=32" or "q8_0", or a
            `MixedKVConfig`; see `mixedkv.config.parse_kv`. With embedding=True the default is "f16". Where a
            context has no room for the window, it is shorter.
        n_seq_max: sequences the context can hold.
        kv_unified: one pool of `n_ctx` tokens for all sequences; otherwise `n_ctx` is divided among them.
        n_rs_seq: how many of a sequence's last tokens (rejected drafts) a hybrid or recurrent model can take
            back. As many more states are kept of each sequence. llama.cpp supports this for some models.
        load_mtp: also load the layers for multi-token prediction, for an engine with speculation="mtp".
        n_windows: most sequences that layers with a sliding window have room for, 0: `n_seq_max`. In a short
            context it is fewer, down to four. An `Engine` runs as many answers at a time, and lets go of
            windows of idle sequences.
        n_ctx: tokens of the context; 0 takes what the model was trained with, "fit" at most that, as many as
            fit into the memory that is free: see `fit`.
        flash_attn: None turns it on where the cache needs it: a mixed one, a quantised V.
        type_k, type_v: ggml types of a uniform cache, as in the base class; only without `kv`.
        stream_layers: layers that are not kept in memory but read from the file for each pass: "auto", as few
            as `memory` allows; a number; all but {"keep_first": n, "keep_last": n}; "all"; or "ffn", the
            feed-forward matrices of all layers, while attention stays. See docs/streaming.md.
        memory: memory that this process may take in all, in bytes or as "6GiB"; by default what the machine
            and its control groups have left. Without stream_layers it implies stream_layers="auto".
        stream_mode: "direct" reads with O_DIRECT into a ring of layers, "prefetch" maps the file and has
            pages come ahead; to compare "mmap", as llama.cpp does it, and "resident". None repacks weights.
        progress: called with the share of the weights that are loaded, 0 to 1; an exception from it ends the
            loading.
        weights: a `Llama` of the same file, whose weights this one uses; closing it closes this one first.
        beside: what else the process will load, for n_ctx="fit" to leave memory to.
        content_tokens: what the text of a control token is in a message of a chat: "text", or "special" as it
            is in llama_cpp, where a message can end its turn. See docs/decisions/110-text-is-text.md.
        **options: arguments of `llama_cpp.Llama`. Its embedding=True sets n_seq_max and kv_unified itself.
            verbose=True shows llama.cpp's log, which the base class shows by default.
            Layers with a sliding window have rows for the window unless swa_full=True. A model stays mapped,
            and shared with other processes, with use_mmap=True; without, Linux has it in large pages.

    Warns:
        UserWarning: n_ctx is more than the model was trained with, or the cache takes more than an F16 one.

    Raises:
        FileNotFoundError: there is no such file.
        InvalidModelFileError: the file is not a GGUF model llama.cpp can load.
        UnsupportedModelError: the model cannot have this cache, or its layers cannot be streamed.
        TypeError: there is no such argument, or it has another type.
        ValueError: a setting is wrong, or does not fit the context or the memory.
    """

    @property
    def metadata(self) -> dict[str, str]:
        """Metadata of the model's file. A chat template that does not parse is one that raises its error."""
        return self._metadata

    @metadata.setter
    def metadata(self, metadata: dict[str, str]) -> None:
        # by llama_cpp.Llama.__init__, which compiles the templates
        self._metadata = readable(metadata)

    def __init__(
        self,
        model_path: str | os.PathLike[str],
        *,
        kv: str | KVSetting | None = None,
        n_seq_max: int = 1,
        kv_unified: bool = False,
        n_rs_seq: int = 0,
        load_mtp: bool = False,
        n_windows: int = 0,
        n_ctx: int | Literal["fit"] = 512,
        flash_attn: bool | None = None,
        type_k: int | None = None,
        type_v: int | None = None,
        embedding: bool = False,
        stream_layers: StreamLayers | None = None,
        memory: int | str | None = None,
        stream_mode: Mode = "direct",
        progress: Callable[[float], object] | None = None,
        weights: Llama | None = None,
        beside: Beside | None = None,
        content_tokens: ContentTokens = "text",
        **options: Unpack[LlamaOptions],
    ) -> None:
        check_names(options, Llama.__init__)
        requested = LoadArguments(
            kv=kv,
            n_seq_max=n_seq_max,
            kv_unified=kv_unified,
            n_rs_seq=n_rs_seq,
            load_mtp=load_mtp,
            n_windows=n_windows,
            n_ctx=n_ctx,
            flash_attn=flash_attn,
            type_k=type_k,
            type_v=type_v,
            embedding=embedding,
            stream_layers=stream_layers,
            memory=memory,
            stream_mode=stream_mode,
            shares_weights=weights is not None,
            beside=beside,
            content_tokens=content_tokens,
            options=cast("dict[str, Any]", options),
        )
        self._guard()
        self._plan = plan = LoadPlan.of(requested, find_path(model_path))
        for text in plan.warnings:
            warnings.warn(text, stacklevel=2)
        _check_weights(weights, plan)
        self._model_stamp, self._n_requested = plan.stamp, 0
        self._streaming = Streaming(plan.streaming) if plan.streaming is not None else None
        self._kv = KVCache(self, plan.setting, weakref.WeakMethod(self._check_evaluation), self.busy)
        self._loading: _core.Loading | None = _core.Loading(progress)
        self._load(weights)

    def _load(self, weights: Llama | None) -> None:
        """Load what was planned; where that fails, free what there is and raise the reason."""
        plan, assertions = self._plan, _core.Assertions()
        with next_context(plan.setting.native(), plan.n_windows):
            try:
                with assertions:
                    _llama_cpp.load(super().__init__, plan.path, plan.base, weights)
                if type(self.tokenizer_) is LlamaTokenizer:
                    self.tokenizer_ = _llama_cpp.ModelTokenizer(self)
                self._pre_tokenizer = _llama_cpp.pre_tokenizer(self)
                check_loaded(self, plan)
                for text in (*surprises(self, plan), *self._resolve_weights(weights)):
                    warnings.warn(text, stacklevel=3)
                self._open_gate()
            except BaseException as error:
                try:
                    if self._loading is not None:
                        self._loading.check()
                    if (reason := reason_of(error, self, plan, assertions.failed)) is not error:
                        raise reason from error
                    raise
                finally:
                    self.close()
            finally:
                self._loading = None

    @property
    def kv(self) -> KVCache:
        """The live cache: contents, and settings that can be changed. It does not keep the `Llama` alive."""
        return self._kv

    @property
    def streaming(self) -> Streaming | None:
        """Streaming of the layers that are read for each pass; None if that was not asked for."""
        return self._streaming

    @property
    def n_ctx_requested(self) -> int:
        """Tokens of the context as they were asked for, which llama.cpp rounds up; 0 if it was to choose."""
        return self._plan.n_ctx

    @property
    def has_mtp(self) -> bool:
        """True if its MTP layers are loaded."""
        return self._plan.load_mtp

    @property
    def evaluated(self) -> tuple[int, int]:
        """The number of tokens evaluated so far, and after the running `eval`; for another thread to show."""
        return self.n_tokens, max(self.n_tokens, self._n_requested)

    def tokenize(self, text: bytes, add_bos: bool = True, special: bool = False) -> list[int]:
        """Tokenize as the base class does, on a stack that is deep enough for the text.

        Raises:
            ValueError: no stack is deep enough: for some vocabularies, lines of more than 262,144 characters.
            UnsupportedModelError: the model has no vocabulary.
        """
        if not isinstance(text, bytes):
            raise TypeError(f"text={text!r:.80}: use bytes, as text.encode() gives them")
        with self.busy.pin():
            if not _llama_cpp.has_vocabulary(self):
                raise UnsupportedModelError(NO_VOCABULARY)
            if special and may_have_marks(text) and (marks := self.content_marks) is not None:
                return tokens_of_marked(marks, text, add_bos, self._tokens)
            return self._tokens(text, add_bos, special)

    def _tokens(self, text: bytes, add_bos: bool, special: bool) -> list[int]:
        base = super().tokenize
        return long_text.tokenize(self._pre_tokenizer, text, lambda text: base(text, add_bos, special))

    @cached_property
    def special_tokens(self) -> list[tuple[int, str, int]]:
        """The ids, texts and attributes of the vocabulary's special tokens."""
        return _llama_cpp.special_tokens(_llama_cpp.vocab(self))

    @cached_property
    def content_marks(self) -> ContentMarks | None:
        """Marks of control tokens in messages; None with content_tokens="special"."""
        marks = ContentMarks(special_tokens(self.special_tokens))
        return marks if self._plan.content_tokens == "text" and marks else None

    def eval(self, tokens: Sequence[int]) -> None:
        """Evaluate tokens after the n_tokens that are there, as in the base class.

        It evaluates a micro-batch at a time, with a draft_model a batch. If an abort, Ctrl-C or a file that
        cannot be read ends it early, the completed ones stay, and n_tokens counts their tokens.

        Raises:
            ModelReadError: layers are streamed, and the file cannot be read any more.
            MissingRowsError: the tokens would read rows that layers no longer have.
            ContextLengthError: the context has no room for them.
            UnsupportedModelError: it has no memory: vocab_only=True, or a model that only embeds.
            ValueError: a token is not of this model.
            RuntimeError: llama_decode failed.
            ContextBusyError: an engine uses this `Llama`.
            StoppedError: `interrupt` was called.
            ClosedError: the `Llama` is closed, maybe meanwhile.
            KeyboardInterrupt: Ctrl-C. Exceptions from handlers of other signals end it at once, too.
        """
        tokens = check_tokens("tokens", tokens, self.n_vocab())
        with self._evaluating("eval"):
            self._check_room(len(tokens))
            size = self.n_batch
            if self.draft_model is None or self._has_states:  # drafts need the logits of one llama_decode
                size = min(size, llama_cpp.llama_n_ubatch(_llama_cpp.context(self)))
            self._n_requested = self.n_tokens + len(tokens)
            for begin in range(0, max(1, len(tokens)), size):
                part = tokens[begin : begin + size]
                self.watch(len(part))
                with self._kv.step(part):
                    super().eval(part)

    def _check_room(self, n: int) -> None:
        most = len(self.input_ids)
        if not _llama_cpp.is_recurrent(self):
            most = min(most, llama_cpp.llama_n_ctx_seq(self.ctx))
        if not llama_cpp.llama_get_memory(self.ctx):
            raise UnsupportedModelError(
                "this context has no memory to evaluate tokens with: load the model without vocab_only=True, "
                "or, if it reads a text at once, use embed"
            )
        if self.n_tokens + n > most:
            raise ContextLengthError(
                f"{n} tokens behind {self.n_tokens} are more than the {most} that a sequence of this context "
                f"has room for: raise n_ctx, or evaluate fewer tokens",
                self.n_tokens + n,
                most,
            )

    def generate(self, tokens: Sequence[int], *args: Any, **kwargs: Any) -> Any:
        """Generate tokens as the base class does, at most as many as the completion may have."""
        made = super().generate(tokens, *args, **kwargs)
        criteria = kwargs.get("stopping_criteria")
        return islice(made, criteria.n_most) if isinstance(criteria, _Limited) else made

    if TYPE_CHECKING:  # what an answer is depends on `stream`, which the base class leaves open

        @overload  # type: ignore[override]
        def __call__(
            self, prompt: str, *, stream: Literal[False] = False, **options: Unpack[CompletionOptions]
        ) -> llama_cpp.CreateCompletionResponse: ...
        @overload
        def __call__(
            self, prompt: str, *, stream: Literal[True], **options: Unpack[CompletionOptions]
        ) -> Iterator[llama_cpp.CreateCompletionStreamResponse]: ...
        def __call__(self, prompt: str, *args: Any, **kwargs: Any) -> Any: ...

    @overload  # type: ignore[override]
    def create_chat_completion(
        self,
        messages: Sequence[Mapping[str, object]],
        *,
        stream: Literal[False] = False,
        **options: Unpack[ChatOptions],
    ) -> llama_cpp.CreateChatCompletionResponse: ...
    @overload
    def create_chat_completion(
        self,
        messages: Sequence[Mapping[str, object]],
        *,
        stream: Literal[True],
        **options: Unpack[ChatOptions],
    ) -> Iterator[llama_cpp.CreateChatCompletionStreamResponse]: ...
    def create_chat_completion(
        self, messages: Sequence[Mapping[str, object]], *args: Any, **kwargs: Any
    ) -> Any:
        """Answer a chat as the base class does, where control tokens in messages are text, and the prompt
        begins with BOS where the vocabulary asks for it. JSON schemas in `response_format` and a required
        tool, which the base class ignores, hold here.

        Raises:
            ValueError: a message, a format or a choice of a tool is not known, or cannot be had here.
        """
        options = chat_arguments(self, messages, args, kwargs)
        chat: Any = messages
        if self.chat_handler is not None:  # it may read messages in its own way
            with self.busy.acquire():
                return super().create_chat_completion(chat, **options)
        if self.content_marks is not None:
            chat, options = marked_chat(self.content_marks, messages, options, self.metadata)
        with self.busy.acquire():
            prompt = cast("llama_cpp.Llama", ChatPrompt(self))
            return llama_cpp.Llama.create_chat_completion(prompt, chat, **options)

    @overload  # type: ignore[override]
    def create_completion(
        self, prompt: str | list[int], *, stream: Literal[False] = False, **options: Unpack[CompletionOptions]
    ) -> llama_cpp.CreateCompletionResponse: ...
    @overload
    def create_completion(
        self, prompt: str | list[int], *, stream: Literal[True], **options: Unpack[CompletionOptions]
    ) -> Iterator[llama_cpp.CreateCompletionStreamResponse]: ...
    def create_completion(
        self,
        prompt: str | list[int],
        suffix: str | None = None,
        max_tokens: int | None = 16,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        """Complete as the base class does, except that it exceeds max_tokens by at most 3 tokens to complete
        a character, where the base class has no limit.
        """
        given = _COMPLETION.bind(self, prompt, suffix, max_tokens, *args, **kwargs).arguments
        del given["self"]
        options = completion_options(given, self.n_vocab())
        if (most := options["max_tokens"]) and most > 0:
            options["stopping_criteria"] = _Limited(most + 3, options.get("stopping_criteria"))
        return super().create_completion(**options)

    def decode_error(self, code: int) -> Exception:
        """Return the error for a code of llama_decode other than 0, after one that this context returned."""
        try:
            self._check_evaluation()
        except (ModelReadError, StoppedError, ClosedError) as error:
            log.error("%s", error)
            return error
        if reason := self._kv.refused():
            return MissingRowsError(reason)
        return EngineError(f"llama_decode returned {code}")

    def _check_evaluation(self) -> None:
        self._check_interrupt()
        self._check_streaming()

    def _check_streaming(self) -> None:
        if self._streaming is not None:
            self._streaming.check()

    # The base class fills in structures of its own making; some of their fields it has no arguments for.
    @property
    def model_params(self) -> llama_cpp.llama_model_params:
        """Parameters of llama.cpp's model, with what the base class has no arguments for."""
        self._model_params.load_mtp = self._plan.load_mtp
        if self._streaming is not None:  # each time: the base class has a load_mode of its own
            self._streaming.prepare(self._model_params)
        if self._loading is not None:
            _llama_cpp.watch_loading(self._model_params, self._loading.callback(), self._loading.address())
        return self._model_params

    @model_params.setter
    def model_params(self, params: llama_cpp.llama_model_params) -> None:
        self._model_params = params

    @property
    def context_params(self) -> llama_cpp.llama_context_params:
        """Parameters of llama.cpp's context, with what the base class has no arguments for."""
        return self._context_params

    @context_params.setter
    def context_params(self, params: llama_cpp.llama_context_params) -> None:
        params.n_seq_max = self._plan.n_seq_max
        params.kv_unified = self._plan.kv_unified
        params.n_rs_seq = self._plan.n_rs_seq
        self._context_params = params

    @classmethod
    def from_pretrained(cls, repo_id: str, filename: str | None, *args: Any, **kwargs: Any) -> Self:
        """Download a model from the Hugging Face Hub and open it; needs the package huggingface-hub.

        Args:
            repo_id, filename: the repository, and the file's name or a glob pattern of it.
            *args: as in the base class: additional_files, local_dir, local_dir_use_symlinks, cache_dir.
            **kwargs: those too, and arguments of this class.
        """
        return cast("Self", super().from_pretrained(repo_id, filename, *args, **kwargs))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        try:
            self.close()
        except RuntimeError:
            # Ctrl-C in the last instructions of a call leaves it entered: that is what the caller has to see
            if not isinstance(error, KeyboardInterrupt):
                raise

    def __getstate__(self) -> dict[str, Any]:
        state: dict[str, Any] = super().__getstate__()  # type: ignore[no-untyped-call]
        del state["type_k"], state["type_v"]
        plan = self._plan
        names = ("n_seq_max", "kv_unified", "n_rs_seq", "n_windows", "load_mtp", "content_tokens")
        own = {name: getattr(plan, name) for name in names}
        return {**state, **own, **plan.again, "kv": str(plan.setting)}

    @property
    def fitted(self) -> Fit | None:
        """The choice that n_ctx="fit" made; None where a number was given."""
        return self._plan.fit

    @property
    def n_windows(self) -> int:
        """Sequences that layers with a sliding window have room for; 0: all, or there are none."""
        return self._plan.n_windows

    def _resolve_weights(self, weights: Llama | None) -> Iterator[str]:
        """Have the weights stay where they are to be; yield what keeps them from it."""
        if self._streaming is not None:
            yield from self._streaming.lock(self)
        elif weights is None and not (self._plan.base.get("use_mmap") or self._plan.base.get("use_mlock")):
            move_to_large_pages(_core.mapped_weights(_llama_cpp.address(_llama_cpp.model(self))))
        if weights is not None:
            closing = weakref.WeakMethod(self.close)
            weights.at_close(lambda: (close := closing()) and close())


class _Limited(llama_cpp.StoppingCriteriaList):
    """A completion's limit, which it gives its own `generate`, however late it is read: how many tokens it
    may have.

    Args:
        n_most: as many.
        own: the caller's criterion.
    """

    def __init__(self, n_most: int, own: Callable[[Any, Any], bool] | None) -> None:
        super().__init__(() if own is None else [own])
        self.n_most = n_most


def _check_weights(weights: Llama | None, plan: LoadPlan) -> None:
    """Refuse the weights of another file, or as another user loaded them."""
    if weights is None:
        return
    if not isinstance(weights, Llama):
        raise TypeError(f"weights={weights!r}: use a Llama of the same file")
    same = (weights.model_path, weights._model_stamp) == (plan.path, plan.stamp)
    if not same or weights.kv_overrides != plan.base.get("kv_overrides"):
        raise ValueError(f"weights: this is a Llama of {weights.model_path}, not of {plan.path} as it is now")
    _llama_cpp.context(weights)  # RuntimeError once it is closed
