"""With the mixed cache and our products with weights off the library is llama.cpp as it was: logits and
states are bit-identical to those of the libllama that comes with llama-cpp-python (the extra `peer`), in a
process of its own.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from mixedkv import bundled
from support import TESTS
from support.cache.stock_library import stock_library
from support.models import zoo

pytestmark = [pytest.mark.nightly, pytest.mark.needs("stock llama.cpp")]

MODELS = [n for n in (*zoo.SUPPORTED, *zoo.REFUSED) if n != "bert"]


def run(which: str, out: Path, paths: list[str]) -> dict[str, np.ndarray]:
    env = {k: v for k, v in os.environ.items() if k not in ("LLAMA_CPP_LIB_PATH", "LD_LIBRARY_PATH")}
    env["MIXEDKV_WEIGHTS"] = "llama.cpp"
    command = [sys.executable, "-m", "support.children.stock_child", which, str(out), *paths]
    done = subprocess.run(
        command, env=env, cwd=TESTS, capture_output=True, text=True, timeout=600, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    with np.load(out) as data:
        return dict(data)


@pytest.fixture(scope="module")
def results(
    tmp_path_factory: pytest.TempPathFactory, zoo_path: Callable[[str], Path]
) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    folder = tmp_path_factory.mktemp("identity")
    paths = [str(zoo_path(name)) for name in MODELS] + [str(bundled.model_path())]
    return run("ours", folder / "ours.npz", paths), run("stock", folder / "stock.npz", paths)


def test_the_two_processes_run_different_libraries(results) -> None:
    ours, stock = (set(r["libraries"].tolist()) for r in results)
    assert ours
    assert stock
    assert not ours & stock
    assert all(Path(p).parent == stock_library() for p in stock)


@pytest.mark.parametrize("name", [*MODELS, "bundled"])
def test_bit_identical(results, name: str) -> None:
    ours, stock = results
    prefix = (bundled.model_path().name.removesuffix(".gguf") if name == "bundled" else name) + "/"
    keys = [key for key in stock if key.startswith(prefix)]
    assert len(keys) >= 4
    for key in keys:
        assert np.array_equal(ours[key], stock[key]), f"{key} differs"


def test_every_model_decodes_something(results) -> None:
    """Refusals are equal too, but must not be all there is to compare."""
    _, stock = results
    refused = {key.rsplit("/", 1)[0] for key in stock if key.endswith("/refused")}
    assert refused == {"llama-48/q8_0", "llama-48/q4_0"}
