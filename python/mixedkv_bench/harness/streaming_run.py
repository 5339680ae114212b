"""Runs what `streaming` measures: a process that reads a prompt and generates in less memory than the model.

As a module it is that process. It says what it did on its last line.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import subprocess
import sys
import time
import warnings
from pathlib import Path
from typing import Any

import llama_cpp
import numpy as np

from mixedkv.engine import Engine
from mixedkv.llama import Llama
from mixedkv_bench.harness.memory_group import MemoryGroup

_TIMEOUT = 3600.0
_LOOKUP = 8  # times as many tokens: a pass gives several
_BATCH = 512  # the same in all modes: sums in another order are other bits


def in_group(group: MemoryGroup, request: dict[str, Any]) -> dict[str, Any]:
    """Run a request in a process of a control group, and return what it did, or an `error`."""
    command = [sys.executable, "-m", __name__, json.dumps(request)]
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, preexec_fn=group.join, timeout=_TIMEOUT
    )
    if done.returncode:
        lines = done.stderr.strip().splitlines()
        killed = "the process was killed: it did not fit" if done.returncode == -9 else ""
        return {
            "error": killed or (lines[-1] if lines else f"the process ended with status {done.returncode}")
        }
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def _child(request: dict[str, Any]) -> dict[str, Any]:
    warnings.simplefilter("ignore")  # of memory that cannot be locked: stats have it
    began = time.perf_counter()
    n_streams, n_gen = request["streams"], request["n_gen"]
    llm = Llama(
        request["model"],
        kv=request["kv"],
        n_ctx=request["n_ctx"],
        n_seq_max=n_streams + 1,
        kv_unified=True,
        n_batch=_BATCH,
        n_ubatch=_BATCH,
        n_threads=request["threads"],
        n_threads_batch=request["threads"],
        stream_mode=request["mode"],
        stream_layers=request["layers"] if request["mode"] in ("direct", "prefetch") else None,
        verbose=False,
    )
    found: dict[str, Any] = {"load_seconds": time.perf_counter() - began}
    logits = hashlib.sha256()
    prompt = np.random.default_rng(1).integers(3, llm.n_vocab(), request["n_prompt"]).tolist()
    found["prefill_seconds"] = _timed(llm, prompt, logits)
    before, stats = _bytes_from_disk(), llm.streaming.stats() if llm.streaming else None
    found["pass_seconds"] = [_timed(llm, [token], logits) for token in prompt[:n_gen]]
    found["disk_bytes"] = _bytes_from_disk() - before
    found["logits"] = logits.hexdigest()
    if llm.streaming and stats:
        after = llm.streaming.stats()
        seconds = after.seconds - stats.seconds
        found["n_streamed"], found["bytes_pass"] = len(after.layers), after.bytes_pass
        found["bytes_kept"], found["o_direct"] = after.bytes_resident, after.o_direct
        found["share_waiting"] = (after.seconds_waiting - stats.seconds_waiting) / seconds if seconds else 0.0
    llm.kv.clear()
    with Engine(llm, parallel=n_streams) as engine:
        if n_streams > 1:
            found["streams_tps"] = _streams(engine, n_streams, n_gen)
        found.update(_lookup(engine, _LOOKUP * n_gen))
    llm.close()
    return found


def _timed(llm: Llama, tokens: list[int], logits: Any) -> float:
    began = time.perf_counter()
    llm.eval(tokens)
    seconds = time.perf_counter() - began
    values = llama_cpp.llama_get_logits_ith(llm.ctx, -1)
    logits.update(np.ctypeslib.as_array(values, (llm.n_vocab(),)).tobytes())
    return seconds


def _streams(engine: Engine, n: int, n_gen: int) -> float:
    """Return the tokens a second of `n` answers at a time, from when all have their first one."""
    bias = tuple((token, -100.0) for token in engine.detokenizer.ends)
    answers = [
        engine.submit([1, 3 + i, 5 + i], max_tokens=n_gen + 1, temperature=0.0, logit_bias=bias)
        for i in range(n)
    ]
    for answer in answers:
        answer.result()
    jobs = [answer.job for answer in answers]
    first, last = max(job.t_first or 0.0 for job in jobs), max(job.t_last or 0.0 for job in jobs)
    return n * n_gen / max(last - first, 1e-9)


def _lookup(engine: Engine, n: int) -> dict[str, float]:
    """Return an answer that says one token again and again, as its prompt does: from its first token on."""
    token = 7
    answer = engine.submit(
        [1] + 16 * [token],
        max_tokens=n + 1,
        temperature=0.0,
        logit_bias=((token, 100.0),),
        speculation="prompt-lookup",
        reuse=False,
    )
    answer.result()
    job = answer.job
    n_passes = n - (job.answer.drafter.n_accepted if job.answer.drafter else 0)  # each gives a token besides
    seconds = (job.t_last or 0.0) - (job.t_first or 0.0)
    return {"lookup_tps": n / max(seconds, 1e-9), "lookup_tokens": n / max(n_passes, 1)}


def _bytes_from_disk() -> int:
    with contextlib.suppress(OSError):
        for line in Path("/proc/self/io").read_text().splitlines():
            if line.startswith("read_bytes:"):
                return int(line.split()[1])
    return 0


if __name__ == "__main__":
    print(json.dumps(_child(json.loads(sys.argv[1]))))
