"""Requests of all kinds to two servers on one store, and the same ones to a server that reuses nothing.

Answers labelled exact are compared token by token: not only which token was chosen, but how likely it was.

PYTHONPATH=tests/python python -m support.mixed_requests MODEL --n 500
"""

from __future__ import annotations

import argparse
import json
import math
import random
import signal
import tempfile
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from mixedkv.bundled.corpus import make_recall
from support.other_cuts import OtherCuts
from support.server_support import Server

CHAT = "/v1/chat/completions"
N_CTX = 1024
OPTIONS = ("--n-ctx", str(N_CTX), "--parallel", "2", "--idle-prefixes", "4")
GREEDY: dict[str, Any] = {"model": "m", "temperature": 0, "max_tokens": 8}
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "description": "Tell the weather of a place.",
            "parameters": {
                "type": "object",
                "properties": {"place": {"type": "string"}},
                "required": ["place"],
            },
        },
    }
]
Message = dict[str, str]


@dataclass
class Outcome:
    """
    Attributes:
        counts: requests by kind and what became of them: "same", "labelled" (not exact, and not the same
            text), "tie" (another text, but each token's log-probability is within `bound`), "cuts" (it is
            not, but evaluations of the same tokens in other steps are as far from each other) or "differs".
        parted: of answers that are not the same all that is known.
        far: of each answer labelled exact the largest difference of a token's log-probability, in nats.
    """

    counts: Counter[str] = field(default_factory=Counter)
    parted: list[dict[str, Any]] = field(default_factory=list)
    far: list[float] = field(default_factory=list)


def text(seed: int, n_sentences: int) -> str:
    return " ".join(make_recall(70_000 + seed, max(3, n_sentences)).journal[:n_sentences])


