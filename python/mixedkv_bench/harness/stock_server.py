"""`python -m llama_cpp.server` where the stock library would crash.

Built by GCC before 13, llama.cpp dies where AMX repacks quantised weights. The server has no option to leave
that out, so it is left out here. Run by its path: nothing of this package is imported.
"""

import runpy
import sys
from pathlib import Path

sys.path = [entry for entry in sys.path if Path(entry or ".").resolve() != Path(__file__).resolve().parent]

import llama_cpp  # noqa: E402

_default_params = llama_cpp.llama_model_default_params


def _without_extra_buffers() -> llama_cpp.llama_model_params:
    params: llama_cpp.llama_model_params = _default_params()
    params.use_extra_bufts = False
    return params


llama_cpp.llama_cpp.llama_model_default_params = _without_extra_buffers
sys.argv[0] = "llama_cpp.server"
runpy.run_module("llama_cpp.server", run_name="__main__")
