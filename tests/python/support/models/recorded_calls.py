"""What models of each family write when they call: raw text, and what it says.

Templates beside this file are our own, written down from what the families document: the markers are theirs,
the words are ours. An output is written as the model's tokens spell it, from where its prompt ends up to the
token that ends the turn.
"""

# ruff: noqa: RUF001

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

TEMPLATES = Path(__file__).parent / "templates"

SEARCH: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "search_notes",
        "description": "Finds notes.",
        "parameters": {
            "type": "object",
            "properties": {
                "text": {"type": "string"},
                "limit": {"type": "integer", "minimum": 1, "maximum": 9},
                "tags": {"type": "array", "items": {"type": "string"}},
            },
            "required": ["text", "limit", "tags"],
        },
    },
}
CLOCK: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "read_clock",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
TOOLS = [SEARCH, CLOCK]

FOUND = {"text": 'Ærø "north"', "limit": 5, "tags": ["a", "b c"]}
TIME = {"city": "Oslo"}
_FOUND, _TIME = (json.dumps(arguments, ensure_ascii=False) for arguments in (FOUND, TIME))
_SEARCHES, _READS = ("search_notes", FOUND), ("read_clock", TIME)


@dataclass(frozen=True, kw_only=True)
class Recorded:
    """One output.

    Attributes:
        template: the name of its family's.
        text: as the model wrote it.
        calls: names and arguments, in order.
        content, reasoning: what is said beside them.
        lazy: llama.cpp has words that begin a call, so arguments are constrained where a call is the model's
            choice.
    """

    template: str
    text: str
    calls: tuple[tuple[str, dict[str, Any]], ...]
    content: str = ""
    reasoning: str = ""
    lazy: bool = True

    @property
    def source(self) -> str:
        return (TEMPLATES / f"{self.template}.jinja").read_text(encoding="utf-8")


def with_a_token_that_calls(folder: Path) -> Path:
    """A template as Qwen 2.5's, but that a call begins with `@` and has no end: the bundled model has a token
    for that, so a bias on it makes a call the model's own choice.
    """
    source = (TEMPLATES / "qwen2.5.jinja").read_text(encoding="utf-8")
    path = folder / "at.jinja"
    path.write_text(source.replace("<tool_call>\\n", "@").replace("\\n</tool_call>", ""), encoding="utf-8")
    return path


def _hermes(*calls: tuple[str, str]) -> str:
    return "\n".join(
        f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'
        for name, arguments in calls
    )


_BOTH = _hermes(("search_notes", _FOUND), ("read_clock", _TIME))
_TAGGED = (
    '<tool_call>\n<function=search_notes>\n<parameter=text>\nÆrø "north"\n</parameter>\n'
    '<parameter=limit>\n5\n</parameter>\n<parameter=tags>\n["a", "b c"]\n</parameter>\n'
    "</function>\n</tool_call>"
)
_GLM = (
    '<tool_call>search_notes\n<arg_key>text</arg_key>\n<arg_value>Ærø "north"</arg_value>\n'
    "<arg_key>limit</arg_key>\n<arg_value>5</arg_value>\n"
    '<arg_key>tags</arg_key>\n<arg_value>["a", "b c"]</arg_value>\n</tool_call>'
)

