"""Tenants of a scheduler in simulated time: how long their requests take, whatever else the machine does.

    PYTHONPATH=tests/python python -m support.engine.simulated_tenants

One tenant floods the engine, the others ask one request at a time. Time is what steps would take.
"""

from __future__ import annotations

import heapq
import itertools
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from mixedkv.engine.schedule.contract import StepPlan
from mixedkv.engine.schedule.progress import Progress
from support.engine.scheduler import Desk

N_CTX, N_BATCH, PARALLEL, IDLE = 4096, 512, 8, 8
N_HONEST, FLOOD = 17, 32
_STEP, _STREAM, _PROMPT = 0.0015, 0.0004, 0.00006  # seconds: of a step, and of each token in it


@dataclass
class Client:
    """Asks again a while after each answer."""

    tenant: str
    make: Callable[[random.Random], tuple[int, int]]  # tokens of the prompt and of the answer
    pause: Callable[[random.Random], float]
    leaves: Callable[[random.Random], float] | None = None  # seconds, after which it does not wait
    seconds: list[float] = field(default_factory=list)


def honest(name: str) -> Client:
    return Client(name, lambda r: (r.randint(60, 400), r.randint(8, 64)), lambda r: r.uniform(0.2, 2))


Made = Callable[[random.Random], tuple[int, int]]
Leaves = Callable[[random.Random], float]
FLOODS: dict[str, tuple[Made, Leaves | None]] = {
    "long prompts": (lambda r: (3000, 200), None),
    "long answers": (lambda r: (30, 600), None),
    "clients that leave": (lambda r: (3000, 50), lambda r: r.uniform(0.05, 2)),
    "many short requests": (lambda r: (20, 4), None),
    "prompts alone": (lambda r: (3900, 1), None),
    "of all sizes": (lambda r: (r.choice((20, 300, 1500, 3900)), r.choice((1, 8, 60))), None),
}


class Timed(Desk):
    """A scheduler whose steps take what a small model's take on a processor."""

    def seconds(self, step: StepPlan[Progress]) -> float:
        return _STEP + _STREAM * step.n_streams + _PROMPT * step.n_prompt


class Simulation:
    """Clients and a scheduler, until `seconds` have passed."""

    def __init__(self, clients: list[Client], seconds: float, seed: int = 1) -> None:
        self.desk = Timed(PARALLEL, IDLE, n_ctx=N_CTX, n_batch=N_BATCH)
        self.now, self.n_steps = 0.0, 0
        self._rng, self._n = random.Random(seed), itertools.count()
        self._ids = itertools.count()
        self._due = [(self._rng.random(), next(self._n), client) for client in clients]
        heapq.heapify(self._due)
        self._asked: dict[Progress, tuple[Client, float, float]] = {}
        while self.now < seconds:
            self._begin()
            if not self._asked:
                self.now = self._due[0][0]
                continue
            self._leave()
            self.now += self.desk.seconds(self.desk.step())
            self.n_steps += 1
            self._end()

    def _begin(self) -> None:
        while self._due and self._due[0][0] <= self.now:
            _, _, client = heapq.heappop(self._due)
            n_prompt, n_answer = client.make(self._rng)
            prompt = [1000 + next(self._ids), *range(n_prompt - 1)]  # shared with nobody
            (job,) = self.desk.add(prompt, max_tokens=n_answer, tenant=client.tenant)
            job.work.t_submit = self.now
            patience = client.leaves(self._rng) if client.leaves else float("inf")
            self._asked[job] = client, self.now, self.now + patience

    def _leave(self) -> None:
        for job, (_, _, until) in self._asked.items():
            job.cancelled = job.cancelled or until < self.now

    def _end(self) -> None:
        for job in [job for job in self._asked if job.cancelled or job.n_answer >= job.request.max_tokens]:
            client, began, _ = self._asked.pop(job)
            client.seconds.append(self.now - began)
            heapq.heappush(self._due, (self.now + client.pause(self._rng), next(self._n), client))


def percentile(values: list[float], q: float = 0.99) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(q * len(ordered)))]


def beside(flood: str, seconds: float, seed: int = 1, n_floods: int = 1) -> list[float]:
    """Seconds of the honest tenants' requests; "" for no flood. The connections of `n_floods` tenants that
    flood are as many as one has.
    """
    clients = [honest(f"t{i}") for i in range(N_HONEST + 1 - n_floods)]
    if flood:
        make, leaves = FLOODS[flood]
        clients += [Client(f"mal{i % n_floods}", make, lambda r: 0.02, leaves) for i in range(FLOOD)]
    Simulation(clients, seconds, seed)
    return [each for client in clients if not client.tenant.startswith("mal") for each in client.seconds]


def report(seconds: float) -> Iterator[str]:
    alone = beside("", seconds)
    yield f"alone: n {len(alone)}, median {percentile(alone, 0.5):.3f}, p99 {percentile(alone):.3f}"
    for flood in FLOODS:
        found = beside(flood, seconds)
        ratio = percentile(found) / percentile(alone)
        yield (
            f"{flood}: n {len(found)}, median {percentile(found, 0.5):.3f}, p99 {percentile(found):.3f}, "
            f"{ratio:.2f} times alone"
        )


if __name__ == "__main__":
    for line in report(60.0):
        print(line, flush=True)
