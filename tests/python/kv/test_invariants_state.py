"""Invariant 5, states: a restored cache goes on as if it had never been away, hot rows included.

States are llama.cpp's own calls. Bytes from outside are hostile: bad ones are refused, and the context
stays usable.
"""

from __future__ import annotations

import struct
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from support import TESTS
from support.cache.checks import assert_same, check_books, check_rows
from support.cache.harness import Ctx, Mixed, Uniform, prompt, rel_rms
from support.models import zoo

pytestmark = [pytest.mark.core, pytest.mark.by_model]

KV = Mixed(threshold=24, group=8, sinks=3)
tokens = prompt(400, seed=6)
# whole models: rounding of sums in another order, which later layers' quantisation can enlarge
ROUNDING = 1e-2


def tiers(ctx: Ctx, name: str = "llama-64", seq: int = 0) -> list[bool]:
    return ctx.rows(zoo.SHAPES[name].kv_layers[0], "k", seq)[2].tolist()


@pytest.mark.parametrize("name", zoo.SUPPORTED)
def test_whole_state(open_ctx, attention: str, name: str) -> None:
    kv = KV.with_(attention=attention)
    stayed, away = open_ctx(name, kv), open_ctx(name, kv)
    stayed.decode(tokens[:70])
    data = stayed.save()
    assert away.load(data) == len(data)
    assert tiers(away, name) == tiers(stayed, name)
    assert any(tiers(away, name))
    assert not all(tiers(away, name))
    assert away.stats() == stayed.stats()
    for i in range(3):
        part = tokens[70 + 10 * i : 80 + 10 * i]
        assert rel_rms(away.decode(part), stayed.decode(part)) < ROUNDING


@pytest.mark.parametrize("name", zoo.SUPPORTED)
def test_one_sequence(open_ctx, attention: str, name: str) -> None:
    kv = KV.with_(attention=attention)
    stayed, away = open_ctx(name, kv), open_ctx(name, kv)
    stayed.decode(tokens[:70])
    data = stayed.save_seq(0)
    away.decode(tokens[200:230])  # what was there goes
    assert away.load_seq(data, 0) == len(data)
    assert tiers(away, name) == tiers(stayed, name)
    part = tokens[70:90]
    assert rel_rms(away.decode(part), stayed.decode(part)) < ROUNDING


CACHES = {
    "f16": Uniform(),
    "merged": KV.with_(attention="merged"),
    "fused": KV.with_(attention="fused"),
    "layers": KV.with_(layers=((1, -1, "q8_0", "q5_0"),)),
    "lm4": KV.with_(k="lm4", v="lm4"),
}


@pytest.mark.parametrize("cache", CACHES)
def test_bit_identical_to_never_having_left(open_ctx, cache: str) -> None:
    """As llama.cpp's own cache: the next logits are the same bits, so a restored chat says the same."""
    kv = CACHES[cache]
    for whole in (True, False):
        stayed, away = open_ctx("llama-64", kv), open_ctx("llama-64", kv)
        stayed.decode(tokens[:70])
        assert away.load(stayed.save()) if whole else away.load_seq(stayed.save_seq())
        for i in range(3):
            part = tokens[70 + 10 * i : 80 + 10 * i]
            assert np.array_equal(away.decode(part), stayed.decode(part))


def test_back_in_time(open_ctx, attention: str) -> None:
    """The same context, further on: the saved moment comes back with the rows that were hot then."""
    ctx = open_ctx("llama-64", KV.with_(attention=attention))
    ctx.decode(tokens[:70])
    hot, data = tiers(ctx), ctx.save()
    want = ctx.decode(tokens[70:80])
    ctx.decode(tokens[80:160])
    assert ctx.load(data) == len(data)
    assert tiers(ctx) == hot
    assert rel_rms(ctx.decode(tokens[70:80]), want) < ROUNDING


