"""Text for the bundled model, the same on every machine: journals of facts, questions with known answers."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from random import Random

from mixedkv.bundled.corpus import NAMES, OBJECTS, Fact, World, filler

OPENING = "<|user|>"
NOTED = "<|end|><|assistant|>I have noted that.<|end|>"
END = "<|end|>"
DEPTHS = (0.05, 0.3, 0.55, 0.8)  # where in a journal its facts are asked for

_FACT_RATE = 0.4
_QUESTIONS_FROM = 0.75  # share of a document after which it is questions and answers
_RIVALS = 3
_TRIES = 20_000

Count = Callable[[str], int]  # tokens of a text


def ask(fact: Fact) -> str:
    """Return the turn that asks for a fact, up to where the answer begins."""
    return f"<|user|>{fact.question}<|end|><|assistant|>"


def document(seed: int, n_tokens: int, count: Count, *, chat: bool = True) -> str:
    """Return at least `n_tokens` tokens: a journal, then questions about its facts with their answers.

    In the bundled model's chat format, or as plain text for another model.
    """
    random = Random(seed)
    world = World(random)
    sentences = _sentences(random, world, int(_QUESTIONS_FROM * n_tokens), count)
    text = OPENING + " ".join(sentences) + NOTED if chat else " ".join(sentences)
    facts, n = list(world.facts.values()) or [world.fact()], count(text)
    while n < n_tokens:
        fact = random.choice(facts)
        plain = f" Question: {fact.question} Answer: {fact.answer}"
        turn = ask(fact) + fact.answer + END if chat else plain
        text, n = text + turn, n + count(turn)
    return text


@dataclass(frozen=True, slots=True)
class Question:
    """A fact to be asked for.

    Attributes:
        variant: "plain", or "rivals" when facts beside it share its name or its object.
        slot: index into `DEPTHS`.
        at: sentence of its statement.
    """

    fact: Fact
    variant: str
    slot: int
    at: int


@dataclass(frozen=True, slots=True)
class Journal:
    sentences: tuple[str, ...]
    questions: tuple[Question, ...]

    @property
    def text(self) -> str:
        return " ".join(self.sentences)


def journal(seed: int, n_tokens: int, per_slot: int, count: Count) -> Journal:
    """Return a journal of about `n_tokens` tokens, and `per_slot` questions of each variant at each of
    `DEPTHS`.
    """
    random = Random(seed)
    world = World(random)
    groups = [
        (slot, variant, _group(random, world, variant))
        for slot in range(len(DEPTHS))
        for variant in ("plain", "rivals")
        for _ in range(per_slot)
    ]
    n_facts = sum(count(fact.statement) for _, _, group in groups for fact in group)
    sentences = _sentences(random, world, n_tokens - n_facts, count)
    places = {slot: round(share * len(sentences)) for slot, share in enumerate(DEPTHS)}
    questions: list[Question] = []
    for slot, variant, group in reversed(groups):
        at = places[slot]
        sentences[at:at] = [fact.statement for fact in group]
        questions = [_later(question, len(group)) for question in questions]
        questions.append(Question(group[0], variant, slot, at))
    return Journal(tuple(sentences), tuple(reversed(questions)))


def _later(question: Question, n: int) -> Question:
    return Question(question.fact, question.variant, question.slot, question.at + n)


def _sentences(random: Random, world: World, n_tokens: int, count: Count) -> list[str]:
    sentences: list[str] = []
    n = 0
    while n < n_tokens:
        sentences.append(world.fact().statement if random.random() < _FACT_RATE else filler(random))
        n += count(" " + sentences[-1])
    return sentences


def _group(random: Random, world: World, variant: str) -> Sequence[Fact]:
    """Return a new fact, and with "rivals" others of its kind about the same name or object."""
    if variant == "plain":
        return [world.fact()]
    while True:
        fact = world.fact()
        if (subject := _subject(fact)) is not None:
            return [fact, *_rivals(random, world, *subject)]


def _rivals(random: Random, world: World, kind: str, name: str, thing: str) -> list[Fact]:
    rivals: list[Fact] = []
    for _ in range(_TRIES):
        other = World(random).fact()
        subject = _subject(other)
        if subject is None or subject[0] != kind or other.question in world.facts:
            continue
        if subject[1] == name or subject[2] == thing:
            world.facts[other.question] = other
            rivals.append(other)
            if len(rivals) == _RIVALS:
                return rivals
    raise RuntimeError("no rivals found")


def _subject(fact: Fact) -> tuple[str, str, str] | None:
    """Return the kind, name and object of a fact about somebody's object; None for another fact."""
    words = re.findall(r"\w+", fact.question)
    names, objects = ([word for word in words if word in known] for known in (NAMES, OBJECTS))
    return (words[1], names[0], objects[0]) if names and objects else None
