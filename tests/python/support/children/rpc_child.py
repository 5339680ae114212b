"""llama.cpp's RPC backend in processes of its own: it is not part of the package, and may end its process.

rpc_child.py server PLUGIN           computes for others, on an endpoint that it prints, until it is killed
rpc_child.py client PLUGIN ENDPOINT  the bundled model with layers there; prints a line of JSON
"""

from __future__ import annotations

import ctypes
import json
import os
import socket
import sys
import threading
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[2]))
from mixedkv import Llama, _native
from mixedkv.bundled import model_path
from support.patience import wait_for

TOKENS = [5 + i % 200 for i in range(300)]
CPU = 0  # enum ggml_backend_dev_type


def load(plugin: str) -> tuple[ctypes.CDLL, ctypes.CDLL]:
    """ggml, and the backend."""
    ggml = ctypes.CDLL(str(_native.library_folder() / "libggml.so"))
    ggml.ggml_backend_load.restype = ggml.ggml_backend_dev_by_type.restype = ctypes.c_void_p
    ggml.ggml_backend_register.argtypes = [ctypes.c_void_p]
    if not ggml.ggml_backend_load(plugin.encode()):
        raise SystemExit(f"{plugin} is no backend")
    return ggml, ctypes.CDLL(plugin)


def serve(plugin: str) -> None:
    ggml, rpc = load(plugin)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        endpoint = f"127.0.0.1:{free.getsockname()[1]}"
    devices = (ctypes.c_void_p * 1)(ggml.ggml_backend_dev_by_type(CPU))
    arguments = (endpoint.encode(), None, ctypes.c_size_t(1), ctypes.c_size_t(1), devices)
    thread = threading.Thread(target=rpc.ggml_backend_rpc_start_server, args=arguments, daemon=True)
    thread.start()
    wait_for(lambda: is_open(endpoint) or not thread.is_alive())  # it says so when it has accepted one
    thread.join()


def is_open(endpoint: str) -> bool:
    host, _, port = endpoint.rpartition(":")
    with socket.socket() as connection:
        return connection.connect_ex((host, int(port))) == 0


def logits(llm: Llama) -> np.ndarray:
    return np.ctypeslib.as_array(llm._ctx.get_logits_ith(-1), (llm.n_vocab(),)).copy()


def run(kv: str, **options: object) -> tuple[np.ndarray, list[str], bool]:
    """Logits, how each layer attends, and whether a state and exported rows go on with the same bits."""
    small = {"n_ctx": 512, "n_threads": 1, "n_threads_batch": 1, "verbose": False}
    with Llama(model_path(), kv=kv, **small, **options) as llm:
        llm.eval(TOKENS)
        state, block = llm.save_state(), llm.kv.export()
        llm.eval([7])
        want = logits(llm)
        llm.load_state(state)
        llm.eval([7])
        same = np.array_equal(logits(llm), want)
        llm.reset()
        llm.kv.clear()
        llm.kv.load(block)
        llm.eval([7])
        same = same and np.array_equal(logits(llm), want)
        return want, [layer.attention for layer in llm.kv.layers], bool(same)


def compare(plugin: str, endpoint: str) -> None:
    ggml, rpc = load(plugin)
    rpc.ggml_backend_rpc_add_server.restype = ctypes.c_void_p
    ggml.ggml_backend_register(rpc.ggml_backend_rpc_add_server(endpoint.encode()))
    want, _, _ = run("mixed", n_gpu_layers=0)
    results = []
    for n_gpu_layers in (-1, 3):
        for offload_kqv in (True, False):
            got, paths, same = run("mixed", n_gpu_layers=n_gpu_layers, offload_kqv=offload_kqv)
            error = float(np.sqrt(np.mean((got - want) ** 2)) / want.std())
            options = {"n_gpu_layers": n_gpu_layers, "offload_kqv": offload_kqv}
            results.append({**options, "paths": paths, "error": error, "same": same})
    print(json.dumps(results))


if __name__ == "__main__":
    os.environ["GGML_NO_BACKTRACE"] = "1"  # a debugger that it starts outlives it
    if sys.argv[1] == "server":
        serve(sys.argv[2])
    else:
        compare(sys.argv[2], sys.argv[3])