@pytest.mark.parametrize("unified", [True, False], ids=["unified", "streams"])
def test_into_another_sequence(open_pair, attention: str, unified: bool) -> None:
    kv, options = KV.with_(attention=attention), {"n_seq_max": 3, "unified": unified, "n_ctx": 768}
    ctx, oracle = open_pair("llama-64", 1, kv, **options)
    assert_same(ctx, oracle, tokens[:50], seq_ids=0)
    assert_same(ctx, oracle, tokens[100:170], seq_ids=1)
    data = ctx.save_seq(1)
    assert ctx.load_seq(data, 2) == len(data)
    copy_rows(oracle, 1, 2)
    check_books(ctx, oracle)
    for seq in (2, 0, 1):
        assert_same(ctx, oracle, tokens[170:185], seq_ids=seq)
        check_books(ctx, oracle)
        check_rows(ctx, oracle, seq)


def copy_rows(oracle, src: int, dst: int) -> None:
    """A restored sequence has cells of its own, unlike a copied one."""
    from copy import deepcopy

    for row in deepcopy(oracle.rows(src)):
        row.seqs = {dst}
        oracle._stream(dst).append(row)


@pytest.mark.parametrize("unified", [True, False], ids=["unified", "streams"])
def test_whole_state_of_several_sequences(open_pair, attention: str, unified: bool) -> None:
    """Shared cells, holes, aged-out rows after a rollback: all as it was."""
    kv, options = KV.with_(attention=attention), {"n_seq_max": 3, "unified": unified, "n_ctx": 768}
    ctx, oracle = open_pair("llama-64", 0, kv, **options)
    away, _ = open_pair("llama-64", 0, kv, **options)
    assert_same(ctx, oracle, tokens[:60], seq_ids=0)
    for side in (ctx, oracle):
        side.cp(0, 1)
        side.rm(0, 10, 20)
    assert_same(ctx, oracle, tokens[60:90], seq_ids=1)
    for side in (ctx, oracle):
        side.rm(1, 80, -1)
    assert_same(ctx, oracle, tokens[100:130], seq_ids=2)
    data = ctx.save()
    assert away.load(data) == len(data)
    check_books(away, oracle)
    for seq in range(3):
        check_rows(away, oracle, seq)
        assert_same(away, oracle, tokens[200:215], seq_ids=seq)
    check_books(away, oracle)


def test_state_files(open_ctx, tmp_path: Path) -> None:
    import ctypes

    import llama_cpp

    stayed, away = open_ctx("llama-64", KV), open_ctx("llama-64", KV)
    stayed.decode(tokens[:70])
    held = (llama_cpp.llama_token * 70)(*tokens[:70])
    path = str(tmp_path / "state").encode()
    assert llama_cpp.llama_state_save_file(stayed.ptr, path, held, 70)
    out, n = (llama_cpp.llama_token * 100)(), ctypes.c_size_t()
    assert llama_cpp.llama_state_load_file(away.ptr, path, out, 100, ctypes.byref(n))
    assert list(out[: n.value]) == tokens[:70]
    assert rel_rms(away.decode(tokens[70:80]), stayed.decode(tokens[70:80])) < ROUNDING


# --- bad bytes ---


def usable(ctx: Ctx, want: np.ndarray) -> None:
    """After a refusal: cleared, the context decodes as a new one does."""
    ctx.clear()
    check_books(ctx)
    assert rel_rms(ctx.decode(tokens[:50]), want) < 1e-6


