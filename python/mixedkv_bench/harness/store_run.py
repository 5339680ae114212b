"""Runs what `store` times: a `Llama` that answers a prompt of tokens, and stores it takes KV from.

As a module it is the new process of that tier: a request on stdin, an answer on stdout.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from mixedkv.llama import Llama
from mixedkv.store import Identity, KVStore
from mixedkv.tokens import Tokens
from mixedkv_bench.harness.cache_settings import Setting
from mixedkv_bench.harness.contexts import CannotRunError

_KEY_BYTES = 32


class StoreRun:
    """A `Llama` of one setting, with a context of one sequence.

    Raises:
        CannotRunError: the model cannot have this cache, or there is no memory for it.
    """

    def __init__(self, path: Path, setting: Setting, n_ctx: int, threads: int) -> None:
        self.facts = {"path": str(path), "spec": setting.spec, "flash_attn": setting.flash_attn}
        self.facts |= {"n_ctx": n_ctx, "threads": threads}
        try:
            self.llm = Llama(
                path,
                kv=setting.kv,
                n_ctx=n_ctx,
                flash_attn=setting.flash_attn,
                n_threads=threads,
                n_threads_batch=threads,
                verbose=False,
            )
        except ValueError as error:
            raise CannotRunError(str(error)) from None
        self.identity = Identity.of(self.llm)

    def __enter__(self) -> StoreRun:
        return self

    def __exit__(self, *_: object) -> None:
        self.llm.close()

    def clear(self) -> None:
        self.llm.kv.clear()

    def first_token(self, tokens: Tokens) -> int:
        """Evaluate tokens after what there is, and choose the next one."""
        self.llm.eval(tokens.tolist())
        return int(self.llm.sample(temp=0.0))

    def generate(self, token: int, n: int) -> Tokens:
        """Return `token` and the likeliest ones after it, n in all; the last is not evaluated."""
        tokens = [token]
        while len(tokens) < n:
            tokens.append(self.first_token(np.array(tokens[-1:], np.int32)))
        return np.array(tokens, np.int32)


class StorePlace:
    """A store that keeps blocks in memory only (no folder), or in files only, so that each hit is of one
    tier. One with a remote has to `forget` for that before each.
    """

    def __init__(self, folder: Path | None, *, encrypted: bool = False, remote: str | None = None) -> None:
        self.folder, self._remote, self._sent = folder, remote, 0
        self._key = os.urandom(_KEY_BYTES) if encrypted else None
        self._store = self._open()

    def _open(self) -> KVStore:
        key: Callable[[], bytes] | None = None
        if (data := self._key) is not None:
            key = lambda: data  # noqa: E731
        if self.folder is None:
            return KVStore(None, max_ram_bytes=2**40, key=key, remote=self._remote)
        return KVStore(self.folder, max_ram_bytes=0, max_kv_size_gb=1e6, key=key)

    def __enter__(self) -> StorePlace:
        return self

    def __exit__(self, *_: object) -> None:
        self._store.close()

    @property
    def nbytes(self) -> int:
        """Bytes of the stored blocks, or of their files."""
        if self._remote is not None:
            return self._sent
        stats = self._store.stats()
        return stats.bytes_ram if self.folder is None else stats.bytes_disk

    def files(self) -> list[Path]:
        """Return the entries' files; the index stays open, and so in memory."""
        assert self.folder is not None
        return [path for path in self.folder.rglob("entries/**/*") if path.is_file()]

    def empty(self) -> None:
        """Begin again with nothing in it."""
        self._store.close()
        if self.folder is not None:
            shutil.rmtree(self.folder)
        self._store = self._open()

    def forget(self) -> None:
        """Forget all but what is in the remote, if there is one."""
        if self._remote is not None:
            self.empty()

    def save(self, run: StoreRun, tokens: Tokens) -> float:
        """Store a sequence and return the seconds it took.

        Raises:
            CannotRunError: it was not stored.
        """
        if self._remote is not None:
            for entry in self._store.entries():  # there too
                self._store.remove(entry.id)
            self.empty()
        saved = self._store.save(run.llm, tokens, identity=run.identity)
        if saved.reason:
            raise CannotRunError(f"the store did not take the prompt: {saved.reason}")
        if self._remote is None:
            return saved.seconds
        self._sent = saved.nbytes
        begin = time.perf_counter()
        self._store.close()  # sends what waits
        return saved.seconds + time.perf_counter() - begin

    def restore(self, run: StoreRun, tokens: Tokens, n_expected: int) -> int:
        """Restore a sequence, which must be all that was stored, exactly; return its number of tokens.

        Raises:
            CannotRunError: they are not.
        """
        restored = self._store.restore(run.llm, tokens, identity=run.identity)
        tier = "remote" if self._remote is not None else "ram" if self.folder is None else "disk"
        if (restored.n_tokens, restored.tier, restored.exact) != (n_expected, tier, True):
            raise CannotRunError(
                f"restored {restored.n_tokens} tokens from {restored.tier} (exact={restored.exact}) "
                f"instead of {n_expected} from {tier}. {restored.reason}"
            )
        return restored.n_tokens


def in_new_process(run: StoreRun, place: StorePlace, tokens: Tokens) -> tuple[float, float, float]:
    """Return the seconds until the model is loaded, to restore, and to the first token; the last two from
    then on.

    Raises:
        CannotRunError: the process ended without an answer.
    """
    request = {**run.facts, "folder": str(place.folder), "tokens": tokens.tolist()}
    command = [sys.executable, "-m", "mixedkv_bench.harness.store_run"]
    done = subprocess.run(command, input=json.dumps(request), capture_output=True, text=True)
    if done.returncode:
        why = done.stderr.strip().splitlines()
        raise CannotRunError(f"the new process failed: {why[-1] if why else done.returncode}")
    answer = json.loads(done.stdout.splitlines()[-1])
    return answer["start"], answer["restore"], answer["ttft"]


def main() -> None:
    from mixedkv_bench.harness.cache_settings import make_settings

    begin = time.perf_counter()
    request: dict[str, Any] = json.load(sys.stdin)
    (setting,) = make_settings([request["spec"]], "on" if request["flash_attn"] else "off")
    tokens = np.array(request["tokens"], np.int32)
    run = StoreRun(Path(request["path"]), setting, request["n_ctx"], request["threads"])
    with run, KVStore(request["folder"], max_ram_bytes=0, max_kv_size_gb=1e6) as store:
        start = time.perf_counter()
        restored = store.restore(run.llm, tokens, identity=run.identity)
        ready = time.perf_counter()
        if not restored.hit:
            raise SystemExit(f"nothing was restored: {restored.reason}")
        run.first_token(tokens[restored.n_tokens :])
        end = time.perf_counter()
    print(json.dumps({"start": start - begin, "restore": ready - start, "ttft": end - start}))


if __name__ == "__main__":
    main()
