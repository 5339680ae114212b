"""A context that fits into the memory that is free."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import pytest

from mixedkv import Llama
from mixedkv.bundled import model_path
from mixedkv.config import parse_kv
from mixedkv.model.fit import Beside, ContextPlace, check_room, fit, fit_with_gpu
from mixedkv.model.footprint import LayerShape, ModelShape, Sliding, footprint
from mixedkv.model.gguf_file import read_model_file
from mixedkv.native.memory import memory_room
from mixedkv_server.serve import open_server
from mixedkv_server.settings import ServerSettings
from mixedkv_service.keys import Keys
from support.models.adapters import write_adapter
from support.models.zoo.projector import write_projector

pytestmark = pytest.mark.full

GIB = 1 << 30
WEIGHTS = {"1B": 808 << 20, "8B": 4920 << 20}  # Q4_K_M
LAYERS = {"1B": (16, 8, 64), "8B": (32, 8, 128)}
TRAINED = 131_072


def place(name: str, room: int | None, n_seq: int = 16, **fields: object) -> ContextPlace:
    n_layer, n_head, head = LAYERS[name]
    layers = tuple(LayerShape(il, n_head, head, head) for il in range(n_layer))
    shape = ModelShape("llama", name, n_layer, (32,) * n_layer, TRAINED, 0, layers)
    given = {"sliding": Sliding(n_windows=8), "weights": WEIGHTS[name], **fields}
    return ContextPlace(shape=shape, n_seq=n_seq, compute=compute, room=room, **given)


def compute(n_ctx: int) -> int:
    return (100 << 20) + 2048 * n_ctx


@pytest.mark.parametrize(
    ("name", "gib", "n_ctx"), [("1B", 2, 32_768), ("1B", 8, TRAINED), ("8B", 8, 32_768), ("8B", 24, TRAINED)]
)
def test_what_is_chosen_for_machines_fits(name: str, gib: int, n_ctx: int) -> None:
    """2, 8 and 24 GiB: agents that send 18,000 tokens are answered on each."""
    where = place(name, gib * GIB)
    found = fit(where, None)
    taken = found.n_bytes + where.compute(found.n_ctx) + where.weights
    assert taken <= gib * GIB * 7 // 8
    assert found.n_left == gib * GIB - taken
    assert found.n_ctx >= n_ctx


def test_more_does_not_fit() -> None:
    where = place("8B", 8 * GIB)
    found = fit(where, parse_kv("mixed"))
    assert found.n_ctx % 256 == 0
    assert where.fits(parse_kv("mixed"), found.n_ctx)
    assert not where.fits(parse_kv("mixed"), found.n_ctx + 256)


def test_the_context_is_shortened_before_rows_are_made_coarser() -> None:
    shorter = fit(place("8B", 13 * GIB // 2), None)
    assert 8_192 <= shorter.n_ctx < 32_768
    assert shorter.kv == parse_kv("mixed")
    assert shorter.warnings == ()


def test_coarser_rows_are_said_and_reach_4096_tokens_at_most() -> None:
    tight = place("8B", 23 * GIB // 4)
    alone = fit(tight, parse_kv("mixed"))
    assert alone.n_ctx < 4_096
    found = fit(tight, None)
    assert alone.n_ctx < found.n_ctx <= 4_096
    [warning] = found.warnings
    assert f"kv=mixed has room for {alone.n_ctx:,} tokens" in warning
    assert f"kv={found.kv}, with room for {found.n_ctx:,}" in warning


def test_a_view_of_the_rows_is_counted_on_gpus_that_need_one() -> None:
    gpu = place("8B", 12 * GIB, on_cpu=False, reads=lambda *layer: True)
    merged = fit(replace(gpu, reads=lambda *layer: False), None)
    assert merged.n_ctx < fit(gpu, None).n_ctx == fit(replace(gpu, on_cpu=True), None).n_ctx
    size = footprint(gpu.shape, parse_kv("mixed"), merged.n_ctx, 16, gpu.sliding)
    assert merged.n_bytes == size.bytes + size.view


def test_a_budget_is_kept() -> None:
    found = fit(place("1B", 24 * GIB), parse_kv("mixed:budget=500MiB"))
    assert found.n_bytes <= 500 << 20
    assert found.n_ctx > 32_768


def test_what_is_loaded_beside_is_counted() -> None:
    """An image encoder or a draft model, and adapters, which have caches of their own."""
    alone = fit(place("8B", 8 * GIB), None)
    encoder = fit(place("8B", 8 * GIB, beside=Beside(n_bytes=lambda n_ctx: GIB)), None)
    assert alone.n_left - 2 * GIB <= encoder.n_left
    assert encoder.n_ctx < alone.n_ctx
    where = place("8B", 24 * GIB, beside=Beside(n_contexts=8))
    found = fit(where, None)
    taken = 8 * (found.n_bytes + where.compute(found.n_ctx)) + where.weights
    assert taken <= 21 * GIB
    assert found.n_left == 24 * GIB - taken
    assert found.n_ctx < fit(place("8B", 24 * GIB), None).n_ctx


@pytest.mark.parametrize("option", ["--mmproj", "--lora", "--speculation", "--embeddings"])
def test_a_server_is_fitted_with_all_that_it_loads(
    option: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In memory that the model's longest context alone just fits into."""
    path = model_path()
    given = {
        "--mmproj": lambda: write_projector(
            "mlp", int(read_model_file(path).get("embedding_length")), tmp_path
        ),
        "--lora": lambda: write_adapter(tmp_path / "a.gguf", path, 1),
        "--speculation": lambda: path,
        "--embeddings": lambda: "",
    }[option]()
    monkeypatch.setattr("mixedkv.context_choice.memory_room", lambda: 45 << 20)

    def served(**options: object) -> int:
        settings = ServerSettings(model=(str(path),), **options)
        with ExitStack() as stack:
            return int(open_server(settings, Keys.of("", ""), stack).engine.llm.fitted.n_ctx)

    name = option[2:].replace("-", "_")
    value = True if not given else str(given) if option == "--speculation" else (str(given),)
    assert served(**{name: value}) < served()


