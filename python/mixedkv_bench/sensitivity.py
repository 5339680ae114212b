"""Measures what K or V of each layer adds to the divergence, and the types of least divergence at given
bits.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, Literal

from pydantic import Field

from mixedkv.config import MixedKVConfig
from mixedkv.model.footprint import n_cells
from mixedkv.model.layer_plan import FINEST, MEASURED, LayerPlan, Part, Shares
from mixedkv.model.resolve_budget import shorten
from mixedkv_bench import plot
from mixedkv_bench.bench_test import Bench, BenchTest, Options
from mixedkv_bench.harness.cache_settings import Setting
from mixedkv_bench.harness.row import Row, measured
from mixedkv_bench.harness.table import NONE, Cells, Table, number
from mixedkv_bench.quality import Document, QualityRow, measure_settings, read_documents

_AT_ONCE = 8  # contexts, beside the reference


class SensitivityRow(Row):
    """One row for K and V of each layer, and one for each number of bits.

    The cache has the finest cold type in all layers, and the coarsest in K or V of one. Its divergence from
    an F32 cache, less that of the finest type everywhere, is what this K or V adds. From that come the types
    of least divergence at given bits, whose divergence is measured as well. Documents, positions and
    divergence are those of `quality`, in large batches.
    """

    test: Literal["sensitivity"] = "sensitivity"
    n_ctx: int = Field(description="tokens of a document")
    layer: int | None = measured("whose K or V has the coarsest type")
    part: Part | None = measured('`"k"` or `"v"`')
    bits: float | None = measured("bits of an allocated K or V element, F16 rows left out")
    kld_mean: float | None = measured("mean KL divergence from an F32 cache, nats")
    kld_se: float | None = measured("its standard error")
    kld_median: float | None = measured("its median")
    same_top1: float | None = measured("share of positions with the same likeliest token")
    kld_share: float | None = measured("what K or V of the layer adds to the mean")
    kld_planned: float | None = measured("what the shares of the chosen types come to")


def check(options: Options) -> None:
    for setting in options.settings:
        if not isinstance(setting.kv, MixedKVConfig):
            raise ValueError(f"--kv {setting.spec}: only a mixed cache can have a type for each layer")
    if not options.shape.layers:
        raise ValueError(f"{options.file.path} has no layers with keys and values that could be measured")
    if not all(layer.head_v for layer in options.shape.layers):
        raise ValueError(f"{options.file.path}: values are a part of the keys (MLA), and have no other types")
    plan = _plan(options)
    least, most = plan.bits(0), plan.bits(len(plan))
    for bits in options.bits:
        if not least <= bits <= most:
            raise ValueError(f"--bits {bits:g}: use numbers from {least:g} to {most:g}")


def measure(bench: Bench) -> None:
    """Add the rows of each cache in `--kv`, one for each choice of cold types.

    Raises:
        ValueError: the text is too short for a document.
    """
    options, documents = bench.options, read_documents(bench.model, bench.options)
    n_cases = 1 + 2 * len(options.shape.layers)
    n_reads = -(-n_cases // _AT_ONCE) + 1
    bench.progress.add(len(options.settings) * n_reads * sum(map(len, documents)))
    for setting in options.settings:
        assert isinstance(setting.kv, MixedKVConfig)
        kv = replace(setting.kv, cold_type_k=FINEST, cold_type_v=FINEST, layers="")
        shares = dict(_measure_shares(bench, documents, kv))
        plan = _plan(options, shares)
        steps = [plan.most(bits) for bits in options.bits]
        rows = _measure(bench, documents, [_with_types(kv, plan.types(n)) for n in steps])
        for n, row in zip(steps, rows, strict=True):
            bench.add(_row(row, bits=plan.bits(n), kld_planned=plan.divergence(n)))


def _plan(options: Options, shares: Shares | None = None) -> LayerPlan:
    return LayerPlan(options.shape, shares, cells=n_cells(options.shape, options.n_ctx))


def _measure_shares(
    bench: Bench, documents: Sequence[Document], kv: MixedKVConfig
) -> Iterator[tuple[tuple[int, Part], float]]:
    """Measure what K or V of each layer adds, and make its row."""
    parts: tuple[Part, ...] = ("k", "v")
    cases = [(layer.il, part) for layer in bench.options.shape.layers for part in parts]
    finest = [(layer.il, FINEST, FINEST) for layer in bench.options.shape.layers]
    coarse = [
        _with_types(kv, [(at, *_coarse(part)) if each[0] == at else each for each in finest])
        for at, part in cases
    ]
    rows = _measure(bench, documents, [kv, *coarse])
    floor = next(rows).kld_mean or 0.0
    for (il, part), row in zip(cases, rows, strict=True):
        share = max((row.kld_mean or 0.0) - floor, 0.0)
        bench.add(_row(row, layer=il, part=part, kld_share=share))
        yield (il, part), share


def _coarse(part: Part) -> tuple[str, str]:
    return (MEASURED, FINEST) if part == "k" else (FINEST, MEASURED)


def _with_types(kv: MixedKVConfig, types: Sequence[tuple[int, str, str]]) -> MixedKVConfig:
    type_k, type_v, layers = shorten(types)
    return replace(kv, cold_type_k=type_k, cold_type_v=type_v, layers=layers)


def _measure(
    bench: Bench, documents: Sequence[Document], caches: Sequence[MixedKVConfig]
) -> Iterator[QualityRow]:
    """Measure a few contexts at a time, each time beside the reference."""
    settings = [Setting(spec=str(kv), kv=kv, flash_attn=True) for kv in caches]
    for i in range(0, len(settings), _AT_ONCE):
        rows: list[QualityRow] = []
        measure_settings(bench, documents, "batch", settings[i : i + _AT_ONCE], rows.append)
        yield from rows


def _row(row: QualityRow, **found: Any) -> SensitivityRow:
    same = ("kv", "flash_attn", "threads", "attention", "error", "n_ctx", "kld_mean", "kld_se", "kld_median")
    kept = {key: getattr(row, key) for key in (*same, "same_top1") if key in row.model_fields_set}
    return SensitivityRow.model_validate({**kept, **found})


def _cells(rows: Sequence[SensitivityRow]) -> Cells:
    total = sum(row.kld_share or 0.0 for row in rows) or 1.0
    if rows[0].layer is not None:
        return [["layer", "KLD mean", "", "adds", "share"]] + [
            [
                f"{row.layer} {(row.part or '').upper()}",
                number(row.kld_mean, ".2e"),
                "+-" + number(row.kld_se, ".0e"),
                number(row.kld_share, ".2e"),
                NONE if row.kld_share is None else f"{row.kld_share / total:.1%}",
            ]
            for row in rows
        ]
    return [["cache", "bits", "planned", "KLD mean", "", "median", "same top"]] + [
        [
            row.kv,
            number(row.bits, ".2f"),
            number(row.kld_planned, ".2e"),
            number(row.kld_mean, ".2e"),
            "+-" + number(row.kld_se, ".0e"),
            number(row.kld_median, ".2e"),
            number(row.same_top1, ".2%"),
        ]
        for row in rows
    ]


TABLE = Table(
    row=SensitivityRow,
    title="Against an F32 cache, {}",
    by=lambda row: "types of least divergence" if row.layer is None else f"{MEASURED} in K or V of one layer",
    cells=_cells,
)
TEST = BenchTest(
    name="sensitivity",
    measures="what K and V of each layer add to the divergence, and the best types for given bits",
    flags=("--text", "--n-ctx", "--repeats", "--bits", "--plot"),
    specs=("mixed",),
    tables=(TABLE,),
    measure=measure,
    check=check,
    draw=plot.sensitivity,
)
