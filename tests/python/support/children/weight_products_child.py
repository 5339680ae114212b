"""Multiplies random matrices of each type with ggml, and writes what comes out.

python -m support.children.weight_products_child IN.npz OUT.npz

IN holds `columns` [n_columns, n_elements] and `weights` [n_rows, n_elements] in F32. OUT has for each type
the rows, as bytes, and the products of some first columns with some threads. For types that
llama.cpp repacks on this machine it has them once more, with rows that it has repacked, as many of the first
rows as that takes. The environment says whose products they are.
"""

from __future__ import annotations

import ctypes
import sys
from pathlib import Path
from typing import Any

import mixedkv  # noqa: F401  (before llama_cpp, which is then its own)

# isort: split
import llama_cpp
import numpy as np
import numpy.typing as npt

TYPES = {"Q4_0": 2, "Q4_1": 3, "Q5_0": 6, "Q5_1": 7, "Q8_0": 8}
TYPES |= {"Q4_K": 12, "Q5_K": 13, "Q6_K": 14, "MXFP4": 39}
HALVES = {"F16": 1, "BF16": 30}
ALL = TYPES | HALVES
N_MANY = 84
CASES = ((1, 1), (3, 1), (7, 2), (N_MANY, 1), (N_MANY, 3))  # columns and threads
REPACKED = ("Q4_0", "Q4_K", "MXFP4")
N_TOGETHER = 8
N_FEWER = 33  # rows of a second matrix of each type
N_EXPERTS, N_USED = 4, 3
N_ROUTED = N_MANY * N_USED  # columns, where those of a token have one for each expert
_F32, _I32 = 0, 26
_MEMORY = 64 << 20


class _InitParams(ctypes.Structure):
    _fields_ = (("mem_size", ctypes.c_size_t), ("mem_buffer", ctypes.c_void_p), ("no_alloc", ctypes.c_bool))


def _library(name: str) -> ctypes.CDLL:
    suffix = {"darwin": "dylib", "win32": "dll"}.get(sys.platform, "so")
    return ctypes.CDLL(str(Path(llama_cpp.__file__).parent / "lib" / f"lib{name}.{suffix}"))


_base, _cpu = _library("ggml-base"), _library("ggml-cpu")
_base.ggml_init.argtypes = (_InitParams,)
for _name in (
    "ggml_init",
    "ggml_new_tensor",
    "ggml_mul_mat",
    "ggml_mul_mat_id",
    "ggml_new_graph",
    "ggml_get_data",
    "ggml_backend_reg_dev_get",
    "ggml_backend_reg_get_proc_address",
    "ggml_backend_alloc_ctx_tensors_from_buft",
):
    getattr(_base, _name).restype = ctypes.c_void_p
_base.ggml_backend_buft_name.restype = ctypes.c_char_p
_cpu.ggml_backend_cpu_reg.restype = ctypes.c_void_p
for _name in ("ggml_nbytes", "ggml_quantize_chunk"):
    getattr(_base, _name).restype = ctypes.c_size_t


def _tensor(context: Any, kind: int, shape: tuple[int, ...]) -> ctypes.c_void_p:
    sizes = (ctypes.c_int64 * len(shape))(*reversed(shape))
    return ctypes.c_void_p(_base.ggml_new_tensor(context, kind, len(shape), sizes))


def _array(tensor: ctypes.c_void_p) -> npt.NDArray[np.uint8]:
    data = _base.ggml_get_data(tensor)
    return np.ctypeslib.as_array((ctypes.c_uint8 * _base.ggml_nbytes(tensor)).from_address(data))


def _quantise(tensor: ctypes.c_void_p, kind: int, values: npt.NDArray[np.float32]) -> None:
    n_rows, n_elements = (ctypes.c_int64(n) for n in values.shape)
    source, to = ctypes.c_void_p(values.ctypes.data), ctypes.c_void_p(_base.ggml_get_data(tensor))
    _base.ggml_quantize_chunk(kind, source, to, ctypes.c_int64(0), n_rows, n_elements, None)


def _repacking_buffers() -> ctypes.c_void_p | None:
    """Return ggml's type of buffers whose rows are repacked, or None where it has none."""
    registry = ctypes.c_void_p(_cpu.ggml_backend_cpu_reg())
    address = _base.ggml_backend_reg_get_proc_address(registry, b"ggml_backend_dev_get_extra_bufts")
    types = ctypes.CFUNCTYPE(ctypes.POINTER(ctypes.c_void_p), ctypes.c_void_p)(address)(
        _base.ggml_backend_reg_dev_get(registry, ctypes.c_size_t(0))
    )
    i = 0
    while types and types[i]:
        if _base.ggml_backend_buft_name(ctypes.c_void_p(types[i])) == b"CPU_REPACK":
            return ctypes.c_void_p(types[i])
        i += 1
    return None


def _repacked(kind: int, rows: npt.NDArray[np.uint8], shape: tuple[int, ...]) -> ctypes.c_void_p | None:
    """Return a tensor of these rows, which ggml repacks as it takes them, or None where it does not."""
    buffers = _repacking_buffers()
    if buffers is None:
        return None
    context = ctypes.c_void_p(_base.ggml_init(_InitParams(1 << 16, None, True)))
    tensor = _tensor(context, kind, shape)
    assert _base.ggml_backend_alloc_ctx_tensors_from_buft(context, buffers)
    _base.ggml_backend_tensor_set(
        tensor, ctypes.c_void_p(rows.ctypes.data), ctypes.c_size_t(0), ctypes.c_size_t(rows.nbytes)
    )
    return tensor


