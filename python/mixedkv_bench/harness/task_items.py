"""Items of `mixedkv bench quality --task`: long documents with facts in them, and questions about these.

Documents are real text, or for `recall` journals of the bundled model's corpus. A question ends in the first
words of its answer, so that a small model answers in a form that can be checked.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from random import Random

from mixedkv_bench.harness import sample_text
from mixedkv_bench.harness.real_text import read_real_text

RECALL = "recall"  # of the bundled model alone, which was taught to answer
TASKS = ("lookup", "needles", "quote", "json", "sums", "format", "code", "fill", "chat")
_PLACES = (
    "mill", "harbor", "library", "bakery", "castle", "museum", "station", "garden", "tower", "market",
    "school", "theater", "brewery", "chapel", "stable", "quarry", "lighthouse", "dairy", "forge", "orchard",
)  # fmt: skip
_KINDS_OF_PLACES = ("old", "new", "upper", "lower")
_EVERY = 32  # tokens of a document for each place
_NAMES = (
    "Mira", "Tomas", "Ines", "Jonas", "Leila", "Pavel", "Rosa", "Stefan", "Yara", "Bruno", "Clara", "Dario",
    "Elena", "Felix", "Greta", "Hugo",
)  # fmt: skip
_CITIES = ("Lisbon", "Oslo", "Prague", "Cairo", "Lima", "Kyoto", "Dublin", "Naples", "Quito", "Sofia")
_JOBS = ("baker", "nurse", "pilot", "farmer", "lawyer", "painter", "teacher", "plumber", "singer", "baker")
_N_PEOPLE = 10
_N_SUMS = 10
_QUOTED = 8  # words that have to come word for word
_GIVEN = 6  # words that a quotation begins with
_N_LINES = 40  # of code that are gone on with
_LINE = 24  # characters that one has at least
_N_FILLED = 40  # lines of functions behind the document
_HEAD = 8  # lines that stand between the head of such a function and the one asked for, at most
_N_TURNS = 10  # of a chat, the one that is asked among them
_QUESTION = "User: What else does the manual say?\nAssistant:"
_SENTENCE = re.compile(r"(?<=[.!?]) (?=[A-Z][a-z])")

Person = dict[str, str | int]
Count = Callable[[str], int]  # tokens of a text


@dataclass(frozen=True, slots=True)
class TaskItem:
    """A question about a document.

    Attributes:
        task: one of `TASKS`, or `RECALL` with the place of the fact in its journal.
        prompt: what comes after the document, up to where the answer begins.
        answer: what a right answer begins with, white space and letter case aside.
        n_tokens: room for the answer; 0: its tokens are given one after the other, and each has to be the
            likeliest one after those before it.
    """

    task: str
    prompt: str
    answer: str
    n_tokens: int

    def is_right(self, said: str) -> bool:
        """Return whether an answer begins as it should."""
        return _plain(said).startswith(_plain(self.answer))

    def is_decided(self, said: str) -> bool:
        """Return whether no further token can change what `is_right` says of an answer's beginning."""
        said, answer = _plain(said), _plain(self.answer)
        is_whole = not said.endswith("\ufffd")  # no byte of a character is missing
        return is_whole and (said.startswith(answer) or not answer.startswith(said))


@dataclass(frozen=True, slots=True)
class Pile:
    """A document and the questions about it."""

    text: str
    items: tuple[TaskItem, ...]


def make_piles(tasks: Sequence[str], seed: int, n_tokens: int, count: Count) -> Iterator[Pile]:
    """Yield documents of about `n_tokens` tokens with the questions of `tasks`: prose with facts in it, a
    dialogue, code, a chat, a journal; those that any of the questions is about.
    """
    makers: dict[tuple[str, ...], Callable[[Random, int, Count], Pile]] = {
        ("format",): _dialogue,
        ("code", "fill"): _code,
        ("chat",): _chat,
        (RECALL,): _journal,
    }
    others = {task for tasks_of_one in makers for task in tasks_of_one}
    facts = tuple(each for each in TASKS if each not in others)
    for kinds, make in {facts: _facts, **makers}.items():
        if any(each in tasks for each in kinds):
            pile = make(Random(seed), n_tokens, count)
            yield Pile(pile.text, tuple(item for item in pile.items if item.task.split()[0] in tasks))


def _plain(text: str) -> str:
    return " ".join(text.lower().split())


