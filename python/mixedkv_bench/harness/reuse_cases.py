"""Prompts made of passages that were evaluated before, in another place."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from random import Random
from typing import Literal, get_args

import numpy as np

from mixedkv.bundled.corpus import Fact, World, filler
from mixedkv.tokens import Tokens
from mixedkv_bench.harness.contexts import CannotRunError
from mixedkv_bench.harness.real_text import KINDS, read_real_text

Workload = Literal["documents", "edited", "system", "few_shot", "prose", "narrative", "code", "dialogue"]
DonorKind = Literal["alone", "bos", "conversation"]

WORKLOADS: tuple[Workload, ...] = get_args(Workload)
DONOR_KINDS: tuple[DonorKind, ...] = get_args(DonorKind)
DONORS: dict[Workload, tuple[DonorKind, ...]] = {
    "documents": ("alone", "bos", "conversation"),
    "edited": ("conversation",),
    "system": ("conversation",),
    "few_shot": ("conversation",),
    "prose": ("alone", "bos", "conversation"),
    "narrative": ("alone", "bos", "conversation"),
    "code": ("alone", "bos", "conversation"),
    "dialogue": ("alone", "bos", "conversation"),
}


def kinds_of(
    workloads: Sequence[Workload] = WORKLOADS, donors: Sequence[DonorKind] = DONOR_KINDS
) -> list[tuple[Workload, DonorKind]]:
    """Return each workload with each of these donors that it has."""
    return [(workload, donor) for workload in workloads for donor in DONORS[workload] if donor in donors]


_SEED = 110_000
_ACKNOWLEDGED = "I have noted that."
_QUESTIONS = (
    "<|im_start|>system\nYou are a careful assistant. Read the passages that the user gives, and answer the "
    "question with what they say. If the passages do not say it, say that you do not know. Quote words of "
    "the passages where that helps. Do not invent names, numbers or facts.<|im_end|>\n<|im_start|>user\n",
    "Summarize the passages above in a few sentences.<|im_end|>\n<|im_start|>assistant\n",
    "What does the second passage say? Explain it in detail.<|im_end|>\n<|im_start|>assistant\n",
    "Explain step by step what is described above.<|im_end|>\n<|im_start|>assistant\n",
)
Encode = Callable[[str], list[int]]


@dataclass(frozen=True, slots=True)
class Case:
    """A prompt, and the sequences that were evaluated and stored before it comes.

    Args:
        stored: token ids from position 0 of each.
        prompt: token ids.
        answer: what the bundled model was taught to say.
    """

    stored: tuple[Tokens, ...]
    prompt: Tokens
    answer: str


class CaseMaker:
    """Cases of about `n_prompt` tokens from the bundled model's corpus.

    Args:
        encode: text to token ids, special tokens read, without BOS.
        bos: token ids that every prompt begins with.
        n_documents: of a prompt.
    """

    TURNS = 5  # of a growing history, a document each

    def __init__(self, encode: Encode, bos: Sequence[int], n_prompt: int, n_documents: int = TURNS) -> None:
        self._encode, self._bos, self._n_prompt = encode, list(bos), n_prompt
        self._n_documents = n_documents
        self._texts: dict[str, Tokens] = {}

    def make(self, workload: Workload, donor: DonorKind, seed: int) -> Case:
        """Make the case with this number: the same for all donors of a workload but for what was stored.

        Raises:
            CannotRunError: the workload's text is not installed, or is too short.
        """
        random = Random(_SEED + seed)
        if workload in KINDS:
            return self._passages(random, workload, donor)
        world = World(random)
        if workload == "few_shot":
            return self._few_shot(random, world)
        n = self.TURNS if workload == "system" else self._n_documents
        documents, facts = self._documents(random, world, n)
        if workload == "system":  # a history that grows, seed by seed
            n = seed % self.TURNS + 1
            documents, facts = documents[:n], facts[:n]
        fact = random.choice([fact for of_document in facts for fact in of_document])
        if workload == "documents":
            return self._shuffled(random, documents, fact, donor)
        if workload == "edited":
            changed = list(documents)
            changed[1] += f" {filler(random)}"  # a sentence that was not there
            return self._case(self._chat(documents, filler_question(random)), self._chat(changed, fact), fact)
        before, after = (f" Today is {day}." for day in random.sample(("Monday", "Friday", "Sunday"), 2))
        earlier = self._chat([before, *documents], filler_question(random))
        return self._case(earlier, self._chat([after, *documents], fact), fact)

    def _shuffled(self, random: Random, documents: list[str], fact: Fact, donor: DonorKind) -> Case:
        order = documents[:]
        while order == documents:
            random.shuffle(order)
        prompt = self._chat(order, fact)
        if donor == "conversation":
            return self._case(self._chat(documents, filler_question(random)), prompt, fact)
        head = self._bos if donor == "bos" else []
        stored = tuple(_ids(head, self._encode(document)) for document in documents)
        return Case(stored, prompt, fact.answer)

    def _passages(self, random: Random, workload: Workload, donor: DonorKind) -> Case:
        """Return the passages of a real text, a question about all of them, and no right answer."""
        size = (self._n_prompt - len(self._encode(_QUESTIONS[0])) - 60) // self._n_documents
        text = self._held_out(workload)
        n = self._n_documents + 1
        free = len(text) - n * size
        if free < 0:
            raise CannotRunError(
                f"{n} passages of {size} tokens are more than half of the text of kind {workload}, which "
                f"has {2 * len(text)} tokens: use a smaller --n-prompt"
            )
        begins = [i * size + at for i, at in enumerate(sorted(random.randint(0, free) for _ in range(n)))]
        random.shuffle(begins)
        texts = [[*text[begin : begin + size].tolist(), *self._encode("\n\n")] for begin in begins]
        head, question = (self._encode(each) for each in (_QUESTIONS[0], random.choice(_QUESTIONS[1:])))
        prompt = _ids(self._bos, head, *texts[:-1], question)
        if donor == "conversation":  # with another passage before them
            return Case((_ids(self._bos, head[:10], texts[-1], *texts[-2::-1], question),), prompt, "")
        begin_of = self._bos if donor == "bos" else []
        return Case(tuple(_ids(begin_of, each) for each in texts[:-1]), prompt, "")

    def _held_out(self, workload: Workload) -> Tokens:
        """Return the second half of a real text. Methods are tuned on the first halves and on other texts."""
        if workload not in self._texts:
            try:
                text = read_real_text(workload).text
            except ValueError as error:
                raise CannotRunError(str(error)) from None
            self._texts[workload] = np.asarray(self._encode(text[len(text) // 2 :]), np.int32)
        return self._texts[workload]

    def _few_shot(self, random: Random, world: World) -> Case:
        """Return a case of examples: short texts, each with a question and its answer. The earlier prompt has
        the same ones in another order.
        """
        shots: list[str] = []
        facts: list[Fact] = []
        while sum(len(self._encode(shot)) for shot in shots) < self._n_prompt - 80:
            fact = world.fact()
            text = " ".join([filler(random), fact.statement, filler(random), filler(random)])
            shots.append(f"<|user|>{text} {fact.question}<|end|><|assistant|>{fact.answer}<|end|>")
            facts.append(fact)
        fact, order = random.choice(facts), shots[:]
        random.shuffle(order)

        def prompt(shots: list[str], question: str) -> Tokens:
            parts = [*(self._encode(shot) for shot in shots), self._question(question)]
            return _ids(self._bos, *parts)

        return self._case(prompt(shots, facts[0].question), prompt(order, fact.question), fact)

    def _documents(self, random: Random, world: World, n: int) -> tuple[list[str], list[list[Fact]]]:
        """Return the documents, and the facts in each; the first sentence of a document is one."""
        size = (self._n_prompt - 60) // n
        documents: list[str] = []
        facts: list[list[Fact]] = []
        for _ in range(n):
            facts.append([world.fact()])
            text = f" {facts[-1][0].statement}"
            while len(self._encode(text)) < size - 8:
                if random.random() < 0.4:
                    facts[-1].append(world.fact())
                    text += f" {facts[-1][-1].statement}"
                else:
                    text += f" {filler(random)}"
            documents.append(text)
        return documents, facts

    def _chat(self, documents: list[str], fact: Fact) -> Tokens:
        parts = [self._encode(document) for document in documents]
        noted = self._encode(f"<|end|><|assistant|>{_ACKNOWLEDGED}<|end|>")
        return _ids(self._bos, self._encode("<|user|>"), *parts, noted, self._question(fact.question))

    def _question(self, question: str) -> list[int]:
        return self._encode(f"<|user|>{question}<|end|><|assistant|>")

    def _case(self, stored: Tokens, prompt: Tokens, fact: Fact) -> Case:
        return Case((stored,), prompt, fact.answer)


def filler_question(random: Random) -> Fact:
    """Return what an earlier conversation about the same passages asked."""
    return World(random).fact()


def _ids(*parts: Sequence[int]) -> Tokens:
    return np.concatenate([np.asarray(part, np.int32) for part in parts])
