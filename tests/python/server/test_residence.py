"""Which models are in memory: decided without models, on loaders that only say what they are told."""

from __future__ import annotations

import asyncio
import math
import threading
import time
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from mixedkv.errors import ClosedError, QueueFullError
from mixedkv.server.keep_alive import parse_keep_alive
from mixedkv.server.residence import Check, ModelGroup, ModelLoadError, Residence, Residency
from mixedkv.server.settings import ServerSettings, load_settings
from support.patience import PATIENCE

pytestmark = pytest.mark.core

SOON = 0.05


class FakeLoader:
    """Loads as soon as `may_load` is set."""

    def __init__(self, said: list[str], name: str) -> None:
        self._said, self._name = said, name
        self.may_load = threading.Event()
        self.may_load.set()
        self.error: Exception | None = None
        self.broken = False

    def load(self, check: Check) -> None:
        while not self.may_load.wait(0.01):
            check()
        self._said.append(f"load {self._name}")
        if self.error is not None:
            raise self.error
        self.broken = False

    def unload(self) -> None:
        self._said.append(f"unload {self._name}")

    async def finish(self) -> None:
        self._said.append(f"finish {self._name}")


class Models:
    """Groups a, b and c of one residence."""

    def __init__(self, **options: Any) -> None:
        self.said: list[str] = []
        self.loaders = {name: FakeLoader(self.said, name) for name in "abc"}
        self.groups = {name: ModelGroup(name, loader) for name, loader in self.loaders.items()}
        self.residence = Residence(on_demand=True, **options)
        for group in self.groups.values():
            self.residence.add(group)

    async def use(self, name: str, tenant: str = "", keep_alive: float | None = None) -> None:
        await self.residence.use(self.groups[name], tenant, keep_alive)

    def release(self, name: str, tenant: str = "") -> None:
        self.residence.release(self.groups[name], tenant)

    def place(self, name: str) -> Residency:
        return self.groups[name].place

    async def until(self, name: str, place: Residency) -> None:
        end = time.monotonic() + PATIENCE
        while self.place(name) is not place:
            assert time.monotonic() < end
            await asyncio.sleep(0.005)

    def loads(self) -> list[str]:
        return [each for each in self.said if not each.startswith("finish")]


def run(test: Callable[[Models], Awaitable[None]], **options: Any) -> Models:
    async def body() -> Models:
        models = Models(**options)
        models.residence.begin()
        await test(models)
        models.residence.refuse()
        return models

    models = asyncio.run(body())
    models.residence.close()
    return models


def test_the_first_request_loads_and_the_last_one_unloads() -> None:
    async def test(models: Models) -> None:
        await asyncio.gather(*(models.use("a") for _ in range(3)))
        assert models.loads() == ["load a"]
        models.release("a")
        models.release("a")
        await asyncio.sleep(4 * SOON)
        assert models.place("a") is Residency.IN, "a request is at work"
        began = time.monotonic()
        models.release("a")
        assert began + SOON <= models.groups["a"].expires[""] <= time.monotonic() + SOON
        await models.until("a", Residency.OUT)
        assert models.said == ["load a", "finish a", "unload a"]
        await models.use("a")
        assert models.loads() == ["load a", "unload a", "load a"]

    run(test, keep_alive=SOON)


def test_a_request_renews_the_time_and_may_say_another() -> None:
    async def test(models: Models) -> None:
        await models.use("a", keep_alive=math.inf)
        models.release("a")
        await asyncio.sleep(3 * SOON)
        assert models.place("a") is Residency.IN
        assert models.groups["a"].expires_in == math.inf
        await models.use("a", keep_alive=0)
        models.release("a")
        await models.until("a", Residency.OUT)

    run(test, keep_alive=SOON)


def test_a_tenant_does_not_end_what_another_one_wants() -> None:
    async def test(models: Models) -> None:
        await models.use("a", "anna", 100)
        models.release("a", "anna")
        await models.use("a", "bob", 0)
        models.release("a", "bob")
        models.residence.let_go(models.groups["a"], "bob")
        await asyncio.sleep(SOON)
        assert models.place("a") is Residency.IN
        models.residence.let_go(models.groups["a"], "anna")
        await models.until("a", Residency.OUT)

    run(test)