def _facts(random: Random, n_tokens: int, count: Count) -> Pile:
    places = [f"{kind} {place}" for kind in _KINDS_OF_PLACES for place in _PLACES]
    chosen = random.sample(places, min(len(places), n_tokens // _EVERY))
    codes = {place: str(random.randrange(1000, 10000)) for place in chosen}
    people = [_person(random, name) for name in random.sample(_NAMES, _N_PEOPLE)]
    statements = [f"The access code of the {place} is {code}." for place, code in codes.items()]
    statements += map(_statement, people)
    random.shuffle(statements)
    fillers = _prose(random, n_tokens - sum(map(count, statements)), count)
    every = len(fillers) / len(statements)
    parts = list(fillers)
    for i, statement in reversed(list(enumerate(statements))):
        parts.insert(int(i * every), statement)
    items = [*_lookups(codes), *_needles(random, codes), *_quotes(random, fillers)]
    items += [*_extractions(people), *_sums(random, people)]
    return Pile("\n\n".join(parts), tuple(items))


def _person(random: Random, name: str) -> Person:
    age, city, job = random.randrange(20, 70), random.choice(_CITIES), random.choice(_JOBS)
    return {"name": name, "age": age, "city": city, "job": job}


def _statement(person: Person) -> str:
    return "{name} is {age} years old, lives in {city} and works as a {job}.".format(**person)


def _prose(random: Random, n_tokens: int, count: Count) -> list[str]:
    """Return paragraphs of prose with that many tokens, from a random place of the text on."""
    whole = read_real_text("prose").text.split("\n\n")
    paragraphs = [" ".join(each.split()) for each in whole]
    paragraphs = [each for each in paragraphs if len(each) > 150 and each[0].isupper() and each.endswith(".")]
    chosen: list[str] = []
    n = 0
    for paragraph in random.sample(paragraphs, len(paragraphs)):
        n += count(paragraph) + 1
        if n > n_tokens:
            return chosen
        chosen.append(paragraph)
    return chosen


def _lookups(codes: dict[str, str]) -> Iterator[TaskItem]:
    for place, code in codes.items():
        prompt = f"\n\nQuestion: What is the access code of the {place}?\n"
        prompt += f"Answer: The access code of the {place} is"
        yield TaskItem("lookup", prompt, code, 0)


def _needles(random: Random, codes: dict[str, str]) -> Iterator[TaskItem]:
    """Yield three codes in a row, one after the other, each after the right ones before it."""
    for _ in range(8):
        chosen = random.sample(sorted(codes), 3)
        places = ", ".join(chosen[:-1]) + " and " + chosen[-1]
        prompt = f"\n\nQuestion: What are the access codes of the {places}, in this order?\nAnswer:"
        for place in chosen:
            prompt += f" The access code of the {place} is"
            yield TaskItem("needles", prompt, codes[place], 8)
            prompt += f" {codes[place]}."


def _quotes(random: Random, paragraphs: Sequence[str]) -> Iterator[TaskItem]:
    sentences = [each for paragraph in paragraphs for each in _SENTENCE.split(paragraph)]
    long = [words for each in sentences if len(words := each.split()) >= _GIVEN + _QUOTED]
    starts = [" ".join(words[:_GIVEN]) for words in long]
    unique = [words for words in long if starts.count(" ".join(words[:_GIVEN])) == 1]
    for words in random.sample(unique, min(20, len(unique))):
        prompt = f'\n\nA passage from the text above, word for word: "{" ".join(words[:_GIVEN])}'
        yield TaskItem("quote", prompt, " ".join(words[_GIVEN : _GIVEN + _QUOTED]), 40)


def _extractions(people: Sequence[Person]) -> Iterator[TaskItem]:
    """Yield the values of a JSON object, one after the other, each after the right ones before it.

    Its keys and their order are given by an example.
    """
    example = json.dumps({"name": "Otto", "age": 51, "city": "Vienna", "job": "tailor"})
    for person in people:
        text = json.dumps(person)
        for key in ("age", "city", "job"):
            at = text.index(f'"{key}": ') + len(f'"{key}": ')
            prompt = f"\n\nPeople of the text above as JSON, one in a line:\n{example}\n{text[:at].rstrip()}"
            yield TaskItem("json", prompt, json.dumps(person[key]), 8)


def _sums(random: Random, people: Sequence[Person]) -> Iterator[TaskItem]:
    """Make questions of how old two of the people are together: either age and the sum, each after the right
    ones before it.
    """
    example = "Otto is 51 years old, Anna is 22 years old: 51 + 22 = 73."
    for _ in range(_N_SUMS):
        one, other = random.sample(list(people), 2)
        prompt = f"\n\nTwo people of the text above and their years together.\n{example}\n{one['name']} is"
        yield TaskItem("sums", prompt, f"{one['age']} years", 8)
        prompt += f" {one['age']} years old, {other['name']} is"
        yield TaskItem("sums", prompt, f"{other['age']} years", 8)
        prompt += f" {other['age']} years old: {one['age']} + {other['age']} ="
        yield TaskItem("sums", prompt, f"{int(one['age']) + int(other['age'])}", 8)


def _dialogue(random: Random, n_tokens: int, count: Count) -> Pile:
    """Turns whose answers are numbered and closed by a mark: will the next ones be?"""
    talks = [talk.split("\n") for talk in read_real_text("dialogue").text.split("\n\n")]
    random.shuffle(talks)
    text, number, questions = "", 0, []
    for talk in talks:
        question, answer = talk[0].removeprefix("A: "), talk[1].removeprefix("B: ") if len(talk) > 1 else ""
        if not answer or len(answer) > 300 or len(question) > 300:
            continue
        turn = f"User: {question}\nReply {number + 1} of many << {answer} >>\n\n"
        if count(text + turn) > n_tokens:
            questions.append(question)
            if len(questions) == 10:
                break
            continue
        text, number = text + turn, number + 1
    form = f"{number + 1} of many <<"
    return Pile(text, tuple(TaskItem("format", f"User: {each}\nReply", form, 12) for each in questions))


def _code(random: Random, n_tokens: int, count: Count) -> Pile:
    """Code; lines of its first half that are gone on with after the two before them, and lines of the
    functions that follow on the document, after the function's lines before them.
    """
    text = read_real_text("code").text
    lines = [line for line in text[random.randrange(len(text) // 2) :].split("\n")[1:] if line.strip()]
    whole = lines
    while (n := count("\n".join(lines))) > n_tokens:
        lines = lines[: max(1, min(len(lines) - 1, len(lines) * n_tokens // n))]
    candidates = [i for i in range(2, len(lines) // 2) if _is_long(lines[i])]
    candidates = [i for i in candidates if lines.count(lines[i]) == lines.count(lines[i - 1]) == 1]
    items = []
    for i in sorted(random.sample(candidates, min(_N_LINES, len(candidates)))):
        items.append(_line("code", "# Once more, word for word:", lines[i - 2 : i], lines[i]))
    return Pile("\n".join(lines), (*items, *_filled(random, whole[len(lines) :])))


def _is_long(line: str) -> bool:
    return len(line.strip()) >= _LINE and line[0] == " "


def _line(task: str, head: str, before: Sequence[str], line: str) -> TaskItem:
    """Make the question for a line of code, its indentation given."""
    answer = line.lstrip()
    given = "\n".join([*before, line[: -len(answer) - 1]])
    return TaskItem(task, f"\n\n{head}\n{given}", answer, 0)


def _filled(random: Random, following: Sequence[str]) -> Iterator[TaskItem]:
    """Yield a line or two of each of the next functions, after the lines of the function before it."""
    heads = [i for i, line in enumerate(following) if line.lstrip().startswith("def ")]
    n = 0
    for head, end in pairwise([*heads, len(following)]):
        candidates = [i for i in range(head + 1, min(end, head + 1 + _HEAD)) if _is_long(following[i])]
        for i in sorted(random.sample(candidates, min(2, len(candidates)))):
            if n == _N_FILLED:
                return
            n += 1
            yield _line("fill", "# The next function:", following[head:i], following[i])


def _chat(random: Random, n_tokens: int, count: Count) -> Pile:
    """Return a chat whose first turn states facts, and whose next ones are about other texts; its last turn
    asks for a fact.
    """
    people = [_person(random, name) for name in random.sample(_NAMES, _N_PEOPLE)]
    stated = " ".join(map(_statement, people))
    turns = [f"User: These are the people of my team. {stated}\nAssistant: Thank you, I have noted that."]
    answers = _prose(random, n_tokens - count(turns[0]) - (_N_TURNS - 2) * count(_QUESTION), count)
    for i in range(_N_TURNS - 2):
        turns.append(f"{_QUESTION} {' '.join(answers[i :: _N_TURNS - 2])}")
    return Pile("\n\n".join(turns), tuple(_facts_of_a_team(people)))


def _facts_of_a_team(people: Sequence[Person]) -> Iterator[TaskItem]:
    for each in people:
        name = each["name"]
        for question, begun, answer in (
            (f"How old is {name}?", f"{name} is", f"{each['age']} years"),
            (f"Where does {name} live?", f"{name} lives in", str(each["city"])),
            (f"What is {name}'s job?", f"{name} works as a", str(each["job"])),
        ):
            prompt = f"\n\nUser: Of my team: {question}\nAssistant: {begun}"
            yield TaskItem("chat", prompt, answer, 8)


_PER_PLACE = 4  # questions of each variant at each place of a journal


def _journal(random: Random, n_tokens: int, count: Count) -> Pile:
    """Return a journal, half of whose facts have others about the same name or object beside them."""
    n = n_tokens - count(sample_text.NOTED)
    journal = sample_text.journal(random.randrange(1 << 30), n, _PER_PLACE, count)
    places = [f"{RECALL} at {share:.0%}" for share in sample_text.DEPTHS]
    items = (
        TaskItem(
            places[each.slot],
            sample_text.NOTED + sample_text.ask(each.fact),
            each.fact.answer + sample_text.END,
            28,
        )
        for each in journal.questions
    )
    return Pile(sample_text.OPENING + journal.text, tuple(items))
