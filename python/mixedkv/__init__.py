"""Long contexts on small machines: `llama_cpp.Llama` with a mixed-precision KV cache.

>>> from mixedkv import Llama
>>> llm = Llama("model.gguf", n_ctx=32768, kv="mixed:cold=q4_0,threshold=256,group=32")
>>> print(llm.kv.stats())
"""

from mixedkv import _signals

_signals.prepare_server()  # before the other imports, which take seconds

from mixedkv import _native, errors  # noqa: E402
from mixedkv._native import cmake_dir, include_dir  # noqa: E402

_native.load()  # before anything imports _core or llama_cpp: all must run on one copy of the libraries

from mixedkv.config import MixedKVConfig, UniformKV  # noqa: E402
from mixedkv.kv.block import KVBlock  # noqa: E402
from mixedkv.kv.stats import KVStats  # noqa: E402
from mixedkv.llama import Llama  # noqa: E402

__version__: str
__all__ = [
    "KVBlock",
    "KVStats",
    "Llama",
    "MixedKVConfig",
    "UniformKV",
    "__version__",
    "cmake_dir",
    "errors",
    "include_dir",
]


def __getattr__(name: str) -> str:
    if name != "__version__":
        raise AttributeError(f"module 'mixedkv' has no attribute {name!r}")
    from importlib.metadata import version  # takes longer to import than most of what is here

    return version("mixedkv")
