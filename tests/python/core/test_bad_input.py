"""Bad input to `Llama`: each kind gives one clear exception, and nothing half-made is left behind."""

from __future__ import annotations

import contextlib
import gc
import math
import os
import struct
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import gguf
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mixedkv import Llama, MixedKVConfig, _core
from mixedkv.bundled import model_path
from mixedkv.errors import ContextLengthError, InvalidModelFileError, UnsupportedModelError
from mixedkv.model.gguf_copy import write_and_close
from mixedkv.model.gguf_file import read_model_file
from support.models import zoo

WINDOWS_FOR_ALL = True  # F16 rows for every sequence, whatever they take
pytestmark = [pytest.mark.core, pytest.mark.by_model]

TINY: dict[str, Any] = {"n_ctx": 256, "verbose": False}


# --- files ---


def test_missing_file(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"none\.gguf"):
        Llama(tmp_path / "none.gguf")


def test_directory(tmp_path: Path) -> None:
    with pytest.raises(InvalidModelFileError, match="is a directory"):
        Llama(tmp_path)


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="no named pipes here")
def test_pipe_does_not_hang(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(InvalidModelFileError, match="not a regular file"):
        Llama(tmp_path / "pipe")


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "it is empty"),
        (b"PK\x03\x04 a zip file", r"no GGUF file: it starts with b'PK"),
        (b"GG", r"no GGUF file: it starts with b'GG'"),
        (b"GGUF", "truncated"),
        (b"GGUF" + struct.pack("<IQQ", 1, 0, 0), "GGUF version 1"),
        (b"GGUF" + struct.pack(">IQQ", 3, 0, 0), "little-endian"),
        (b"GGUF" + struct.pack("<IQQ", 3, 1 << 60, 0), "claims 0 keys and 1152921504606846976 tensors"),
        (b"GGUF" + struct.pack("<IQQ", 3, 0, 1 << 60), "claims 1152921504606846976 keys"),
        (b"GGUF" + struct.pack("<IQQQ", 3, 0, 1, 1 << 60), "claims a name or text of 1152921504606846976"),
    ],
)
def test_not_a_model(tmp_path: Path, data: bytes, message: str) -> None:
    path = tmp_path / "bad.gguf"
    path.write_bytes(data)
    with pytest.raises(InvalidModelFileError, match=message) as error:
        Llama(path)
    assert str(path) in str(error.value)


def write(folder: Path, name: str, keys: dict[str, object]) -> Path:
    """A model of the zoo with other numbers in its header."""
    model = zoo.make(name)
    model.keys |= keys
    model.write(folder / "model.gguf")
    return folder / "model.gguf"


ROPE, RMS, LAYER_NORM = (
    "rope.dimension_count",
    "attention.layer_norm_rms_epsilon",
    "attention.layer_norm_epsilon",
)
SCALE, LENGTH, SECTIONS = (
    "attention.temperature_scale",
    "attention.temperature_length",
    "rope.dimension_sections",
)
NO_PAIRS, NO_EPSILON = r", and RoPE turns pairs of the \d+ el", r"(; a norm's eps|, not a number)"
NUMBERS: list[tuple[str, dict[str, object], str]] = [
    # ggml aborts where RoPE turns half a pair, or more than a head; where it turns none it never ends
    *(("gemma2", {ROPE: n}, f"its {ROPE} is {n}{NO_PAIRS}") for n in (0, 63, 66, 2**32 - 1)),
    ("gemma2", {f"{ROPE}_swa": 31}, f"its {ROPE}_swa is 31{NO_PAIRS}"),
    ("qwen35", {ROPE: 0}, f"its {ROPE} is 0{NO_PAIRS}"),
    ("qwen35", {SECTIONS: [0, 0, 0, 0]}, "dimension_sections are .*not all 0"),
    ("qwen35", {SECTIONS: [31, 31, 31, 31]}, "dimension_sections are .* together at most"),
    ("llama-64", {"rope.freq_base": math.nan}, r"its rope\.freq_base is nan, not a number"),
    # and where a norm's epsilon is negative or no number, once tokens are evaluated
    *(
        (name, {key: value}, f"its {key} is {value}{NO_EPSILON}")
        for name, key in (("qwen3", RMS), ("rwkv7", LAYER_NORM))
        for value in (-1.0, -(2.0**-17), 2.0, math.inf, -math.inf, math.nan)
    ),
    # no layers to evaluate a token with
    *(("glm4moe", {"nextn_predict_layers": n}, f"{n} of its 2 layers guess further") for n in (2, 2**31)),
    ("deepseek2", {SCALE: 0.5}, "temperature_length is None: it must be 1"),
    ("deepseek2", {SCALE: 0.5, LENGTH: 0}, "temperature_length is 0: it must be 1"),
    # divisions by zero, and writes behind a buffer
    ("llama4", {"attention.sliding_window": 0}, "sliding_window is 0: it must be 1 or more"),
    ("rwkv7", {"wkv.head_size": 2}, "wkv.head_size is 2: it must be a multiple of 32"),
    ("qwen35", {"full_attention_interval": 0}, "full_attention_interval is 0: it must be 1 or more"),
    *(
        ("llama-64", {key: 2**32 - 1}, rf"its {key} is 4294967295: it must be from 0 to \d+")
        for key in ("block_count", "context_length")
    ),
]