RECORDED = [
    Recorded(
        template="llama-3",
        text=f'{{"name": "search_notes", "parameters": {_FOUND}}}',
        calls=(_SEARCHES,),
        lazy=False,
    ),
    Recorded(
        template="qwen2.5", text=f"Let me look.\n{_BOTH}", content="Let me look.", calls=(_SEARCHES, _READS)
    ),
    Recorded(
        template="qwen3",
        text=f"<think>\nTwo things.\n</think>\n\n{_BOTH}",
        reasoning="Two things.",
        calls=(_SEARCHES, _READS),
    ),
    Recorded(template="qwen3-coder", text=f"I look.\n\n{_TAGGED}", content="I look.", calls=(_SEARCHES,)),
    Recorded(
        template="mistral-nemo",
        text=(
            f'[TOOL_CALLS][{{"name": "search_notes", "arguments": {_FOUND}, "id": "abcdefghi"}}, '
            f'{{"name": "read_clock", "arguments": {_TIME}, "id": "jklmnopqr"}}]'
        ),
        calls=(_SEARCHES, _READS),
    ),
    Recorded(
        template="mistral-small-3.2",
        text=f"[TOOL_CALLS]search_notes[ARGS]{_FOUND}[TOOL_CALLS]read_clock[ARGS]{_TIME}",
        calls=(_SEARCHES, _READS),
    ),
    Recorded(template="hermes-3", text=_BOTH, calls=(_SEARCHES, _READS)),
    Recorded(
        template="deepseek-r1",
        text=(
            "I need both.\n</think>\n\n<｜tool▁calls▁begin｜>"
            f"<｜tool▁call▁begin｜>function<｜tool▁sep｜>search_notes\n```json\n{_FOUND}\n```<｜tool▁call▁end｜>\n"
            f"<｜tool▁call▁begin｜>function<｜tool▁sep｜>read_clock\n```json\n{_TIME}\n```<｜tool▁call▁end｜>"
            "<｜tool▁calls▁end｜>"
        ),
        reasoning="I need both.",
        calls=(_SEARCHES, _READS),
    ),
    Recorded(
        template="deepseek-v3.1",
        text=(
            "I look.<｜tool▁calls▁begin｜>"
            f"<｜tool▁call▁begin｜>search_notes<｜tool▁sep｜>{_FOUND}<｜tool▁call▁end｜>"
            f"<｜tool▁call▁begin｜>read_clock<｜tool▁sep｜>{_TIME}<｜tool▁call▁end｜><｜tool▁calls▁end｜>"
        ),
        content="I look.",
        calls=(_SEARCHES, _READS),
    ),
    Recorded(
        template="gpt-oss",
        text=(
            "<|channel|>analysis<|message|>The notes.<|end|><|start|>assistant<|channel|>commentary "
            f"to=functions.search_notes <|constrain|>json<|message|>{_FOUND}"
        ),
        reasoning="The notes.",
        calls=(_SEARCHES,),
        lazy=False,
    ),
    Recorded(
        template="glm-4.5",
        text=f"\n<think>The notes.</think>\n{_GLM}",
        reasoning="The notes.",
        calls=(_SEARCHES,),
    ),
    Recorded(
        template="kimi-k2",
        text=(
            "I look.<|tool_calls_section_begin|>"
            f"<|tool_call_begin|>functions.search_notes:0<|tool_call_argument_begin|>{_FOUND}<|tool_call_end|>"
            f"<|tool_call_begin|>functions.read_clock:1<|tool_call_argument_begin|>{_TIME}<|tool_call_end|>"
            "<|tool_calls_section_end|>"
        ),
        content="I look.",
        calls=(_SEARCHES, _READS),
    ),
    Recorded(
        template="gemma-4",
        text=(
            "<|channel>thought\nThe notes.<channel|><|tool_call>call:search_notes"
            '{text:<|"|>Ærø "north"<|"|>,limit:5,tags:[<|"|>a<|"|>,<|"|>b c<|"|>]}<tool_call|>'
        ),
        reasoning="The notes.",
        calls=(_SEARCHES,),
    ),
    Recorded(
        template="granite-3.3",
        text=(
            f'<|tool_call|>[{{"name": "search_notes", "arguments": {_FOUND}}}, '
            f'{{"name": "read_clock", "arguments": {_TIME}}}]'
        ),
        calls=(_SEARCHES, _READS),
    ),
    Recorded(template="granite-4", text=_BOTH, calls=(_SEARCHES, _READS)),
    Recorded(
        template="functionary-v3.1",
        text=f"I look.<function=search_notes>{_FOUND}</function><function=read_clock>{_TIME}</function>",
        content="I look.",
        calls=(_SEARCHES, _READS),
    ),
    Recorded(template="functionary-v3.2", text=f"search_notes\n{_FOUND}", calls=(_SEARCHES,), lazy=False),
    Recorded(
        template="command-r7b",
        text=(
            "<|START_THINKING|>The notes.<|END_THINKING|><|START_ACTION|>[\n"
            f'    {{"tool_call_id": "0", "tool_name": "search_notes", "parameters": {_FOUND}}},\n'
            f'    {{"tool_call_id": "1", "tool_name": "read_clock", "parameters": {_TIME}}}\n]<|END_ACTION|>'
        ),
        reasoning="The notes.",
        calls=(_SEARCHES, _READS),
    ),
]
