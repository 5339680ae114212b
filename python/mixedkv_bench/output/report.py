"""All tables of a result, for a terminal."""

from __future__ import annotations

from collections.abc import Sequence

from mixedkv_bench.catalog import TESTS, Document


def render(document: Document) -> str:
    """Return a report of what was run, with a table for everything there are rows of."""
    machine, model = document.machine, document.model
    heads = (
        f", {_list(model.n_head)} query heads over {_list(model.n_head_kv)} KV heads "
        f"of size {_list(model.head_size_k)}"
    )
    lines = [
        f"{model.name}: {model.n_layer} layers{heads if model.n_head else ''}",
        f"{machine.cpu}, {machine.cores} cores, {document.versions.isa} kernels, "
        f"load {machine.load_average[0]:.1f} at the start",
    ]
    for test in TESTS.values():
        for table in test.tables:
            lines += table.lines(document.rows)
    if document.interrupted:
        lines += ["", "Interrupted: what was measured until then."]
    return "\n".join(lines)


def _list(values: Sequence[int]) -> str:
    return "/".join(map(str, values))