class Mix:
    """Two servers on one store, and one that every answer is compared with.

    Args:
        bound: how far, in nats, the log-probability of a token may be from the fresh server's in an answer
            that is labelled exact. Where it is further, it may be twice as far as evaluations of the same
            tokens in other steps are from each other: see "The same request again" in
            docs/server-guarantees.md.
    """

    def __init__(
        self,
        model: Path,
        folder: Path,
        seed: int,
        kv: str = "mixed",
        embeddings: bool = True,
        bound: float = 0.1,
    ) -> None:
        self.random, self.outcome, self.bound = random.Random(seed), Outcome(), bound
        template = Path(__file__).parent / "templates" / "qwen2.5.jinja"  # as the model's own, with tools
        own = (
            "--model",
            str(model),
            "--model-name",
            "m",
            "--chat-format",
            str(template),
            "--kv",
            kv,
            *OPTIONS,
            *(["--embeddings"] if embeddings else []),
        )
        self._other_cuts = lambda: OtherCuts(model, kv, N_CTX)
        self.cuts: OtherCuts | None = None
        reuse = "chunks:check=0" if kv.startswith("mixed") else "chunks:check=0,repair=seam"
        self._options = (*own, "--store", str(folder / "store"), "--reuse", reuse)
        self.fresh = Server(*own)
        self.servers = [Server(*self._options), Server(*self._options)]
        for server in (self.fresh, *self.servers):
            server.wait_until_ready()
        self.chats: list[list[Message]] = []
        self.sessions: dict[str, list[Message]] = {}
        self.kinds: dict[str, Callable[[], None]] = {
            "chat": self._chat,
            "completion": self._completion,
            "session": self._session,
            "chunks": self._chunks,
            "tools": self._tools,
            "embeddings": self._embeddings,
            "slide": self._slide,
        }
        if not embeddings:
            self.kinds["embeddings"] = self._completion

    def close(self) -> None:
        for server in (self.fresh, *self.servers):
            server.stop(signal.SIGKILL)
        if self.cuts is not None:
            self.cuts.close()

    def run(self, n: int, each: Callable[[int], None] = lambda i: None) -> Outcome:
        for i in range(n):
            if i and i % 40 == 0:
                self._restart()
            kind = self.random.choices(list(self.kinds), (6, 3, 4, 2, 2, 2, 1))[0]
            self.kinds[kind]()
            each(i)
        return self.outcome

    def _restart(self) -> None:
        """One of the two begins anew on the store, after an end in order or a kill."""
        at = self.random.randrange(2)
        self.servers[at].wait_until_idle()
        self.servers[at].stop(self.random.choice((signal.SIGTERM, signal.SIGKILL)))
        self.servers[at] = Server(*self._options).wait_until_ready()
        self.outcome.counts["restart"] += 1

    def _ask(
        self, kind: str, body: dict[str, Any], whole: dict[str, Any] | None = None, path: str = CHAT
    ) -> Any:
        """Ask one of the servers, and the fresh one for `whole`, which is the same without a session."""
        server = self.random.choice(self.servers)
        tell = {"logprobs": True, "top_logprobs": 5} if path == CHAT else {"logprobs": 5}
        answer = server.post(path, {**GREEDY, **tell, "reuse": "exact", **body})
        alone = self.fresh.post(path, {**GREEDY, **tell, **(whole or body), "use_kv_cache": False})
        self.outcome.counts[f"{kind} {self._verdict(kind, whole or body, answer, alone)}"] += 1
        return answer

    def _verdict(self, kind: str, body: dict[str, Any], answer: Any, alone: Any) -> str:
        mine, other = answer["choices"][0], alone["choices"][0]
        same = _said(mine) == _said(other)
        if not answer["usage"]["prompt_tokens_details"]["cached_exact"]:
            return "same" if same else "labelled"
        far = _far(_tokens(mine), _tokens(other))
        self.outcome.far.append(far)
        if same and far < self.bound:
            return "same"
        verdict, spread = "tie", None
        if far >= self.bound:
            spread = self._spread(body, [one for one, _ in _tokens(mine)], [one for one, _ in _tokens(other)])
            verdict = "cuts" if far <= 2 * spread else "differs"
        found = {"verdict": verdict, "kind": kind, "far": far, "spread": spread, "usage": answer["usage"]}
        self.outcome.parted.append({**found, "said": _said(mine), "alone": _said(other), "body": body})
        return verdict

    def _spread(self, body: dict[str, Any], mine: list[str], other: list[str]) -> float:
        """Return how far evaluations of a prompt in other steps are from each other, in nats, up to where two
        answers part.
        """
        self.cuts = self.cuts or self._other_cuts()
        chat = "messages" in body
        prompt = self.fresh.post("/apply-template", body)["prompt"] if chat else body["prompt"]
        n = next((i for i, (a, b) in enumerate(zip(mine, other, strict=False)) if a != b), None)
        n = min(len(mine), len(other)) - 1 if n is None else n
        before, ours, theirs = (
            self.fresh.post("/tokenize", {"content": text})["tokens"]
            for text in ("".join(mine[:n]), mine[n], other[n])
        )
        ids = self.fresh.post("/tokenize", {"content": prompt, "add_special": not chat})["tokens"]
        return self.cuts.spread(ids, [*before, ours[0]], theirs[0]) if len(ids) < N_CTX - 16 else 0.0

    # --- kinds ---

    def _chat(self) -> None:
        """A new chat, or one that goes on."""
        pick = self.random
        if not self.chats or len(self.chats[-1]) > 8 or pick.random() < 0.3:
            self.chats.append([{"role": "system", "content": text(pick.randrange(4), 3)}])
        chat = pick.choice(self.chats[-3:])
        chat.append({"role": "user", "content": text(pick.randrange(900), 2)})
        answer = self._ask("chat", {"messages": chat})
        chat.append({"role": "assistant", "content": answer["choices"][0]["message"]["content"]})
        if len(chat) > 9:
            self.chats.remove(chat)

    def _completion(self) -> None:
        pick = self.random
        prompt = f"{text(pick.randrange(4), 6)} {text(pick.randrange(900), 1)}"
        self._ask("completion", {"prompt": prompt}, path="/v1/completions")

    def _session(self) -> None:
        pick = self.random
        if len(self.sessions) < 3:
            messages = [{"role": "system", "content": text(10 + len(self.sessions), 5)}]
            name = f"session-{len(self.sessions)}"
            pick.choice(self.servers).post(
                "/v1/context", {"model": "m", "session_id": name, "messages": messages, "mode": "append"}
            )
            self.sessions[name] = messages
        name = pick.choice(list(self.sessions))
        question = {"role": "user", "content": text(pick.randrange(900), 1)}
        append = len(self.sessions[name]) < 9
        body = {"session_id": name, "messages": [question], "append": append}
        answer = self._ask("session", body, {"messages": [*self.sessions[name], question]})
        if append:
            said = {"role": "assistant", "content": answer["choices"][0]["message"]["content"]}
            self.sessions[name] += [question, said]

    def _chunks(self) -> None:
        pick = self.random
        first, second = pick.sample(range(3), 2)
        passages = f"{text(20 + first, 12)} {text(20 + second, 12)}"
        body = {"prompt": f"{passages} {text(pick.randrange(900), 1)}"}
        self._ask(
            "chunks", {**body, "reuse": self.random.choice(("exact", "chunks"))}, body, path="/v1/completions"
        )

    def _tools(self) -> None:
        question = {
            "role": "user",
            "content": f"What is the weather in {self.random.choice(('Rome', 'Oslo', 'Lima'))}?",
        }
        self._ask("tools", {"messages": [question], "tools": TOOLS})

    def _embeddings(self) -> None:
        body = {"model": "m", "input": [text(self.random.randrange(900), 1) for _ in range(2)]}
        mine, other = (
            np.array([one["embedding"] for one in server.post("/v1/embeddings", body)["data"]])
            for server in (self.random.choice(self.servers), self.fresh)
        )
        same = bool(np.abs(mine - other).max() < 1e-3)
        self.outcome.counts[f"embeddings {'same' if same else 'differs'}"] += 1

    def _slide(self) -> None:
        seed = self.random.randrange(5)
        chat = [{"role": "user", "content": text(30 + seed, 3)}]
        for i in range(12):
            chat += [
                {"role": "assistant", "content": "Noted."},
                {"role": "user", "content": text(40 + 20 * seed + i, 6)},
            ]
        self._ask("slide", {"messages": chat[: 2 * self.random.randrange(8, 13) + 1], "overflow": "slide"})


