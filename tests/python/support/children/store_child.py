"""A process of its own that continues stored sequences: what is left after a restart is the folder, or the
remote whose URL is given.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np

from mixedkv import Llama
from mixedkv.bundled import model_path
from mixedkv.store import KVStore

N_NEW = 16


def open_llama(kv: str) -> Llama:
    return Llama(model_path(), kv=kv, n_ctx=1024, n_threads=1, n_threads_batch=1, verbose=False)


def continue_greedily(llm: Llama, follow_up: list[int]) -> tuple[list[int], np.ndarray]:
    """Evaluate some tokens, then the most likely ones: their ids, and the logits before the first."""
    llm.eval(follow_up)
    before = _logits(llm).copy()
    ids = []
    for _ in range(N_NEW):
        ids.append(int(_logits(llm).argmax()))
        llm.eval(ids[-1:])
    return ids, before


def _logits(llm: Llama) -> np.ndarray:
    return np.ctypeslib.as_array(llm._ctx.get_logits_ith(-1), (llm.n_vocab(),))


def main() -> None:
    kv, folder, tasks = sys.argv[1], sys.argv[2], json.loads(Path(sys.argv[3]).read_text())
    remote = sys.argv[4] if len(sys.argv) > 4 else None
    tier = "remote" if remote else "disk"
    results = []
    with open_llama(kv) as llm, KVStore(folder, max_ram_bytes=0, remote=remote) as store:
        for tokens, follow_up in tasks:
            restored = store.restore(llm, [*tokens, *follow_up])
            assert (restored.n_tokens, restored.exact, restored.tier) == (len(tokens), True, tier), restored
            ids, logits = continue_greedily(llm, follow_up)
            results.append([ids, logits.tobytes().hex()])
        assert store.stats().hits == {tier: len(tasks)}
        assert store.stats().n_misses == 0
    print(json.dumps(results))


if __name__ == "__main__":
    main()
