"""Shifts and copies between streams wait for the next evaluation: a state is saved as if they were done."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from pathlib import Path
from typing import Any

import llama_cpp
import numpy as np
import pytest

from support.cache.checks import worst
from support.cache.harness import Ctx, Mixed, Uniform, prompt

pytestmark = pytest.mark.full

KVS: dict[str, Uniform | Mixed] = {
    "f16": Uniform(),
    "f16 without flash attention": Uniform(flash=False),
    "q8_0": Uniform(k="q8_0", v="q8_0"),
    "mixed": Mixed(k="q8_0", v="q8_0", threshold=24, group=8, sinks=3),
}
TEXT = prompt(300, seed=15)
TOLERANCE = 2e-3  # cells lie elsewhere: sums in another order

Move = Callable[[Ctx, Ctx, Path], None]


def whole_state(source: Ctx, target: Ctx, _: Path) -> None:
    data = source.save()
    assert target.load(data) == len(data)


def state_of_a_sequence(source: Ctx, target: Ctx, _: Path) -> None:
    data = source.save_seq(1)
    assert target.load_seq(data, 1) == len(data)


def file_of_a_sequence(source: Ctx, target: Ctx, folder: Path) -> None:
    name, tokens, n_read = str(folder / "state").encode(), (ctypes.c_int32 * 1)(), ctypes.c_size_t()
    assert llama_cpp.llama_state_seq_save_file(source.ptr, name, 1, tokens, 0)
    assert llama_cpp.llama_state_seq_load_file(target.ptr, name, 1, tokens, 1, n_read)


def file_of_all(source: Ctx, target: Ctx, folder: Path) -> None:
    name, tokens, n_read = str(folder / "state").encode(), (ctypes.c_int32 * 1)(), ctypes.c_size_t()
    assert llama_cpp.llama_state_save_file(source.ptr, name, tokens, 0)
    assert llama_cpp.llama_state_load_file(target.ptr, name, tokens, 1, n_read)


@pytest.mark.parametrize("move", [whole_state, state_of_a_sequence, file_of_a_sequence, file_of_all])
@pytest.mark.parametrize("kv", KVS)
@pytest.mark.parametrize("pending", ["shift", "copy", "copy and shift"])
def test_a_state_is_saved_behind_what_was_pending(
    open_ctx: Any, tmp_path: Path, kv: str, pending: str, move: Move
) -> None:
    options = {"n_ctx": 512, "n_seq_max": 2, "unified": False}
    stayed, saved, restored = (open_ctx("llama-64", KVS[kv], **options) for _ in range(3))
    for side in (stayed, saved):
        side.decode(TEXT[:120], seq_ids=0 if "copy" in pending else 1)
        if "copy" in pending:
            side.cp(0, 1)
        if "shift" in pending:
            side.context_shift(4, 60, seq=1)
    move(saved, restored, tmp_path)
    assert restored.pos_max(1) == stayed.pos_max(1)
    want = stayed.decode(TEXT[200:220], seq_ids=1)
    for side in (restored, saved):
        assert worst(side.decode(TEXT[200:220], seq_ids=1), want) < TOLERANCE


@pytest.mark.parametrize("kv", KVS)
def test_a_state_is_read_behind_what_was_pending(open_ctx: Any, kv: str) -> None:
    """Else the rows that it brings would be turned, or copied over."""
    options = {"n_ctx": 512, "n_seq_max": 2, "unified": False}
    source, target, twin = (open_ctx("llama-64", KVS[kv], **options) for _ in range(3))
    for side in (source, twin):
        side.decode(TEXT[:80], seq_ids=1)
    state = source.save_seq(1)
    target.decode(TEXT[100:200], seq_ids=0)
    target.cp(0, 1)
    target.context_shift(4, 60, seq=0)
    assert target.load_seq(state, 1) == len(state)
    mine, theirs = (side.decode(TEXT[200:220], seq_ids=1) for side in (target, twin))
    assert worst(mine, theirs) < TOLERANCE
    assert np.isfinite(target.decode(TEXT[200:220], seq_ids=0)).all()
