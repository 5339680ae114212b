"""All that is private in llama-cpp-python, in one place: what a new version of it may move."""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import FunctionType, SimpleNamespace
from typing import Any

import llama_cpp
from llama_cpp import _internals, _logger
from llama_cpp.llama_tokenizer import LlamaTokenizer

from mixedkv import _core
from mixedkv.errors import CLOSED, ClosedError
from mixedkv.limits import RANGES, check_int, check_sampling
from mixedkv.tokens import check_tokens

# llama_cpp's own is a Python function: the handler of a signal may run in it, and what that raises is lost
_log, no_log = (llama_cpp.llama_log_callback(address) for address in _core.log_functions())

_SPECIAL = (
    llama_cpp.LLAMA_TOKEN_ATTR_CONTROL
    | llama_cpp.LLAMA_TOKEN_ATTR_USER_DEFINED
    | llama_cpp.LLAMA_TOKEN_ATTR_UNKNOWN
)
_NAMES = {"temp": "temperature", "mirostat_mode": "mirostat"}  # those of `RANGES`


def show_log() -> None:
    """Have llama.cpp's log written to stderr, as far as llama_cpp's logger wants it."""
    llama_cpp.llama_log_set(_log, ctypes.c_void_p(id(_logger.logger)))


def silence_log() -> None:
    """Have llama.cpp's log written nowhere."""
    llama_cpp.llama_log_set(no_log, ctypes.c_void_p(0))


show_log()


class TensorBufferOverride(ctypes.Structure):
    """Mirrors llama_model_tensor_buft_override; llama_model_params has an array that ends with an empty
    one.
    """

    _fields_ = (("pattern", ctypes.c_char_p), ("buft", ctypes.c_void_p))


def context(llm: llama_cpp.Llama) -> Any:
    """Return the llama_context, as llama.cpp's own functions take it.

    Raises:
        ClosedError: the `Llama` is closed.
    """
    owner = getattr(llm, "_ctx", None)
    if owner is None or owner.ctx is None:
        raise ClosedError(CLOSED)
    return owner.ctx


def address(handle: Any) -> int:
    """Return the native pointer of a llama_context or llama_model as an int."""
    return int(getattr(handle, "value", handle))


def model(llm: llama_cpp.Llama) -> Any:
    """Return the llama_model, as llama.cpp's own functions take it.

    Raises:
        ClosedError: the `Llama` is closed.
    """
    return _open_model(llm).model


def vocab(llm: llama_cpp.Llama | LlamaTokenizer) -> Any:
    """Return the llama_vocab. It needs no context, so any thread may use it.

    Raises:
        ClosedError: the `Llama` is closed.
    """
    return _open_model(llm).vocab


def _open_model(llm: llama_cpp.Llama | LlamaTokenizer) -> Any:
    owner = getattr(llm, "_model", None)
    if owner is None or owner.model is None:
        raise ClosedError(CLOSED)
    return owner


def has_vocabulary(llm: llama_cpp.Llama) -> bool:
    """Return whether the model knows tokens. The body of a split model does not: asking llama.cpp then ends
    the process.
    """
    return bool(llama_cpp.llama_vocab_type(vocab(llm)) != llama_cpp.LLAMA_VOCAB_TYPE_NONE)


def pre_tokenizer(llm: llama_cpp.Llama) -> str:
    """Name of what cuts a text into words before it has tokens; "" where there is none."""
    if llama_cpp.llama_vocab_type(vocab(llm)) != llama_cpp.LLAMA_VOCAB_TYPE_BPE:
        return ""
    key = "tokenizer.ggml.pre"
    return str((llm.kv_overrides or {}).get(key) or llm.metadata.get(key) or "default")


def missing_byte(llm: llama_cpp.Llama) -> int | None:
    """Return a byte that a SentencePiece vocabulary has no token for; texts with it end the process."""
    if llama_cpp.llama_vocab_type(vocab(llm)) != llama_cpp.LLAMA_VOCAB_TYPE_SPM:
        return None
    byte_of = {text: byte for byte in range(256) for text in (b"<0x%02X>" % byte, bytes([byte]))}
    bytes_left = set(range(256))
    for token in range(llama_cpp.llama_vocab_n_tokens(vocab(llm))):
        bytes_left.discard(byte_of.get(llama_cpp.llama_vocab_get_text(vocab(llm), token), -1))
        if not bytes_left:
            return None
    return min(bytes_left)


def is_recurrent(llm: llama_cpp.Llama) -> bool:
    """Return whether all layers keep a state instead of rows."""
    return bool(llm._is_recurrent)


def is_hybrid(llm: llama_cpp.Llama) -> bool:
    """Return whether some layers keep a state instead of rows."""
    return bool(llm._is_hybrid)


def has_experts(llm: llama_cpp.Llama) -> bool:
    """Return whether each token is computed by a few of many experts, which rounding may choose otherwise."""
    key = f"{llm.metadata.get('general.architecture')}.expert_count"
    return int(llm.metadata.get(key) or 0) > 0


def n_rollback(llm: llama_cpp.Llama) -> int:
    """Return how many of the last tokens can be removed from a sequence with a state of all of it
    (`n_rs_seq`).
    """
    return int(llama_cpp.llama_n_rs_seq(context(llm)))


def has_adapter(llm: llama_cpp.Llama) -> bool:
    """Return whether its LoRA adapter was loaded: the base class goes on without one that was refused."""
    if not llm._lora_adapter:
        llm._lora_adapter = None  # which it would free
    return llm._lora_adapter is not None


def watch_loading(params: Any, callback: int, data: int) -> None:
    """Have llama_model_params say how far a model is: addresses of the callback and its argument."""
    params.progress_callback = ctypes.cast(callback, llama_cpp.llama_progress_callback)
    params.progress_callback_user_data = data


