"""The installed C API: programs in plain C, compiled in an empty folder, and bad arguments of all kinds."""

from __future__ import annotations

import copy
import os
import re
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mixedkv import _core, _native
from mixedkv._native import cmake_dir, include_dir
from mixedkv.bundled import model_path
from support import REPOSITORY
from support.cache.harness import Ctx, Mixed, Uniform, prompt, rel_rms
from support.models import zoo

pytestmark = pytest.mark.full

SOURCES = REPOSITORY / "tests" / "cpp" / "capi"
KV = Mixed(threshold=32, group=8, sinks=4)
IDS = [-(2**31), -1, 4, 5, 31, 38, 43, 1000, 2**31 - 1]  # of no type, or of one that was removed
LIBRARIES = _native.library_folder().relative_to(_native.package_folder())
NO_QUANTISER = [9, 15, 16, 17, 18, 19, 21, 22, 24, 26, 28, 29]


def run(*command: str | Path) -> str:
    env = {name: value for name, value in os.environ.items() if name != "LD_LIBRARY_PATH"}
    words = [str(part) for part in command]
    result = subprocess.run(words, capture_output=True, text=True, env=env, check=False)
    assert result.returncode == 0, f"{result.returncode}: {result.stdout[-2000:]}{result.stderr[-2000:]}"
    return result.stdout


def build(folder: Path, *options: str) -> Path:
    generator = ["-G", "Ninja"] if shutil.which("ninja") else []
    run("cmake", "-S", SOURCES, "-B", folder, *generator, *options)
    run("cmake", "--build", folder)
    return folder


@pytest.fixture(scope="module")
def programs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(tmp_path_factory.mktemp("c"), f"-Dmixedkv_DIR={cmake_dir()}")


# --- programs


def test_example(programs: Path) -> None:
    lines = run(programs / "example", model_path()).splitlines()
    assert [line.split()[0] for line in lines] == ["mixedkv", "stats:", "rows:", "copy:", "next:", "status"]
    assert "33 of 93 tokens hot" in lines[1]
    assert "the same bits" in lines[4]
    assert lines[5].startswith("status 1: quantization_threshold 8 is smaller than group_size 1000")


def test_package_works_where_it_is_moved_to(tmp_path: Path) -> None:
    installed = include_dir().parent
    for part in ("include", "share", LIBRARIES):
        shutil.copytree(installed / part, tmp_path / "moved" / part)
    folder = build(tmp_path / "build", f"-DCMAKE_PREFIX_PATH={tmp_path / 'moved'}")
    libraries = [
        Path(path) for path in re.findall(r"=> (\S*/lib(?:llama|ggml)\S*)", run("ldd", folder / "example"))
    ]
    assert {path.name for path in libraries} >= {"libllama.so", "libggml.so", "libggml-base.so"}
    assert {path.resolve().parent for path in libraries} == {(tmp_path / "moved" / LIBRARIES).resolve()}
    assert "the same bits" in run(folder / "example", model_path())


def test_arguments_out_of_range(programs: Path, tmp_path: Path) -> None:
    """Heads of 256 elements, so that no type is refused for its block size."""
    model = tmp_path / "model.gguf"
    zoo.decoder(zoo.Shape("llama-256", "llama", head=256)).write(model)
    assert run(programs / "test_arguments", model).splitlines()[-1] == "0 failed"


def test_header_needs_nothing_that_is_not_there(tmp_path: Path) -> None:
    program = tmp_path / "alone.c"
    program.write_text("#include <mixedkv/mixedkv.h>\nint main(void) { return MIXEDKV_OK; }\n")
    run(
        "cc",
        "-std=c11",
        "-Wall",
        "-Wextra",
        "-Wpedantic",
        "-Werror",
        f"-I{include_dir()}",
        "-fsyntax-only",
        program,
    )


# --- the same through the extension module


@pytest.fixture
def ctx(open_ctx: Callable[..., Ctx]) -> Ctx:
    ctx = open_ctx("llama-64", KV, n_ctx=256, n_seq_max=2)
    ctx.decode(prompt(48))
    return ctx


def wrong(groups: list[Any], change: Callable[[Any], None]) -> list[Any]:
    groups = copy.deepcopy(groups)
    change(groups[0])
    return groups


@pytest.mark.parametrize("key", ["type_k", "type_v"])
@pytest.mark.parametrize("type_id", IDS + NO_QUANTISER)
def test_rows_of_no_type(ctx: Ctx, key: str, type_id: int) -> None:
    groups = ctx.export()
    with pytest.raises(ValueError, match=r"can have type|does not have the size"):
        ctx.put(wrong(groups, lambda g: g["layers"][0].update({key: type_id})), seq=1)


@pytest.mark.parametrize("key", ["n_head_kv", "head_size_k", "head_size_v"])
@pytest.mark.parametrize("value", [0, 2**31, 2**32 - 1])
def test_rows_of_no_size(ctx: Ctx, key: str, value: int) -> None:
    groups = ctx.export()
    with pytest.raises(ValueError, match=r"can have type|does not have the size"):
        ctx.put(wrong(groups, lambda g: g["layers"][0].update({key: value})), seq=1)


@pytest.mark.parametrize("key", ["positions", "hot", "slots"])
@pytest.mark.parametrize("value", [[0, 1, 2], None, 7, np.zeros((2, 2), np.int32), np.zeros(3, np.int64)])
def test_no_array_of_positions(ctx: Ctx, key: str, value: object) -> None:
    groups = ctx.export()
    with pytest.raises((TypeError, ValueError)):
        ctx.put(wrong(groups, lambda g: g.update({key: value})), seq=1)


@pytest.mark.parametrize("key", ["k", "v", "k_hot", "v_hot"])
@pytest.mark.parametrize("value", [b"rows", None, np.zeros((1, 1), np.uint8), np.zeros((48, 0), np.uint8)])
def test_no_array_of_rows(ctx: Ctx, key: str, value: object) -> None:
    groups = ctx.export()
    with pytest.raises((TypeError, ValueError)):
        ctx.put(wrong(groups, lambda g: g["layers"][1].update({key: value})), seq=1)


@pytest.mark.parametrize("groups", [[], [None], [[]], [{}], [{"positions": []}], [3]])
def test_no_groups(ctx: Ctx, groups: list[Any]) -> None:
    with pytest.raises((KeyError, TypeError, ValueError)):
        ctx.put(groups, seq=1)


@pytest.mark.parametrize("value", [-1, 2**32])
def test_integers_that_do_not_fit(value: int) -> None:
    with pytest.raises(TypeError):
        _core.CacheConfig(threshold=value, group_size=8)


def test_closed_context() -> None:
    for call in (_core.stats, _core.layers, _core.sequences, _core.Threads):
        with pytest.raises(ValueError, match="is closed"):
            call(0)


# --- a shift of rows that upstream does not rotate


@pytest.mark.parametrize("types", ["q8_0", "q4_0"])
def test_uniform_cache_without_rotation_can_be_shifted(open_ctx: Callable[..., Ctx], types: str) -> None:
    """Heads of 96: llama.cpp's own cache keeps them as they are, and its shift took them for rotated."""
    logits = []
    for kind in ("f32", types):
        ctx = open_ctx("llama-96", Uniform(k=kind, v=kind), n_ctx=256)
        ctx.decode(prompt(48))
        ctx.context_shift(4, 16)
        logits.append(ctx.decode(prompt(8, seed=2))[-1])
    assert rel_rms(logits[1], logits[0]) < (0.05 if types == "q8_0" else 0.5)