@pytest.mark.parametrize(("name", "keys", "message"), NUMBERS)
def test_numbers_that_end_the_process_are_refused(
    tmp_path: Path, name: str, keys: dict[str, object], message: str
) -> None:
    with pytest.raises(InvalidModelFileError, match=message):
        Llama(write(tmp_path, name, keys), **TINY)


@pytest.mark.parametrize(
    ("name", "keys"),
    [("gemma2", {ROPE: 62}), ("nemotron-h", {ROPE: 0}), ("deepseek2", {SCALE: 0.5, LENGTH: 8192})],
)
def test_numbers_that_may_be_are_taken(tmp_path: Path, name: str, keys: dict[str, object]) -> None:
    with Llama(write(tmp_path, name, keys), kv="f16", **TINY) as llm:
        llm.eval([1, 2, 3])


def test_a_model_without_causal_attention_is_evaluated_in_whole_batches(tmp_path: Path) -> None:
    """llama.cpp ends the process where a batch has more tokens than a micro-batch."""
    path = write(tmp_path, "llama-64", {"attention.causal": False})
    for kv in ("f16", "mixed"):
        with Llama(path, kv=kv, n_ctx=256, n_batch=64, n_ubatch=32, verbose=False) as llm:
            llm.eval(list(range(3, 103)))
            assert llm.n_tokens == 100


@pytest.mark.parametrize(
    ("name", "key", "value"),
    [
        ("qwen3", "rope.dimension_count", 32),
        ("phi", "attention.head_count", 1),
        ("glm4moe", "expert_used_count", 2**32 - 1),
        ("rwkv7", "block_count", 1 << 16),
    ],
)
@pytest.mark.parametrize("kv", ["f16", "mixed"])
def test_an_assertion_while_loading_is_an_error(
    tmp_path: Path, name: str, key: str, value: int, kv: str
) -> None:
    """Without `_core.Assertions` each of them ends the process."""
    path = write(tmp_path, name, {key: value})
    with pytest.raises(InvalidModelFileError, match=r"model.gguf cannot be loaded: .*GGML_ASSERT\("):
        Llama(path, kv=kv, n_ctx=256, verbose=False)
    zoo.make("qwen3").write(path)
    with Llama(path, kv=kv, n_ctx=256, verbose=False) as llm:
        llm.eval([1, 2, 3])


@pytest.mark.parametrize(
    ("kind", "n", "message"),
    [
        (gguf.GGUFValueType.UINT8, 1 << 62, "truncated"),
        (gguf.GGUFValueType.STRING, 1 << 62, "claims 4611686018427387904 strings"),
        (gguf.GGUFValueType.STRING, 1 << 20, "truncated"),
        (gguf.GGUFValueType.ARRAY, 1, "array of the unknown type 9"),
        (77, 1, "array of the unknown type 77"),
    ],
)
def test_hostile_arrays(tmp_path: Path, kind: int, n: int, message: str) -> None:
    path = tmp_path / "bad.gguf"
    header = b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + struct.pack("<Q1sI", 1, b"a", 9)
    path.write_bytes(header + struct.pack("<IQ", kind, n) + b"\0" * 64)
    with pytest.raises(InvalidModelFileError, match=message):
        Llama(path)


