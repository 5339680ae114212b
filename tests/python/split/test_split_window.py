"""Sessions longer than the context go on with their first and last tokens, which are sent anew."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest

from mixedkv import Llama
from mixedkv.bundled import model_path
from mixedkv.chunks.gate import last_logits
from mixedkv.split.client import SplitClient, SplitSession
from mixedkv.split.export import Exported
from mixedkv.split.head import Head
from mixedkv.split.session_key import new_key
from support import split_support
from support.split_support import Running

_N_CTX, _SINKS, _WINDOW = 512, 4, 200
_SLIDE: dict[str, Any] = {"sinks": _SINKS, "window": _WINDOW}
_GO_ON = ((2, -100.0),)  # the token that ends an answer
_N = 1000  # tokens of an answer
_STEP = _N_CTX - _SINKS - _WINDOW  # tokens that go at a time
_N_SEQ = 4
_MIXED = "mixed:threshold=32,group=8"
Code = grpc.StatusCode


@pytest.fixture(scope="module")
def parts(tmp_path_factory: pytest.TempPathFactory) -> Exported:
    return split_support.split(model_path(), tmp_path_factory.mktemp("split"))


@pytest.fixture(scope="module")
def prompt(head: Head) -> list[int]:
    return head.tokenizer.encode("The rain fell on the mill, and the lamp in the window was out.")[0]


def _answer(session: SplitSession, prompt: list[int], n: int = _N, **options: Any) -> list[int]:
    return list(
        session.generate_tokens(
            prompt, max_tokens=n, **{"temperature": 0, "logit_bias": _GO_ON, **_SLIDE, **options}
        )
    )


def _local(kv: str, prompt: list[int], n: int, sinks: int = _SINKS) -> list[int]:
    """The answer of `Llama` alone, which evaluates what is left of the text anew."""
    threads = {"n_threads": 1, "n_threads_batch": 1}
    cells = {"n_ctx": _N_CTX, "n_seq_max": _N_SEQ, "kv_unified": True}  # as the server's
    with Llama(model_path(), kv=kv, **cells, **threads, verbose=False) as llm:
        llm.eval(prompt)
        tokens, answer = list(prompt), []
        while True:
            logits = last_logits(llm).copy()
            logits[2] -= 100.0
            answer.append(int(logits.argmax()))
            tokens.append(answer[-1])
            if len(answer) == n:
                return answer
            new = tokens[-1:]
            if len(tokens) == _N_CTX:
                del tokens[sinks : len(tokens) - _WINDOW]
                llm.reset()
                llm.kv.clear()
                new = tokens
            llm.eval(new)


@pytest.fixture(scope="module")
def expected(prompt: list[int]) -> dict[str, list[int]]:
    return {kv: _local(kv, prompt, _N) for kv in ("f16", "q8_0", _MIXED)}


@contextmanager
def _session(
    parts: Exported, head: Head, kv: str = "f16", **options: Any
) -> Iterator[tuple[Running, SplitClient, SplitSession]]:
    with (
        _running(parts, kv, **options) as server,
        SplitClient(head, server.address, precision="f32") as client,
        client.session() as session,
    ):
        yield server, client, session


def _running(parts: Exported, kv: str = "f16", **options: Any) -> AbstractContextManager[Running]:
    """With few sequences, so that a mixed cache has the window that was asked for."""
    few = {"n_ctx": _N_CTX, "parallel": 2, "idle_sessions": _N_SEQ - 2}
    return split_support.running(parts.body, kv=kv, **{**few, **options})


def _n_sent(head: Head, session: SplitSession) -> float:
    """Vectors that were sent."""
    return session.n_sent_bytes / (4 * head.width)


# --- as one model, and what is sent ---


@pytest.mark.parametrize("kv", ["f16", "q8_0", _MIXED])
def test_an_answer_is_that_of_one_model_that_has_what_is_left(
    parts: Exported, head: Head, prompt: list[int], expected: dict[str, list[int]], kv: str
) -> None:
    with _session(parts, head, kv) as (_, _, session):
        assert _answer(session, prompt) == expected[kv]
        assert session.n_resends == 0
        assert session.n_dropped == 2 * _STEP
        left = _SINKS + _WINDOW - 1  # besides the token that had no room
        assert _n_sent(head, session) == len(prompt) + _N - 1 + 2 * left
        assert len(session.tokens) + session.n_dropped == len(prompt) + _N - 1


def test_drafts_are_as_without_them(
    parts: Exported, head: Head, prompt: list[int], expected: dict[str, list[int]]
) -> None:
    """In a mixed cache, where drafts have the bits of single tokens; in F16 near logits may change places."""
    n = 700
    with _session(parts, head, _MIXED) as (server, _, session):
        assert _answer(session, prompt, n, draft=8) == expected[_MIXED][:n]
        assert session.n_resends == 0
        assert session.n_dropped == _STEP
        assert server.engine.n_steps < n


def test_the_next_turn_goes_on_from_what_is_left(parts: Exported, head: Head, prompt: list[int]) -> None:
    """Whether it is asked with the whole text or with what the session has of it."""
    more = head.tokenizer.tokenize(" The mill", start=False)
    with _session(parts, head) as (_, client, whole), client.session() as rest:
        answers = []
        for session in (whole, rest):
            first = _answer(session, prompt)
            sent = _n_sent(head, session)
            before = [*prompt, *first] if session is whole else session.text_tokens
            answers.append(_answer(session, [*before, *more], 20))
            assert _n_sent(head, session) - sent == 1 + len(more) + 19
            assert session.n_resends == 0
        assert answers[0] == answers[1]


def test_a_prompt_that_outgrows_the_context_keeps_what_is_near(
    parts: Exported, head: Head, prompt: list[int]
) -> None:
    with _session(parts, head) as (_, _, session):
        first = _answer(session, prompt, 450)
        sent = _n_sent(head, session)
        more = head.tokenizer.tokenize("the lamp in the mill and the rain " * 20, start=False)[:100]
        _answer(session, [*prompt, *first, *more], 1)
        assert session.n_dropped == len(prompt) + 550 - _SINKS - _WINDOW
        assert _n_sent(head, session) - sent == _SINKS + _WINDOW
        other = [9, *more, *prompt, *first]  # another text: nothing of it is there
        _answer(session, other, 1)
        assert session.tokens == [*other[:_SINKS], *other[-_WINDOW:]]


@pytest.mark.nightly
def test_sinks_can_be_none(parts: Exported, head: Head, prompt: list[int]) -> None:
    with _session(parts, head) as (_, _, session):
        assert _answer(session, prompt, 600, sinks=0) == _local("f16", prompt, 600, sinks=0)


@pytest.mark.nightly
def test_a_server_that_comes_back_is_sent_what_is_left(
    parts: Exported, head: Head, prompt: list[int], expected: dict[str, list[int]]
) -> None:
    with _running(parts) as server:
        port = server.port
        client = SplitClient(head, server.address, precision="f32")
        session = client.session()
        stream = session.generate_tokens(prompt, max_tokens=_N, temperature=0, logit_bias=_GO_ON, **_SLIDE)
        answer = [next(stream) for _ in range(600)]
        assert session.n_dropped
    with _running(parts, port=port):
        left = session.text_tokens.copy()
        answer += list(stream)
        assert session.n_resends == 1
        assert answer[:600] == expected["f16"][:600]
        n_more = _N_CTX - len(left)
        with client.session() as other:  # what the server has not is evaluated anew
            assert _answer(other, left, n_more) == answer[600 : 600 + n_more]
        session.close()
        client.close()


# --- sessions that are kept ---


@pytest.mark.parametrize("kv", ["f16", _MIXED])
def test_what_is_kept_behind_a_drop_is_what_is_left(
    parts: Exported, head: Head, tmp_path: Path, prompt: list[int], kv: str
) -> None:
    key, store = new_key(), str(tmp_path)
    with (
        _running(parts, kv, store=store) as server,
        SplitClient(head, server.address, precision="f32") as client,
        client.session(key) as session,
    ):
        _answer(session, prompt, 60)
        session.keep()
        _answer(session, session.text_tokens.copy(), 550)
        assert session.n_dropped
        assert session.n_kept == 0  # what was kept before is of another beginning
        sent = _n_sent(head, session)
        assert session.keep() == len(session.tokens) - _SINKS  # those are kept already
        assert _n_sent(head, session) == sent
        kept, text = session.tokens.copy(), session.text_tokens.copy()
    with (
        _running(parts, kv, store=store) as server,
        SplitClient(head, server.address, precision="f32") as client,
        client.session(key, kept) as session,
        client.session() as plain,
    ):
        assert _answer(session, text, 40) == _answer(plain, text, 40)
        assert session.n_resends == 0
        assert _n_sent(head, session) == len(session.tokens) - len(kept)
        _answer(session, session.text_tokens.copy(), 400)  # and it slides once more
        assert session.n_dropped


def test_a_prompt_that_is_cut_is_told(
    parts: Exported, head: Head, prompt: list[int], caplog: pytest.LogCaptureFixture
) -> None:
    with _session(parts, head, _MIXED) as (_, _, session):
        _answer(session, prompt, n=2)
        assert not caplog.records
        _answer(session, prompt * 100, n=2)
    (said,) = caplog.messages
    assert said == (
        f"the prompt has {100 * len(prompt)} tokens, and the server room for {_N_CTX - 1}: "
        f"its first {_SINKS} and its last {_WINDOW} are used"
    )
