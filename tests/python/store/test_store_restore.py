"""A sequence that comes back from a store continues as if it had never left."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from mixedkv import Llama
from mixedkv.bundled import model_path
from mixedkv.bundled.corpus import make_recall
from mixedkv.store import Identity, KVStore
from support import TESTS
from support.children.store_child import continue_greedily, open_llama

pytestmark = pytest.mark.core

MIXED = "mixed:threshold=32,group=16,sinks=0"
SETTINGS = ["f16", "q8_0", "q4_0", "mixed"]


def task(llm: Llama, i: int) -> tuple[list[int], list[int]]:
    """Tokens that are stored, and those that follow."""
    recall = make_recall(seed=70_000 + i, n_sentences=8 + i % 7)
    ids = llm.tokenize(recall.prompt.encode())
    cut = len(ids) - 2 - i % 11
    return ids[:cut], ids[cut:]


def check_continuations(tmp_path: Path, kv: str, n: int) -> None:
    """Never left, from memory, from disk, and from disk in a new process: the same ids and logits."""
    with open_llama(kv) as llm:
        tasks = [task(llm, i) for i in range(n)]
        expected = []
        with KVStore(tmp_path / "kv") as store:
            for i, (tokens, follow_up) in enumerate(tasks):
                llm.reset()
                turns = [tokens[: len(tokens) // 2], tokens[len(tokens) // 2 :]] if i % 2 else [tokens]
                for turn in turns:  # every other sequence is stored turn by turn
                    llm.eval(turn)
                    saved = store.save(llm)
                    assert (saved.n_stored, saved.reason) == (len(turn), "")
                expected.append(continue_greedily(llm, follow_up))
            assert len(store.entries()) == n + n // 2
            check_all(store, llm, tasks, expected, "ram")
        with KVStore(tmp_path / "kv", max_ram_bytes=0) as store:
            check_all(store, llm, tasks, expected, "disk")
    (tmp_path / "tasks").write_text(json.dumps(tasks))
    command = [sys.executable, "-m", "support.children.store_child", kv, tmp_path / "kv", tmp_path / "tasks"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=900, cwd=TESTS, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    assert json.loads(done.stdout) == [[ids, logits.tobytes().hex()] for ids, logits in expected]


def check_all(store: KVStore, llm: Llama, tasks: list, expected: list, tier: str) -> None:
    for (tokens, follow_up), (ids, logits) in zip(tasks, expected, strict=True):
        restored = store.restore(llm, [*tokens, *follow_up])
        assert (restored.n_tokens, restored.exact, restored.tier) == (len(tokens), True, tier)
        assert restored.reason == ""
        got, before = continue_greedily(llm, follow_up)
        assert got == ids
        assert np.array_equal(before, logits)
    assert store.stats().hits == {tier: len(tasks)}
    assert store.stats().n_misses == 0
    assert store.stats().tokens_hit == sum(len(tokens) for tokens, _ in tasks)


@pytest.mark.parametrize("kv", SETTINGS)
def test_continuations(tmp_path: Path, kv: str) -> None:
    check_continuations(tmp_path, kv, 4)


@pytest.mark.slow
@pytest.mark.parametrize("kv", SETTINGS)
def test_200_continuations(tmp_path: Path, kv: str) -> None:
    check_continuations(tmp_path, kv, 200)


# --- the same on other models, and what is said about it ---


@pytest.mark.parametrize("key", [None, b"k" * 32])
@pytest.mark.parametrize("kv", ["f16", "mixed:threshold=32,group=16"])
@pytest.mark.parametrize("name", ["llama-64", "gemma2"])
def test_other_models(
    zoo_path: Callable[[str], Path], tmp_path: Path, name: str, kv: str, key: bytes
) -> None:
    tokens = [3 + i * 7 % 250 for i in range(300)]
    options = {"kv": kv, "n_ctx": 512, "n_threads": 1, "verbose": False}
    with Llama(zoo_path(name), **options) as llm, KVStore(tmp_path, key=key and (lambda: key)) as store:
        llm.eval(tokens[:200])
        store.save(llm)
        llm.eval(tokens[200:290])
        store.save(llm)
        expected = continue_greedily(llm, tokens[290:])
        restored = store.restore(llm, tokens)
        assert (restored.n_tokens, restored.exact) == (290, True)
        got = continue_greedily(llm, tokens[290:])
        assert got[0] == expected[0]
        assert np.array_equal(got[1], expected[1])


@pytest.mark.parametrize("kv", ["f16", "mixed"])
def test_a_cut_sequence_continues(tmp_path: Path, kv: str) -> None:
    """Exactly for a uniform cache, and labelled for a mixed one."""
    with open_llama(kv) as llm, KVStore(None) as store:
        tokens, _ = task(llm, 5)
        llm.eval(tokens)
        store.save(llm)
        n = len(tokens) // 2
        other = [*tokens[:n], 7, 8, 9]
        restored = store.restore(llm, other)
        assert (restored.n_tokens, restored.exact) == (n, kv == "f16")
        got = continue_greedily(llm, other[n:])
        llm.reset()
        llm.eval(tokens[:n])
        expected = continue_greedily(llm, other[n:])
        assert np.array_equal(got[1], expected[1]) == (kv == "f16")
        if kv == "f16":
            assert got[0] == expected[0]
        else:
            assert np.corrcoef(got[1], expected[1])[0, 1] > 0.95
            llm.reset()
            missed = store.restore(llm, other, exact_only=True)
            assert (missed.n_tokens, missed.hit, missed.reason.partition(":")[0]) == (0, False, "inexact")


def test_a_conversation_costs_its_turns(tmp_path: Path) -> None:
    with open_llama("q8_0") as llm, KVStore(tmp_path, max_ram_bytes=0) as store:
        tokens, _ = task(llm, 6)
        sizes = []
        for end in range(20, 120, 20):
            restored = store.restore(llm, tokens[:end])
            assert restored.n_tokens == end - 20
            llm.n_tokens = restored.n_tokens
            llm.eval(tokens[restored.n_tokens : end])
            saved = store.save(llm)
            assert saved.n_stored == 20
            sizes.append(saved.nbytes)
        assert len(set(sizes)) == 1
        again = store.save(llm)
        assert (again.n_stored, again.entry) == (0, saved.entry)


def test_a_miss_leaves_the_sequence_alone(tmp_path: Path) -> None:
    with open_llama("f16") as llm, KVStore(tmp_path) as store:
        llm.eval([5, 6, 7])
        restored = store.restore(llm, [8, 9])
        assert (restored.n_tokens, restored.hit, restored.tier, restored.exact) == (0, False, "none", True)
        assert restored.reason == "unknown: nothing stored begins like this"
        assert llm.n_tokens == 3
        assert llm.kv.export(0).tokens.tolist() == [5, 6, 7]


def test_damage_on_the_way_is_passed_over(tmp_path: Path) -> None:
    """The newest turn is damaged: what comes before it is restored, and the reason is told."""
    with open_llama("mixed") as llm, KVStore(tmp_path, max_ram_bytes=0) as store:
        tokens, follow_up = task(llm, 9)
        entries = []
        for begin in range(0, 90, 30):
            llm.eval(tokens[begin : begin + 30])
            entries.append(store.save(llm).entry)
        (path,) = tmp_path.rglob(f"{entries[-1]}.*")
        path.write_bytes(path.read_bytes()[:-5])
        restored = store.restore(llm, tokens)
        assert (restored.n_tokens, restored.exact, restored.hit) == (60, True, True)
        assert restored.reason.startswith("damaged: ")
        assert (store.stats().n_hits, store.stats().misses) == (1, {"damaged": 1})
        got = continue_greedily(llm, follow_up)
        llm.reset()
        llm.eval(tokens[:30])
        llm.eval(tokens[30:60])
        expected = continue_greedily(llm, follow_up)
        assert got[0] == expected[0]
        assert np.array_equal(got[1], expected[1])


def test_what_the_cache_refuses_is_a_miss(tmp_path: Path) -> None:
    """Longer than the context: nothing of it is left in the sequence."""
    with open_llama("f16") as llm, KVStore(tmp_path) as store:
        tokens = [3 + i % 200 for i in range(600)]
        llm.eval(tokens)
        store.save(llm)
        with Llama(model_path(), kv="f16", n_ctx=256, verbose=False) as small:
            assert Identity.of(small) == Identity.of(llm)
            restored = store.restore(small, tokens)
            assert (restored.n_tokens, restored.reason.partition(":")[0]) == (0, "refused")
            assert small.n_tokens == 0
            assert store.restore(small, tokens, max_tokens=200).n_tokens == 200
        assert store.stats().misses == {"refused": 1}
        assert len(store.entries()) == 1


def test_other_sequences(tmp_path: Path) -> None:
    tokens = list(range(3, 90))
    with (
        Llama(model_path(), kv="q8_0", n_ctx=1024, n_seq_max=3, verbose=False) as llm,
        KVStore(tmp_path) as store,
    ):
        llm.eval(tokens)
        store.save(llm)
        restored = store.restore(llm, tokens, seq=2)
        assert restored.n_tokens == len(tokens)
        assert llm.n_tokens == len(tokens)
        a, b = llm.kv.export(0), llm.kv.export(2, tokens=tokens)
        for x, y in zip(a.groups[0].layers, b.groups[0].layers, strict=True):
            assert np.array_equal(x.k, y.k)
        with pytest.raises(ValueError, match="sequence 2"):
            store.save(llm, seq=2)
        assert store.save(llm, tokens, seq=2).n_stored == 0


@pytest.mark.parametrize("seq", [-1, 1, 300, True, "0"])
def test_a_sequence_that_the_context_does_not_have(seq: object) -> None:
    with open_llama("f16") as llm, KVStore(None) as store:
        llm.eval([5, 6, 7])
        store.save(llm)
        for call in (store.restore, store.save):
            error = ValueError if type(seq) is int else TypeError
            with pytest.raises(error, match="use a whole number from 0 to 0"):
                call(llm, [5, 6, 7], seq=seq)  # type: ignore[operator]
        assert llm.kv.export(0).tokens.tolist() == [5, 6, 7]


@pytest.mark.parametrize("kv", ["f16", MIXED])
def test_only_exact_rows_are_stored(kv: str) -> None:
    """Rows that were computed behind approximate ones are never found as if they were not."""
    with open_llama(kv) as llm, KVStore(None) as store:
        tokens, _ = task(llm, 5)
        llm.eval(tokens)
        llm.kv.limit_exact(50)
        saved = store.save(llm)
        assert (saved.n_tokens, saved.n_stored, saved.reason) == (50, 50, "")
        assert store.restore(llm, tokens, exact_only=True).n_tokens == (50 if kv == "f16" else 0)
        llm.reset()
        llm.eval(tokens)
        llm.kv.limit_exact(0)
        for given in (None, tokens):
            saved = store.save(llm, given)
            assert (saved.entry, saved.n_tokens, saved.n_stored) == ("", 0, 0)
            assert "none of the rows" in saved.reason


def test_what_follows_an_inexact_restore_is_not_stored() -> None:
    with open_llama(MIXED) as llm, KVStore(None) as store:
        tokens, _ = task(llm, 5)
        llm.eval(tokens)
        store.save(llm)
        n = len(tokens) // 2
        other = [*tokens[:n], *range(300, 330)]
        assert not store.restore(llm, other).exact
        llm.eval(other[n:])
        assert store.save(llm).n_stored == 0
        llm.reset()
        restored = store.restore(llm, other)
        assert (restored.n_tokens, restored.exact) == (n, False)


def test_an_exact_end_is_stored_over_an_inexact_one() -> None:
    """A prefix of what is stored was computed again: what its window lacked is stored now, and only that."""
    with open_llama(MIXED) as llm, KVStore(None) as store:
        tokens, follow_up = task(llm, 5)
        n = len(tokens) - 40
        llm.eval(tokens)
        store.save(llm)
        assert store.save(llm, tokens[:n]).n_stored == 0  # its rows have left the window
        llm.reset()
        llm.eval(tokens[:n])
        assert 0 < store.save(llm).n_stored <= 32
        assert store.save(llm).n_stored == 0
        expected = continue_greedily(llm, follow_up)
        restored = store.restore(llm, tokens[:n], exact_only=True)
        assert (restored.n_tokens, restored.exact) == (n, True)
        got = continue_greedily(llm, follow_up)
        assert got[0] == expected[0]
        assert np.array_equal(got[1], expected[1])


def test_a_whole_window_is_stored_over_one_that_lacks_rows(zoo_path: Callable[[str], Path]) -> None:
    tokens = [3 + i * 7 % 250 for i in range(900)]
    options = {"kv": "f16", "n_ctx": 1024, "n_threads": 1, "n_batch": 16, "n_ubatch": 16, "swa_full": False}
    with Llama(zoo_path("gemma2"), verbose=False, **options) as llm, KVStore(None) as store:
        llm.eval(tokens)
        first = store.save(llm, tokens[:660], session="a")
        assert store.restore(llm, tokens[:660]).reason.startswith("window")
        llm.reset()
        llm.eval(tokens[:660])
        again = store.save(llm)
        assert again.n_stored == 660
        assert store.restore(llm, tokens[:660]).n_tokens == 660
        assert [entry.id for entry in store.entries()] == [again.entry] != [first.entry]
        assert store.remove(session="a") == 1


def test_saving_what_is_not_there(tmp_path: Path) -> None:
    with open_llama("f16") as llm, KVStore(tmp_path) as store:
        with pytest.raises(ValueError, match="tokens is empty"):
            store.save(llm)
        llm.eval([5, 6, 7])
        with pytest.raises(LookupError):
            store.save(llm, [5, 6, 7, 8])
        with pytest.raises(ValueError, match="session id"):
            store.save(llm, session="../x")
        assert store.entries() == []


def test_a_store_that_cannot_write(tmp_path: Path) -> None:
    """Saving reports it; the program goes on."""
    with open_llama("f16") as llm, KVStore(tmp_path, max_kv_size_gb=1e-6) as store:
        llm.eval(list(range(3, 100)))
        saved = store.save(llm)
        assert (saved.entry, saved.n_stored) == ("", 0)
        assert "more than the budget" in saved.reason
    with open_llama("f16") as llm, KVStore(tmp_path) as store:
        llm.eval(list(range(3, 100)))
        (tmp_path / "v1" / "entries").rmdir()
        (tmp_path / "v1" / "entries").write_text("no folder")
        saved = store.save(llm)
        assert (saved.entry, saved.n_stored) == ("", 0)
        assert "File exists" in saved.reason


def test_stats_to_read(tmp_path: Path) -> None:
    with open_llama("mixed") as llm, KVStore(tmp_path) as store:
        llm.eval(list(range(3, 100)))
        store.save(llm)
        store.restore(llm, [99])
        store.restore(llm, list(range(3, 100)))
        text = str(store.stats())
    assert "hits      1 (1 RAM, 0 disk, 0 remote), 97 tokens" in text
    assert "misses    1 (unknown 1)" in text
    assert max(map(len, text.splitlines())) <= 80
