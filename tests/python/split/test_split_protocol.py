"""The modules that protoc writes are those in the repository, and the wire is as split.proto says."""

from __future__ import annotations

import hashlib
from pathlib import Path

import numpy as np
import pytest

from mixedkv_split import split_pb2 as pb
from mixedkv_split import wire
from support.servers import split_protocol

pytestmark = pytest.mark.core


def test_generated_modules_are_up_to_date(tmp_path: Path) -> None:
    """After a change of split.proto: python tests/python/support/servers/split_protocol.py"""

    def text(path: Path) -> str:  # other versions of protoc write other numbers
        lines = path.read_text().splitlines()
        return "\n".join(line for line in lines if not any(c.isdigit() for c in line) or "serialized" in line)

    split_protocol.generate(tmp_path)
    for name in split_protocol.NAMES:
        kept = split_protocol.PYTHON / "mixedkv_split" / name
        assert text(tmp_path / "mixedkv_split" / name) == text(kept)


def test_hashes_are_those_of_the_proto_file() -> None:
    vectors = np.arange(6, dtype=np.float32).reshape(3, 2)
    data = wire.pack(vectors, pb.F32)
    h = hashlib.blake2b(b"mixedkv.split.v1" + b"pair" + bytes([2]), digest_size=16).digest()
    assert wire.first_hash("pair", pb.F32) == h
    for i, found in enumerate(wire.next_hashes(h, data, 3)):
        h = hashlib.blake2b(h + data[8 * i : 8 * i + 8], digest_size=16).digest()
        assert found == h
    after = h + b"mixedkv.split.v1 drop" + bytes([4, 0, 0, 0, 2, 1, 0, 0])
    assert wire.hash_after_drop(h, 4, 258) == hashlib.blake2b(after, digest_size=16).digest()


@pytest.mark.parametrize("precision", [pb.F16, pb.F32])
def test_vectors_come_back(precision: int) -> None:
    vectors = np.random.default_rng(1).standard_normal((5, 8)).astype(np.float16).astype(np.float32)
    assert np.array_equal(wire.unpack(wire.pack(vectors, precision), 5, 8, precision), vectors)


def test_what_f16_cannot_hold_becomes_its_largest() -> None:
    vectors = np.array([[1e6, -1e6]], np.float32)
    assert wire.unpack(wire.pack(vectors, pb.F16), 1, 2, pb.F16).tolist() == [[65504, -65504]]
