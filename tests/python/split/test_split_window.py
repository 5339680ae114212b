"""Sessions longer than the context: the server drops tokens and moves the rows behind them."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest

from mixedkv import Llama
from mixedkv.bundled import model_path
from mixedkv.chunks.gate import last_logits
from mixedkv.config.cut_rule import CutRule
from mixedkv.engine.schedule.scheduler import Scheduler
from mixedkv.kv.cache import KVCache
from mixedkv_bench.harness.real_text import read_real_text
from mixedkv_split import client as client_module
from mixedkv_split import split_pb2 as pb
from mixedkv_split import wire
from mixedkv_split.client import SplitClient, SplitSession
from mixedkv_split.export import Exported
from mixedkv_split.head import Head
from mixedkv_split.service import SplitService, _RefusedError
from mixedkv_split.session_key import new_key
from support.patience import PATIENCE
from support.servers import split_servers
from support.servers.split_servers import Running

pytestmark = pytest.mark.full

_N_CTX, _SINKS, _WINDOW = 256, 4, 100
_SLIDE: dict[str, Any] = {"sinks": _SINKS, "window": _WINDOW}
_GO_ON = ((2, -100.0),)  # the token that ends an answer
_N = 420  # tokens of an answer
_STEP = _N_CTX - _SINKS - _WINDOW  # tokens that are dropped at a time
_N_SEQ = 4
_MIXED = "mixed:threshold=32,group=8"
Code = grpc.StatusCode


@pytest.fixture(scope="module")
def parts(tmp_path_factory: pytest.TempPathFactory) -> Exported:
    return split_servers.split(model_path(), tmp_path_factory.mktemp("split"))


@pytest.fixture(scope="module")
def prompt(head: Head) -> list[int]:
    return head.tokenizer.encode("The rain fell on the mill, and the lamp in the window was out.")[0]


def _answer(session: SplitSession, prompt: list[int], n: int = _N, **options: Any) -> list[int]:
    return list(
        session.generate_tokens(
            prompt, max_tokens=n, **{"temperature": 0, "logit_bias": _GO_ON, **_SLIDE, **options}
        )
    )


def _local(kv: str, prompt: list[int], n: int, moves: bool = True, sinks: int = _SINKS) -> list[int]:
    """The answer of `Llama` alone: its rows are moved, or what is left of the text is evaluated anew."""
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
                end = len(tokens) - _WINDOW
                del tokens[sinks:end]
                if moves:
                    llm.kv.remove_and_shift(0, sinks, end)
                else:
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
    return split_servers.running(parts.body, kv=kv, **{**few, **options})


def _n_sent(head: Head, session: SplitSession) -> float:
    """Vectors that were sent."""
    return session.n_sent_bytes / (4 * head.width)


# --- as one model, and what is sent ---


@pytest.mark.parametrize("kv", ["f16", "q8_0", _MIXED])
def test_an_answer_is_that_of_one_model_whose_rows_are_moved(
    parts: Exported, head: Head, prompt: list[int], expected: dict[str, list[int]], kv: str
) -> None:
    with _session(parts, head, kv) as (_, client, session):
        assert client.can_drop
        assert _answer(session, prompt) == expected[kv]
        assert session.n_resends == 0
        assert session.n_dropped == 2 * _STEP
        assert _n_sent(head, session) == len(prompt) + _N - 1  # each once
        assert len(session.tokens) + session.n_dropped == len(prompt) + _N - 1


def test_what_was_dropped_still_counts(prompt: list[int], expected: dict[str, list[int]]) -> None:
    """Else the test above would not tell moved rows from those of what is left."""
    assert _local("f16", prompt, _N, moves=False) != expected["f16"]


def test_drafts_are_as_without_them(
    parts: Exported, head: Head, prompt: list[int], expected: dict[str, list[int]]
) -> None:
    """In a mixed cache, where drafts have the bits of single tokens; in F16 near logits may change places."""
    n = 300
    with _session(parts, head, _MIXED) as (server, _, session):
        assert _answer(session, prompt, n, draft=8) == expected[_MIXED][:n]
        assert session.n_resends == 0
        assert session.n_dropped == _STEP
        assert server.engine.n_steps < n


def test_the_next_turn_goes_on_from_moved_rows(parts: Exported, head: Head, prompt: list[int]) -> None:
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
        first = _answer(session, prompt, 200)
        sent = _n_sent(head, session)
        more = head.tokenizer.tokenize("the lamp in the mill and the rain " * 20, start=False)[:50]
        _answer(session, [*prompt, *first, *more], 1)
        assert session.n_dropped == len(prompt) + 250 - _SINKS - _WINDOW
        assert _n_sent(head, session) - sent == 1 + len(more)
        other = [9, *more, *prompt, *first]  # another text: nothing of it is there
        _answer(session, other, 1)
        assert session.tokens == [*other[:_SINKS], *other[-_WINDOW:]]


def test_a_session_that_shares_rows_leaves_them_to_the_other(
    parts: Exported, head: Head, expected: dict[str, list[int]]
) -> None:
    text = expected["f16"][:200]
    with _session(parts, head, n_ctx=2048) as (server, client, other), client.session() as session:
        before = other._evaluate(text, 1)
        client.n_ctx = _N_CTX  # so that it slides while there is room for copies
        _answer(session, text, 100, window=200)
        assert session.n_dropped == _N_CTX - _SINKS - 200
        assert session.n_resends == 0
        assert np.array_equal(other._evaluate(text, 1), before)  # of the last token, to the bit
        assert other.n_resends == 0
        used = server.engine.call(lambda: server.engine.pool.used).result(PATIENCE)
        assert used == len(other.tokens) + len(session.tokens) - _SINKS


@pytest.mark.nightly
def test_sinks_can_be_none(parts: Exported, head: Head, prompt: list[int]) -> None:
    with _session(parts, head) as (_, client, session):
        assert client.sinks == 0
        assert _answer(session, prompt, 300, sinks=0) == _local("f16", prompt, 300, sinks=0)
        assert _n_sent(head, session) == len(prompt) + 299


@pytest.mark.nightly
def test_what_lies_before_a_drop_is_not_gone_back_to(parts: Exported, head: Head, prompt: list[int]) -> None:
    with _session(parts, head) as (_, _, session), _session(parts, head) as (_, _, plain):
        _answer(session, prompt, _N_CTX - len(prompt) + 2)  # two tokens behind the drop
        assert session.n_dropped == _STEP
        other = [*session.tokens[:-5], 9, 8, 7]
        assert _answer(session, other, 20) == _answer(plain, other, 20)
        assert session.tokens == plain.tokens
        assert session.n_resends == 0  # the client knows


def test_a_session_that_begins_anew_leaves_no_moved_rows(
    parts: Exported, head: Head, prompt: list[int]
) -> None:
    """Nobody could go on from them."""
    with _session(parts, head) as (server, _, session):
        _answer(session, prompt, 300)
        _answer(session, [9, 8, 7], 2)
        used = server.engine.call(lambda: server.engine.pool.used).result(PATIENCE)
        assert used == len(session.tokens)


# --- a drop is done once, or what is left is sent again ---


@pytest.fixture
def drops(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """Ranges that schedulers have dropped."""
    seen, plain = [], Scheduler.drop_waiting

    def drop(self: Any, seq: Any, tenant: str, tokens: Any, begin: int, end: int, most_cut: int = 0) -> bool:
        done = plain(self, seq, tenant, tokens, begin, end, most_cut)
        seen.append((begin, end) if done else (-1, -1))
        return done

    monkeypatch.setattr(Scheduler, "drop_waiting", drop)
    return seen


class _LostError(grpc.RpcError):
    def __init__(self, code: Code) -> None:
        self._code = code

    def code(self) -> Code:
        return self._code


def test_a_drop_whose_reply_is_lost_is_not_done_twice(
    parts: Exported,
    head: Head,
    prompt: list[int],
    expected: dict[str, list[int]],
    drops: list[tuple[int, int]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    plain = client_module._Stream.receive
    lost = []

    def receive(stream: Any) -> pb.Hidden:
        reply = plain(stream)
        if len(drops) > len(lost):
            lost.append(reply)
            stream.close()
            raise _LostError(Code.UNAVAILABLE)
        return reply

    monkeypatch.setattr(client_module._Stream, "receive", receive)
    with _session(parts, head, _MIXED) as (_, _, session):
        assert _answer(session, prompt) == expected[_MIXED]
        assert session.n_resends == 0
    assert len(lost) == len(drops) >= 2
    assert (-1, -1) not in drops


@pytest.mark.nightly
def test_a_step_that_fails_behind_a_drop_is_tried_again_without_it(
    parts: Exported,
    head: Head,
    prompt: list[int],
    expected: dict[str, list[int]],
    drops: list[tuple[int, int]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    plain, failed = SplitService._run, []

    async def run(self: Any, job: Any) -> Any:
        if len(drops) > len(failed):
            failed.append(job)
            raise _RefusedError(Code.DEADLINE_EXCEEDED, "a step took too long")
        return await plain(self, job)

    monkeypatch.setattr(SplitService, "_run", run)
    with _session(parts, head) as (_, _, session):
        assert _answer(session, prompt) == expected["f16"]
        assert session.n_resends == 0
    assert len(failed) == len(drops) >= 2


@pytest.mark.nightly
def test_rows_that_have_gone_before_a_drop_are_sent_again(
    parts: Exported, head: Head, prompt: list[int], drops: list[tuple[int, int]]
) -> None:
    reference = _local("f16", prompt, 300, moves=False)
    with _session(parts, head) as (server, _, session):
        answer = []
        for token in session.generate_tokens(
            prompt, max_tokens=300, temperature=0, logit_bias=_GO_ON, **_SLIDE
        ):
            answer.append(token)
            if len(prompt) + len(answer) == _N_CTX:
                _drop_all(server)
        assert session.n_resends == 1
        assert drops == [(-1, -1)]
    assert answer == reference  # as they are then those of what is left


def _drop_all(server: Running) -> None:
    pool = server.engine.pool
    server.engine.call(lambda: [pool.drop(seq) for seq in pool.idle()]).result(PATIENCE)


@pytest.mark.nightly
def test_a_server_that_comes_back_is_sent_what_is_left(
    parts: Exported, head: Head, prompt: list[int], expected: dict[str, list[int]]
) -> None:
    with _running(parts) as server:
        port = server.port
        client = SplitClient(head, server.address, precision="f32")
        session = client.session()
        stream = session.generate_tokens(prompt, max_tokens=_N, temperature=0, logit_bias=_GO_ON, **_SLIDE)
        answer = [next(stream) for _ in range(260)]
        assert session.n_dropped
    with _running(parts, port=port):
        left = session.text_tokens.copy()
        answer += list(stream)
        assert session.n_resends == 1
        assert answer[:260] == expected["f16"][:260]
        n_more = _N_CTX - len(left)
        with client.session() as other:  # what the server has not is evaluated anew
            assert _answer(other, left, n_more) == answer[260 : 260 + n_more]
        session.close()
        client.close()


# --- sessions that are kept ---


@pytest.mark.parametrize("kv", ["f16", _MIXED])
def test_what_is_kept_behind_a_drop_is_what_is_left(
    parts: Exported, head: Head, tmp_path: Path, prompt: list[int], kv: str
) -> None:
    """Moved rows are those of no text: they are evaluated anew before they are kept."""
    key, store = new_key(), str(tmp_path)
    with (
        _running(parts, kv, store=store) as server,
        SplitClient(head, server.address, precision="f32") as client,
        client.session(key) as session,
    ):
        _answer(session, prompt, 60)
        session.keep()
        _answer(session, session.text_tokens.copy(), 230)
        assert session.n_dropped
        assert session.n_kept == 0  # what was kept before is of another beginning
        sent = _n_sent(head, session)
        assert session.keep() == len(session.tokens) - _SINKS  # those are kept already
        assert _n_sent(head, session) - sent == len(session.tokens)
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
        _answer(session, session.text_tokens.copy(), 120)  # and it slides once more
        assert session.n_dropped


def test_a_kept_session_slides_when_its_rows_are_on_disk_only(
    parts: Exported, head: Head, tmp_path: Path, prompt: list[int], drops: list[tuple[int, int]]
) -> None:
    key, store = new_key(), str(tmp_path)
    with (
        _running(parts, store=store) as server,
        SplitClient(head, server.address, precision="f32") as client,
        client.session(key) as session,
    ):
        _answer(session, prompt, 200)
        session.keep()
        kept, text = session.tokens.copy(), session.text_tokens.copy()
    more = [*text, *range(5, 85)]
    with (
        _running(parts, store=store) as server,
        SplitClient(head, server.address, precision="f32") as client,
        client.session(key, kept) as session,
        client.session() as plain,
    ):
        assert _N_CTX <= len(more) < len(kept) + _WINDOW  # some of what stays was kept
        found = _answer(session, more, 20)
        assert session.n_resends == 1
        assert found == _answer(plain, [*more[:_SINKS], *more[-_WINDOW:]], 20)
    assert drops == []


# --- servers that cannot, and ranges that are refused ---


def test_sinks_of_the_cache_stay(parts: Exported, head: Head, prompt: list[int]) -> None:
    with _session(parts, head, "mixed:sinks=8") as (_, client, session):
        assert (client.can_drop, client.sinks) == (True, 8)
        _answer(session, prompt, 300)
        assert _n_sent(head, session) == len(prompt) + 299 + _SINKS + _WINDOW - 1
    with _session(parts, head, "mixed:sinks=8") as (_, _, session):
        _answer(session, prompt, 300, sinks=8)
        assert _n_sent(head, session) == len(prompt) + 299


def _begun(head: Head, n: int, name: bytes = b"w" * 16) -> tuple[pb.Vectors, dict[str, Any]]:
    """A message that begins a session of `n` tokens, and where it stands then."""
    data = wire.pack(head.embed(list(range(5, 5 + n))), pb.F32)
    first = wire.first_hash(head.pair, pb.F32)
    message = pb.Vectors(session=name, running_hash=first, precision=pb.F32, n=n, data=data, n_hidden=1)
    return message, {
        "session": name,
        "position": n,
        "running_hash": wire.next_hashes(first, data, n)[-1],
        "precision": pb.F32,
        "n": 1,
        "data": wire.pack(head.embed([7]), pb.F32),
        "n_hidden": 1,
    }


def _send(server: Running, *messages: pb.Vectors) -> tuple[Code, str, list[pb.Hidden]]:
    replies = []
    with grpc.insecure_channel(server.address) as channel:
        stub: Any = wire.Stub(channel)
        try:
            for reply in stub.Evaluate(iter(messages)):
                replies.append(reply)
        except grpc.RpcError as error:
            return error.code(), str(error.details()), replies
    return Code.OK, "", replies


def test_ranges_that_cannot_be_dropped_are_refused_and_change_nothing(parts: Exported, head: Head) -> None:
    begin, at = _begun(head, 40)
    with _running(parts, _MIXED) as server:
        code, _, replies = _send(server, begin, pb.Vectors(**at))
        assert code == Code.OK
        reference = replies[-1]
        for drop_begin, drop_end in (
            (0, 10),  # from the sinks
            (3, 10),
            (10, 10),
            (10, 9),
            (10, 0),
            (10, 40),  # all to the end
            (10, 41),
            (10, 2**32 - 1),
            (2**32 - 1, 2**32 - 1),
            (40, 50),
        ):
            wrong = pb.Vectors(**at, drop_begin=drop_begin, drop_end=drop_end)
            code, text, _ = _send(server, wrong)
            assert code == Code.INVALID_ARGUMENT
            assert f"drop_begin={drop_begin}, drop_end={drop_end}: use sinks=4 <= drop_begin" in text
        good = {"drop_begin": 10, "drop_end": 30}
        for field, value, expected in (
            ("data", b"x", Code.INVALID_ARGUMENT),
            ("n", 0, Code.INVALID_ARGUMENT),
            ("n_hidden", 2, Code.INVALID_ARGUMENT),
            ("running_hash", bytes(16), Code.FAILED_PRECONDITION),
            ("position", 41, Code.FAILED_PRECONDITION),
            ("session", bytes(16), Code.FAILED_PRECONDITION),
        ):
            assert _send(server, pb.Vectors(**{**at, **good, field: value}))[0] == expected
        f16 = {"precision": pb.F16, "data": wire.pack(head.embed([7]), pb.F16)}
        code, text, _ = _send(server, pb.Vectors(**{**at, **good, **f16}))
        assert code == Code.INVALID_ARGUMENT
        assert text.startswith("precision:")
        assert _send(server, pb.Vectors(**at))[2] == [reference]
        code, _, replies = _send(server, *[pb.Vectors(**at, **good)] * 2)  # and one that can, twice
        assert code == Code.OK
        assert replies[0] == replies[1]
        assert replies[0].position == 21
        h = wire.hash_after_drop(at["running_hash"], 10, 30)
        assert replies[0].running_hash == wire.next_hashes(h, at["data"], 1)[0]
        assert replies[0].data != reference.data
        # there is no way back behind it
        assert _send(server, pb.Vectors(**at))[0] == Code.FAILED_PRECONDITION


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("can_shift", False),  # recurrent layers, or positions of several numbers
        ("cut_rule", CutRule(sliding=24)),  # layers that have let go of rows which a drop brings near
    ],
)
def test_a_memory_that_cannot_move_rows_says_so(
    parts: Exported, head: Head, prompt: list[int], monkeypatch: pytest.MonkeyPatch, name: str, value: Any
) -> None:
    monkeypatch.setattr(KVCache, name, property(lambda self: value))
    with _session(parts, head) as (server, client, session):
        assert not client.can_drop
        _answer(session, prompt, 300)
        assert session.n_resends == 0
        assert _n_sent(head, session) == len(prompt) + 299 + _SINKS + _WINDOW - 1
        begin, at = _begun(head, 40)
        code, text, _ = _send(server, begin, pb.Vectors(**at, drop_begin=4, drop_end=20))
        assert code == Code.INVALID_ARGUMENT
        assert "drop_begin=4, drop_end=20: this server cannot move rows" in text
        assert "from position 0" in text
        assert _send(server, pb.Vectors(**at))[0] == Code.OK


# --- what it costs ---


@pytest.mark.needs("real model")
@pytest.mark.slow
@pytest.mark.parametrize("drops", [True, False])
def test_bytes_of_a_long_answer(real_model: Path, tmp_path: Path, drops: bool) -> None:
    """docs/split.md has the figures, with TOKENS=3000."""
    n = int(os.environ.get("TOKENS", "300"))
    n_ctx = 1024 if n > 2000 else 256
    parts = split_servers.split(real_model, tmp_path)
    with (
        Head(parts.head, n_threads=1) as head,
        split_servers.linked(parts, head, n_ctx=n_ctx, threads=2) as client,
        client.session() as session,
    ):
        client.can_drop = drops
        ends = [token for token in range(head.tokenizer.n_vocab) if head.detokenizer.is_end(token)]
        prompt = head.tokenizer.tokenize(read_real_text("narrative").text[:400])
        options = {"temperature": 0.8, "seed": 1, "logit_bias": tuple((end, -100.0) for end in ends)}
        began = time.perf_counter()
        answer = list(session.generate_tokens(prompt, max_tokens=n, window=n_ctx // 2, **options))
        seconds, n_tokens = time.perf_counter() - began, len(prompt) + n - 1
        assert len(answer) == n
        print(
            f"{n_tokens} tokens, context {n_ctx}, window {n_ctx // 2}, "
            f"{'dropped on the server' if drops else 'sent anew'}: "
            f"{session.n_sent_bytes / n_tokens:.0f} bytes a token sent, {seconds:.0f} s"
        )
        assert session.n_dropped > 0
        assert (session.n_sent_bytes == 2 * head.width * n_tokens) == drops


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
