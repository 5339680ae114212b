"""What compiling a constraint may take is bounded, whatever is in it."""

from __future__ import annotations

import json
import signal
import subprocess
from typing import Any

import pytest

from mixedkv.constrain import trial
from mixedkv.constrain.constraint_text import Constraint
from mixedkv.engine.chat.chat_template import ChatRenderer, ToolChoice
from mixedkv.work import processes
from support.engine.hostile_constraints import BYTES, compile_one
from support.models.recorded_calls import TEMPLATES

pytestmark = pytest.mark.full

PATTERNS = {f"^a{i}[a-z]*$": {"type": "string"} for i in range(900)}
PAIRS = [
    {"anyOf": [{"type": "object", "properties": {f"a{i}": {"const": j}}} for j in range(2)]}
    for i in range(10)
]
USER = {"role": "user", "content": "?"}


def schema(value: Any) -> Constraint:
    return Constraint("json_schema", json.dumps(value), "response_format")


def parameters(value: dict[str, Any]) -> dict[str, Any]:
    arguments = {"type": "object", "properties": value}
    return {"type": "function", "function": {"name": "find", "parameters": arguments}}


@pytest.fixture
def renderer() -> ChatRenderer:
    return ChatRenderer((TEMPLATES / "qwen2.5.jinja").read_text(encoding="utf-8"), "<s>", "</s>")


def test_a_schema_that_takes_minutes_is_refused_and_others_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trial, "SECONDS", 0.5)
    bomb = schema({"type": "object", "patternProperties": PATTERNS})
    for _ in range(2):  # the second time its outcome is known
        with pytest.raises(ValueError, match=r"^response_format: compiling it takes more than 0.5 seconds"):
            BYTES.compile(bomb)
    assert BYTES.compile(schema({"type": "integer"})).allowed().tolist()


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGABRT])
def test_a_machine_that_was_busy_refuses_for_once(
    monkeypatch: pytest.MonkeyPatch, number: signal.Signals
) -> None:
    """Only what a constraint itself takes is remembered of it, also where a process does not say how it
    ended.
    """
    start = processes.start
    constraint = schema({"type": "integer", "maximum": number.value})  # one that is not known yet

    def start_stopped() -> subprocess.Popen[bytes]:  # it gets no processor
        process = start()
        process.send_signal(signal.SIGSTOP)
        return process

    def kill(process: subprocess.Popen[bytes]) -> None:
        process.send_signal(number)
        process.send_signal(signal.SIGCONT)

    processes.processes.end()
    with monkeypatch.context() as busy:
        busy.setattr(processes, "start", start_stopped)
        busy.setattr(processes, "CLOCK_SECONDS", 0.2)
        busy.setattr(subprocess.Popen, "kill", kill)
        with pytest.raises(
            ValueError, match=r"^response_format: compiling it was not done within 0.2 seconds"
        ):
            BYTES.compile(constraint)
    assert BYTES.compile(constraint).allowed().tolist()


def test_a_schema_whose_first_token_takes_long_is_refused() -> None:
    with pytest.raises(ValueError, match=r"^response_format: (a token of it|compiling it) takes more than"):
        BYTES.compile(schema({"allOf": PAIRS}))


@pytest.mark.parametrize("seed", range(20))
def test_a_hostile_constraint_compiles_or_is_refused_in_time(seed: int) -> None:
    seconds, outcome = compile_one(seed)
    assert outcome
    assert seconds < 2 * trial.SECONDS


@pytest.mark.parametrize(
    ("kind", "text"), [("regex", "a(b"), ("json_schema", '{"type": "string", "pattern": "a(b"}')]
)
def test_the_reason_of_an_error_in_an_expression_is_said(kind: Any, text: str) -> None:
    with pytest.raises(ValueError, match=r"^it: the regular expression 'a\(b': unclosed group$"):
        BYTES.compile(Constraint(kind, text, "it"))


def test_a_pattern_in_a_tool_is_not_blamed_on_the_template(renderer: ChatRenderer) -> None:
    tools = [parameters({"a": {"type": "string"}}), parameters({"a": {"type": "string", "pattern": "^a(b$"}})]
    tools[0]["function"]["name"] = "look"
    with pytest.raises(ValueError, match=r"^tools: the parameters of find cannot be followed: .*unbalanced"):
        renderer.render([USER], tools, ToolChoice(mode="required"))


@pytest.mark.parametrize(
    "tools",
    [
        [parameters({f"a{i}": {"type": "string"} for i in range(900)})],
        [parameters({"a" * i: {"type": "string"} for i in range(250)})],
        [parameters({"a": {"enum": ["x" * 100] * 700}})],
        [parameters({f"a{i}": {"type": "string"} for i in range(200)})] * 30,
    ],
)
def test_tools_whose_grammar_takes_seconds_are_refused(
    renderer: ChatRenderer, tools: list[dict[str, Any]]
) -> None:
    with pytest.raises(ValueError, match=r"^tools: .* at most"):
        renderer.render([USER], tools, ToolChoice())
