"""Prompts with known answers for the bundled model: a house journal of facts among filler, then a question.

The text is the model's training distribution, from the same word lists and templates. A seed gives the same
text on every machine and in every version of Python, as `random.Random` promises for `random()`.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

T = TypeVar("T")


def _words(text: str) -> tuple[str, ...]:
    return tuple(text.split())


NAMES = _words(
    "Ada Ben Cora Dov Elsa Finn Greta Hugo Ines Jonas Kaia Leo Mira Nils Olga Pia Quinn Rosa Sven Tara "
    "Ugo Vera Wim Xenia Yara Zeno Anton Bela Clio Dario Edda Flora Gino Hedda Ivo Jutta Kurt Lotte "
    "Marek Nadia Otto Petra Remy Signe Tomas Ursa Viktor Wanda Yusuf Zita"
)
OBJECTS = _words(
    "kite lantern compass violin umbrella teapot ladder bicycle telescope basket drum anchor blanket "
    "mirror clock candle saddle map globe whistle helmet bucket chisel hammer kettle notebook satchel "
    "sundial teacup trumpet vase wagon wheel anvil barrel bell boot broom cane chest"
)
COLORS = _words(
    "red blue green teal amber violet silver golden black white brown orange pink grey crimson ivory"
)
PLACES = _words(
    "attic cellar garden kitchen library harbor stable workshop chapel tower orchard market mill bakery "
    "forge station garret pantry hallway bridge"
)
MATERIALS = _words("brass copper iron tin oak pine glass stone clay leather wool linen")
WEATHER = _words("rain fog wind snow sun hail thunder mist frost drizzle")
DAYS = _words("Monday Tuesday Wednesday Thursday Friday Saturday Sunday")
FOODS = _words("bread soup plums cheese apples barley honey pears onions rice walnuts figs")
ANIMALS = _words("heron fox goose mule otter crow badger hare swan goat")
VERBS = ("walked to", "looked at", "asked about", "talked about", "waited near", "worked in")

_TRIES = 50
_DIGITS = "0123456789"
_CODE_LENGTHS = (4, 4, 5, 6)


@dataclass(frozen=True, slots=True)
class Fact:
    """A statement, a question about it, and the answer word for word. `key` is what it is about."""

    key: tuple[str, ...]
    statement: str
    question: str
    answer: str


class Dice:
    """Choices from one seed that do not change between versions of Python."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed).random

    def below(self, n: int) -> int:
        return int(self._random() * n)

    def chance(self, probability: float) -> bool:
        return self._random() < probability

    def choice(self, items: Sequence[T]) -> T:
        return items[self.below(len(items))]


class World:
    """Facts that are unique inside one document: no two are about the same thing."""

    def __init__(self, dice: Dice) -> None:
        self._dice = dice
        self.facts: dict[tuple[str, ...], Fact] = {}

    def fact(self) -> Fact:
        """A new fact.

        Raises:
            RuntimeError: there are so many facts that no new one was found.
        """
        for _ in range(_TRIES):
            fact = self._dice.choice((_color, _code, _place, _debt, _material))(self._dice)
            if fact.key not in self.facts:
                self.facts[fact.key] = fact
                return fact
        raise RuntimeError(f"no new fact after {len(self.facts)}")


def _color(dice: Dice) -> Fact:
    name, item, color = dice.choice(NAMES), dice.choice(OBJECTS), dice.choice(COLORS)
    statement = f"{name}'s {item} is {color}."
    return Fact(("color", name, item), statement, f"What color is {name}'s {item}?", statement)


def _code(dice: Dice) -> Fact:
    place = dice.choice(PLACES)
    code = "".join(dice.choice(_DIGITS) for _ in range(dice.choice(_CODE_LENGTHS)))
    statement = f"The code of the {place} is {code}."
    return Fact(("code", place), statement, f"What is the code of the {place}?", statement)