def test_who_lets_a_model_go_at_work_has_it_unloaded_after_that() -> None:
    async def test(models: Models) -> None:
        await models.use("a", keep_alive=100)
        models.residence.let_go(models.groups["a"], "")
        await asyncio.sleep(SOON)
        assert models.place("a") is Residency.IN
        models.release("a")
        await models.until("a", Residency.OUT)

    run(test)


def test_a_load_that_fails_is_told_to_all_who_wait_and_tried_again() -> None:
    async def test(models: Models) -> None:
        models.loaders["a"].error = ValueError("no memory")
        found = await asyncio.gather(*(models.use("a") for _ in range(3)), return_exceptions=True)
        assert {type(each) for each in found} == {ModelLoadError}
        assert "'a' could not be loaded: no memory" in str(found[0])
        assert models.loads() == ["load a"]
        models.loaders["a"].error = None
        await models.use("a")

    run(test)


def test_where_there_is_no_room_the_least_recently_used_one_leaves() -> None:
    async def test(models: Models) -> None:
        for name in "ab":
            await models.use(name)
            models.release(name)
        await models.use("a")
        models.release("a")
        await models.use("c")
        assert models.loads() == ["load a", "load b", "unload b", "load c"]

    run(test, max_loaded=2)


def test_where_all_are_at_work_they_take_turns() -> None:
    """Who is always asked for does not keep the others out, and who waits longest comes first."""

    async def test(models: Models) -> None:
        await models.use("a")
        b = asyncio.create_task(models.use("b"))
        await asyncio.sleep(SOON)
        again = asyncio.create_task(models.use("a"))
        c = asyncio.create_task(models.use("c"))
        await asyncio.sleep(SOON)
        assert {b.done(), again.done()} == {False}
        for name, task in (("a", b), ("b", again), ("a", c)):
            models.release(name)
            await asyncio.wait_for(task, PATIENCE)
        assert [each for each in models.loads() if each.startswith("load")] == [
            "load a", "load b", "load a", "load c",
        ]  # fmt: skip

    run(test, max_loaded=1)


def test_who_gives_up_waits_no_more() -> None:
    async def test(models: Models) -> None:
        models.loaders["a"].may_load.clear()
        first, second = (asyncio.create_task(models.use("a")) for _ in range(2))
        other = asyncio.create_task(models.use("b"))
        await asyncio.sleep(SOON)
        first.cancel()
        other.cancel()
        await asyncio.sleep(SOON)
        models.loaders["a"].may_load.set()
        await second
        assert models.groups["a"].users == 1
        models.release("a")
        await models.until("a", Residency.OUT)
        assert models.loads() == ["load a", "unload a"], "nobody wants b"

    run(test, keep_alive=SOON)


def test_a_model_that_nobody_waits_for_any_more_is_unloaded() -> None:
    async def test(models: Models) -> None:
        models.loaders["a"].may_load.clear()
        first = asyncio.create_task(models.use("a"))
        await asyncio.sleep(SOON)
        first.cancel()
        await asyncio.sleep(0)
        models.loaders["a"].may_load.set()
        await models.until("a", Residency.OUT)
        assert models.loads() == ["load a", "unload a"]

    run(test, keep_alive=SOON)


def test_so_many_of_a_tenant_may_wait() -> None:
    async def test(models: Models) -> None:
        models.loaders["a"].may_load.clear()
        waiting = [asyncio.create_task(models.use("a", "anna")) for _ in range(2)]
        await asyncio.sleep(SOON)
        with pytest.raises(QueueFullError):
            await models.use("a", "anna")
        waiting.append(asyncio.create_task(models.use("a", "bob")))
        await asyncio.sleep(SOON)
        models.loaders["a"].may_load.set()
        await asyncio.gather(*waiting)

    run(test, most_waiting=lambda tenant: 2)


def test_work_on_other_threads_keeps_a_model() -> None:
    async def test(models: Models) -> None:
        from concurrent.futures import Future

        work: Future[None] = Future()
        await models.use("a", keep_alive=0)
        models.residence.hold_during(models.groups["a"], work)
        models.release("a")
        await asyncio.sleep(SOON)
        assert models.place("a") is Residency.IN
        work.set_result(None)
        await models.until("a", Residency.OUT)

    run(test)


def test_one_that_is_broken_is_loaded_anew() -> None:
    async def test(models: Models) -> None:
        await models.use("a")
        models.loaders["a"].broken = True
        again = asyncio.create_task(models.use("a"))
        await asyncio.sleep(SOON)
        assert not again.done(), "a request is at work"
        models.release("a")
        await again
        assert models.loads() == ["load a", "unload a", "load a"]
        models.release("a")
        models.residence.unload_broken(models.groups["a"])
        await models.until("a", Residency.OUT)

    run(test)


