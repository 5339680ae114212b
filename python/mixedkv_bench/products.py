"""Measures what products with quantised weights cost: the next-token distribution against that of the same
weights in F16.

A product with quantised weights rounds what they are multiplied with to 8 bits. llama.cpp does that in one
way, this package in another (`cpp/weights`), and with AMX in a third, in BF16, where a user says so. Which of
them computes is settled once in a process, so each has a process of its own.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
from gguf import GGMLQuantizationType
from pydantic import Field

from mixedkv import _core
from mixedkv.model.packaged_model import write_f16
from mixedkv_bench.bench_test import Bench, BenchTest, Options
from mixedkv_bench.harness.cache_settings import Setting
from mixedkv_bench.harness.contexts import CannotRunError
from mixedkv_bench.harness.table import Cells, Table, number
from mixedkv_bench.quality import (
    MODE_NAMES,
    DivergenceRow,
    Document,
    compare_logits,
    read_documents,
    summarise,
)

_WHOLE = (GGMLQuantizationType.F32, GGMLQuantizationType.F16, GGMLQuantizationType.BF16)
_VARIABLE = "MIXEDKV_WEIGHTS"
_MAKERS: dict[str, dict[str, str]] = {"mixedkv": {}, "llama.cpp": {_VARIABLE: "llama.cpp"}}
if _core.version()["isa"] == "amx":
    _MAKERS["mixedkv, BF16"] = {_VARIABLE: "bf16"}


class ProductsRow(DivergenceRow):
    """One row per setting, maker of the products and mode.

    The reference has the file's weights in F16, whose products round nothing to 8 bits, and the same cache.
    All positions of the documents count, but the last of each.
    """

    test: Literal["products"] = "products"
    products: Literal["mixedkv", "llama.cpp", "mixedkv, BF16"] = Field(
        description='whose products they are; `"mixedkv, BF16"`: with `MIXEDKV_WEIGHTS=bf16`'
    )
    mode: Literal["batch", "token"] = Field(
        description='`"batch"`: micro-batches of up to 512 tokens; `"token"`: one by one, as in decoding'
    )
    n_ctx: int = Field(description="tokens of a document")
    text: str = Field(description="what was read: kind, source and hash of the text")


def check(options: Options) -> None:
    file = options.file
    if all(tensor.kind in _WHOLE for tensor in file.tensors):
        raise ValueError(f"{file.path}: its weights are not quantised, and no product rounds anything")
    if len(file.tensors) != file.n_tensors:
        raise ValueError(f"{file.path} has several parts: join them into one file (llama-gguf-split --merge)")


def measure(bench: Bench) -> None:
    """Add one row per setting, maker and mode.

    Raises:
        ValueError: the text is too short for a document.
        OSError: there is no room for the weights in F16.
    """
    options, documents = bench.options, read_documents(bench.model, bench.options)
    ways = [(maker, mode) for maker in _MAKERS for mode in options.modes]
    bench.progress.add(len(options.settings) * len(documents) * (1 + len(ways)))
    with tempfile.TemporaryDirectory() as folder:
        whole = Path(folder, "f16.gguf")
        bench.progress.show("products: writing the weights in F16")
        write_f16(options.file.path, whole)
        for setting in options.settings:
            kept: dict[tuple[str, str], list[npt.NDArray[np.float64]]] = {way: [] for way in ways}
            error = ""
            try:
                for document in documents:
                    _compare(bench, whole, document, setting, kept)
            except CannotRunError as problem:
                error = str(problem)
            for (maker, mode), found in kept.items():
                row: dict[str, Any] = {
                    **setting.head(options.threads),
                    "products": maker,
                    "mode": mode,
                    "n_ctx": len(documents[0]),
                    "text": options.text_source,
                    **(summarise(np.concatenate(found)) if found else {}),
                    **({"error": error} if error else {}),
                }
                bench.add(ProductsRow.model_validate(row))


def _compare(
    bench: Bench,
    whole: Path,
    document: Document,
    setting: Setting,
    kept: dict[tuple[str, str], list[npt.NDArray[np.float64]]],
) -> None:
    """Compare one document in each way, and add what `compare_logits` found to `kept`."""
    options = bench.options
    bench.progress.show(f"products: the weights in F16, {setting.name}")
    want = _logits(whole, document, setting, "batch", options.threads, {})
    bench.progress.step()
    for (maker, mode), found in kept.items():
        bench.progress.show(f"products of {maker}, {MODE_NAMES[mode]}: {setting.name}")
        got = _logits(options.file.path, document, setting, mode, options.threads, _MAKERS[maker])
        found.append(compare_logits(want, got, document[1:]))
        bench.progress.step()


def _logits(
    path: Path, document: Document, setting: Setting, mode: str, threads: int, environ: dict[str, str]
) -> npt.NDArray[np.float32]:
    """Return the logits [n - 1, n_vocab] of a document of n tokens, computed by a process of its own.

    Raises:
        CannotRunError: it ended with an error, which is the text.
    """
    with tempfile.TemporaryDirectory() as folder:
        tokens, out = Path(folder, "tokens.npy"), Path(folder, "logits.npy")
        np.save(tokens, document)
        flash = "on" if setting.flash_attn else "off"
        arguments = [str(path), setting.spec, flash, mode, str(threads), str(tokens), str(out)]
        done = subprocess.run(
            [sys.executable, "-m", "mixedkv_bench.harness.logits_of", *arguments],
            env={**{k: v for k, v in os.environ.items() if k != _VARIABLE}, **environ},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode:
            reason = done.stderr.strip() or f"its process ended with {done.returncode}"
            raise CannotRunError(f"{path.name} with {setting.spec}: {reason}")
        found: npt.NDArray[np.float32] = np.load(out)
    return found


def _cells(rows: Sequence[ProductsRow]) -> Cells:
    head = ["cache", "products", "evaluated", "KLD mean", "", "median", "99%", "max", "same top"]
    return [head] + [
        [
            row.name,
            row.products,
            MODE_NAMES[row.mode],
            number(row.kld_mean, ".2e"),
            "+-" + number(row.kld_se, ".0e"),
            *(number(value, ".1e") for value in (row.kld_median, row.kld_p99, row.kld_max)),
            number(row.same_top1, ".2%"),
        ]
        for row in rows
    ]


TABLE = Table(
    row=ProductsRow,
    title="Products with the file's weights, against the same weights in F16, {} tokens",
    by=lambda row: row.n_ctx,
    cells=_cells,
)

TEST = BenchTest(
    name="products",
    measures="divergence that products with quantised weights cause, this package's and llama.cpp's",
    flags=("--text", "--n-ctx", "--repeats", "--mode"),
    specs=("f16",),
    tables=(TABLE,),
    measure=measure,
    check=check,
)
