"""`llama_cpp.Llama` with a choice of KV cache."""

from __future__ import annotations

import os
import warnings
from collections.abc import Sequence
from typing import Any, NoReturn

import llama_cpp

from mixedkv import _core, _llama_cpp, long_text
from mixedkv.config import KVSetting, MixedKVConfig, UniformKV, ggml_type, parse_kv, type_bits, type_name
from mixedkv.errors import InvalidModelFileError, UnsupportedModelError
from mixedkv.kv.cache import KVCache
from mixedkv.limits import MAX_SEQUENCES
from mixedkv.model.footprint import model_shape
from mixedkv.model.gguf_file import ModelFile, file_stamp, read_model_file

NO_VOCABULARY = "this model has no vocabulary, so it takes no text: the body of a split model needs its head"


class Llama(llama_cpp.Llama):
    """A `llama_cpp.Llama` whose KV cache is chosen by `kv`. All else is as in the base class.

    Args:
        model_path: a GGUF file; of a split model the first part.
        kv: a spec such as "mixed" (the default), "mixed:cold=q8_0,threshold=256,group=32" or "q8_0", or a
            `MixedKVConfig`; see `mixedkv.config.parse_kv`. With embedding=True the default is "f16".
        n_seq_max: sequences the context can hold.
        kv_unified: one pool of `n_ctx` tokens for all sequences; otherwise `n_ctx` is divided among them.
        n_ctx: tokens of the context; 0 takes what the model was trained with.
        flash_attn: None turns it on where the cache needs it: a mixed one, a quantised V.
        type_k, type_v: ggml types of a uniform cache, as in the base class; only without `kv`.
        **kwargs: arguments of `llama_cpp.Llama`. Its embedding=True sets n_seq_max and kv_unified itself.

    Raises:
        FileNotFoundError: there is no such file.
        InvalidModelFileError: the file is not a GGUF model llama.cpp can load.
        UnsupportedModelError: the model cannot have this cache.
        ValueError: a setting is wrong, or does not fit the context.
    """

    def __init__(
        self,
        model_path: str | os.PathLike[str],
        *,
        kv: str | KVSetting | None = None,
        n_seq_max: int = 1,
        kv_unified: bool = False,
        n_ctx: int = 512,
        flash_attn: bool | None = None,
        type_k: int | None = None,
        type_v: int | None = None,
        embedding: bool = False,
        **kwargs: Any,
    ) -> None:
        self._setting = _choose_setting(kv, type_k, type_v, embedding)
        self._n_seq_max, self._kv_unified = _check_sequences(n_seq_max), bool(kv_unified)
        flash_attn = _choose_flash_attn(self._setting, flash_attn)
        path = os.fsdecode(model_path)
        file = read_model_file(path)
        self._check_context(n_ctx or int(file.get("context_length", 0)), embedding)
        native = self._setting.native()
        # what is loaded now: KV is kept under the file's name, which another file may take meanwhile
        self._model_stamp = file_stamp(path)
        lora_path = kwargs.get("lora_path")
        self._lora_stamp = file_stamp(lora_path) if lora_path and os.path.exists(lora_path) else None
        self._kv = KVCache(self, self._setting)
        try:
            if native is not None:  # the context that super().__init__ makes on this thread takes it
                _core.configure_next(**native)
            super().__init__(
                path,
                n_ctx=n_ctx,
                flash_attn=flash_attn,
                type_k=ggml_type(self._setting.type_k),
                type_v=ggml_type(self._setting.type_v),
                embedding=embedding,
                **kwargs,
            )
            self._check_bytes(file)
            if not kwargs.get("vocab_only"):
                self._warn_of_size()
            self._pre_tokenizer = _llama_cpp.pre_tokenizer(self)
            threads = _core.Threads(_llama_cpp.address(_llama_cpp.context(self)))
            _llama_cpp.at_close(self, threads.close)
        except BaseException as error:
            try:
                self._raise_clearly(error, file)
            finally:
                self.close()
        finally:
            _core.withdraw()

    @property
    def kv(self) -> KVCache:
        """The live cache: its contents and the settings that can be changed."""
        return self._kv

    def tokenize(self, text: bytes, add_bos: bool = True, special: bool = False) -> list[int]:
        """As in the base class, on a stack that is deep enough for the text.

        Raises:
            ValueError: none would be: a line of more than 262,144 characters, for some vocabularies.
            UnsupportedModelError: the model has no vocabulary.
        """
        if not _llama_cpp.has_vocabulary(self):
            raise UnsupportedModelError(NO_VOCABULARY)
        base = super().tokenize
        return long_text.tokenize(self._pre_tokenizer, text, lambda text: base(text, add_bos, special))

    def eval(self, tokens: Sequence[int]) -> None:
        """Evaluate tokens behind the n_tokens that are there, as in the base class."""
        with self._kv.evaluating():
            super().eval(tokens)

    def load_state(self, state: llama_cpp.LlamaState) -> None:
        """As in the base class. What was done before it was saved is unknown: see `KVCache.exact_tokens`."""
        with self._kv.busy.at_once("load_state"):
            self._kv.limit_exact(0)
            super().load_state(state)

    def save_state(self) -> llama_cpp.LlamaState:
        """As in the base class."""
        with self._kv.busy.at_once("save_state"):
            return super().save_state()

    # The base class fills in a structure of its own making; these two fields it has no arguments for.
    @property
    def context_params(self) -> llama_cpp.llama_context_params:
        return self._context_params

    @context_params.setter
    def context_params(self, params: llama_cpp.llama_context_params) -> None:
        params.n_seq_max = self._n_seq_max
        params.kv_unified = self._kv_unified
        self._context_params = params

    def close(self) -> None:
        """Free the context and the model. Can be called again, and on an object whose making failed."""
        _llama_cpp.close(self)

    def __enter__(self) -> Llama:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __getstate__(self) -> dict[str, Any]:
        state: dict[str, Any] = super().__getstate__()  # type: ignore[no-untyped-call]
        del state["type_k"], state["type_v"]
        own = {"kv": str(self._setting), "n_seq_max": self._n_seq_max, "kv_unified": self._kv_unified}
        return {**state, **own}

    def _check_context(self, n_ctx: int, embedding: bool) -> None:
        """`n_ctx` is 0 where the file does not tell; llama.cpp then has the last word."""
        n_seq = 1 if self._kv_unified or embedding else self._n_seq_max
        if n_ctx:
            self._setting.check_context(n_ctx // n_seq)

    def _check_bytes(self, file: ModelFile) -> None:
        if (byte := _llama_cpp.missing_byte(self)) is not None:
            raise InvalidModelFileError(
                f"{file.path} has no token for the byte 0x{byte:02X}: llama.cpp could not read every text. "
                f"Convert the model again, with its byte tokens"
            )

    def _warn_of_size(self) -> None:
        """Without a hot_budget such a cache is refused."""
        if isinstance(self._setting, MixedKVConfig) and (stats := self._kv.stats()).saving < 0:
            warnings.warn(
                f"kv={str(self._setting)!r} takes {stats.bytes_total} bytes here, more than the "
                f"{stats.bytes_f16} of kv='f16'",
                stacklevel=3,
            )

    def _raise_clearly(self, error: BaseException, file: ModelFile) -> NoReturn:
        """Say what the base class leaves to llama.cpp's log."""
        if isinstance(error, ValueError) and str(error).startswith("Failed to load model"):
            raise InvalidModelFileError(
                f"{file.path} cannot be loaded: llama.cpp refuses it (architecture {file.architecture}); "
                f"verbose=True shows why"
            ) from error
        if isinstance(error, ValueError) and str(error) == "Failed to create llama_context":
            raise self._context_error(_core.last_error(), file) from error
        raise error

    def _context_error(self, reason: str, file: ModelFile) -> ValueError:
        problem = self._unsupported() or _block_problem(self._setting, file)
        if problem or "not supported" in reason:
            return UnsupportedModelError(problem or reason)
        asked = f"n_ctx={self._context_params.n_ctx} and kv={str(self._setting)!r}"
        return ValueError(f"llama.cpp could not make a context of {asked}: {reason or 'its log says why'}")

    def _unsupported(self) -> str:
        """Why this model cannot have this cache, "" if it can."""
        native = self._setting.native()
        if native is None:
            return ""
        n_ctx = self._context_params.n_ctx // (1 if self._kv_unified else self._n_seq_max)
        type_k, type_v = ggml_type(self._setting.type_k), ggml_type(self._setting.type_v)
        try:
            _core.check(_llama_cpp.model(self), **native, type_k=type_k, type_v=type_v, n_ctx=n_ctx)
        except UnsupportedModelError as error:
            return str(error)
        return ""


def _choose_setting(
    kv: str | KVSetting | None, type_k: int | None, type_v: int | None, embedding: bool
) -> KVSetting:
    """Embeddings are read once, and the base class reserves sequences by the hundred for them."""
    if type_k is None and type_v is None:
        return parse_kv(kv if kv is not None else "f16" if embedding else "mixed")
    if kv is not None:
        raise ValueError(
            f"kv={str(kv)!r} and type_k={type_k}, type_v={type_v} both choose the cache: give kv only"
        )
    k, v = (1 if kind is None else kind for kind in (type_k, type_v))
    return UniformKV(type_k=type_name(k), type_v=type_name(v))


def _choose_flash_attn(setting: KVSetting, flash_attn: bool | None) -> bool:
    if setting.needs_flash and flash_attn is False:
        raise ValueError(
            f"flash_attn=False does not go with kv={str(setting)!r}: this cache is read with flash "
            f"attention only. Leave flash_attn out, or use kv='f16'"
        )
    return setting.needs_flash or bool(flash_attn)


def _check_sequences(n_seq_max: int) -> int:
    if isinstance(n_seq_max, bool) or not isinstance(n_seq_max, int):
        raise TypeError(f"n_seq_max={n_seq_max!r}: use a whole number")
    if not 1 <= n_seq_max <= MAX_SEQUENCES:
        raise ValueError(f"n_seq_max={n_seq_max}: use a number from 1 to {MAX_SEQUENCES}")
    return n_seq_max


def _block_problem(setting: KVSetting, file: ModelFile) -> str:
    """Quantised types pack 32 elements of a head; that a head size does not fit, llama.cpp only logs."""
    try:
        layers = model_shape(file).layers
    except UnsupportedModelError:
        return ""
    for layer in layers:
        for kind, size in ((setting.type_k, layer.head_k), (setting.type_v, layer.head_v)):
            if type_bits(kind) < 16 and size % 32:
                return f"{kind} packs 32 elements, layer {layer.il} has heads of {size}: use kv='f16'"
    return ""
