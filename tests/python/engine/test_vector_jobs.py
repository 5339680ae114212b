"""Jobs whose rows are there or have gone, without a model."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest

from mixedkv._core import HotWindow
from mixedkv.config.cut_rule import CutRule
from mixedkv.engine.batch.vector_job import VectorJob
from mixedkv.errors import NotFiniteError, RowsGoneError
from mixedkv.kv.fetched import Fetched
from mixedkv.prefix.sequences import Sequence
from support.engine.scheduler import Desk

pytestmark = pytest.mark.full

WIDTH = 4


def _job(n: int, n_new: int, n_hidden: int = 1, resume: Sequence | None = None, **options: int) -> VectorJob:
    """Of `n` tokens, the last `n_new` as vectors."""
    vectors = np.ones((n_new, WIDTH), np.float32)
    return VectorJob(range(100, 100 + n), vectors, n_hidden, resume=resume, **options)


def _evaluate(desk: Desk, job: VectorJob) -> VectorJob:
    desk.scheduler.add([job])
    desk.finish()
    return job


def test_a_session_goes_on_in_its_own_rows_however_few() -> None:
    desk = Desk()
    first = _evaluate(desk, _job(3, 3))
    assert first.rows is not None
    assert first.rows.paused
    second = _evaluate(desk, _job(4, 1, resume=first.rows))
    assert second.rows is first.rows
    assert len(second.rows.tokens) == 4
    assert desk.scheduler.pop_unstartable() == []


def test_a_job_whose_rows_have_gone_fails_and_leaves_its_place() -> None:
    desk = Desk()
    first = _evaluate(desk, _job(3, 3))
    assert first.rows is not None
    desk.pool.drop(first.rows)
    second = _job(4, 1, resume=first.rows)
    desk.scheduler.add([second])
    desk.scheduler.admit()
    assert desk.scheduler.pop_unstartable() == [second]
    assert not desk.scheduler.running
    assert not desk.scheduler.waiting


def test_only_the_rows_that_a_session_means_are_moved() -> None:
    desk = Desk()
    rows = _evaluate(desk, _job(40, 40)).rows
    assert rows is not None
    tokens, drop = np.arange(100, 140, dtype=np.int32), desk.scheduler.drop_waiting
    for tenant, meant, most_cut in (
        ("another", tokens, 0),
        ("", tokens + 1, 0),
        ("", np.append(tokens, 140).astype(np.int32), 0),  # more than there are
        ("", tokens[:35], 4),  # five would have to go
    ):
        assert not drop(rows, tenant, meant, 4, 20, most_cut)
        assert list(rows.tokens) == tokens.tolist()
    desk.pool.drop(rows)
    assert not drop(rows, "", tokens, 4, 20)


def test_others_that_begin_alike_start_from_a_sessions_rows() -> None:
    desk = Desk()
    _evaluate(desk, _job(40, 40))
    assert _evaluate(desk, _job(60, 60)).work.n_cached == 40


def test_a_session_that_grows_token_by_token_takes_no_checkpoints() -> None:
    """Each would copy the window: more than the step itself takes."""
    desk = Desk(rule=CutRule(HotWindow(32, 16, 4)))
    last = _evaluate(desk, _job(64, 64))
    assert last.rows is not None
    assert [point.n for point in last.rows.checkpoints] == [64]
    for n in range(65, 75):
        last = _evaluate(desk, _job(n, 1, resume=last.rows))
    assert [point.n for point in last.rows.checkpoints] == [64]
    last = _evaluate(desk, _job(120, 46, resume=last.rows))
    assert [point.n for point in last.rows.checkpoints] == [64, 120]


def test_rows_that_were_fetched_are_gone_on_from() -> None:
    desk = Desk()
    job = _job(41, 1)
    job.prefix.fetched = Fetched([SimpleNamespace(tokens=job.prompt[:40])], "disk", exact=True)
    desk.scheduler.add([job])
    desk.scheduler.admit()
    assert desk.scheduler.running == [job]
    assert desk.scheduler.pop_unstartable() == []
    desk.scheduler.refetch(job)  # they cannot be loaded: nobody has the vectors before
    assert not desk.scheduler.running
    assert desk.scheduler.pop_unstartable() == [job]
    assert desk.pool.used == 0


def test_hidden_states_nobody_computed_are_told() -> None:
    with pytest.raises(RowsGoneError):
        _ = _job(3, 3, n_hidden=2).hidden
    job = _job(3, 3, n_hidden=1)
    job._parts.append(np.full(WIDTH, np.nan, np.float32))
    with pytest.raises(NotFiniteError, match="hidden states"):
        _ = job.hidden