def _multiply(
    context: Any, rows: ctypes.c_void_p, n_rows: int, columns: npt.NDArray[np.float32], n_threads: int
) -> npt.NDArray[np.float32]:
    (product,) = _multiply_all(context, [rows], columns, n_threads)
    return product.reshape(len(columns), n_rows)


def _multiply_all(
    context: Any, all_rows: list[ctypes.c_void_p], columns: npt.NDArray[np.float32], n_threads: int
) -> list[npt.NDArray[np.float32]]:
    """Multiply the same columns with several matrices, in one graph, one behind the other."""
    some = _tensor(context, _F32, columns.shape)
    _array(some)[:] = np.ascontiguousarray(columns).view(np.uint8).ravel()
    graph = ctypes.c_void_p(_base.ggml_new_graph(context))
    products = [ctypes.c_void_p(_base.ggml_mul_mat(context, rows, some)) for rows in all_rows]
    for product in products:
        _base.ggml_build_forward_expand(graph, product)
    assert _cpu.ggml_graph_compute_with_ctx(context, graph, n_threads) == 0
    return [_array(product).view(np.float32).copy() for product in products]


def routes(n_tokens: int) -> npt.NDArray[np.int32]:
    """Return the experts of each token, [n_tokens, N_USED]."""
    random = np.random.default_rng(3)
    return np.array([random.permutation(N_EXPERTS)[:N_USED] for _ in range(n_tokens)], np.int32)


def _route(
    context: Any, rows: ctypes.c_void_p, columns: npt.NDArray[np.float32], n_threads: int
) -> npt.NDArray[np.float32]:
    """Multiply columns [n_tokens, 1 or N_USED, n_elements] with the rows of the experts that they go to."""
    experts = routes(len(columns))
    some, ids = _tensor(context, _F32, columns.shape), _tensor(context, _I32, experts.shape)
    _array(some)[:] = np.ascontiguousarray(columns).view(np.uint8).ravel()
    _array(ids)[:] = experts.view(np.uint8).ravel()
    graph = ctypes.c_void_p(_base.ggml_new_graph(context))
    product = ctypes.c_void_p(_base.ggml_mul_mat_id(context, rows, some, ids))
    _base.ggml_build_forward_expand(graph, product)
    assert _cpu.ggml_graph_compute_with_ctx(context, graph, n_threads) == 0
    return _array(product).view(np.float32).reshape(*experts.shape, -1).copy()


def _route_all(
    name: str, weights: npt.NDArray[np.float32], columns: npt.NDArray[np.float32]
) -> dict[str, npt.NDArray[np.float32]]:
    """Route columns to experts whose rows are the first ones of `weights`, one expert after the other."""
    kind, out = TYPES[name], {}
    n_rows = len(weights) // N_EXPERTS // N_TOGETHER * N_TOGETHER
    some, shape = weights[: N_EXPERTS * n_rows], (N_EXPERTS, n_rows, weights.shape[1])
    for n_tokens, n_threads in CASES:
        for shared in (True, False):
            n = n_tokens if shared else n_tokens * N_USED
            given = columns[:n].reshape(n_tokens, -1, weights.shape[1])
            context = ctypes.c_void_p(_base.ggml_init(_InitParams(_MEMORY, None, False)))
            rows = _tensor(context, kind, shape)
            _quantise(rows, kind, some)
            case = f"{shared} {n_tokens} {n_threads}"
            out[f"{name} routed {case}"] = _route(context, rows, given, n_threads)
            repacked = _repacked(kind, _array(rows).copy(), shape) if name in REPACKED else None
            if repacked:
                out[f"{name} routed repacked {case}"] = _route(context, repacked, given, n_threads)
            _base.ggml_free(context)
    return out


def main() -> None:
    given = np.load(sys.argv[1])
    weights, columns = given["weights"], given["columns"]
    n_rows = len(weights)
    n_whole = n_rows - n_rows % N_TOGETHER
    out: dict[str, npt.NDArray[Any]] = {}
    for name, kind in ALL.items():
        if name in TYPES:
            out |= _route_all(name, weights, columns)
        for n_columns, n_threads in (*CASES, (N_ROUTED, 1)):
            context = ctypes.c_void_p(_base.ggml_init(_InitParams(_MEMORY, None, False)))
            rows = _tensor(context, kind, weights.shape)
            _quantise(rows, kind, weights)
            out[name] = _array(rows).copy()
            case = f"{n_columns} {n_threads}"
            out[f"{name} {case}"] = _multiply(context, rows, n_rows, columns[:n_columns], n_threads)
            if name in REPACKED:
                whole = out[name].reshape(n_rows, -1)[:n_whole].copy()
                repacked = _repacked(kind, whole, (n_whole, weights.shape[1]))
                if repacked:
                    got = _multiply(context, repacked, n_whole, columns[:n_columns], n_threads)
                    out[f"{name} repacked {case}"] = got
            _base.ggml_free(context)
    for n_columns, n_threads in CASES:
        context = ctypes.c_void_p(_base.ggml_init(_InitParams(_MEMORY, None, False)))
        parts = [(name, weights[:n]) for name in ALL for n in (n_rows, N_FEWER)]
        tensors = [_tensor(context, ALL[name], part.shape) for name, part in parts]
        for tensor, (name, part) in zip(tensors, parts, strict=True):
            _quantise(tensor, ALL[name], part)
        products = _multiply_all(context, tensors, columns[:n_columns], n_threads)
        for product, (name, part) in zip(products, parts, strict=True):
            case = f"{name} {len(part)} together {n_columns} {n_threads}"
            out[case] = product.reshape(n_columns, len(part))
        _base.ggml_free(context)
    np.savez(sys.argv[2], **out)


if __name__ == "__main__":
    main()
