"""The bytes of a cache by formula are those that are allocated."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from mixedkv import Llama
from mixedkv.model.footprint import Sliding, footprint, model_shape
from mixedkv.model.gguf_file import read_model_file
from support.models import zoo

pytestmark = [pytest.mark.full, pytest.mark.by_model]

SLIDING = ("gemma2", "gemma3", "gemma4", "gpt-oss", "llama4")
KINDS = tuple(name for name in (*zoo.SUPPORTED, *zoo.MORE) if name != "llama-96")


def held(path: Path, kv: str, n_seq: int, sliding: Sliding) -> tuple[int, int]:
    """Return what is allocated, and the formula's."""
    options = {
        "n_seq_max": n_seq,
        "kv_unified": True,
        "n_batch": 128,
        "n_ubatch": sliding.n_ubatch,
        "verbose": False,
    }
    with Llama(
        path,
        kv=kv,
        n_ctx=2048,
        swa_full=sliding.full,
        n_windows=sliding.n_windows,
        flash_attn=True,
        **options,
    ) as llm:
        stats = llm.kv.stats()
        shape = model_shape(read_model_file(path))
        said = footprint(shape, llm.kv.config, 2048, n_seq, sliding)
        assert stats.n_elements == said.n_elements
        return stats.bytes_cold + stats.bytes_hot, said.bytes


@pytest.mark.parametrize("kv", ["f16", "mixed"])
@pytest.mark.parametrize("name", KINDS)
def test_every_kind_of_model(name: str, kv: str, zoo_path: Callable[[str], Path]) -> None:
    allocated, said = held(zoo_path(name), kv, 2, Sliding(n_ubatch=64))
    assert allocated == said


@pytest.mark.parametrize(
    "sliding",
    [Sliding(full=True, n_ubatch=64), Sliding(n_windows=8, n_ubatch=100), Sliding(n_ubatch=128)],
    ids=["full", "some", "windows"],
)
@pytest.mark.parametrize("name", SLIDING)
def test_layers_with_a_sliding_window(name: str, sliding: Sliding, zoo_path: Callable[[str], Path]) -> None:
    allocated, said = held(zoo_path(name), "mixed:threshold=32,group=16", 16, sliding)
    assert allocated == said


def test_windows_are_as_many_as_a_sixteenth_of_the_context_holds_but_four() -> None:
    most = Sliding(n_windows=8)
    assert [most.windows(512, n_ctx, 16) for n_ctx in (8192, 32768, 65536, 131072)] == [4, 4, 7, 8]
    assert most.windows(512, 131072, 2) == 2
    assert Sliding().windows(512, 8192, 16) == 16
    assert Sliding(full=True, n_windows=8).n_cells(512, 8192, 16) == 8192