@pytest.mark.parametrize("share", [0.001, 0.3, 0.9, 0.9999])
def test_truncated_file(tmp_path: Path, share: float) -> None:
    data = model_path().read_bytes()
    path = tmp_path / "short.gguf"
    path.write_bytes(data[: int(share * len(data))])
    with pytest.raises(InvalidModelFileError, match=r"short\.gguf cannot be loaded: it is truncated"):
        Llama(path)


@settings(max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(data=st.data())
def test_damaged_headers_are_an_error_or_a_header(tmp_path: Path, data: st.DataObject) -> None:
    """Whatever a few wrong bytes claim, reading ends with a header or with the error."""
    whole = bytearray(model_path().read_bytes()[:32768])
    for _ in range(data.draw(st.integers(1, 4))):
        whole[data.draw(st.integers(4, 2000))] = data.draw(st.integers(0, 255))
    path = tmp_path / "damaged.gguf"
    with path.open("wb") as file:
        file.write(whole)
        file.truncate(model_path().stat().st_size)
    with contextlib.suppress(InvalidModelFileError):
        assert read_model_file(path).n_tensors <= 1 << 20


def test_unknown_architecture(tmp_path: Path) -> None:
    path = tmp_path / "odd.gguf"
    writer = gguf.GGUFWriter(path, "abacus")
    write_and_close(writer)
    with pytest.raises(InvalidModelFileError, match=r"llama.cpp refuses it .*abacus"):
        Llama(path, verbose=False)


def split(folder: Path, count: int = 2) -> Path:
    """A model of two files, as llama.cpp's own tool names them."""
    model = zoo.make("llama-64")
    names = sorted(model.tensors)
    for no in range(count):
        writer = gguf.GGUFWriter(folder / f"tiny-{no + 1:05d}-of-{count:05d}.gguf", model.shape.arch)
        if no == 0:
            zoo.add_tokenizer(writer)
            for key, value in model.keys.items():
                zoo.add_key(writer, f"{model.shape.arch}.{key}", value)
        writer.add_uint16("split.no", no)
        writer.add_uint16("split.count", count)
        writer.add_int32("split.tensors.count", len(names))
        for name in names[no::count]:
            writer.add_tensor(name, model.tensors[name])
        write_and_close(writer)
    return folder / f"tiny-00001-of-{count:05d}.gguf"


def test_split_model_loads(tmp_path: Path) -> None:
    with Llama(split(tmp_path), **TINY) as llm:
        assert llm.kv.stats().n_layer == zoo.SHAPES["llama-64"].n_layer


def test_split_model_with_a_part_missing(tmp_path: Path) -> None:
    first = split(tmp_path)
    (tmp_path / "tiny-00002-of-00002.gguf").unlink()
    with pytest.raises(InvalidModelFileError, match=r"2 parts, but tiny-00002-of-00002\.gguf is not"):
        Llama(first)


def test_split_model_by_its_second_part(tmp_path: Path) -> None:
    split(tmp_path)
    with pytest.raises(InvalidModelFileError, match="give its part 00001"):
        Llama(tmp_path / "tiny-00002-of-00002.gguf")


def test_split_model_under_another_name(tmp_path: Path) -> None:
    renamed = split(tmp_path).rename(tmp_path / "model.gguf")
    with pytest.raises(InvalidModelFileError, match="its name must end in -00001-of-00002"):
        Llama(renamed)


def test_split_model_with_a_truncated_part(tmp_path: Path) -> None:
    first = split(tmp_path)
    second = tmp_path / "tiny-00002-of-00002.gguf"
    second.write_bytes(second.read_bytes()[:-5000])
    with pytest.raises(InvalidModelFileError, match=r"tiny-00002-of-00002.gguf .*truncated"):
        Llama(first)


# --- settings ---


@pytest.mark.parametrize("kv", ["mixed:cold=q9_0", "q3_k", "mixed:hot=f16", MixedKVConfig])
def test_unknown_cache(kv: object) -> None:
    with pytest.raises((ValueError, TypeError), match=r"q9_0|q3_k|hot|MixedKVConfig"):
        Llama(model_path(), kv=kv)  # type: ignore[arg-type]


def test_threshold_smaller_than_group() -> None:
    with pytest.raises(ValueError, match="threshold=8 is smaller than group=16"):
        Llama(model_path(), kv="mixed:threshold=8")


@pytest.mark.parametrize(
    "options", [{"n_ctx": 512}, {"n_ctx": 1024, "n_seq_max": 2}], ids=["one sequence", "divided"]
)
def test_threshold_above_the_context(options: dict[str, int]) -> None:
    with pytest.raises(ValueError, match=r"quantization_threshold=600 .*n_ctx=512"):
        Llama(model_path(), kv="mixed:threshold=600", **options)  # type: ignore[arg-type]


def test_threshold_above_the_context_of_the_model() -> None:
    with pytest.raises(ValueError, match=r"quantization_threshold=9000 .*n_ctx=8192"):
        Llama(model_path(), kv="mixed:threshold=9000", n_ctx=0)


def test_the_window_may_be_the_whole_context() -> None:
    kv = "mixed:threshold=256,sinks=0"
    with pytest.warns(UserWarning, match="more than"), Llama(model_path(), kv=kv, **TINY) as llm:
        assert llm.kv.quantization_threshold == 256


def test_two_ways_to_choose_the_cache() -> None:
    with pytest.raises(ValueError, match="kv='q8_0' and type_k=8, type_v=None both choose"):
        Llama(model_path(), kv="q8_0", type_k=8)


@pytest.mark.parametrize("kv", ["mixed", "q8_0", "f16/q4_0", "f16:attention=fused"])
def test_flash_attention_turned_off_where_it_is_needed(kv: str) -> None:
    with pytest.raises(ValueError, match=f"flash_attn=False does not go with kv='{kv}'"):
        Llama(model_path(), kv=kv, flash_attn=False)


@pytest.mark.parametrize(
    ("n", "error"), [(0, ValueError), (257, ValueError), (1.5, TypeError), (True, TypeError)]
)
def test_number_of_sequences(n: object, error: type[Exception]) -> None:
    with pytest.raises(error, match=f"n_seq_max={n}"):
        Llama(model_path(), n_seq_max=n)  # type: ignore[arg-type]


# --- models that cannot have the cache ---


@pytest.mark.parametrize("kv", ["mixed", "q8_0"])
def test_head_size_that_does_not_fit_the_block(zoo_path: Callable[[str], Path], kv: str) -> None:
    with pytest.raises(UnsupportedModelError, match=r"48.*'f16'"):
        Llama(zoo_path("llama-48"), kv=kv, **TINY)


def test_one_row_for_keys_and_values_has_one_type(zoo_path: Callable[[str], Path]) -> None:
    with pytest.raises(UnsupportedModelError, match=r"deepseek2.*MLA.*cold_type_k and cold_type_v"):
        Llama(zoo_path("deepseek2"), kv="mixed:cold_k=q8_0,cold_v=q4_0", **TINY)


@pytest.mark.parametrize(("name", "reason"), [("mamba", "recurrent"), ("bert", "no KV cache")])
def test_memory_that_is_no_kv_cache(zoo_path: Callable[[str], Path], name: str, reason: str) -> None:
    with pytest.raises(UnsupportedModelError, match=f"'{name}' .*{reason}.*'f16'"):
        Llama(zoo_path(name), kv="mixed", **TINY)


def test_the_remedy_works(zoo_path: Callable[[str], Path]) -> None:
    with Llama(zoo_path("mamba"), kv="f16", **TINY) as llm:
        assert llm.kv.stats().n_layer == 0
    with (
        Llama(zoo_path("bert"), kv="f16", embedding=True, **TINY) as llm,
        pytest.raises(LookupError, match="no KV cache"),
    ):
        llm.kv.stats()


# --- calls ---


@pytest.fixture(scope="module")
def llm() -> Iterator[Llama]:
    with Llama(model_path(), **TINY) as llm:
        yield llm


Call = Callable[[Llama], object]
N_VOCAB = r"is not one of this model's \d+"
CALLS: list[tuple[Call, type[Exception], str]] = [
    *(
        (lambda llm, call=call, tokens=tokens: call(llm, tokens), ValueError, message)
        for tokens, message in (
            ([-1], f"token -1 {N_VOCAB}"),
            ([5, 10**6], f"token 1000000 {N_VOCAB}"),
            ([2**40], r"=\[1099511627776\]: give a flat list of token ids"),
            (["a"], r"=\['a'\]: give a flat list"),
            ([1.5], r"=\[1.5\]: give a flat list"),
            ([[1], [2, 3]], r"=\[\[1\], \[2, 3\]\]: give a flat list"),
            (None, "=None: give a flat list"),
        )
        for call in (Llama.eval, Llama.__call__, Llama.detokenize, lambda llm, ids: llm.kv.fill(ids, [0]))
    ),
    (lambda llm: llm.eval([5] * 300), ContextLengthError, "300 tokens behind 0 are more than the 256"),
    (lambda llm: llm([]), ValueError, "no token was evaluated"),
    (lambda llm: llm.tokenize("a"), TypeError, "text='a': use bytes"),  # type: ignore[arg-type]
    (lambda llm: llm.load_state(None), TypeError, "state=None: use what save_state"),  # type: ignore[arg-type]
    (lambda llm: llm.kv.export(0, 10**12), ValueError, "p0=1000000000000: use at most 2147483647"),
    (lambda llm: llm.kv.export("a"), TypeError, "seq='a': use a whole number"),
    (lambda llm: llm.kv.remove(p0=1.5), TypeError, "p0=1.5: use a whole number"),
    (lambda llm: llm.kv.load(None), TypeError, "block=None: use a KVBlock"),
    (lambda llm: llm.kv.resume(None, 1, 0, 0), TypeError, "point=None: use a Checkpoint"),
    (lambda llm: llm.kv.set_window(group_size="a"), TypeError, "group_size='a': use a whole number"),
    (lambda llm: llm.kv.layer(0).k(0, None), TypeError, "p0=None: use a whole number"),
    (lambda llm: llm.create_chat_completion([{}]), ValueError, r"messages\[0\]: give a dictionary"),
    (
        lambda llm: llm.create_chat_completion([{"role": "user"}], stop=5),
        TypeError,
        "stop=5: use a text or a list of texts",
    ),
    *(
        (lambda llm, options=options: llm("ab", **{"max_tokens": 2, **options}), error, message)
        for options, error, message in (
            ({"logit_bias": {10**6: 1}}, ValueError, f"logit_bias: token 1000000 {N_VOCAB}"),
            ({"logit_bias": {-1: 1}}, ValueError, f"logit_bias: token -1 {N_VOCAB}"),
            ({"logit_bias": {5: math.nan}}, ValueError, "logit_bias: nan"),
            ({"logit_bias": {"a": 1}}, TypeError, r"logit_bias=\{'a': 1\}: use a dictionary"),
            ({"logits_processor": [lambda ids, scores: 1 / 0]}, ZeroDivisionError, "division"),
            ({"temperature": math.nan}, ValueError, "temperature=nan: use 0 to 100"),
            ({"temperature": None}, TypeError, "temperature=None: use a number from 0 to 100"),
            ({"top_p": 9}, ValueError, "top_p=9: use 0 to 1"),
            ({"top_k": 1.5}, TypeError, "top_k=1.5: use a whole number from -1"),
            ({"repeat_penalty": -1}, ValueError, "repeat_penalty=-1: use 0.01 to 100"),
            ({"mirostat_mode": 7}, ValueError, "mirostat_mode=7: use 0 to 2"),
            ({"seed": "x"}, TypeError, "seed='x': use a whole number"),
            ({"max_tokens": "x"}, TypeError, "max_tokens='x': use a whole number"),
            ({"stop": [5]}, TypeError, r"stop=\[5\]: use a text"),
            ({"grammar": "x"}, TypeError, "grammar='x': use LlamaGrammar"),
        )
    ),
    (lambda llm: next(llm.generate([1], temp=-1)), ValueError, "temperature=-1: use 0 to 100"),
]


@pytest.mark.parametrize(("call", "error", "message"), CALLS)
def test_a_bad_argument_is_named(llm: Llama, call: Call, error: type[Exception], message: str) -> None:
    llm.reset()
    with pytest.raises(error, match=message):
        call(llm)


def test_a_context_without_room_says_who_has_it() -> None:
    with Llama(model_path(), n_seq_max=2, kv_unified=True, **TINY) as llm:
        llm.eval([5] * 200)
        llm.kv.copy(0, 1)
        llm.reset()
        with pytest.raises(ContextLengthError, match="no room for 100 tokens behind 0: other sequences"):
            llm.eval([6] * 100)


def test_a_model_without_a_memory_says_so() -> None:
    with (
        Llama(model_path(), vocab_only=True, **TINY) as llm,
        pytest.raises(UnsupportedModelError, match="vocab_only"),
    ):
        llm("ab")


# --- nothing is left behind ---


def half_made(error: BaseException) -> Llama:
    """The object whose __init__ raised."""
    trace = error.__traceback__
    while trace is not None:
        owner = trace.tb_frame.f_locals.get("self")
        if isinstance(owner, Llama):
            return owner
        trace = trace.tb_next
    raise LookupError("no Llama in the traceback")


def test_a_failed_context_frees_its_model(zoo_path: Callable[[str], Path]) -> None:
    with pytest.raises(UnsupportedModelError) as caught:
        Llama(zoo_path("llama-48"), **TINY)
    llm = half_made(caught.value)
    assert llm._model.model is None
    with pytest.raises(RuntimeError, match="closed"):
        llm.kv.stats()


def test_a_failure_after_the_context_frees_both(monkeypatch: pytest.MonkeyPatch) -> None:
    def out_of_memory(**_: object) -> None:
        raise MemoryError("batch")

    monkeypatch.setattr("llama_cpp._internals.LlamaBatch", out_of_memory)
    with pytest.raises(MemoryError, match="batch") as caught:
        Llama(model_path(), **TINY)
    llm = half_made(caught.value)
    assert llm._ctx.ctx is None
    assert llm._model.model is None


def test_a_failure_before_the_model_is_quiet(recwarn: pytest.WarningsRecorder) -> None:
    with pytest.raises(ValueError, match="n_seq_max"):
        Llama(model_path(), n_seq_max=0)
    gc.collect()  # __del__ of the half-made object
    assert [w for w in recwarn if issubclass(w.category, pytest.PytestUnraisableExceptionWarning)] == []


def test_a_failed_setting_does_not_reach_the_next_context(zoo_path: Callable[[str], Path]) -> None:
    """The native setting is taken by the next context on the thread: a failure must withdraw it."""
    path = zoo_path("llama-64")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("llama_cpp.llama_cpp.llama_model_load_from_file", lambda *_: None)
        with pytest.raises(InvalidModelFileError):
            Llama(path, kv="mixed:threshold=128", **TINY)
    with Llama(path, kv="f16", **TINY) as llm:
        assert not llm.kv.stats().mixed


def test_closed_objects_say_so(zoo_path: Callable[[str], Path]) -> None:
    llm = Llama(zoo_path("llama-64"), **TINY)
    view, layer = llm.kv, llm.kv.layer(0)
    llm.close()
    llm.close()
    uses: list[Callable[[], object]] = [view.stats, layer.k, layer.hot, view.positions]
    for use in uses:
        with pytest.raises(RuntimeError, match="this Llama is closed"):
            use()


def test_a_null_address_is_refused() -> None:
    functions = [_core.stats, _core.layers, _core.sequences]
    for function in functions:
        assert isinstance(function, types.BuiltinFunctionType)
        with pytest.raises(ValueError, match="closed"):
            function(0)
