"""What KV is keyed by: everything that shapes it, and nothing else."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import gguf
import numpy as np
import pytest

from mixedkv import Llama
from mixedkv.bundled import model_path
from mixedkv.errors import InvalidModelFileError
from mixedkv.model import fingerprint as fingerprint_module
from mixedkv.model.fingerprint import fingerprint
from mixedkv.model.gguf_copy import write_and_close
from mixedkv.model.gguf_file import file_stamp
from mixedkv.store import Identity, KVStore
from mixedkv.store.identity import _check_files
from support.models import zoo
from support.models.adapters import write_adapter

pytestmark = pytest.mark.core

N_TENSORS = 6
GOLDEN = (5**0.5 - 1) / 2  # multiples of it, modulo 1, lie far from each other


def write_large(path: Path, *, seed: int = 0, changed: int = -1, key: str = "") -> Path:
    """A file of 24 MB, which is more than what is read whole, with one tensor of its own."""
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_string("some.key", key)
    for i in range(N_TENSORS):
        rng = np.random.default_rng([seed, i, i == changed])
        writer.add_tensor(f"tensor.{i}", rng.standard_normal((1024, 1024)).astype(np.float32))
    write_and_close(writer)
    return path


def test_a_fingerprint_is_of_the_content(tmp_path: Path) -> None:
    path = write_large(tmp_path / "a.gguf")
    first = fingerprint(path)
    os.utime(path, (1, 1))
    assert fingerprint(path) == first
    path.rename(tmp_path / "b.gguf")
    (tmp_path / "c.gguf").symlink_to("b.gguf")
    assert fingerprint(tmp_path / "b.gguf") == fingerprint(tmp_path / "c.gguf") == first
    assert fingerprint(write_large(tmp_path / "d.gguf")) == first
    assert len(first) == 64


def test_every_tensor_and_the_header_count(tmp_path: Path) -> None:
    changes = [{}, {"key": "x"}, *({"changed": i} for i in range(N_TENSORS))]
    paths = [write_large(tmp_path / f"{i}.gguf", **change) for i, change in enumerate(changes)]  # type: ignore[arg-type]
    assert len({fingerprint(path) for path in paths}) == len(paths)


def test_the_full_hash_finds_a_single_byte(tmp_path: Path) -> None:
    path = write_large(tmp_path / "a.gguf")
    before = fingerprint(path), fingerprint(path, full_hash=True)
    data = bytearray(path.read_bytes())
    data[len(data) // 2 + 12345] ^= 1
    path.write_bytes(data)
    after = fingerprint(path), fingerprint(path, full_hash=True)
    assert after[1] != before[1]
    assert before[0] == after[0]  # what sampling leaves out


def test_a_file_that_changes_is_read_again(tmp_path: Path) -> None:
    path = write_large(tmp_path / "a.gguf")
    first = fingerprint(path)
    write_large(path, seed=1)
    assert fingerprint(path) != first


def write_split(folder: Path, second: int) -> Path:
    folder.mkdir(exist_ok=True)
    for no in range(2):
        path = folder / f"m-{no + 1:05d}-of-00002.gguf"
        writer = gguf.GGUFWriter(path, "llama")
        writer.add_uint16("split.count", 2)
        writer.add_uint16("split.no", no)
        writer.add_tensor(f"t.{no}", np.full((4, 4), second if no else 7, np.float32))
        write_and_close(writer)
    return folder / "m-00001-of-00002.gguf"


def test_every_part_of_a_split_model_counts(tmp_path: Path) -> None:
    paths = [write_split(tmp_path / name, second) for name, second in (("a", 1), ("b", 2), ("c", 1))]
    digests = [fingerprint(path) for path in paths]
    assert digests[0] == digests[2] != digests[1]


def test_what_is_no_model(tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(b"adapter of another kind")
    with pytest.raises(InvalidModelFileError):
        fingerprint(tmp_path / "x")
    with pytest.raises(FileNotFoundError):
        fingerprint(tmp_path / "y")


# --- of a Llama ---


def open_llama(path: Path, **options: object) -> Llama:
    return Llama(path, **{"kv": "mixed", "n_ctx": 512, "verbose": False, **options})  # type: ignore[arg-type]


@pytest.mark.parametrize("kv", ["q8_0", "mixed", "f16"])
def test_a_rotation_that_is_turned_off_counts(
    kv: str, zoo_path: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    digests = []
    for value in ("", "0", "1"):
        monkeypatch.setenv("LLAMA_ATTN_ROT_DISABLE", value)
        with open_llama(zoo_path("llama-64"), kv=kv) as llm:
            monkeypatch.delenv("LLAMA_ATTN_ROT_DISABLE")  # what counts is how the context was made
            digests.append(Identity.of(llm).digest)
    assert digests[0] == digests[1]
    assert (digests[1] == digests[2]) == (kv == "f16")


def test_all_that_shapes_kv_counts(zoo_path: Callable[[str], Path], tmp_path: Path) -> None:
    model = zoo_path("llama-64")
    lora = [str(write_adapter(tmp_path / f"{seed}.gguf", model, seed)) for seed in range(2)]
    variants: list[dict] = [
        {},
        {"kv": "f16"},
        {"kv": "f16", "flash_attn": True},
        {"kv": "q8_0"},
        {"kv": "q4_0"},
        {"kv": "q8_0/q4_0"},
        {"kv": "mixed:threshold=32"},
        {"kv": "mixed:sinks=2"},
        {"kv": "mixed:cold_k=q8_0"},
        {"kv": "mixed:layers=0:q8_0"},
        {"kv": "mixed:layers=1:q8_0"},
        {"rope_freq_base": 5000.0},
        {"rope_freq_scale": 0.5},
        {"yarn_ext_factor": 0.5},
        {"rope_scaling_type": 2},
        {"rope_scaling_type": 2, "yarn_orig_ctx": 128},
        {"kv_overrides": {"llama.attention.layer_norm_rms_epsilon": 1e-3}},
        {"lora_path": lora[0]},
        {"lora_path": lora[0], "lora_scale": 0.5},
        {"lora_path": lora[1]},
    ]
    seen: dict[bytes, object] = {}
    for variant in variants:
        with open_llama(zoo_path("llama-64"), **variant) as llm:
            for tenant, extra in (("", ""), ("a", ""), ("b", ""), ("", "x")):
                who = Identity.of(llm, tenant=tenant, extra=extra)
                assert who.digest not in seen, f"{variant} is as {seen[who.digest]}"
                seen[who.digest] = variant
            assert Identity.of(llm, full_hash=True).digest not in seen
    for name in ("llama-128", "gemma2"):
        with open_llama(zoo_path(name)) as llm:
            assert Identity.of(llm).digest not in seen


def test_what_does_not_shape_kv_does_not_count(zoo_path: Callable[[str], Path], tmp_path: Path) -> None:
    (tmp_path / "other name.gguf").symlink_to(zoo_path("llama-64"))
    with open_llama(zoo_path("llama-64")) as llm:
        first = Identity.of(llm)
    for options in (
        {"n_threads": 1},
        {"n_ctx": 1024},
        {"n_ctx": 2 * zoo.N_CTX_TRAIN},
        {"n_batch": 64, "n_ubatch": 32},
        {"seed": 7},
        {"yarn_orig_ctx": 128},  # without YaRN
        {"swa_full": True},  # without a sliding window
    ):
        with open_llama(zoo_path("llama-64"), **options) as llm:
            assert Identity.of(llm) == first, options
    with open_llama(tmp_path / "other name.gguf", n_seq_max=2) as llm:
        assert Identity.of(llm) == first
        assert Identity.of(llm).label == "other name.gguf mixed"


def test_the_window_counts_as_it_is_now() -> None:
    with open_llama(model_path()) as llm:
        first = Identity.of(llm)
        llm.kv.quantization_threshold = 16
        assert Identity.of(llm) != first
        llm.kv.quantization_threshold = 64
        assert Identity.of(llm) == first


def test_the_window_is_named_whatever_the_default_is() -> None:
    """Rows of a version with another default are not taken for those of this one."""
    named = "cold_k=q4_0,cold_v=q4_0,threshold=64,group=16,sinks=4"
    with open_llama(model_path()) as llm, open_llama(model_path(), kv=f"mixed:{named}") as other:
        assert " types=q4_0 " in Identity.of(llm).setting
        assert " window=64/16/4" in Identity.of(llm).setting
        assert Identity.of(other) == Identity.of(llm)


@pytest.mark.parametrize(
    "other",
    [
        {"tenant": "b"},
        {"kv": "q8_0"},
        {"kv": "mixed:layers=1:q8_0/q4_0"},
        {"rope_freq_base": 7.0},
        {"lora": True},
    ],
)
def test_restoring_never_crosses(zoo_path: Callable[[str], Path], tmp_path: Path, other: dict) -> None:
    """The same tokens under another tenant, cache, RoPE base or adapter are a miss."""
    tokens = list(range(3, 100))
    path = zoo_path("llama-64")
    options, tenant = dict(other), other.get("tenant", "a")
    options.pop("tenant", None)
    if options.pop("lora", False):
        options["lora_path"] = str(write_adapter(tmp_path / "lora.gguf", zoo_path("llama-64"), 0))
    with KVStore(tmp_path / "kv") as store:
        with open_llama(path) as llm:
            llm.eval(tokens)
            store.save(llm, tenant="a")
        with open_llama(path, **options) as llm:
            assert store.restore(llm, tokens, tenant=tenant).n_tokens == 0
            assert store.stats().misses == {"unknown": 1}
        with open_llama(path) as llm:
            assert store.restore(llm, tokens, tenant="a").n_tokens == len(tokens)


def test_an_identity_that_cannot_be_computed_is_a_miss(
    zoo_path: Callable[[str], Path], tmp_path: Path
) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(zoo_path("llama-64").read_bytes())
    with KVStore(tmp_path / "kv") as store, open_llama(path) as llm:
        path.unlink()
        restored = store.restore(llm, [1, 2, 3])
        assert (restored.n_tokens, restored.reason.partition(":")[0]) == (0, "identity")
        with pytest.raises(FileNotFoundError):
            Identity.of(llm)


def test_a_file_replaced_while_it_is_loaded(zoo_path: Callable[[str], Path], tmp_path: Path) -> None:
    """What was loaded is not what the name now stands for. Of an adapter what was loaded is looked at."""
    lora = write_adapter(tmp_path / "lora.gguf", zoo_path("llama-64"), 0)
    path = tmp_path / "model.gguf"
    path.write_bytes(zoo_path("llama-64").read_bytes())
    with KVStore(None) as store, open_llama(path, lora_path=str(lora)) as llm:
        llm.eval([5, 6, 7])
        first = Identity.of(llm)
        write_adapter(lora, zoo_path("llama-64"), 1)
        assert Identity.of(llm) == first
        (tmp_path / "new").write_bytes(path.read_bytes())
        (tmp_path / "new").rename(path)
        with pytest.raises(ValueError, match=f"{path.name} is not the file that was loaded"):
            store.save(llm)
        restored = store.restore(llm, [5, 6, 7])
        assert (restored.n_tokens, restored.reason.partition(":")[0]) == (0, "identity")


def test_a_part_of_a_split_model_replaced_while_it_is_loaded(tmp_path: Path) -> None:
    class Loaded:
        model_path = str(write_split(tmp_path, 1))
        _model_stamp = file_stamp(model_path)

    loaded = Loaded()
    _check_files(loaded)  # type: ignore[arg-type]
    (part,) = tmp_path.glob("*-00002-of-*")
    (tmp_path / "new").write_bytes(part.read_bytes())
    (tmp_path / "new").rename(part)
    with pytest.raises(ValueError, match="was replaced after it was loaded"):
        _check_files(loaded)  # type: ignore[arg-type]
    _check_files(Loaded())  # type: ignore[arg-type]


def test_what_is_hashed_of_a_large_file_lies_within_each_tensor_and_at_another_place_in_each(
    tmp_path: Path,
) -> None:
    path = write_large(tmp_path / "a.gguf")
    tensors = sorted(
        (tensor.data_offset, tensor.data_offset + tensor.n_bytes) for tensor in gguf.GGUFReader(path).tensors
    )
    with path.open("rb") as file:
        (start, header), *samples = fingerprint_module._samples(path, file)
    assert start == 0
    assert tensors[0][0] - 32 < header <= tensors[0][0]  # all before the padding of the first tensor
    assert [size for _, size in samples] == [4096] * N_TENSORS
    places = []
    for (begin, end), (offset, size) in zip(tensors, samples, strict=True):
        assert begin <= offset <= end - size
        places.append((offset - begin) / (end - begin - size))
    assert places == pytest.approx([i * GOLDEN % 1 for i in range(N_TENSORS)], abs=1e-6)


def test_a_tensor_smaller_than_a_sample_is_hashed_whole(tmp_path: Path) -> None:
    path = tmp_path / "a.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    for i, n in enumerate((8, 1024, 1032)):  # 32, 4096 and 4128 bytes
        writer.add_tensor(f"tensor.{i}", np.full(n, i, np.float32))
    write_and_close(writer)
    begins = [tensor.data_offset for tensor in gguf.GGUFReader(path).tensors]
    with path.open("rb") as file:
        _, *samples = fingerprint_module._samples(path, file)
    assert samples == [(begins[0], 32), (begins[1], 4096), (begins[2] + int(32 * (2 * GOLDEN % 1)), 4096)]