def test_where_nothing_is_known_of_memory() -> None:
    found = fit(place("1B", None), None)
    assert found.n_ctx == 32_768
    assert found.n_left is None


def test_where_the_weights_alone_are_too_much() -> None:
    found = fit(place("8B", 2 * GIB), None)
    assert found.n_ctx == 512
    [warning] = found.warnings
    assert (
        "the weights (4.8 GiB) and what is loaded beside them take 4.9 GiB, and 2.0 GiB are free" in warning
    )
    assert "--memory 2.0GiB" in warning


def test_the_line_is_for_people() -> None:
    assert str(fit(place("1B", 24 * GIB, n_seq=1), None)) == (
        "131,072 tokens (the model's limit), mixed, 1.1 GiB; 21.7 GiB free"
    )


def test_layers_go_to_a_gpu_that_has_room() -> None:
    where = place("8B", 24 * GIB)
    whole = fit_with_gpu(where, None, 24 * GIB, None)
    assert (whole.n_gpu_layers, whole.n_ctx) == (-1, TRAINED)
    some = fit_with_gpu(where, None, 4 * GIB, None)
    assert 4 <= some.n_gpu_layers <= 16
    assert fit_with_gpu(where, None, 4 * GIB, 5).n_gpu_layers == 5


def test_layers_on_a_gpu_leave_room_for_the_view() -> None:
    """An F16 view of 131,072 tokens takes as much memory as several layers."""

    def where(reads: bool) -> ContextPlace:
        return place("8B", 24 * GIB, reads=lambda *layer: reads)

    in_place, merged = (fit_with_gpu(where(reads), None, 4 * GIB, None) for reads in (True, False))
    assert in_place.n_ctx == merged.n_ctx == TRAINED
    assert 0 < merged.n_gpu_layers < in_place.n_gpu_layers
    merging = where(False)
    view = footprint(merging.shape, merged.kv, TRAINED, merging.n_seq, merging.sliding, merging.reads).view
    assert merged.n_bytes - in_place.n_bytes == view > 0
    layer = (WEIGHTS["8B"] + in_place.n_bytes) / 32
    beside = compute(TRAINED) + view
    assert merged.n_gpu_layers * layer + beside <= 3.5 * GIB < (merged.n_gpu_layers + 1) * layer + beside


def test_a_view_of_all_layers_has_its_room_on_a_gpu() -> None:
    """kv="mixed:attention=merged" takes the view whatever the GPU reads."""
    merged = fit_with_gpu(place("8B", 24 * GIB, reads=lambda *layer: False), None, 4 * GIB, None)
    asked = fit_with_gpu(
        place("8B", 24 * GIB, reads=lambda *layer: True), parse_kv("mixed:attention=merged"), 4 * GIB, None
    )
    assert (asked.n_gpu_layers, asked.n_bytes) == (merged.n_gpu_layers, merged.n_bytes)


