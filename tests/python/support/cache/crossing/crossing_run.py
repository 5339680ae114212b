"""Runs random plans, and makes those that find something short."""

from __future__ import annotations

import random
import re
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from support.cache.crossing.plans import Player, Step, random_plan
from support.cache.crossing.subject import EXPERTS, Setup, Subject
from support.models import zoo

EIGHT = "mixed:cold=q8_0,threshold=24,group=8,sinks=3"
KINDS = (
    "f16",
    EIGHT,
    "q8_0",
    "mixed:threshold=24,group=8,sinks=3",
    "mixed:cold=lm4,threshold=24,group=8,sinks=3",
    f"{EIGHT},attention=fused",  # whose sequences take F16 rows from each other
)
RECURRENT = ("mamba", "rwkv7")
FAMILIES = ("deep", *zoo.SUPPORTED, *zoo.MORE, *RECURRENT)
LENGTH = 14


@dataclass
class Tally:
    """What was done, and what it found."""

    n_plans: int = 0
    n_steps: int = 0
    n_compared: int = 0
    steps: dict[str, int] = field(default_factory=dict)
    findings: list[dict[str, object]] = field(default_factory=list)


def setups() -> Iterator[Setup]:
    """Every family with every kind of cache that it can have, and layouts that take turns."""
    for i, family in enumerate(FAMILIES):
        for j, kv in enumerate(KINDS):
            if family in RECURRENT and kv != "f16":
                continue
            for k in range(2):
                turn = i + j + k
                full = family in ("llama4",) or turn % 5 == 4
                streamed = family not in (*EXPERTS, *RECURRENT) and (
                    turn % 4 == 1 or (family == "deep" and k == 0)
                )
                n_batch, n_ubatch = ((64, 16), (64, 64), (256, 16))[turn % 3]
                yield Setup(
                    family=family,
                    kv=kv,
                    streamed=streamed,
                    unified=k == 0,
                    swa_full=full,
                    n_batch=n_batch,
                    n_ubatch=n_ubatch,
                )


def attempt(subject: Subject, plan: Sequence[Step], tally: Tally | None = None) -> tuple[int, str]:
    """The step that found something and what, or (-1, "")."""
    player = Player(subject)
    for i, step in enumerate([("eval", 0, 40, 1), *plan, ("finish",)]):
        try:
            player.play(step)
        except Exception as error:
            return i, f"{type(error).__name__}: {error}"
        finally:
            if tally is not None:
                tally.n_steps += 1
                tally.steps[step[0]] = tally.steps.get(step[0], 0) + 1
    if tally is not None:
        tally.n_compared += subject.n_compared
    return -1, ""


def again(setup: Setup, path: Path, plan: Sequence[Step], times: int = 1) -> str:
    """What a plan finds in a context that nothing else was done to."""
    for _ in range(times):
        with tempfile.TemporaryDirectory() as folder:
            subject = Subject(setup, path, Path(folder))
            try:
                _, found = attempt(subject, plan)
            finally:
                subject.close()
        if found:
            return found
    return ""


def shortened(setup: Setup, path: Path, plan: list[Step], seconds: float = 8.0) -> tuple[list[Step], str]:
    """A shorter plan that finds something too, and what."""
    end, found = time.monotonic() + seconds, again(setup, path, plan, 3)
    if not found:
        return plan, ""
    size = max(1, len(plan) // 2)
    while size:
        i = 0
        while i < len(plan) and time.monotonic() < end:
            fewer = plan[:i] + plan[i + size :]
            if other := again(setup, path, fewer):
                plan, found = fewer, other
            else:
                i += size
        size //= 2
    return plan, found


def kind_of(found: str) -> str:
    """What a finding is about, without its numbers."""
    return re.sub(r"[-+]?[0-9][0-9.e+-]*", "N", found)


def explore(
    setup: Setup, path: Path, seconds: float, seed: int, length: int = LENGTH, signals: bool = True
) -> Tally:
    """Random plans until the time is over, at least one."""
    tally, rng, end = Tally(), random.Random(f"{seed}/{setup}"), time.monotonic() + seconds
    subject, seen = None, set()
    with tempfile.TemporaryDirectory() as folder:
        while tally.n_plans == 0 or time.monotonic() < end:
            if subject is None:
                subject = Subject(setup, path, Path(folder))
            plan = random_plan(rng, length, signals)
            at, found = attempt(subject, plan, tally)
            tally.n_plans += 1
            if found:
                subject.close()
                subject = None
                if (kind := kind_of(found)) in seen:
                    continue
                seen.add(kind)
                plan, short = shortened(setup, path, plan[: max(at, 0)])
                tally.findings.append(
                    {"setup": asdict(setup), "found": short or f"(once) {found}", "plan": plan}
                )
        if subject is not None:
            subject.close()
    return tally
