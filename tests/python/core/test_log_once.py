"""A message that may be due many times is in the log once."""

from __future__ import annotations

import logging
from concurrent.futures import ThreadPoolExecutor

import pytest

from mixedkv.log_once import LogOnce

pytestmark = pytest.mark.core

LOG = logging.getLogger("mixedkv.test")


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]


def test_a_message_is_a_warning_once_and_then_at_debug(caplog: pytest.LogCaptureFixture) -> None:
    once = LogOnce(LOG)
    with caplog.at_level(logging.DEBUG, LOG.name):
        for name in ("a", "b", "a"):
            once.warning("%s is full", name)
        once.warning("100% of it")
    assert warnings(caplog) == ["a is full", "b is full", "100% of it"]
    assert [record.levelname for record in caplog.records].count("DEBUG") == 1


def test_a_key_stands_for_all_its_messages_until_it_is_forgotten(caplog: pytest.LogCaptureFixture) -> None:
    once = LogOnce(LOG)
    once.warning("disk at %d%%", 97, key="disk")
    once.warning("disk at %d%%", 98, key="disk")
    once.forget("disk")
    once.warning("disk at %d%%", 99, key="disk")
    assert warnings(caplog) == ["disk at 97%", "disk at 99%"]


def test_keys_that_clients_choose_take_bounded_memory() -> None:
    once = LogOnce(LOG, most=2)
    assert [once.is_new(key) for key in ("a", "b", "c", "a")] == [True, True, False, False]
    once.forget("a")
    assert once.is_new("c")


def test_of_many_threads_one_is_first() -> None:
    once = LogOnce(LOG)
    with ThreadPoolExecutor(8) as pool:
        for i in range(200):
            assert sum(pool.map(lambda _, i=i: once.is_new(i), range(8))) == 1  # type: ignore[misc]