@pytest.mark.parametrize("n_gpu_layers", [None, 10])
def test_a_cache_that_stays_on_the_cpu_has_what_the_cpu_reads(n_gpu_layers: int | None) -> None:
    """offload_kqv=False: types that GPUs do not write, and no view."""
    where = place("8B", 24 * GIB, offloads=False, reads=lambda *layer: False)
    kv = parse_kv("mixed:budget=3GiB")
    alone, found = fit(where, kv), fit_with_gpu(where, kv, 4 * GIB, n_gpu_layers)
    assert "tc3" in str(alone.kv)
    assert (found.n_ctx, found.kv, found.n_bytes) == (alone.n_ctx, alone.kv, alone.n_bytes)
    layer, beside = WEIGHTS["8B"] / 32, compute(found.n_ctx)  # GPUs have weights only
    n = found.n_gpu_layers
    assert fit_with_gpu(where, kv, 8 * GIB, None).n_gpu_layers == -1
    assert n == n_gpu_layers or n * layer + beside <= 3.5 * GIB < (n + 1) * layer + beside


def test_layers_on_a_gpu_have_types_that_it_writes() -> None:
    """Whether all layers are there or some."""
    where = replace(place("8B", 24 * GIB), on_cpu=True)
    kv = parse_kv("mixed:budget=3GiB")
    assert "tc3" in str(fit(where, kv).kv)
    assert "tc3" in str(fit_with_gpu(replace(where, gpus_write_all=True), kv, 4 * GIB, None).kv)
    some = fit_with_gpu(where, kv, 4 * GIB, None)
    assert some.n_gpu_layers > 0
    assert "tc3" not in str(some.kv)


def test_a_gpu_without_room_for_a_layer_changes_nothing() -> None:
    where = place("8B", 6 * GIB)
    assert fit_with_gpu(where, None, 200 << 20, None) == fit(where, None)


def test_too_much_is_refused_with_the_choice_that_fits() -> None:
    where = place("8B", 6 * GIB, n_seq=1, weights=0)
    with pytest.raises(
        ValueError, match=r"take 16\.0 GiB for the cache, and 6\.0 GiB are free\. n_ctx=\d+ fits"
    ):
        check_room(where, parse_kv("f16"), TRAINED)
    check_room(where, parse_kv("mixed"), TRAINED)


def test_a_llama_is_fitted_into_its_control_group(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A limit that is planted where the kernel has them, version 2 and version 1."""
    proc, groups = tmp_path / "proc", tmp_path / "groups"
    (proc / "self").mkdir(parents=True)
    (proc / "meminfo").write_text(f"MemTotal: {24 << 20} kB\nMemAvailable: {23 << 20} kB\n")
    monkeypatch.setattr("mixedkv.context_choice.memory_room", lambda: memory_room(proc, groups))
    size = model_path().stat().st_size
    for line, folder, limit, usage in (
        ("0::/box", groups / "box", "memory.max", "memory.current"),
        ("4:memory:/box", groups / "memory" / "box", "memory.limit_in_bytes", "memory.usage_in_bytes"),
    ):
        folder.mkdir(parents=True)
        (proc / "self" / "cgroup").write_text(line)
        (folder / usage).write_text("0")
        (folder / "memory.stat").write_text("")
        (folder / limit).write_text(str(64 << 30))
        with Llama(model_path(), n_ctx="fit", n_seq_max=16, kv_unified=True, verbose=False) as llm:
            assert llm.fitted is not None
            trained = llm.fitted.n_ctx_train
            assert llm.fitted.n_ctx == trained <= llm.n_ctx()
        (folder / limit).write_text(str(size + (26 << 20)))
        with Llama(model_path(), n_ctx="fit", n_seq_max=16, kv_unified=True, verbose=False) as llm:
            assert 512 <= llm.fitted.n_ctx < trained
            stats = llm.kv.stats()
            assert stats.bytes_total == llm.fitted.n_bytes


def test_models_without_rows(zoo_path: Callable[[str], Path]) -> None:
    with Llama(zoo_path("mamba"), n_ctx="fit", verbose=False) as llm:
        assert llm.n_ctx() >= 512