def close(llm: llama_cpp.Llama) -> None:
    """Free the context and the model; also of an object whose making failed."""
    stack = getattr(llm, "_stack", None)
    if stack is not None:
        stack.close()


class _Borrowed:
    """A model that another `Llama` frees."""

    def __init__(self, model: Any) -> None:
        self._model = model

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    def close(self) -> None:
        pass


def load(
    init: Callable[..., None], path: str, options: Mapping[str, Any], weights: llama_cpp.Llama | None
) -> None:
    """Call `init`, the base class's `__init__` of a `Llama`. With the `weights` of another it reads no file:
    the function runs with a global `internals` of its own, whose model is the other one's.
    """
    if weights is not None:
        method: Any = init
        function = method.__func__
        borrowed = {**vars(_internals), "LlamaModel": lambda **_: _Borrowed(weights._model)}
        names = {**function.__globals__, "internals": SimpleNamespace(**borrowed)}
        own = FunctionType(function.__code__, names, argdefs=function.__defaults__)
        own.__kwdefaults__ = function.__kwdefaults__
        init = own.__get__(method.__self__)
    init(path, **options)


def free_sampler(llm: llama_cpp.Llama) -> None:
    """Free the sampler of the last completion. Otherwise its `__del__` does when the next one is made, where
    Python prints a Ctrl-C and goes on.
    """
    before, llm._sampler = llm._sampler, None
    if before is not None:
        before.close()


def has_logits(llm: llama_cpp.Llama) -> None:
    """Tell a `Llama` that the logits of its last token are there, though it did not evaluate it itself."""
    llm._requires_eval = False


class Processors:
    """Calls an answer's logits processors, as a callback of llama.cpp: Python would print what they raise,
    and the answer would go on without them. `check` raises it.
    """

    def __init__(self, processors: Iterable[Callable[[Any, Any], Any]]) -> None:
        self._processors = list(processors)
        self._error: BaseException | None = None

    def __call__(self, tokens: Any, scores: Any) -> Any:
        try:
            for processor in self._processors if self._error is None else ():
                scores[:] = processor(tokens, scores)
        except BaseException as error:
            self._error = error
        return scores

    def check(self) -> None:
        if self._error is not None:
            raise self._error


class SampledLlama(llama_cpp.Llama):
    """Makes samplers of settings that are within `RANGES`, and of processors that may raise."""

    processors: Processors

    def _init_sampler(self, **sampling: Any) -> Any:  # type: ignore[override]
        for name, value in sampling.items():
            if (known := _NAMES.get(name, name)) in RANGES:
                check_sampling(known, value, "temperature" if name == "temp" else name)
        check_int("seed", self._seed, -sys.maxsize, sys.maxsize)  # llama.cpp's is this modulo 2**32
        given = sampling.pop("logits_processor", None) or ()
        self.processors = Processors(given)
        wrapped = llama_cpp.LogitsProcessorList([self.processors]) if given else None
        n = self.last_n_tokens_size
        try:
            if n < 0:  # to llama.cpp that would be none
                self.last_n_tokens_size = self.n_ctx()
            return super()._init_sampler(**sampling, logits_processor=wrapped)
        finally:
            self.last_n_tokens_size = n


class ModelTokenizer(LlamaTokenizer):
    """Tokenizes as llama_cpp, which loses the text of a token of more than 32 bytes, and where one that is
    none ends the process.
    """

    def tokenize(self, text: bytes, add_bos: bool = True, special: bool = True) -> list[int]:
        vocab(self)
        tokens: list[int] = super().tokenize(text, add_bos, special)
        return tokens

    def detokenize(
        self, tokens: Sequence[int], prev_tokens: Sequence[int] | None = None, special: bool = False
    ) -> bytes:
        """Return the text of tokens.

        Raises:
            ValueError: one is not of this vocabulary.
            ClosedError: the `Llama` is closed.
        """
        words = vocab(self)
        ids = check_tokens("tokens", tokens, llama_cpp.llama_vocab_n_tokens(words))
        text = b"".join(token_bytes(words, token, special) for token in ids)
        begins = bool(ids) and ids[0] == llama_cpp.llama_vocab_bos(words)
        return text.removeprefix(b" ") if begins else text  # the space of Llama 1


def with_bos(of: Any, tokens: list[int]) -> list[int]:
    """Return a chat's tokens with the token that begins a sequence, where the vocabulary asks for it and the
    template leaves it out.

    Args:
        of: the vocabulary.
    """
    bos = llama_cpp.llama_vocab_bos(of)
    adds = llama_cpp.llama_vocab_get_add_bos(of) and tokens[:1] != [bos]
    return [bos, *tokens] if adds else tokens


def special_tokens(vocab: Any) -> list[tuple[int, str, int]]:
    """Return the ids, texts and attributes of the tokens that are looked for in a text before all else."""
    found = []
    for token in range(llama_cpp.llama_vocab_n_tokens(vocab)):
        attributes = int(llama_cpp.llama_vocab_get_attr(vocab, token))
        if attributes & _SPECIAL and (text := llama_cpp.llama_vocab_get_text(vocab, token)):
            found.append((token, text.decode("utf-8", "replace"), attributes))
    return found


def token_bytes(vocab: Any, token: int, special: bool) -> bytes:
    """Return the bytes of a token; with `special` control tokens are written out."""
    size = 64
    while True:
        buffer = ctypes.create_string_buffer(size)
        n = llama_cpp.llama_token_to_piece(vocab, token, buffer, size, 0, special)
        if n >= 0:
            return buffer.raw[:n]
        size = -n
