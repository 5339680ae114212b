"""A streamed evaluation that cannot read its layers leaves the cache, and recurrent states, as they were."""

from __future__ import annotations

import os
import shutil
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import llama_cpp
import numpy as np
import pytest

from mixedkv import Llama
from mixedkv.errors import ModelReadError
from support.cache.harness import prompt
from support.models import zoo

pytestmark = pytest.mark.full

WINDOWS_FOR_ALL = True  # F16 rows for every sequence, whatever they take

TEXT = prompt(200, seed=41)
OPTIONS: dict[str, Any] = {"n_ctx": 256, "n_threads": 1, "n_threads_batch": 1, "verbose": False}
KVS = ["f16", "mixed:cold=q8_0,threshold=24,group=8"]


def open_(path: Path, **options: Any) -> Llama:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # where memory may not be locked
        return Llama(path, **{**OPTIONS, **options})


def logits(llm: Llama) -> bytes:
    row = llama_cpp.llama_get_logits_ith(llm.ctx, -1)
    return np.ctypeslib.as_array(row, (llm.n_vocab(),)).tobytes()


def shift(llm: Llama) -> None:
    llm.kv.remove(0, 4, 24)
    llm.kv.shift(0, 24, -1, -20)


@pytest.mark.by_model
@pytest.mark.parametrize("kv", KVS)
@pytest.mark.parametrize(
    ("name", "moves"), [("gemma4", False), ("gemma4", True), ("lfm2", False), ("nemotron-h", False)]
)
def test_it_goes_on_as_if_nothing_had_been(
    zoo_path: Callable[[str], Path], tmp_path: Path, kv: str, name: str, moves: bool
) -> None:
    path = Path(shutil.copy(zoo_path(name), tmp_path / "model.gguf"))
    whole, status = path.read_bytes(), path.stat()
    steps = [TEXT[60:100], TEXT[100:101], TEXT[101:120]]
    with open_(path, kv=kv, stream_mode="resident") as llm:
        llm.eval(TEXT[:60])
        if moves:
            shift(llm)
        expected = [(llm.eval(step), logits(llm))[1] for step in steps]
    with open_(path, kv=kv, stream_layers=zoo.SHAPES[name].n_layer) as llm:
        llm.eval(TEXT[:60])
        if moves:
            shift(llm)
        for step, want in zip(steps, expected, strict=True):
            n = llm.n_tokens
            for share in (0.1, 0.3, 0.6):  # layers before that place are evaluated
                os.truncate(path, int(share * len(whole)))
                with pytest.raises(ModelReadError):
                    llm.eval(step)
                assert llm.n_tokens == n
                with path.open("r+b") as file:
                    file.write(whole)
                os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
            llm.eval(step)
            assert logits(llm) == want
