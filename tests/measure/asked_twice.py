"""Ask an idle server each prompt twice in a row at temperature 0, and count the answers that differ.

Prompts are questions about passages of real text: prose, code and dialogue in turn, each of another length.

PYTHONPATH=tests/python python tests/measure/asked_twice.py smollm2:f16 --n 200
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import takewhile
from typing import Any

from mixedkv.model.named_model import find_measured_model
from mixedkv_bench.harness.real_text import read_real_text
from support.servers.server import Server, running

_CHAT = "/v1/chat/completions"
_QUESTIONS = ("What is this about?", "Say it in one sentence.", "Go on from here.", "Which words matter?")
_MIN_WORDS, _MAX_WORDS = 30, 400
_N_ANSWER = 48


@dataclass
class Differences:
    """How many second answers were not the first one: in their text, and in the bits of a log-probability."""

    n: int = 0
    texts: int = 0
    bits: int = 0
    farthest: float = 0.0  # nats, over the tokens that both answers begin with
    not_exact: int = 0  # answers without `cached_exact`


def ask_twice(server: Server, prompts: Iterator[str]) -> Differences:
    """Ask each prompt twice in a row and return what differed."""
    found = Differences()
    for prompt in prompts:
        first, second = _ask(server, prompt), _ask(server, prompt)
        found.n += 1
        found.texts += first.text != second.text
        found.bits += first.logprobs != second.logprobs
        both = zip(first.tokens, second.tokens, first.logprobs, second.logprobs, strict=False)
        same = takewhile(lambda each: each[0] == each[1], both)
        found.farthest = max([found.farthest, *(abs(a - b) for _, _, a, b in same)])
        found.not_exact += not second.exact
    return found


def real_prompts(n: int, seed: int) -> Iterator[str]:
    """Yield questions about passages of real text, each about another one."""
    pick = random.Random(seed)
    texts = [read_real_text(kind).text.split(" ") for kind in ("prose", "code", "dialogue")]
    for i in range(n):
        words, n_words = texts[i % len(texts)], pick.randrange(_MIN_WORDS, _MAX_WORDS)
        begin = pick.randrange(len(words) - n_words)
        yield " ".join(words[begin : begin + n_words]) + "\n\n" + pick.choice(_QUESTIONS)


@dataclass(frozen=True)
class _Answer:
    text: str
    tokens: tuple[str, ...]
    logprobs: tuple[float, ...]
    exact: bool


def _ask(server: Server, prompt: str) -> _Answer:
    server.wait_until_idle()
    body: dict[str, Any] = {"model": "m", "temperature": 0, "max_tokens": _N_ANSWER, "logprobs": True}
    answer = server.post(_CHAT, body | {"messages": [{"role": "user", "content": prompt}]})
    [choice] = answer["choices"]
    content = choice["logprobs"]["content"]
    tokens, logprobs = tuple(one["token"] for one in content), tuple(one["logprob"] for one in content)
    exact = answer["usage"]["prompt_tokens_details"].get("cached_exact", True)
    return _Answer(choice["message"]["content"], tokens, logprobs, exact)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--kv", action="append", help="default: f16 and mixed")
    parser.add_argument("--n", type=int, default=200)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("options", nargs="*", metavar="OPTION", help="of mixedkv serve, after --")
    args = parser.parse_args()
    path = find_measured_model(args.model)
    for kv in args.kv or ("f16", "mixed"):
        with running("-m", str(path), "--kv", kv, *args.options) as server:
            found = ask_twice(server, real_prompts(args.n, args.seed))
        print(
            f"{kv}: {found.texts} of {found.n} texts differ, {found.bits} in the bits of a log-probability, "
            f"the farthest by {found.farthest:.3g} nats; {found.not_exact} without cached_exact",
            flush=True,
        )


if __name__ == "__main__":
    main()
