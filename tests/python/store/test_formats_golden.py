"""Files that this version of the formats wrote once are read as what they were made from."""

from __future__ import annotations

import numpy as np
import pytest
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from golden import make_golden as made
from mixedkv.store import pack_kv_cache, pack_kv_cache_v2, unpack_kv_cache
from mixedkv.store.encryption import decrypt
from mixedkv.store.formats.native import decode
from support.stores.blocks import same

pytestmark = pytest.mark.core

IDS = {"identity": made.IDENTITY, "entry": made.ENTRY}


@pytest.mark.parametrize("name", made.BLOCKS)
def test_native(name: str) -> None:
    data = np.fromfile(made.FOLDER / f"native-{name}.safetensors", np.uint8)
    assert same(decode(data, **IDS), made.BLOCKS[name])


def test_encrypted() -> None:
    path = made.FOLDER / "encrypted-v1.safetensors.enc"
    with path.open("rb") as file:
        data = decrypt(AESGCM(made.KEY), file, path.stat().st_size, made.CONTEXT)
    assert same(decode(data, **IDS), made.BLOCKS[made.ENCRYPTED])


@pytest.mark.parametrize("name", ["packed-v2.bin", "packed-flat.bin"])
def test_packed(name: str) -> None:
    data = (made.FOLDER / name).read_bytes()
    want = made.layers() if name == "packed-v2.bin" else made.layers()[:1]
    have = unpack_kv_cache(data)
    assert [array.shape for pair in have for array in pair] == [
        array.shape for pair in want for array in pair
    ]
    assert all(
        a.tobytes() == b.tobytes() for x, y in zip(have, want, strict=True) for a, b in zip(x, y, strict=True)
    )
    assert data == (pack_kv_cache_v2(want) if name == "packed-v2.bin" else pack_kv_cache(*want[0]))
