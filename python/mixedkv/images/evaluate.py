"""A picture as part of a sequence: a batch is of tokens or of vectors, so it is a decode of its own."""

from __future__ import annotations

import numpy as np

from mixedkv.images.picture import Picture
from mixedkv.kv.cache import KVCache
from mixedkv.native.batch import NativeBatch


def evaluate(picture: Picture, kv: KVCache, pos: int, seq: int, n_batch: int) -> int:
    """Evaluate at positions of a sequence from `pos` on; return llama_decode's code. Where it is not 0
    after the first `n_batch` vectors, rows of those are left.
    """
    with kv.causal(picture.causal):
        for begin in range(0, len(picture), n_batch):
            batch = _batch(picture, pos, seq, begin, min(begin + n_batch, len(picture)))
            if (code := kv.decode(batch.native)) != 0:
                return code
        return 0


def _batch(picture: Picture, pos: int, seq: int, begin: int, end: int) -> NativeBatch:
    n = end - begin
    vectors = np.ascontiguousarray(picture.vectors[begin:end])
    if picture.grid is None:
        batch = NativeBatch(vectors)
        batch.pos[:] = np.arange(pos + begin, pos + end)
    else:  # the fourth part is 0
        batch = NativeBatch(vectors, n_pos=4)
        batch.pos[: 3 * n] = (picture.grid[:, begin:end] + pos).ravel()
    batch.seq[:] = seq
    batch.native.n_tokens = n
    return batch