def _said(choice: dict[str, Any]) -> Any:
    message = choice.get("message")
    if message is None:
        return choice["text"]
    calls = [call["function"] for call in message.get("tool_calls") or []]
    return [message.get("content"), calls]


Token = tuple[str, dict[str, float]]


def _far(mine: Sequence[Token], other: Sequence[Token]) -> float:
    """Return the largest difference of log-probabilities, in nats, up to the first token that differs.

    At that token both servers tell how likely the two candidates are. A candidate that one of them does not
    have among its likeliest counts as infinitely far.
    """
    far = 0.0
    for (token, tops), (theirs, their_tops) in zip(mine, other, strict=False):
        for name in {token, theirs}:
            if name not in tops or name not in their_tops:
                return math.inf
            far = max(far, abs(tops[name] - their_tops[name]))
        if token != theirs:
            break
    return far


def _tokens(choice: dict[str, Any]) -> list[Token]:
    """Return each token with the log-probabilities of the likeliest ones in its place."""
    found = choice["logprobs"]
    if "content" in found:
        return [
            (one["token"], {top["token"]: top["logprob"] for top in one["top_logprobs"]})
            for one in found["content"]
        ]
    return list(zip(found["tokens"], found["top_logprobs"], strict=True))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("model", type=Path)
    parser.add_argument("--n", type=int, default=500)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--kv", default="mixed")
    parser.add_argument("--bound", type=float, default=0.1, help="nats")
    parser.add_argument("--no-embeddings", action="store_true")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        mix = Mix(args.model, Path(folder), args.seed, args.kv, not args.no_embeddings, args.bound)

        def note(i: int) -> None:
            while mix.outcome.parted:
                print(json.dumps(mix.outcome.parted.pop(0)), flush=True)
            if i % 10 == 9:
                print(i + 1, dict(mix.outcome.counts), flush=True)

        try:
            mix.run(args.n, note)
        finally:
            far = sorted(mix.outcome.far)
            print(dict(mix.outcome.counts))
            print("furthest, nats:", " ".join(f"{x:.2g}" for x in far[-20:]), f"median {np.median(far):.2g}")
            mix.close()


if __name__ == "__main__":
    main()
