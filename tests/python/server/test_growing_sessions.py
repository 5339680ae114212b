"""Sessions that grow: each answered turn becomes part of them, once, and they outlive a kill."""

from __future__ import annotations

import itertools
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from support.patience import wait_for
from support.servers.server import Server, running

pytestmark = pytest.mark.full

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
SYSTEM = {"role": "system", "content": "The lamp lies in the market and the key in the harbour. " * 4}

LONG = {"max_tokens": 600, "ignore_eos": True}  # so that mostly all have begun before one ends


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with running("--n-ctx", "4096", "--model-name", "m") as server:
        yield server


def make(server: Server, session: str, **body: Any) -> None:
    content = {} if "prompt" in body else {"messages": [SYSTEM]}
    server.post("/v1/context", {"model": "m", "session_id": session, **content, **body})


def ask(server: Server, session: str, text: str, **body: Any) -> tuple[int, Any, dict[str, str]]:
    turn = {"messages": [{"role": "user", "content": text}], "session_id": session, "max_tokens": 8}
    return server.request("POST", CHAT, {**turn, "temperature": 0, **body})


def version(server: Server, session: str) -> int:
    return int(server.request("GET", f"/v1/context/{session}")[1]["version"])


def test_a_turn_becomes_part_of_it_and_only_what_is_new_is_evaluated(server: Server) -> None:
    make(server, "grows")
    plain = [SYSTEM]
    for i in range(4):
        question = {"role": "user", "content": f"Where is thing {i}?"}
        status, answer, headers = ask(server, "grows", question["content"], append=True)
        assert status == 200
        assert int(headers["x-session-version"]) == i + 1 == version(server, "grows")
        plain.append(question)
        whole = server.post(CHAT, {"messages": plain, "max_tokens": 8, "temperature": 0})
        assert whole["usage"]["prompt_tokens"] == answer["usage"]["prompt_tokens"]  # what a client would send
        plain.append({"role": "assistant", "content": answer["choices"][0]["message"]["content"]})
        details = answer["usage"]["prompt_tokens_details"]
        assert answer["usage"]["prompt_tokens"] - details["cached_tokens"] < 40
        assert details["cached_exact"]


def test_an_answer_that_was_begun_is_one_message(server: Server) -> None:
    make(server, "begun")
    begun = [{"role": "user", "content": "Where?"}, {"role": "assistant", "content": "The key is"}]
    more = {"role": "user", "content": "And now?"}
    _, answer, _ = ask(server, "begun", "", messages=begun, continue_final_message=True, append=True)
    said = "The key is" + answer["choices"][0]["message"]["content"]
    whole = [SYSTEM, begun[0], {"role": "assistant", "content": said}, more]
    expected = server.post(CHAT, {"messages": whole, "max_tokens": 1})["usage"]["prompt_tokens"]
    _, answer, _ = ask(server, "begun", more["content"])
    assert answer["usage"]["prompt_tokens"] == expected


def test_without_a_word_it_stays_a_prefix(server: Server) -> None:
    make(server, "prefix")
    sizes = [ask(server, "prefix", "Where?")[1]["usage"]["prompt_tokens"] for _ in range(2)]
    assert sizes[0] == sizes[1]
    assert version(server, "prefix") == 0


def test_the_mode_at_its_creation_is_the_default(server: Server) -> None:
    make(server, "mode", mode="append")
    assert ask(server, "mode", "Where?", append=False)[0] == 200
    assert version(server, "mode") == 0
    assert ask(server, "mode", "Where?")[0] == 200
    assert version(server, "mode") == 1


def test_a_stream_grows_it_too(server: Server) -> None:
    make(server, "stream")
    turn = {"messages": [{"role": "user", "content": "Where?"}], "session_id": "stream", "append": True}
    chunks = server.events(CHAT, {**turn, "max_tokens": 8, "temperature": 0})
    assert version(server, "stream") == 1
    said = "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in chunks)
    turns = [SYSTEM, {"role": "user", "content": "Where?"}, {"role": "assistant", "content": said}]
    turns.append({"role": "user", "content": "And?"})
    whole = server.post(CHAT, {"messages": turns, "max_tokens": 8})["usage"]["prompt_tokens"]
    assert ask(server, "stream", "And?")[1]["usage"]["prompt_tokens"] == whole


def test_a_raw_prompt_grows(server: Server) -> None:
    make(server, "raw", prompt="Once upon a time")
    body = {"session_id": "raw", "max_tokens": 6, "temperature": 0, "append": True, "ignore_eos": True}
    said = server.post(TEXT, {**body, "prompt": " there was"})["choices"][0]["text"]
    text = f"Once upon a time there was{said}"
    more = server.post(TEXT, {"session_id": "raw", "prompt": " And", "max_tokens": 1})
    whole = server.post(TEXT, {"prompt": text, "max_tokens": 1})["usage"]["prompt_tokens"]
    assert abs(more["usage"]["prompt_tokens"] - whole) <= 2