def _place(dice: Dice) -> Fact:
    name, item, place = dice.choice(NAMES), dice.choice(OBJECTS), dice.choice(PLACES)
    statement = f"{name} keeps the {item} in the {place}."
    return Fact(("place", name, item), statement, f"Where does {name} keep the {item}?", statement)


def _debt(dice: Dice) -> Fact:
    name, other, coins = dice.choice(NAMES), dice.choice(NAMES), 10 + dice.below(980)
    statement = f"{name} owes {other} {coins} coins."
    return Fact(("debt", name), statement, f"Whom does {name} owe, and how much?", statement)


def _material(dice: Dice) -> Fact:
    name, item, material = dice.choice(NAMES), dice.choice(OBJECTS), dice.choice(MATERIALS)
    statement = f"The {item} of {name} is made of {material}."
    return Fact(("material", name, item), statement, f"What is the {item} of {name} made of?", statement)


def filler(dice: Dice) -> str:
    """One sentence without a fact."""
    name, other, place = dice.choice(NAMES), dice.choice(NAMES), dice.choice(PLACES)
    item, weather, verb = dice.choice(OBJECTS), dice.choice(WEATHER), dice.choice(VERBS)
    day, food, dish, animal = dice.choice(DAYS), dice.choice(FOODS), dice.choice(FOODS), dice.choice(ANIMALS)
    return dice.choice(
        (
            f"On {day} there was {weather} over the {place}.",
            f"{name} {verb} the {place} with {other}.",
            f"{name} bought {food} and {dish} at the market.",
            f"A {animal} slept beside the {place} until {name} came home.",
            f'"The {weather} will stop soon," said {name}, and {other} closed the door.',
            f"{name} told {other} a long story about a {animal} and a {item}.",
            f"In the evening {name} cooked {food} while {other} read by the fire.",
            f"The road to the {place} was full of {weather}, so {name} stayed inside.",
            f"{name} and {other} cleaned the {place} before {day}.",
        )
    )


@dataclass(frozen=True, slots=True)
class Recall:
    """A journal, and a question about one of its facts.

    Attributes:
        journal: the sentences.
        fact: what is asked for.
        at: index of its statement in `journal`.
    """

    journal: tuple[str, ...]
    fact: Fact
    at: int

    @property
    def text(self) -> str:
        """A raw prompt in plain journal form; the model goes on with the answer."""
        return f"{' '.join(self.journal)} Question: {self.fact.question} Answer:"

    @property
    def messages(self) -> list[dict[str, str]]:
        """The same for `create_chat_completion`, whose answer is exactly `fact.answer`."""
        return [
            {"role": "user", "content": " ".join(self.journal)},
            {"role": "assistant", "content": "I have noted that."},
            {"role": "user", "content": self.fact.question},
        ]

    @property
    def prompt(self) -> str:
        """`messages` as the chat template writes them, for raw completion with special tokens."""
        turns = "".join(f"<|{turn['role']}|>{turn['content']}<|end|>" for turn in self.messages)
        return turns + "<|assistant|>"


def make_recall(seed: int, n_sentences: int, where: float = 0.0, fact_rate: float = 0.4) -> Recall:
    """A journal of `n_sentences` and a question about its fact nearest to the share `where` of the text.

    `where` is 0 for the start and 1 for the end. A sentence is about 14 tokens. Seeds of one's own keep
    prompts apart from those of other tests.

    Raises:
        ValueError: there is no room for a fact, or `where` is not a share.
    """
    if n_sentences < 1 or not 0 <= where <= 1:
        raise ValueError(f"n_sentences={n_sentences} must be at least 1 and where={where} from 0 to 1")
    dice = Dice(seed)
    world = World(dice)
    asked = min(n_sentences - 1, int(where * n_sentences))
    journal, fact = [], None
    for i in range(n_sentences):
        if i == asked:
            fact = world.fact()
            journal.append(fact.statement)
        else:
            journal.append(world.fact().statement if dice.chance(fact_rate) else filler(dice))
    assert fact is not None
    return Recall(tuple(journal), fact, asked)
