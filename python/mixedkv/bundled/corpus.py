"""Prompts with known answers for the bundled model: a house journal of facts among filler, then a question.

The text is the model's training distribution, from the same word lists and templates.
"""

from __future__ import annotations

from dataclasses import dataclass
from random import Random
from typing import NamedTuple


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


class Fact(NamedTuple):
    """A statement, a question about it, and the answer word for word."""

    statement: str
    question: str
    answer: str


class World:
    """Facts that are unique inside one document: no two answer the same question."""

    def __init__(self, random: Random) -> None:
        self._random = random
        self.facts: dict[str, Fact] = {}  # by question

    def fact(self) -> Fact:
        """Return a new fact.

        Raises:
            RuntimeError: there are so many facts that no new one was found.
        """
        for _ in range(_TRIES):
            fact = self._random.choice((_color, _code, _place, _debt, _material))(self._random)
            if fact.question not in self.facts:
                self.facts[fact.question] = fact
                return fact
        raise RuntimeError(f"no new fact after {len(self.facts)}: make a shorter document")


def _color(r: Random) -> Fact:
    name, item, color = r.choice(NAMES), r.choice(OBJECTS), r.choice(COLORS)
    statement = f"{name}'s {item} is {color}."
    return Fact(statement, f"What color is {name}'s {item}?", statement)


def _code(r: Random) -> Fact:
    place, code = r.choice(PLACES), "".join(r.choices(_DIGITS, k=r.choice(_CODE_LENGTHS)))
    statement = f"The code of the {place} is {code}."
    return Fact(statement, f"What is the code of the {place}?", statement)


def _place(r: Random) -> Fact:
    name, item, place = r.choice(NAMES), r.choice(OBJECTS), r.choice(PLACES)
    statement = f"{name} keeps the {item} in the {place}."
    return Fact(statement, f"Where does {name} keep the {item}?", statement)


def _debt(r: Random) -> Fact:
    name, other, coins = r.choice(NAMES), r.choice(NAMES), r.randrange(10, 990)
    statement = f"{name} owes {other} {coins} coins."
    return Fact(statement, f"Whom does {name} owe, and how much?", statement)


def _material(r: Random) -> Fact:
    name, item, material = r.choice(NAMES), r.choice(OBJECTS), r.choice(MATERIALS)
    statement = f"The {item} of {name} is made of {material}."
    return Fact(statement, f"What is the {item} of {name} made of?", statement)


def filler(r: Random) -> str:
    """Return one sentence without a fact."""
    name, other, place = r.choice(NAMES), r.choice(NAMES), r.choice(PLACES)
    item, weather, verb = r.choice(OBJECTS), r.choice(WEATHER), r.choice(VERBS)
    day, food, dish, animal = r.choice(DAYS), r.choice(FOODS), r.choice(FOODS), r.choice(ANIMALS)
    return r.choice(
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
        at: the index of its statement in `journal`.
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


def make_recall(seed: int, n_sentences: int, where: float = 0.2, fact_rate: float = 0.4) -> Recall:
    """Return a journal of `n_sentences`, of about 12 tokens each, and a question about a fact in it.

    The fact stands at the share `where` of the text, 0 for the start and 1 for the end. A share `fact_rate`
    of the other sentences are facts too. Take seeds of your own to keep prompts apart. The model answers
    nearly all questions up to some 2,000 tokens, but only about half of those about the first sentence.

    Raises:
        ValueError: there is no room for a fact, or `where` is not a share.
    """
    if n_sentences < 1 or not 0 <= where <= 1:
        raise ValueError(f"n_sentences={n_sentences} must be at least 1 and where={where} from 0 to 1")
    r = Random(seed)
    world = World(r)
    at = min(n_sentences - 1, int(where * n_sentences))
    journal = [_sentence(world, r, 1.0 if i == at else fact_rate) for i in range(n_sentences)]
    fact = next(fact for fact in world.facts.values() if fact.statement == journal[at])
    return Recall(tuple(journal), fact, at)


def _sentence(world: World, r: Random, fact_rate: float) -> str:
    return world.fact().statement if r.random() < fact_rate else filler(r)
