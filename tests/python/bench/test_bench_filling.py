"""A cache filled with a made-up state is, for the clock, as one filled by decoding."""

from __future__ import annotations

from collections.abc import Iterator

import llama_cpp
import numpy as np
import pytest

from mixedkv.bundled import model_path
from mixedkv_bench.harness.cache_settings import Setting, make_settings
from mixedkv_bench.harness.contexts import CannotRunError, Context, LoadedModel
from mixedkv_bench.harness.filling import make_fill
from mixedkv_bench.harness.speed_run import Local, SpeedWork

pytestmark = pytest.mark.nightly

SINKS = 4
SPECS = ("f16", "q8_0/q4_0", "mixed", "mixed:cold_k=q8_0,threshold=100,group=33,sinks=3")
SETTINGS = make_settings(SPECS)


@pytest.fixture(scope="module")
def model() -> Iterator[LoadedModel]:
    model = LoadedModel(model_path())
    yield model
    model.close()


@pytest.mark.parametrize("setting", SETTINGS, ids=lambda s: s.name)
def test_a_made_up_state_has_the_cells_of_a_real_one(model: LoadedModel, setting: Setting) -> None:
    """As many, at the same positions, and with the same of them hot but for the sinks, which are few."""
    from mixedkv import _core

    context = Context(model, setting, n_ctx=512, threads=1)
    seen = []
    for how in ("synthetic", "real"):
        fill = make_fill(context, 300, how)
        fill.restore()
        assert fill.kind == how
        positions, hot = _core.read_tiers(context.address, 0, 0, 0, -1)
        seen.append((positions.tolist(), hot[SINKS:].tolist()))
        context.decode(model.random_tokens(1))
        assert np.isfinite(context.logits()).all()
    context.close()
    assert seen[0] == seen[1]


def test_restoring_brings_the_same_logits_again(model: LoadedModel) -> None:
    """With the F16 window as full as before, which rolling back would leave empty."""
    (setting,) = make_settings(["mixed:threshold=64,group=16"])
    context = Context(model, setting, n_ctx=512, threads=1)
    fill = make_fill(context, 200)
    logits = []
    for _ in range(2):
        fill.restore()
        context.feed(model.random_tokens(100, seed=4))
        logits.append(context.logits().copy())
    context.close()
    assert (logits[0] == logits[1]).all()


def test_peaked_keys_have_a_structure(model: LoadedModel) -> None:
    """A tenth of the pages holds the attention, so `sparse` reads few of them."""
    (setting,) = make_settings(["mixed:sparse=eps:0.5"])  # 2,000 keys alike need most pages for less
    read = {}
    for fill in ("synthetic", "peaked"):
        with Local(
            model, setting, SpeedWork(depth=2000, n_prompt=1, n_gen=2, threads=1, fill=fill)
        ) as runner:
            assert runner.facts["fill"] == fill
            runner.measure()
            read[fill] = runner.facts["pages_read"]
    assert 2 * read["peaked"] < read["synthetic"], read


def test_only_some_keys_can_be_peaked(model: LoadedModel) -> None:
    (setting,) = make_settings(["mixed:cold=q5_0"])
    with pytest.raises(CannotRunError, match="keys in q5_0 cannot be peaked: only f16, q4_0, q8_0"):
        Local(model, setting, SpeedWork(depth=600, n_prompt=1, n_gen=1, threads=1, fill="peaked"))


@pytest.mark.parametrize("setting", make_settings(["f16", "mixed"], "off"), ids=lambda s: s.name)
def test_all_sequences_are_at_the_depth(model: LoadedModel, setting: Setting) -> None:
    """And each gets the tokens that are generated."""
    with Local(model, setting, SpeedWork(depth=300, n_prompt=40, n_gen=3, threads=1, sequences=3)) as runner:
        for _ in range(2):
            runner.measure()
            memory = llama_cpp.llama_get_memory(runner.context.ptr)
            assert [llama_cpp.llama_memory_seq_pos_max(memory, seq) for seq in range(3)] == [303] * 3
