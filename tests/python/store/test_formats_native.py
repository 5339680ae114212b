"""The .safetensors file of an entry: exact, readable by others, and every deviation is found."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors import safe_open

from mixedkv.store.entry_row import EntryError
from mixedkv.store.formats.native import decode, encode
from support.stores.blocks import make_block, same

pytestmark = pytest.mark.core

IDENTITY = bytes(range(32))
ENTRY = "ab" * 16
TOKENS = list(range(1000, 1040))


def to_bytes(block: Any) -> bytes:
    return b"".join(encode(block, identity=IDENTITY, entry=ENTRY))


def read(data: bytes, **options: Any) -> Any:
    return decode(np.frombuffer(data, np.uint8), **{"identity": IDENTITY, "entry": ENTRY, **options})


@given(
    st.lists(st.integers(-(2**31), 2**31 - 1), min_size=1, max_size=20),
    st.integers(0, 1000),
    st.sampled_from(["f16", "q8_0", "q4_0", "iq4_nl", "lm4"]),
    st.integers(1, 3),
    st.data(),
)
def test_round_trip(tokens: list[int], p0: int, kind: str, n_layers: int, data: st.DataObject) -> None:
    some = st.lists(st.integers(p0, p0 + len(tokens) - 1), unique=True).map(sorted)
    hot, window = data.draw(some), data.draw(some)
    block = make_block(tokens, p0, kind=kind, n_layers=n_layers, hot=hot, window=window)
    assert same(read(to_bytes(block)), block)


def test_another_program_can_read_it(tmp_path: Path) -> None:
    block = make_block(TOKENS, 7, kind="q4_0", hot=[40, 44, 45])
    (tmp_path / "x.safetensors").write_bytes(to_bytes(block))
    with safe_open(tmp_path / "x.safetensors", framework="numpy") as file:
        metadata = file.metadata()
        assert metadata["format"] == "mixedkv.block"
        assert metadata["version"] == "4"
        assert metadata["identity"] == IDENTITY.hex()
        assert json.loads(metadata["block"]) == block.describe()
        assert set(file.keys()) == set(block.to_arrays())
        for name, array in block.to_arrays().items():
            assert np.array_equal(file.get_tensor(name), array)


def test_arrays_are_views() -> None:
    data = np.frombuffer(to_bytes(make_block(TOKENS)), np.uint8)
    block = decode(data, identity=None, entry=None)
    assert all(np.shares_memory(array, data) for array in block.to_arrays().values() if array.size)


def test_every_changed_bit_is_found() -> None:
    data = bytearray(to_bytes(make_block(TOKENS[:3], n_layers=1)))
    for i in range(len(data)):
        data[i] ^= 1 << i % 8
        with pytest.raises(EntryError):
            read(bytes(data))
        data[i] ^= 1 << i % 8
    assert same(read(bytes(data)), make_block(TOKENS[:3], n_layers=1))


def test_every_truncation_is_found() -> None:
    data = to_bytes(make_block(TOKENS[:3], n_layers=1))
    for n in range(len(data)):
        with pytest.raises(EntryError):
            read(data[:n])
    with pytest.raises(EntryError):
        read(data + b"\0")


def test_another_identity_or_entry() -> None:
    data = to_bytes(make_block(TOKENS))
    for options in ({"identity": bytes(32)}, {"entry": "cd" * 16}):
        with pytest.raises(EntryError) as error:
            read(data, **options)
        assert error.value.reason == "identity"


# --- files that are whole, and wrong ---


def forge(change: Callable[[dict[str, Any]], None], data: bytes | None = None) -> bytes:
    """A file with a changed header and the right checksum for it."""
    data = data or to_bytes(make_block(TOKENS, kind="q8_0"))
    size = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + size])
    header["__metadata__"]["checksum"] = "0" * 64
    change(header)
    return sign(json.dumps(header, separators=(",", ":")).encode(), data[8 + size :])


def sign(header: bytes, tensors: bytes) -> bytes:
    header += b" " * (-len(header) % 8)
    data = len(header).to_bytes(8, "little") + header + tensors
    return data.replace(b"0" * 64, hashlib.sha256(data).hexdigest().encode(), 1)


def block_field(name: str, value: Any, layer: bool = False) -> Callable[[dict[str, Any]], None]:
    def change(header: dict[str, Any]) -> None:
        described = json.loads(header["__metadata__"]["block"])
        (described["groups"][0]["layers"][0] if layer else described)[name] = value
        header["__metadata__"]["block"] = json.dumps(described)

    return change


def tensor_field(name: str, field: str, value: Any) -> Callable[[dict[str, Any]], None]:
    return lambda header: header[name].update({field: value})


def metadata(name: str, value: Any) -> Callable[[dict[str, Any]], None]:
    return lambda header: header["__metadata__"].update({name: value})


def test_a_forged_file_that_changes_nothing_is_read() -> None:
    assert same(read(forge(lambda header: None)), make_block(TOKENS, kind="q8_0"))


FORGERIES = {
    "old version": metadata("version", "0"),
    "new version": metadata("version", "5"),
    "other format": metadata("format", "pt"),
    "identity": metadata("identity", "00" * 32),
    "version is no text": metadata("version", 1),
    "no metadata": lambda header: header.pop("__metadata__"),
    "no block": lambda header: header["__metadata__"].pop("block"),
    "block is no JSON": metadata("block", "{"),
    "block is a list": metadata("block", "[]"),
    "block is deep": metadata("block", "[" * 100_000),
    "block has NaN": metadata("block", '{"p0": NaN}'),
    "block has a huge number": metadata("block", '{"p0": ' + "9" * 5000 + "}"),
    "p0": block_field("p0", 1),
    "p1": block_field("p1", 2**31),
    "p1 is true": block_field("p1", True),
    "type": block_field("type_k", "q4_0", layer=True),
    "unknown type": block_field("type_k", "q3_k", layer=True),
    "heads": block_field("n_head_kv", 2**40, layer=True),
    "head size": block_field("head_size_v", 16, layer=True),
    "rotation": block_field("rotation_k", 3, layer=True),
    "layer": block_field("il", 5, layer=True),
    "layer twice": block_field("il", 1, layer=True),
    "no groups": block_field("groups", []),
    "missing tensor": lambda header: header.pop("tokens"),
    "hole": tensor_field("0.1.v", "data_offsets", [0, 4]),
    "beyond the end": tensor_field("0.1.v", "data_offsets", [2**39, 2**39 + 2720]),
    "negative offset": tensor_field("tokens", "data_offsets", [-160, 0]),
    "huge shape": tensor_field("0.0.k", "shape", [2**39, 2**39]),
    "negative shape": tensor_field("0.0.k", "shape", [-40, -68]),
    "shape of many dimensions": tensor_field("0.0.k", "shape", [1] * 100_000),
    "shape is no list": tensor_field("0.0.k", "shape", "40"),
    "shape of fractions": tensor_field("0.0.k", "shape", [40.0, 68.0]),
    "dtype": tensor_field("tokens", "dtype", "F32"),
    "dtype is a list": tensor_field("tokens", "dtype", ["I32"]),
    "tensor is no object": lambda header: header.update(tokens=[]),
    "more in a tensor": tensor_field("tokens", "extra", 1),
}


@pytest.mark.parametrize("change", FORGERIES.values(), ids=FORGERIES.keys())
def test_forged_headers_are_refused(change: Callable[[dict[str, Any]], Any]) -> None:
    with pytest.raises(EntryError) as error:
        read(forge(change))
    assert error.value.reason in ("damaged", "version", "identity")


def test_a_key_given_twice_is_refused() -> None:
    data = to_bytes(make_block(TOKENS))
    size = int.from_bytes(data[:8], "little")
    header = data[8 : 8 + size].decode()
    checksum = json.loads(header)["__metadata__"]["checksum"]
    header = header.rstrip()[:-1].replace(checksum, "0" * 64) + ',"tokens":' + "{}" + "}"
    with pytest.raises(EntryError, match="twice"):
        read(sign(header.encode(), data[8 + size :]))


@pytest.mark.parametrize("size", [0, 1, 2**24 + 1, 2**63, 2**64 - 1])
def test_header_sizes(size: int) -> None:
    data = to_bytes(make_block(TOKENS))
    with pytest.raises(EntryError, match="header"):
        read(size.to_bytes(8, "little") + data[8:])