def test_of_two_turns_at_a_time_one_is_told_of_the_other(server: Server) -> None:
    names = (f"race-{i}" for i in itertools.count())

    def one_came_first() -> bool:
        """Else one began when another had ended, and grew the session again."""
        name = next(names)
        make(server, name)
        with ThreadPoolExecutor(2) as pool:
            answers = list(pool.map(lambda i: ask(server, name, f"{i}?", append=True, **LONG), range(2)))
        n_grown = sum(status == 200 for status, _, _ in answers)
        assert version(server, name) == n_grown
        for status, answer, headers in answers:
            if status != 200:
                assert (status, answer["error"]["code"]) == (409, "session_changed")
                assert f"is at version {headers['x-session-version']}" in answer["error"]["message"]
                assert 1 <= int(headers["x-session-version"]) <= n_grown
        return n_grown == 1

    wait_for(one_came_first)


def test_a_stream_that_comes_second_ends_with_an_error(server: Server) -> None:
    names = (f"late-{i}" for i in itertools.count())
    options = {"append": True, "stream": True, **LONG}

    def one_came_second() -> bool:
        """Else it began when the first one had ended."""
        name = next(names)
        make(server, name)
        with ThreadPoolExecutor(2) as pool:
            texts = [
                text for _, text, _ in pool.map(lambda i: ask(server, name, f"{i}?", **options), range(2))
            ]
        late = [text for text in texts if "[DONE]" not in text]
        assert version(server, name) == 2 - len(late)
        for text in late:
            assert "session_changed" in text.splitlines()[-2] + text.splitlines()[-1]
        return len(late) == 1

    wait_for(one_came_second)


def test_who_means_another_version_is_told_before_anything_is_evaluated(server: Server) -> None:
    make(server, "versions")
    assert ask(server, "versions", "Where?", append=True, session_version=0)[0] == 200
    for options in ({"append": True}, {}):
        status, answer, headers = ask(server, "versions", "Where?", session_version=0, **options)
        assert (status, answer["error"]["param"]) == (409, "session_version")
        assert headers["x-session-version"] == "1"


def test_renewing_meanwhile_is_no_conflict(server: Server) -> None:
    make(server, "renewed", ttl=60)
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(ask, server, "renewed", "Where?", append=True, **LONG)
        renewed = 0
        while not (asked.done() and renewed):
            assert server.status("PATCH", "/v1/context/renewed", {"ttl": 6000}) == 200
            renewed += 1
    assert asked.result()[0] == 200
    assert server.request("GET", "/v1/context/renewed")[1]["ttl"] == 6000
    assert version(server, "renewed") == 1


@pytest.mark.parametrize(
    ("where", "body", "says"),
    [
        (CHAT, {"messages": [SYSTEM], "append": True}, "append goes with session_id only"),
        (CHAT, {"messages": [SYSTEM], "session_version": 1}, "session_version goes with session_id only"),
        (CHAT, {"messages": [SYSTEM], "session_id": "refused", "append": True, "n": 2}, "one answer"),
        (TEXT, {"prompt": "a", "session_id": "refused", "append": True}, "use /v1/chat/completions"),
        (CHAT, {"messages": [SYSTEM], "session_id": "refused-raw", "append": True}, "use /v1/completions"),
        (TEXT, {"prompt": [1], "session_id": "refused-raw", "append": True}, "as one text"),
    ],
)
def test_what_cannot_be_appended_is_refused(server: Server, where: str, body: Any, says: str) -> None:
    for name, content in (("refused", {}), ("refused-raw", {"prompt": "a"})):
        if server.status("GET", f"/v1/context/{name}") == 404:
            make(server, name, **content)
    status, answer, _ = server.request("POST", where, body)
    assert status == 400
    assert says in answer["error"]["message"]
    assert version(server, "refused") == version(server, "refused-raw") == 0


@pytest.mark.nightly
def test_what_has_grown_outlives_a_kill(tmp_path: Path) -> None:
    options = ("--n-ctx", "2048", "--model-name", "m", "--store", str(tmp_path / "kv"))
    with running(*options) as server:
        make(server, "s", mode="append")
        sizes = [ask(server, "s", f"Where is {i}?")[1]["usage"]["prompt_tokens"] for i in range(3)]
        server.wait_until_idle()
        server.stop(signal.SIGKILL)
    with running(*options) as server:
        assert version(server, "s") == 3
        usage = ask(server, "s", "Where is 3?")[1]["usage"]
        assert usage["prompt_tokens"] > sizes[-1]
        assert usage["prompt_tokens_details"]["cached_tokens"] > sizes[-1] - 40
        assert usage["prompt_tokens_details"]["cached_tier"] == "disk"


def test_texts_of_a_session_are_tokenized_each_by_itself_until_it_has_grown(server: Server) -> None:
    def n_tokens(text: str, start: bool = True) -> int:
        return len(server.post("/tokenize", {"content": text, "add_special": start})["tokens"])

    begin, rest = "Where is the win", "dow"
    assert n_tokens(begin + rest) < n_tokens(begin) + n_tokens(rest, False), "tokens merge here"
    make(server, "seam", prompt=begin, mode="append")
    body = {"prompt": rest, "session_id": "seam", "max_tokens": 1, "temperature": 0, "ignore_eos": True}
    first = server.post(TEXT, body)
    assert first["usage"]["prompt_tokens"] == n_tokens(begin) + n_tokens(rest, False)
    then = server.post(TEXT, {**body, "prompt": " In"})
    grown = begin + rest + first["choices"][0]["text"]
    assert then["usage"]["prompt_tokens"] == n_tokens(grown) + n_tokens(" In", False)
