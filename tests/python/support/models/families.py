"""One call as each family of models writes it, and their chat templates, which come with llama.cpp."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from support import REPOSITORY

TEMPLATES = REPOSITORY / "build" / "release" / "llama.cpp" / "models" / "templates"

WEATHER: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather of a city.",
        "parameters": {
            "type": "object",
            "properties": {
                "city": {"type": "string", "maxLength": 12},
                "days": {"type": "integer", "minimum": 1, "maximum": 9},
            },
            "required": ["city", "days"],
        },
    },
}
ADD: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "add",
        "parameters": {
            "type": "object",
            "properties": {"a": {"type": "integer", "minimum": 0, "maximum": 99}, "b": {"enum": [1, 2]}},
            "required": ["a", "b"],
        },
    },
}

ARGUMENTS = '{"city": "Oslo", "days": 3}'
_NAMED = f'{{"name": "get_weather", "arguments": {ARGUMENTS}}}'
_HERMES = f"<tool_call>\n{_NAMED}\n</tool_call>"
_FUNCTION = (
    "<tool_call>\n<function=get_weather>\n<parameter=city>\nOslo\n</parameter>\n"
    "<parameter=days>\n3\n</parameter>\n</function>\n</tool_call>"
)
_ARG_KEYS = (
    "<tool_call>get_weather\n<arg_key>city</arg_key>\n<arg_value>Oslo</arg_value>\n"
    "<arg_key>days</arg_key>\n<arg_value>3</arg_value>\n</tool_call>"
)

# template: what the model writes; some begin within a thought
CALLS = {
    "NousResearch-Hermes-3-Llama-3.1-8B-tool_use": _HERMES,
    "Qwen-Qwen2.5-7B-Instruct": _HERMES,
    "Qwen-Qwen3-0.6B": _HERMES,
    "Qwen3-Coder": _FUNCTION,
    "Qwen3.5-4B": _FUNCTION,
    "meta-llama-Llama-3.1-8B-Instruct": f'{{"name": "get_weather", "parameters": {ARGUMENTS}}}',
    "mistralai-Mistral-Nemo-Instruct-2407": (
        f'[TOOL_CALLS][{{"name": "get_weather", "arguments": {ARGUMENTS}, "id": "abcdefghi"}}]'
    ),
    "mistralai-Ministral-3-14B-Reasoning-2512": f"[TOOL_CALLS]get_weather[ARGS]{ARGUMENTS}",
    "llama-cpp-deepseek-r1": (
        "Rain, then.</think><｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>get_weather\n"  # noqa: RUF001
        f"```json\n{ARGUMENTS}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>"  # noqa: RUF001
    ),
    "deepseek-ai-DeepSeek-V3.2": (
        '<｜DSML｜function_calls>\n<｜DSML｜invoke name="get_weather">\n'  # noqa: RUF001
        '<｜DSML｜parameter name="city" string="true">Oslo</｜DSML｜parameter>\n'  # noqa: RUF001
        '<｜DSML｜parameter name="days" string="false">3</｜DSML｜parameter>\n'  # noqa: RUF001
        "</｜DSML｜invoke>\n</｜DSML｜function_calls>"  # noqa: RUF001
    ),
    "openai-gpt-oss-120b": (
        f"<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>{ARGUMENTS}"
    ),
    "GLM-4.6": _ARG_KEYS,
    "moonshotai-Kimi-K2": (
        "<|tool_calls_section_begin|><|tool_call_begin|>functions.get_weather:0"
        f"<|tool_call_argument_begin|>{ARGUMENTS}<|tool_call_end|><|tool_calls_section_end|>"
    ),
    "google-gemma-4-31B-it": '<|tool_call>call:get_weather{city:<|"|>Oslo<|"|>,days:3}<tool_call|>',
    "ibm-granite-granite-4.0": _HERMES,
    "meetkai-functionary-medium-v3.1": f"<function=get_weather>{ARGUMENTS}</function>",
    "meetkai-functionary-medium-v3.2": f"get_weather\n{ARGUMENTS}",
    "CohereForAI-c4ai-command-r7b-12-2024-tool_use": (
        '<|START_ACTION|>[\n    {"tool_call_id": "0", "tool_name": "get_weather", "parameters": '
        f"{ARGUMENTS}}}\n]<|END_ACTION|>"
    ),
    "MiniMax-M2": (
        'Rain, then.</think><minimax:tool_call>\n<invoke name="get_weather">\n'
        '<parameter name="city">Oslo</parameter>\n'
        '<parameter name="days">3</parameter>\n</invoke>\n</minimax:tool_call>'
    ),
    "LFM2-8B-A1B": '<|tool_call_start|>[get_weather(city="Oslo", days=3)]<|tool_call_end|>',
    "Apertus-8B-Instruct": f'<|tools_prefix|>[{{"get_weather": {ARGUMENTS}}}]<|tools_suffix|>',
}


def template_path(name: str) -> Path:
    """The file of a family's template; skips the test where no build in this tree unpacked llama.cpp."""
    path = TEMPLATES / f"{name}.jinja"
    if not path.is_file():
        pytest.skip(f"needs {path}: build in this tree", allow_module_level=True)
    return path


def template(name: str) -> str:
    return template_path(name).read_text(encoding="utf-8")
