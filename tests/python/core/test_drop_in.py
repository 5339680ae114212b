"""`mixedkv.Llama` in the place of `llama_cpp.Llama`: llama-cpp-python's own tests, from its sources."""

from __future__ import annotations

import re
import subprocess
import sys
import tarfile
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import llama_cpp
import pytest
import tomllib

from mixedkv import Llama
from mixedkv.bundled import model_path

pytestmark = pytest.mark.full

ROOT = Path(__file__).parents[3]
OTHER_MODEL = "test_real_model", "test_real_llama", "test_real_llama_repeated_prompt_cache"  # the text of one
CONFTEST = """
import sys, types
import numpy as np
import llama_cpp
import mixedkv

MODELS = {models!r}
hub = types.ModuleType("huggingface_hub")
hub.hf_hub_download = lambda repo, name: MODELS[repo]
special = types.ModuleType("scipy.special")
special.log_softmax = lambda x, axis=None: x - np.log(np.exp(x).sum(axis=axis, keepdims=True))
sys.modules.update({{"huggingface_hub": hub, "scipy": types.ModuleType("scipy"), "scipy.special": special}})
llama_cpp.Llama = mixedkv.Llama

def pytest_collection_modifyitems(items):
    items[:] = [item for item in items if item.name not in {left_out!r}]
"""


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The source distribution that the package is built from, unpacked."""
    folder = tmp_path_factory.mktemp("sdist")
    version = tomllib.loads((ROOT / "vendor" / "pin.toml").read_text())["version"]
    name = f"llama_cpp_python-{version}"
    given = next((ROOT / "build").glob(f"**/{name}.tar.gz"), None)
    if given is None:
        pip = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--no-build-isolation"]
        pip += ["--no-binary", ":all:", "--retries", "0", "-d", str(folder), f"llama-cpp-python=={version}"]
        done = subprocess.run(pip, capture_output=True, text=True, timeout=300, check=False)
        if done.returncode:
            pytest.skip(f"pip cannot download {name}: {done.stderr.strip().splitlines()[-1]}")
        given = folder / f"{name}.tar.gz"
    with tarfile.open(given) as archive:
        expected = re.compile(rf"{re.escape(name)}/(tests/.*|vendor/llama\.cpp/models/ggml-vocab-.*)")
        careful: dict[str, Any] = {"filter": "data"} if hasattr(tarfile, "data_filter") else {}
        archive.extractall(folder, [x for x in archive if expected.fullmatch(x.name)], **careful)
    return folder / name


def test_its_own_tests_pass(source: Path, zoo_path: Callable[[str], Path]) -> None:
    models = {
        "ggml-org/models": str(model_path()),
        "CompendiumLabs/bge-small-en-v1.5-gguf": str(zoo_path("bert")),
        "QuantFactory/mamba-130m-hf-GGUF": str(zoo_path("mamba")),
        "tiiuae/Falcon-H1-Tiny-90M-Instruct-GGUF": str(zoo_path("falcon-h1")),
    }
    (source / "conftest.py").write_text(CONFTEST.format(models=models, left_out=OTHER_MODEL))
    pytest_ = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "tests"]
    done = subprocess.run(pytest_, cwd=source, capture_output=True, text=True, timeout=500, check=False)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    assert int(re.findall(r"(\d+) passed", done.stdout)[-1]) >= 23


def test_it_can_replace_the_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """As programs on top of llama_cpp are switched over."""
    monkeypatch.setattr(llama_cpp, "Llama", Llama)
    with llama_cpp.Llama(str(model_path()), n_ctx=64, n_batch=32, verbose=False) as llm:
        assert isinstance(llm, Llama)
        assert llm("A journal", max_tokens=2)["choices"][0]["text"]


@pytest.mark.parametrize("n_ctx", [1, 32, 300])
def test_small_contexts_have_a_shorter_window(n_ctx: int) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        llm = Llama(str(model_path()), n_ctx=n_ctx, verbose=False)
    with llm:
        assert llm.n_ctx() >= n_ctx
        assert llm.kv.stats().saving > 0
