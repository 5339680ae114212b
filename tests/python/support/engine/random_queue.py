"""Random jobs of random tenants at a scheduler without a model, where every job has to end in time."""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

import numpy as np

from mixedkv._core import HotWindow
from mixedkv.config.cut_rule import CutRule
from mixedkv.engine.schedule.progress import Progress
from mixedkv.engine.schedule.request import Request
from mixedkv.kv.checkpoint import Checkpoint
from mixedkv.kv.rows import APPROXIMATE, COMPUTED, Validities, all_of
from mixedkv.prompts.overflow import NOWHERE, LongPrompt, head_of
from mixedkv.work.turns import TenantLimits
from support.engine.scheduler import Cells, Desk
from support.engine.toy_parts import SlicedPart, WholePart

RULES = [CutRule(), CutRule(HotWindow(16, 8, 2)), CutRule(sliding=20), CutRule(recurrent=True)]
_SLOWEST = 4  # steps for a token of a prompt beside answers


class UnsteadyCells(Cells):
    """Cells of a context that now and then has lost what belongs to a moment."""

    def __init__(self, n_seq: int, rule: CutRule, chance: random.Random) -> None:
        super().__init__(n_seq, rule)
        self._chance = chance

    def holds(self, seq: int, n: int) -> bool:
        return super().holds(seq, n) and self._chance.random() > 0.05

    def validity(self, seq: int, tokens: Any, p0: int = 0) -> Validities:
        return all_of(len(tokens), APPROXIMATE if self._chance.random() < 0.01 else COMPUTED)

    def resume(self, point: Checkpoint, n: int, source: int, target: int) -> None:
        if self._chance.random() < 0.05:
            raise ValueError("this checkpoint has gone")
        super().resume(point, n, source, target)


class World(Desk):
    """A desk with random sizes, limits and jobs."""

    def __init__(self, seed: int) -> None:
        self.chance = chance = random.Random(seed)
        self.tenants = [f"t{i}" for i in range(chance.randint(1, 6))]
        limits = {
            tenant: TenantLimits(
                weight=chance.choice([1, 1, 1, 3]), running=chance.choice([None, None, 1, 2])
            )
            for tenant in self.tenants
        }
        super().__init__(
            parallel=chance.randint(1, 5),
            idle=chance.randint(1, 4),
            rule=chance.choice(RULES),
            n_ctx=chance.choice([64, 128, 256]),
            n_batch=chance.choice([4, 16, 64]),
            limits=limits.__getitem__,
        )
        self.jobs: list[Progress] = []
        self.n_steps = self._n_quiet = 0

    def make_cells(self, n_seq: int, rule: CutRule) -> Cells:
        return UnsteadyCells(n_seq, rule, self.chance)

    def n_drafts(self, job: Progress) -> int:
        left = job.request.max_tokens - job.n_answer - 1
        return max(0, min(left, self.n_ctx - len(job.tokens) - 1, self.chance.choice([0, 0, 1, 3])))

    def n_right(self, n: int) -> int:
        return self.chance.randint(0, n)

    def bring(self) -> Progress:
        """Add a job with a prompt that shares its beginning with others of its kind."""
        chance, n_ctx = self.chance, self.n_ctx
        n, stem = chance.choice([chance.randint(1, n_ctx - 1), n_ctx // 2 + chance.randint(0, 9)]), 0
        if chance.random() < 0.5:
            stem = 1000 * chance.randint(1, 4)
        prompt = [stem + i if i < chance.randint(0, n) else chance.randint(1, 10**6) for i in range(n)]
        parts = []
        if n > 12 and chance.random() < 0.2:
            at, size = chance.randint(0, n - 10), chance.randint(1, 8)
            ids = -np.arange(1, size + 1, dtype=np.int32) - 1000 * chance.randint(1, 9)
            prompt[at : at + size] = ids.tolist()
            more = chance.choice([0, 0, 2])
            if n + more < n_ctx:
                parts = [WholePart(ids, more)]
            else:
                prompt[at : at + size] = range(size)
        slides = not parts and chance.random() < 0.2
        if slides and chance.random() < 0.5:
            prompt += range(5000, 5000 + chance.randint(0, 2 * n_ctx))
        request = Request(
            prompt=prompt,
            max_tokens=chance.choice([0, 1, chance.randint(1, 40), chance.randint(1, n_ctx)]),
            tenant=chance.choice(self.tenants),
            reuse=chance.choice([True, True, False, "prefix"]),
            keep=chance.random() < 0.1,
            store=chance.random() < 0.9,
            overflow="slide" if slides else "refuse",
            parts=parts,
            n_logprobs=None,
        )
        job = Progress(request)
        if job.n_prompt > 8 and not (parts or slides) and job.prefix.reuse and chance.random() < 0.25:
            begin = chance.randint(1, job.n_prompt - 4)  # as a connector does that has found chunks
            job.prefix.accept = "chunks"
            job.import_rows(begin, SlicedPart(job.n_prompt - 1 - begin, chance), "toy")
        if slides and job.n_prompt >= n_ctx:
            long = LongPrompt(job.prompt, head_of(NOWHERE, n_ctx), n_ctx)
            job.leave_out(long, long.to_drop())
        self.jobs.append(job)
        self.scheduler.add([job])
        return job

    @property
    def open(self) -> list[Progress]:
        return [*self.scheduler.running, *self.scheduler.waiting]

    def go_on(self) -> None:
        """One step, which must get on: somebody's answer grows or ends, or does so soon."""
        before = Counter({id(job): job.n_answer for job in self.open})
        self.log.most_paused = self.log.seen["paused"] + 2 * len(before)  # to admit, and to relieve
        self.step()
        self.n_steps += 1
        after = {id(job): job.n_answer for job in self.open}
        self._n_quiet = self._n_quiet + 1 if after == before else 0
        # each prompt may be evaluated once more when its rows had to go
        most = 50 + 2 * _SLOWEST * sum(len(job.tokens) for job in self.open)
        assert self._n_quiet <= most, f"nothing got on in {most} steps"

    def run(self, n_jobs: int) -> None:
        """Let jobs come, and run until all have ended."""
        for _ in range(n_jobs):
            self.bring()
            for _ in range(self.chance.choice([0, 0, 1, 3, 20])):
                self.go_on()
            if self.chance.random() < 0.1:
                self.chance.choice(self.jobs).cancelled = True
        work = sum(len(job.tokens) + job.request.max_tokens for job in self.open)
        end = self.n_steps + 200 + 2 * _SLOWEST * work
        while self.open:
            self.go_on()
            assert self.n_steps <= end, f"jobs do not end in {end} steps"
        self.check_rows()

    def check_rows(self) -> None:
        """Every cell belongs to a sequence, and none to one that runs or waits."""
        held = self.pool.held()
        assert not any(seq.running or seq.paused for seq in held)
        for seq in held:
            assert sorted(self.cells.rows[seq.id]) == list(range(len(seq.tokens)))
        while self.pool.evict():
            pass
        assert self.cells.used == 0


def run_world(seed: int) -> int:
    """Run a world and return its number of steps; a failure names the seed."""
    world = World(seed)
    try:
        world.run(world.chance.randint(2, 25))
    except Exception as error:
        raise AssertionError(f"the world of seed {seed} after {world.n_steps} steps: {error}") from error
    return world.n_steps
