"""The packed form: what goes in comes out, and nothing that is not it is taken for it."""

from __future__ import annotations

import struct

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as nps

from mixedkv.store import (
    pack_kv_cache,
    pack_kv_cache_v2,
    unpack_kv_cache,
    unpack_kv_cache_flat,
    unpack_kv_cache_v2,
)

pytestmark = pytest.mark.full

ARRAYS = nps.arrays(np.float16, nps.array_shapes(min_dims=1, max_dims=4, min_side=0, max_side=5))
LAYERS = st.lists(st.tuples(ARRAYS, ARRAYS), max_size=4)


def same(a: np.ndarray, b: np.ndarray) -> bool:
    """Equal in shape, type and bits: NaN and -0 too."""
    return a.shape == b.shape and a.dtype == b.dtype and a.tobytes() == b.tobytes()


@given(LAYERS)
def test_v2_round_trip(layers: list[tuple[np.ndarray, np.ndarray]]) -> None:
    data = pack_kv_cache_v2(layers)
    for unpack in (unpack_kv_cache_v2, unpack_kv_cache):
        back = unpack(data)
        assert len(back) == len(layers)
        assert all(same(a, b) for x, y in zip(back, layers, strict=True) for a, b in zip(x, y, strict=True))


@given(ARRAYS, ARRAYS)
def test_flat_round_trip(key: np.ndarray, value: np.ndarray) -> None:
    data = pack_kv_cache(key, value)
    for pair in (unpack_kv_cache_flat(data), *unpack_kv_cache(data)):
        assert same(pair[0], key)
        assert same(pair[1], value)


def test_v2_bytes() -> None:
    key = np.array([[1.0, -2.0, 0.5]], np.float16)
    value = np.array([4.0], np.float16)
    want = (
        b"\x02"
        + struct.pack("<I", 1)
        + struct.pack("<IIII", 6, 2, 1, 3)
        + b"\x00\x3c\x00\xc0\x00\x38"
        + struct.pack("<III", 2, 1, 1)
        + b"\x00\x44"
    )
    assert pack_kv_cache_v2([(key, value)]) == want
    assert pack_kv_cache(key, value) == want[5:]


def test_a_flat_cache_may_begin_with_the_version_byte() -> None:
    """A key of 129 elements has 258 = 0x0102 bytes: the same first byte as version 2."""
    key, value = np.arange(129, dtype=np.float16), np.ones(3, np.float16)
    data = pack_kv_cache(key, value)
    assert data[0] == 2
    ((k, v),) = unpack_kv_cache(data)
    assert same(k, key)
    assert same(v, value)


@given(LAYERS, ARRAYS, ARRAYS)
def test_no_bytes_are_both(layers: list, key: np.ndarray, value: np.ndarray) -> None:
    with pytest.raises(ValueError, match="packed cache"):
        unpack_kv_cache_flat(pack_kv_cache_v2(layers))
    with pytest.raises(ValueError, match="packed cache"):
        unpack_kv_cache_v2(pack_kv_cache(key, value))


@given(LAYERS, st.data())
def test_a_part_is_refused(layers: list, data: st.DataObject) -> None:
    packed = pack_kv_cache_v2(layers)
    n = data.draw(st.integers(0, len(packed) - 1))
    with pytest.raises(ValueError, match="packed cache"):
        unpack_kv_cache_v2(packed[:n])
    with pytest.raises(ValueError, match="follow after its end"):
        unpack_kv_cache_v2(packed + b"\0")


@given(st.binary(max_size=200), st.sampled_from([b"", b"\x02", b"\x02\x01\0\0\0"]))
def test_any_bytes_are_a_cache_or_a_value_error(data: bytes, begin: bytes) -> None:
    try:
        layers = unpack_kv_cache(begin + data)
    except ValueError:
        return
    packed = pack_kv_cache_v2(layers), *(pack_kv_cache(*pair) for pair in layers)
    assert begin + data in packed


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "cut off"),
        (b"\x01" + bytes(8), "version byte"),
        (b"\x02\xff\xff\xff\xff", "cannot hold 4294967295 layers"),
        (
            b"\x02" + struct.pack("<I", 1) + struct.pack("<IIII", 2**32 - 2, 2, 2**16, 2**15 - 1),
            "cannot hold",
        ),
        (b"\x02" + struct.pack("<I", 1) + struct.pack("<II", 2, 2**32 - 1) + bytes(99), "4294967295 dim"),
        (
            b"\x02" + struct.pack("<I", 1) + struct.pack("<III", 4, 1, 1) + bytes(99),
            r"shape \(1,\) has 4 bytes",
        ),
        (b"\x02" + struct.pack("<I", 1) + struct.pack("<III", 2**31, 1, 2**30) + bytes(99), "cut off"),
        (
            b"\x02" + struct.pack("<I", 1) + struct.pack("<10I", 0, 8, *[2**32 - 1] * 8) + bytes(99),
            "has 0 bytes",
        ),
    ],
)
def test_sizes_are_checked_before_anything_is_allocated(data: bytes, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        unpack_kv_cache_v2(data)


def test_views_are_read_only() -> None:
    ((key, _),) = unpack_kv_cache_v2(pack_kv_cache_v2([(np.ones(4, np.float16), np.ones(4, np.float16))]))
    with pytest.raises(ValueError, match="read-only"):
        key[0] = 0


@pytest.mark.parametrize(
    ("layers", "message"),
    [
        ([(np.ones(3, np.float32), np.ones(3, np.float16))], "layer 0: its key is float32"),
        ([(np.ones(3, np.float16), [1.0])], "layer 0: its value is list"),
        ([(np.ones(3, np.float16),)], "layer 0: give a key and a value"),
        ([(np.float16(1) * np.ones((), np.float16), np.ones(3, np.float16))], "layer 0: its key"),
        ([(np.ones((1,) * 9, np.float16), np.ones(3, np.float16))], "9 dimensions"),
        ([(np.empty((0, 2**33), np.float16), np.ones(3, np.float16))], "layer 0: its key"),
    ],
)
def test_what_cannot_be_packed(layers: list, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        pack_kv_cache_v2(layers)
