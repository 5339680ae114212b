"""Write the golden files of the formats as they are now: run it when a format gets a new version.

From the first release on files of old versions stay: tests read them, or find that they are refused for their
version.
"""

from __future__ import annotations

import tempfile
from dataclasses import replace
from pathlib import Path

import numpy as np
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from mixedkv import Llama
from mixedkv.kv.block import Checkpoint, KVBlock, LayerRows, RowGroup, row_bytes
from mixedkv.kv.rows import APPROXIMATE, COMPUTED, FOREIGN, UNVERIFIED, all_of
from mixedkv.store import pack_kv_cache, pack_kv_cache_v2, packed_from_block
from mixedkv.store.encryption import encrypt
from mixedkv.store.formats.native import VERSION, encode
from support.models import zoo

FOLDER = Path(__file__).parent
IDENTITY = bytes(range(32))
ENTRY = "0123456789abcdef" * 2
KEY = bytes(range(32, 64))
CONTEXT = b"file" + IDENTITY + ENTRY.encode()


def numbers(n: int, start: int) -> np.ndarray:
    """Fixed bytes that do not depend on any generator's version."""
    return ((np.arange(n, dtype=np.uint32) * 167 + start * 59) % 251).astype(np.uint8)


def block(kind: str, hot: list[int]) -> KVBlock:
    """Six tokens at positions 10 to 15 of two layers, the second with a sliding window of four."""
    groups = [
        _group(0, np.arange(10, 16, dtype=np.int32), kind, hot),
        _group(1, np.arange(12, 16, dtype=np.int32), kind, [row - 2 for row in hot if row >= 2]),
    ]
    tokens = np.array([1, 7, -3, 2**31 - 1, 5, 11], np.int32)
    return KVBlock(p0=10, p1=16, tokens=tokens, groups=tuple(groups))


def _group(il: int, positions: np.ndarray, kind: str, hot: list[int]) -> RowGroup:
    n, n_hot, width = len(positions), len(hot), 64
    size = row_bytes(kind, width)
    rows = [numbers(n * size, il + start).reshape(n, size) for start in (1, 2)]
    f16 = [(numbers(n_hot * width, il + start) / 16).astype(np.float16) for start in (3, 4)]
    rotation = 0 if kind == "f16" else 64
    layer = LayerRows(
        il=il,
        type_k=kind,
        type_v=kind,
        rotation_k=rotation,
        rotation_v=rotation,
        n_head_kv=1,
        head_size_k=width,
        head_size_v=width,
        k=rows[0],
        v=rows[1],
        k_hot=f16[0].reshape(n_hot, width),
        v_hot=f16[1].reshape(n_hot, width),
    )
    slots = np.array([n_hot - 1 - i for i in range(n_hot)], np.int32)
    return RowGroup(positions=positions, hot=np.array(hot, np.int32), slots=slots, layers=(layer,))


def image() -> KVBlock:
    """Two tokens of text, an image of two by three at position 12, and text behind it; M-RoPE."""
    positions = np.array([10, 11, *[12] * 6, 15], np.int32)
    xy = np.array(
        [[10, 10], [11, 11], *([12 + x, 12 + y] for y in range(2) for x in range(3)), [15, 15]], np.int32
    )
    group = replace(_group(0, positions, "f16", [3, 8]), xy=xy)
    return KVBlock(p0=10, p1=16, tokens=np.arange(6, dtype=np.int32), groups=(group,))


def latent() -> KVBlock:
    """Layers that store no values; MLA."""
    group = _group(0, np.arange(10, 16, dtype=np.int32), "f16", [])
    (layer,) = group.layers
    layer = replace(layer, head_size_v=0, v=layer.v[:, :0], v_hot=layer.v_hot[:, :0])
    return KVBlock(
        p0=10, p1=16, tokens=np.arange(6, dtype=np.int32), groups=(replace(group, layers=(layer,)),)
    )


def point() -> Checkpoint:
    """A checkpoint that serves the last two cuts, with the F16 rows of one layer and a state."""
    group = _group(0, np.arange(10, 16, dtype=np.int32), "q4_0", [4, 5])
    return Checkpoint(
        n=16,
        first=14,
        groups=(group,),
        state=numbers(9, 7),
        pasts=np.array([1, 2**64 - 1, 2**40], np.uint64),
        setting="model=0 types=q4_0 window=3/1/1",
    )


VALIDITY = np.array([COMPUTED, COMPUTED, APPROXIMATE, FOREIGN, UNVERIFIED, UNVERIFIED], np.uint8)
SETTING = "model=0 types=q4_0 window=2/1/1"
BLOCKS = {
    "v4-f16": replace(block("f16", []), validity=all_of(6, COMPUTED)),
    "v4-mixed_q4_0": replace(
        block("q4_0", [0, 4, 5]), validity=VALIDITY, past=2**64 - 3, setting=SETTING, checkpoints=(point(),)
    ),
    "v4-image": image(),
    "v4-latent": latent(),
}
ENCRYPTED = "v4-mixed_q4_0"


def layers() -> list[tuple[np.ndarray, np.ndarray]]:
    """Two layers of float16 arrays, with an infinity, a NaN, and no rows at all among them."""
    k = (numbers(24, 5) / 8).astype(np.float16).reshape(3, 2, 4)
    v = (numbers(12, 6) / 8 - 9).astype(np.float16).reshape(3, 4)
    special = np.array([np.inf, -np.inf, np.nan, -0.0, 6e-8], np.float16)
    return [(k, v), (special, np.empty((0, 4), np.float16))]


SESSION = [1, *range(3, 26)]  # what the packed sessions evaluated


def session_model(n_layer: int, folder: Path) -> Path:
    """The model of the packed sessions; the flat form holds one layer only."""
    g = zoo.make("llama-64")
    g.keys["block_count"] = n_layer
    for name in [name for name in g.tensors if name.startswith("blk.")]:
        if int(name.split(".")[1]) >= n_layer:
            del g.tensors[name]
    path = folder / f"session-{n_layer}.gguf"
    g.write(path)
    return path


def packed_session(n_layer: int, folder: Path) -> bytes:
    with Llama(session_model(n_layer, folder), kv="f16", n_ctx=256, n_threads=1, verbose=False) as llm:
        llm.eval(SESSION)
        rows = packed_from_block(llm.kv.export())
    return pack_kv_cache_v2(rows) if n_layer > 1 else pack_kv_cache(*rows[0])


def main() -> None:
    for name, kv in BLOCKS.items():
        if name.startswith(f"v{VERSION}-"):
            pieces = encode(kv, identity=IDENTITY, entry=ENTRY)
            (FOLDER / f"native-{name}.safetensors").write_bytes(b"".join(pieces))
    pieces = encode(BLOCKS[ENCRYPTED], identity=IDENTITY, entry=ENTRY)
    (FOLDER / "encrypted-v1.safetensors.enc").write_bytes(b"".join(encrypt(AESGCM(KEY), pieces, CONTEXT)))
    (FOLDER / "packed-v2.bin").write_bytes(pack_kv_cache_v2(layers()))
    (FOLDER / "packed-flat.bin").write_bytes(pack_kv_cache(*layers()[0]))
    with tempfile.TemporaryDirectory() as folder:
        (FOLDER / "packed-v2-session.bin").write_bytes(packed_session(2, Path(folder)))
        (FOLDER / "packed-flat-session.bin").write_bytes(packed_session(1, Path(folder)))


if __name__ == "__main__":
    main()