def test_one_that_is_about_to_leave_stays_for_a_request() -> None:
    """While another one is being loaded nothing is unloaded. Also after it was loaded anew."""

    async def test(models: Models) -> None:
        await models.use("a")
        models.release("a")
        models.residence.unload_broken(models.groups["a"])
        await models.until("a", Residency.OUT)
        await models.use("a", keep_alive=0)
        models.loaders["b"].may_load.clear()
        other = asyncio.create_task(models.use("b"))
        await asyncio.sleep(SOON)
        models.release("a")
        await models.until("a", Residency.LEAVING)
        await asyncio.wait_for(models.use("a"), PATIENCE)
        models.loaders["b"].may_load.set()
        await other
        assert models.loads() == ["load a", "unload a", "load a", "load b"]

    run(test)


def test_who_gives_up_as_the_model_comes_holds_nothing() -> None:
    async def test(models: Models) -> None:
        waiting = asyncio.create_task(models.use("a"))
        while models.place("a") is not Residency.IN:
            await asyncio.sleep(0)
        waiting.cancel()
        await asyncio.wait({waiting})
        assert models.groups["a"].users == (0 if waiting.cancelled() else 1)
        assert waiting.cancelled(), "the test would show nothing"

    run(test)


def test_a_shutdown_ends_a_load() -> None:
    async def test(models: Models) -> None:
        models.loaders["a"].may_load.clear()
        waiting = [asyncio.create_task(models.use(name)) for name in "ab"]
        await asyncio.sleep(SOON)
        models.residence.refuse()
        found = await asyncio.gather(*waiting, return_exceptions=True)
        assert {type(each) for each in found} == {ClosedError}
        with pytest.raises(ClosedError):
            await models.use("c")

    assert "load a" not in run(test).said


def test_models_that_were_loaded_before_leave_too() -> None:
    async def body() -> None:
        models = Models(keep_alive=SOON, max_loaded=1)
        models.residence.load_now(models.groups["a"])
        models.residence.load_now(models.groups["b"])
        assert models.said == ["load a", "unload a", "load b"]
        models.residence.begin()
        await models.until("b", Residency.OUT)
        models.residence.refuse()
        models.residence.close()

    asyncio.run(body())


def test_where_models_stay_none_is_unloaded() -> None:
    async def body() -> None:
        models = Models()
        models.residence.on_demand = False
        for group in models.groups.values():
            models.residence.load_now(group)
        models.residence.begin()
        await models.use("a", keep_alive=0)
        models.release("a")
        models.residence.unload_broken(models.groups["a"])
        await asyncio.sleep(SOON)
        assert models.loads() == ["load a", "load b", "load c"]
        models.residence.refuse()
        models.residence.close()

    asyncio.run(body())


# --- times and options ---


@pytest.mark.parametrize(
    ("given", "seconds"),
    [
        (300, 300), (0, 0), (0.5, 0.5), ("5m", 300), ("1h30m", 5400), ("300", 300), ("90s", 90),
        ("2d", 172_800), ("500ms", 0.5), ("30min", 1800), ("0", 0), ("0s", 0), (-1, math.inf),
        ("-1", math.inf), ("-1m", math.inf),
    ],
)  # fmt: skip
def test_times_are_read(given: Any, seconds: float) -> None:
    assert parse_keep_alive(given) == seconds


@pytest.mark.parametrize(
    "given", ["", "-", "m", "5 m", "5y", "1h30", "forever", True, math.nan, [], "9" * 40]
)
def test_other_times_are_refused(given: Any) -> None:
    with pytest.raises(ValueError, match="use seconds"):
        parse_keep_alive(given)


def test_options() -> None:
    assert not ServerSettings().on_demand
    assert ServerSettings(keep_alive="5m").keep_alive_seconds == 300
    assert ServerSettings(max_loaded=1).on_demand
    assert ServerSettings(max_loaded=1).keep_alive_seconds == math.inf
    assert load_settings({}, environ={"MIXEDKV_KEEP_ALIVE": "-1"}).keep_alive_seconds == math.inf
    with pytest.raises(ValueError, match=r"--keep-alive='soon': .*use seconds"):
        load_settings({"keep_alive": "soon"}, environ={})
