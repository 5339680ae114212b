"""Requests of all kinds to two servers on one store, and the same ones to a server that reuses nothing.

PYTHONPATH=tests/python python -m support.mixed_requests MODEL --n 500
"""

from __future__ import annotations

import argparse
import json
import random
import signal
import tempfile
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from mixedkv.bundled.corpus import make_recall
from support.server_support import Server

CHAT = "/v1/chat/completions"
N_CTX = 1024
OPTIONS = ("--n-ctx", str(N_CTX), "--parallel", "2", "--idle-prefixes", "4", "--chunk-check", "0")
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
        counts: requests by kind and what became of them: "same", "labelled", "tie" (the reference's two
            likeliest tokens are within `TIE` where answers part) or "differs".
        differing: of these all that is known.
    """

    counts: Counter[str] = field(default_factory=Counter)
    differing: list[dict[str, Any]] = field(default_factory=list)


TIE = 1.0  # nats: what quantised caches and weights make of sums in another order, see docs/server.md


def text(seed: int, n_sentences: int) -> str:
    return " ".join(make_recall(70_000 + seed, max(3, n_sentences)).journal[:n_sentences])


class Mix:
    """Two servers on one store, and one that every answer is compared with."""

    def __init__(
        self, model: Path, folder: Path, seed: int, kv: str = "mixed", embeddings: bool = True
    ) -> None:
        self.random, self.outcome = random.Random(seed), Outcome()
        template = Path(__file__).parent / "templates" / "qwen2.5.jinja"  # as the model's own, with tools
        own = (
            "--model",
            str(model),
            "--model-name",
            "m",
            "--chat-template",
            str(template),
            "--kv",
            kv,
            *OPTIONS,
            *(["--embeddings"] if embeddings else []),
        )
        self._options = (*own, "--store", str(folder / "store"), "--reuse", "chunks")
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
        tell = {"logprobs": True, "top_logprobs": 2} if path == CHAT else {"logprobs": 2}
        answer = server.post(path, {**GREEDY, **tell, "reuse": "exact", **body})
        alone = self.fresh.post(path, {**GREEDY, **tell, **(whole or body), "use_kv_cache": False})
        self.outcome.counts[f"{kind} {self._verdict(kind, body, answer, alone)}"] += 1
        return answer

    def _verdict(self, kind: str, body: dict[str, Any], answer: Any, alone: Any) -> str:
        mine, other = answer["choices"][0], alone["choices"][0]
        if _said(mine) == _said(other):
            return "same"
        details = answer["usage"]["prompt_tokens_details"]
        if not details["cached_exact"] or answer.get("warnings"):
            return "labelled"
        margin = _margin(mine, other)
        found = {"kind": kind, "margin": margin, "body": body, "usage": answer["usage"], "said": _said(mine)}
        self.outcome.differing.append({**found, "alone": _said(other), "usage_alone": alone["usage"]})
        verdict = "tie" if margin is not None and margin < TIE else "differs"
        self.outcome.differing[-1]["verdict"] = verdict
        return verdict

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


def _margin(mine: dict[str, Any], other: dict[str, Any]) -> float | None:
    """How much likelier the reference's token is than the one after it where two answers part, in nats."""
    ours, theirs = (_tokens(choice) for choice in (mine, other))
    for (token, _), (theirs_token, tops) in zip(ours, theirs, strict=False):
        if token != theirs_token:
            best = sorted(tops, reverse=True)
            return best[0] - best[1] if len(best) > 1 else None
    return None


def _tokens(choice: dict[str, Any]) -> list[tuple[str, list[float]]]:
    found = choice.get("logprobs") or {}
    if "content" in found:
        return [
            (one["token"], [top["logprob"] for top in one["top_logprobs"]]) for one in found["content"] or []
        ]
    tops = found.get("top_logprobs") or []
    return [(token, list(top.values())) for token, top in zip(found.get("tokens", []), tops, strict=False)]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("model", type=Path)
    parser.add_argument("--n", type=int, default=500)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--kv", default="mixed")
    parser.add_argument("--no-embeddings", action="store_true")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        mix = Mix(args.model, Path(folder), args.seed, args.kv, not args.no_embeddings)

        def note(i: int) -> None:
            while mix.outcome.differing:
                print(json.dumps(mix.outcome.differing.pop(0)), flush=True)
            if i % 10 == 9:
                print(i + 1, dict(mix.outcome.counts), flush=True)

        try:
            mix.run(args.n, note)
        finally:
            print(dict(mix.outcome.counts))
            mix.close()


if __name__ == "__main__":
    main()