@pytest.mark.parametrize("whole", [True, False], ids=["whole", "sequence"])
def test_truncated_states_are_refused(open_ctx, whole: bool) -> None:
    ctx, other = open_ctx("llama-64", KV), open_ctx("llama-64", KV)
    want = ctx.decode(tokens[:50])
    data = ctx.save() if whole else ctx.save_seq()
    n = len(data)
    for cut in sorted({0, 3, 4, 8, 40, n // 7, n // 3, n // 2, 2 * n // 3, n - 5000, n - 100, n - 4, n - 1}):
        assert (other.load(data[:cut]) if whole else other.load_seq(data[:cut])) == 0, (
            f"{cut} of {n} bytes accepted"
        )
    usable(other, want)
    assert (other.load(data) if whole else other.load_seq(data)) == n


def test_states_of_other_caches_are_refused(open_ctx) -> None:
    """Another cold type, another model, another number of streams."""
    ctx = open_ctx("llama-64", KV)
    want = ctx.decode(tokens[:50])
    others = [
        open_ctx("llama-64", KV.with_(k="q8_0")),
        open_ctx("llama-96", KV),
        open_ctx("llama-64", KV, n_seq_max=2, n_ctx=512),
        open_ctx("llama-64", Uniform()),
    ]
    for other in others:
        other.decode(tokens[:30])
        assert ctx.load(other.save()) == 0
        usable(ctx, want)


def test_a_smaller_ring_takes_what_fits_or_refuses(open_ctx) -> None:
    """A state with more hot rows than the target's window: never a wrong row, whichever it does."""
    big, small = open_ctx("llama-64", KV.with_(threshold=64, group=8)), open_ctx("llama-64", KV)
    big.decode(tokens[:60])
    data = big.save()
    fresh = open_ctx("llama-64", KV)
    want = fresh.decode(tokens[:50])
    if small.load(data):
        check_books(small)
        f32 = open_ctx("llama-64", Uniform(k="f32", v="f32", flash=False)).decode(tokens[:70])[60:]
        q4 = open_ctx("llama-64", Uniform(k="q4_0", v="q4_0")).decode(tokens[:70])[60:]
        assert rel_rms(small.decode(tokens[60:70]), f32) < 1.5 * rel_rms(q4, f32)
        check_books(small)
    usable(small, want)


FUZZ = """
import sys
sys.path.insert(0, sys.argv[1])
import mixedkv
import numpy as np
from support.cache.harness import Ctx, DecodeError, Mixed, Model, prompt
from support.cache.checks import check_books
model = Model(sys.argv[2])
kv = Mixed(threshold=8, group=4, sinks=1)
with Ctx(model, kv, n_ctx=256) as ctx:
    want = ctx.decode(prompt(12))
    data = bytearray(ctx.save_seq())
    tried = refused = 0
    for at in range(0, len(data) - 3, 4):
        for value in (b"\\xff\\xff\\xff\\xff", b"\\xff\\xff\\xff\\x7f", b"\\x01\\x00\\x01\\x00"):
            bad = bytes(data[:at]) + value + bytes(data[at + 4:])
            tried += 1
            if ctx.load_seq(bad) == 0:
                refused += 1
            else:
                try:
                    ctx.decode([5], logits_at="last")
                except DecodeError:
                    pass  # positions may have been damaged
            ctx.clear()
    got = ctx.decode(prompt(12))
    check_books(ctx)
    assert np.array_equal(got, want)
print(tried, refused)
"""


@pytest.mark.slow
def test_damaged_states_do_not_crash(zoo_path) -> None:
    """Every word of a small state overwritten in turn, in a process of its own."""
    run = subprocess.run(
        [sys.executable, "-c", FUZZ, str(TESTS), str(zoo_path("llama-96"))],
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert run.returncode == 0, run.stderr[-2000:]
    tried, refused = map(int, run.stdout.split()[-2:])
    assert refused > 0
    assert tried > refused


def test_garbage_is_refused(open_ctx) -> None:
    ctx = open_ctx("llama-64", KV)
    want = ctx.decode(tokens[:50])
    rng = np.random.default_rng(0)
    for n in (1, 16, 4096, 100_000):
        noise = rng.integers(0, 256, n, dtype=np.uint8).tobytes()
        assert ctx.load_seq(noise) == 0
        # llama.cpp reads the architecture's name first, and makes room for whatever length stands there
        assert ctx.load(struct.pack("<I", 5) + b"llama" + noise) == 0
    usable(ctx, want)
