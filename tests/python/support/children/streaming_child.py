"""A process that streams a model: python -m support.children.streaming_child MODEL WHAT."""

from __future__ import annotations

import ctypes
import re
import resource
import sys

import numpy as np

from mixedkv import Llama
from mixedkv.errors import ModelReadError

PROMPT = list(range(3, 43))
OPTIONS = {"n_ctx": 256, "n_batch": 32, "n_ubatch": 32, "n_threads": 1, "n_threads_batch": 1}
_CAP_IPC_LOCK = 14


def main(model: str, what: str) -> None:
    if what == "unlocked":
        _may_lock_nothing()
    with Llama(model, kv="f16", stream_layers=6, verbose=False, **OPTIONS) as llm:
        if what == "wait":
            print("ready", flush=True)
            sys.stdin.readline()
        if what == "errors":
            ctypes.CDLL(None).setenv(
                b"MIXEDKV_TEST_FAILS", b"1", 1
            )  # as the library before the system's sees it
            try:
                for _ in range(3):
                    llm.reset()
                    llm.eval(PROMPT)
            except ModelReadError as error:
                print(re.sub(r"byte \d+", "byte N", str(error)))
            return
        while what == "forever":
            llm.reset()
            llm.eval(PROMPT)
            print("pass", flush=True)
        llm.eval(PROMPT)
        if what == "buffered":
            assert llm.streaming is not None
            print(f"o_direct={llm.streaming.stats().o_direct}")
        import llama_cpp  # after mixedkv, whose library it is to run on

        logits = llama_cpp.llama_get_logits_ith(llm.ctx, -1)
        print(np.ctypeslib.as_array(logits, (llm.n_vocab(),)).tobytes().hex())


def _may_lock_nothing() -> None:
    """Root may lock all it wants unless it gives that up."""
    resource.setrlimit(resource.RLIMIT_MEMLOCK, (0, 0))
    libc = ctypes.CDLL(None, use_errno=True)

    class Header(ctypes.Structure):
        _fields_ = (("version", ctypes.c_uint32), ("pid", ctypes.c_int))

    class Data(ctypes.Structure):
        _fields_ = (
            ("effective", ctypes.c_uint32),
            ("permitted", ctypes.c_uint32),
            ("inheritable", ctypes.c_uint32),
        )

    header, data = Header(0x20080522, 0), (Data * 2)()
    libc.capget(ctypes.byref(header), data)
    data[0].effective &= ~(1 << _CAP_IPC_LOCK)
    libc.capset(ctypes.byref(header), data)


if __name__ == "__main__":
    main(*sys.argv[1:])
