"""MIXEDKV_KV: llama.cpp's own programs with this package's caches, through a library that is preloaded."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import pytest

from mixedkv._native import cmake_dir, include_dir
from mixedkv.bundled import model_path
from support import REPOSITORY

pytestmark = [pytest.mark.full, pytest.mark.needs("Linux")]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The library, and a program whose context has a window of its own."""
    folder = tmp_path_factory.mktemp("tools")
    for name in ("cpp/tools", "tests/cpp/capi"):
        build, package = folder / Path(name).name, f"-Dmixedkv_DIR={cmake_dir()}"
        for command in (["cmake", "-S", str(REPOSITORY / name), "-B", str(build), package],
                        ["cmake", "--build", str(build)]):  # fmt: skip
            subprocess.run(command, check=True, capture_output=True)
    return folder


def run(
    folder: Path, spec: str | None, program: Path | None = None, **variables: str
) -> subprocess.CompletedProcess[str]:
    env = {name: value for name, value in os.environ.items() if name != "LD_LIBRARY_PATH"} | variables
    env["LD_PRELOAD"] = str(folder / "tools" / "libmixedkv-environment.so")
    if spec is not None:
        env["MIXEDKV_KV"] = spec
    command = [str(program or folder / "capi" / "example"), str(model_path())]
    return subprocess.run(command, capture_output=True, text=True, env=env, check=False)


def stats(folder: Path, spec: str | None) -> str:
    done = run(folder, spec)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()[1]


def test_without_the_variable_a_program_has_its_own_cache(folder: Path) -> None:
    assert "33 of 93 tokens hot" in stats(folder, None)


def test_a_spec_replaces_the_cache(folder: Path) -> None:
    spec = "mixed:cold=lm4,threshold=16,group=1,sinks=2,layers=1-2:q8_0,sparse=eps:0.1/0.01"
    assert "18 of 93 tokens hot" in stats(folder, spec)


def test_a_program_that_asks_for_upstreams_names_gets_these_libraries(folder: Path, tmp_path: Path) -> None:
    """llama.cpp's own programs ask for libllama.so.0; a second copy of it would not have the asked cache."""

    def cc(*options: object) -> None:
        subprocess.run(["cc", *map(str, options)], check=True, capture_output=True)

    source, names = REPOSITORY / "tests" / "cpp" / "capi" / "example.c", ("llama", "ggml", "ggml-base")
    cc("-c", f"-I{include_dir()}", source, "-o", tmp_path / "example.o")
    unknown = subprocess.run(["nm", "-u", tmp_path / "example.o"], check=True, capture_output=True, text=True)
    functions = re.findall(r"\b(?:llama|ggml|mixedkv)_\w+", unknown.stdout)
    (tmp_path / "stub.c").write_text("".join(f"void {name}(void) {{}}\n" for name in functions))
    stubs = [tmp_path / f"lib{name}.so.0" for name in names]
    for stub in stubs:  # only their names are of use
        cc("-shared", "-fPIC", tmp_path / "stub.c", f"-Wl,-soname,{stub.name}", "-o", stub)
    cc(tmp_path / "example.o", "-Wl,--no-as-needed", *stubs, "-lpthread", "-o", tmp_path / "example")

    links = folder / "tools" / "mixedkv-libraries"
    spec = "mixed:cold=lm4,threshold=16,group=1,sinks=2"
    done = run(folder, spec, program=tmp_path / "example", LD_LIBRARY_PATH=str(links))
    assert done.returncode == 0, done.stderr
    assert "18 of 93 tokens hot" in done.stdout


@pytest.mark.parametrize(
    ("spec", "problem"),
    [
        ("q9_9", "'q9_9' names no cache"),
        ("mixed:tiny", "'tiny' is neither a preset (compact, balanced, quality) nor key=value"),
        ("mixed:budget=2GiB", "a budget's types are chosen for a model"),
        ("mixed:cold_v=q4_1", "'q4_1' was taken out, use 'q5_0'"),
        ("mixed:threshold=8,group=16", "threshold=8 is smaller than group=16"),
    ],
)
def test_a_spec_that_cannot_be_ends_the_program(folder: Path, spec: str, problem: str) -> None:
    done = run(folder, spec)
    assert done.returncode == 1
    assert f"MIXEDKV_KV={spec}: " in done.stderr
    assert problem in done.stderr
