"""Arguments of `PromptCache.chat`, in the words of OpenAI and of `create_chat_completion`, as an engine takes
them.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Any

from llama_cpp.llama_grammar import LlamaGrammar

from mixedkv.constrain.constraint_text import Constraint
from mixedkv.engine.chat.chat_template import Chat, ToolChoice
from mixedkv.engine.sample.sampling import Sampling
from mixedkv.ids import check_id
from mixedkv.limits import check_int
from mixedkv.llama import Llama
from mixedkv.native.llama_arguments import check_messages
from mixedkv.prompts.part import Insert

Message = Mapping[str, Any]

# those of create_chat_completion, which a chat that moves here keeps
_DEFAULTS: dict[str, Any] = {"temperature": 0.2, "top_p": 0.95, "top_k": 40, "min_p": 0.05}
_SAMPLING = {each.name for each in fields(Sampling)} - {"constraint", "logit_bias"}
_OF_SUBMIT = {"stop", "reuse_options", "speculation", "prediction"}
_OWN = {
    "max_tokens",
    "tools",
    "tool_choice",
    "response_format",
    "grammar",
    "logit_bias",
    "logprobs",
    "top_logprobs",
}
_NAMES = {"mirostat_mode": "mirostat"}
_IN_PYTHON = (
    "it calls Python for each token of a Llama, and an engine samples: use llm.create_chat_completion"
)
_INSTEAD = {
    "logits_processor": _IN_PYTHON + ", or response_format, grammar or logit_bias here",
    "stopping_criteria": _IN_PYTHON + ", or stop here",
    "functions": "use tools",
    "function_call": "use tool_choice",
    "stream": "call chat for a whole answer, or stream for its chunks",
    "tfs_z": "llama.cpp has it no longer: leave it out",
    "model": "this cache has one Llama: leave it out",
}


def chat_of(
    messages: Sequence[Message], options: Mapping[str, Any], images: Sequence[Insert] = ()
) -> tuple[Chat, list[tuple[str, str]]]:
    """Return the chat to answer, and the ids of its messages with their texts; "" for one without an id.

    Raises:
        ValueError, TypeError: messages, ids or tools are malformed; the message names the first that is.
    """
    check_messages(messages)
    plain, named = [], []
    for i, message in enumerate(messages):
        name = message.get("message_id")
        content = _text(f"messages[{i}].content", message.get("content"))
        named.append(("" if name is None else check_id(f"messages[{i}].message_id", name), content or ""))
        kept = {key: value for key, value in message.items() if key not in ("message_id", "content")}
        plain.append({**kept, "content": content} if "content" in message else kept)
    tools = options.get("tools") or ()
    if not isinstance(tools, list | tuple):
        raise TypeError(f"tools={tools!r:.80}: use a list of tools")
    names = [_function("tools", tool) for tool in tools]
    return Chat(messages=plain, tools=tools, choice=_choice(options, names), images=images), named


def _text(field: str, content: Any) -> Any:
    """Return a content as a text; parts of texts are joined."""
    if not isinstance(content, list):
        return content
    for part in content:
        if (
            not isinstance(part, Mapping)
            or part.get("type") != "text"
            or not isinstance(part.get("text"), str)
        ):
            raise ValueError(
                f'{field}: {part!r:.80} is no text: use {{"type": "text", "text": TEXT}}, and the argument '
                f"`images` for images"
            )
    return "".join(part["text"] for part in content)


def _choice(options: Mapping[str, Any], names: Sequence[str]) -> ToolChoice:
    given = options.get("tool_choice")
    if given is None or given in ("none", "auto", "required"):
        if given == "required" and not names:
            raise ValueError("tool_choice='required' asks for a call, and there are no tools: give tools")
        return ToolChoice(mode=given or "auto")
    if (name := _function("tool_choice", given)) not in names:
        raise ValueError(f"tool_choice: there is no tool {name!r:.80} in tools")
    return ToolChoice(mode="required", name=name, parallel=False)


def _function(field: str, given: Any) -> str:
    function = given.get("function") if isinstance(given, Mapping) else None
    if not (isinstance(function, Mapping) and isinstance(function.get("name"), str)):
        one_of = ' or one of "auto", "none", "required"' if field == "tool_choice" else ""
        raise ValueError(
            f'{field}: {given!r:.80} is not {{"type": "function", "function": {{"name": NAME}}}}{one_of}'
        )
    return str(function["name"])


def submit_options(llm: Llama, options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of `Engine.submit` besides the chat and `max_tokens`.

    Raises:
        TypeError, ValueError: there is no such option, or it has no such value; the message says what to use.
    """
    known = _SAMPLING | _OF_SUBMIT | _OWN | set(_NAMES)
    for name in options:
        if name in _INSTEAD:
            raise TypeError(f"{name}: not with a PromptCache: {_INSTEAD[name]}")
        if name not in known:
            raise TypeError(f"chat has no option {name!r}: use {', '.join(sorted(known))}")
    given = {_NAMES.get(name, name): value for name, value in options.items() if value is not None}
    made = {**_DEFAULTS, "repeat_last_n": llm.last_n_tokens_size}
    made |= {name: value for name, value in given.items() if name in _SAMPLING | _OF_SUBMIT}
    seed = check_int("seed", given.get("seed", -1))
    made["seed"] = secrets.randbits(32) if seed < 0 else seed % 2**32
    made["logit_bias"] = _biases(given.get("logit_bias") or {})
    if (constraint := _constraint(given)) is not None:
        if given.get("tools") and given.get("tool_choice") != "none":
            raise ValueError(
                f"{constraint.name} and tools both say what the answer looks like: leave one out, or set "
                f"tool_choice to none"
            )
        made["constraint"] = constraint
    if given.get("logprobs"):
        made["n_logprobs"] = check_int("top_logprobs", given.get("top_logprobs", 0), 0)
    return made


def _biases(given: Any) -> tuple[tuple[int, float], ...]:
    try:
        return tuple((int(token), by) for token, by in given.items())
    except (AttributeError, TypeError, ValueError):
        raise TypeError(f"logit_bias={given!r:.80}: use a dictionary of token ids and numbers") from None


def _constraint(options: Mapping[str, Any]) -> Constraint | None:
    """Return what `response_format` or `grammar` asks for."""
    form, grammar = options.get("response_format"), options.get("grammar")
    if grammar is not None:
        if form is not None:
            raise ValueError("response_format and grammar both constrain the answer: give one of them")
        text = grammar._grammar if isinstance(grammar, LlamaGrammar) else grammar
        if not isinstance(text, str):
            raise TypeError(f"grammar={grammar!r:.80}: use a text in GBNF, or LlamaGrammar.from_string")
        return Constraint("gbnf", text, "grammar")
    if form is None:
        return None
    if not isinstance(form, Mapping):
        raise TypeError(f"response_format={form!r:.80}: use a dictionary with a type")
    kind, schema = form.get("type"), form.get("schema")
    if kind == "text":
        return None
    if kind == "json_schema":
        inner = form.get("json_schema")
        schema = inner.get("schema") if isinstance(inner, Mapping) else schema
    elif kind == "json_object":
        schema = {"type": "object"} if schema is None else schema
    else:
        raise ValueError(f"response_format: type={kind!r:.80} is none of text, json_object, json_schema")
    if not isinstance(schema, Mapping):
        raise ValueError(
            'response_format: there is no schema: write {"type": "json_schema", "json_schema": '
            '{"schema": {...}}}'
        )
    return Constraint("json_schema", json.dumps(schema), "response_format")
