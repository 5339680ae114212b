"""Many steps that fail, and what they leave behind: logits after them are, to the bit, those of a context
that evaluated in the same steps and in which nothing failed.
"""

from __future__ import annotations

import random
import tempfile
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

from llama_cpp import StoppingCriteriaList

from support.cache.crossing.crossing_run import EIGHT, FAMILIES, RECURRENT
from support.cache.crossing.injections import Calls, RaisedError, abort_callback, cut_short, signal_after
from support.cache.crossing.subject import EXPERTS, FindingError, Setup, Subject
from support.cache.harness import prompt

MOST = 90  # tokens of the sequence before it begins again


class Failing:
    """Sequence 0 of a subject, steps of which some fail, and what must be so after each."""

    def __init__(self, subject: Subject, seed: int) -> None:
        self.subject, self.llm, self.rng = subject, subject.llm, random.Random(seed)
        self.kinds: dict[str, Callable[[list[int]], bool]] = {
            "signal": self._signal,
            "exception": self._exception,
        }
        if subject.setup.streamed:
            self.kinds["read error"] = self._unreadable
        else:
            self.kinds["callback"] = self._callback
        self.counts: Counter[str] = Counter()
        self.n_most = 200  # calls of the abort callback in a step

    def once(self) -> None:
        """A step that may fail, and one behind it that does not.

        Raises:
            FindingError: the step left something behind.
        """
        subject, line = self.subject, self.subject.lines[0]
        if not 20 <= line.end <= MOST:
            self.llm.kv.remove(0)
            subject.drop(0)
            subject.go_on(0, prompt(self.rng.choice((24, 45)), self.rng.randrange(999)))
            line = subject.lines[0]
        before, exact = line.end, self.llm.kv.exact_tokens
        kind = self.rng.choice(list(self.kinds))
        tokens = prompt(self.rng.choice((1, 3, 16, 40, 60)), self.rng.randrange(999))
        if not self.kinds[kind](tokens):
            self.counts["no " + kind] += 1
            return
        self.counts[kind] += 1
        if kind == "exception":  # the prompt before it has been evaluated
            subject.go_on(0, prompt(3, self.rng.randrange(999)))
            return
        line.eval(tokens[line.end - before : max(0, self.llm.n_tokens - before)])  # a signal may hit us, too
        after = self.llm.n_tokens, self.llm.kv.positions(0)[1] + 1
        now, done = self.llm.kv.exact_tokens, line.end - before  # micro-batches that ended well stay
        whole = done % subject.setup.n_ubatch == 0 or done == len(tokens)
        if set(after) != {line.end} or not whole or not exact <= now <= line.end:
            raise FindingError(
                f"{kind} in [{before}, {before + len(tokens)}): n_tokens and positions end at {after}, "
                f"exact_tokens={now}"
            )
        if now < line.end:  # a signal between the end of a step and the note of it: less is vouched for
            self.counts["no note"] += 1
            subject.loaded = True
        subject.go_on(0, prompt(3, self.rng.randrange(999)))

    def _callback(self, tokens: list[int]) -> bool:
        calls = Calls(self.rng.randrange(self.n_most))
        with abort_callback(self.llm, calls):
            try:
                got = self.subject.evaluate(0, tokens)
            except RuntimeError:
                return True
        self.n_most = max(20, calls.n + 1)
        self.subject.compare(0, got)
        return False

    def _signal(self, tokens: list[int]) -> bool:
        with suppress(RaisedError), signal_after(self.rng.random() ** 2 * 0.008):
            got = self.subject.evaluate(0, tokens)
            self.subject.compare(0, got)
            return False
        return True

    def _unreadable(self, tokens: list[int]) -> bool:
        with cut_short(self.subject.path, self.rng.random()):
            try:
                got = self.subject.evaluate(0, tokens)
            except OSError:
                return True
        self.subject.compare(0, got)
        return False

    def _exception(self, tokens: list[int]) -> bool:
        """A stopping criterion raises before the first token: the prompt has been evaluated."""
        if not self.subject.cuts:
            return False

        def stop(_tokens: object, _logits: object) -> bool:
            raise RaisedError

        line = self.subject.lines[0]
        with suppress(RaisedError):
            list(
                self.llm.generate(
                    [*line.tokens, *tokens], temp=0.0, stopping_criteria=StoppingCriteriaList([stop])
                )
            )
        now = self.llm.input_ids[: self.llm.n_tokens].tolist()
        if now[: line.end] != line.tokens:
            raise FindingError("a stopping criterion that raises leaves other tokens")
        line.eval(now[line.end :])
        return True


def setups() -> Iterator[Setup]:
    for i, family in enumerate(FAMILIES):
        for kv in ("f16", EIGHT):
            if family in RECURRENT and kv != "f16":
                continue
            yield Setup(family=family, kv=kv, unified=i % 2 == 0, n_ubatch=16)
        if family not in (*EXPERTS, *RECURRENT):  # which are not streamed
            yield Setup(family=family, kv="f16" if i % 2 else EIGHT, streamed=True, n_ubatch=16)


def run(setup: Setup, path: Path, n: int, seed: int) -> tuple[Counter[str], list[str]]:
    """Until `n` steps have failed; how many of which kind, and what they left behind."""
    counts: Counter[str] = Counter()
    found: list[str] = []
    subject = None
    with tempfile.TemporaryDirectory() as folder:
        while (
            sum(counts[kind] for kind in ("callback", "signal", "read error", "exception")) < n
            and len(found) < 5
        ):
            subject = Subject(setup, path, Path(folder), same_steps=True)
            failing = Failing(subject, seed + len(found))
            try:
                while sum(failing.counts.values()) - sum(
                    failing.counts[k] for k in failing.counts if k.startswith("no ")
                ) < n - sum(counts.values()):
                    failing.once()
            except FindingError as error:
                found.append(str(error))
            except Exception:
                found.append(traceback.format_exc())
            finally:
                counts += Counter({k: v for k, v in failing.counts.items() if not k.startswith("no ")})
                subject.close()
    return counts, found
