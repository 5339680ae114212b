"""`MixedKVLLM` in this process, through LlamaIndex's own chat engine, agent and programs: it has no suite for
models.
"""

from __future__ import annotations

import asyncio
import gc
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel, ValidationError

from mixedkv.bundled.corpus import make_recall
from mixedkv.errors import ClosedError
from support.patience import PATIENCE, wait_for
from support.recorded import TEMPLATES

pytest.importorskip("llama_index.core", reason="needs the package llama-index-core")

from llama_index.core.agent import FunctionAgent
from llama_index.core.base.llms.types import (
    ChatMessage,
    ImageBlock,
    MessageRole,
    TextBlock,
    ThinkingBlock,
    ToolCallBlock,
)
from llama_index.core.chat_engine import SimpleChatEngine
from llama_index.core.program import FunctionCallingProgram
from llama_index.core.prompts import PromptTemplate
from llama_index.core.tools import FunctionTool

from mixedkv.frameworks.llama_index import MixedKVLLM
from mixedkv.frameworks.llama_index_messages import openai_messages

pytestmark = pytest.mark.nightly

TEMPLATE = (TEMPLATES / "qwen2.5.jinja").read_text("utf-8")
RECALL = make_recall(seed=53_001, n_sentences=40)  # long enough to be stored
SYSTEM, QUESTION = " ".join(RECALL.journal), RECALL.fact.question
TALK = [ChatMessage(SYSTEM, role="system"), ChatMessage(QUESTION)]
GREEDY: dict[str, Any] = {"temperature": 0, "max_tokens": 12, "n_ctx": 2048, "parallel": 2}


@pytest.fixture(scope="module")
def plain() -> Iterator[MixedKVLLM]:
    with MixedKVLLM(**GREEDY) as llm:
        yield llm


@pytest.fixture(scope="module")
def with_tools() -> Iterator[MixedKVLLM]:
    with MixedKVLLM(temperature=0, max_tokens=200, n_ctx=4096, seed=1, chat_template=TEMPLATE) as llm:
        yield llm


def usage(response: Any) -> dict[str, int]:
    return dict(response.raw["usage"])


def open_door(number: int) -> str:
    """Open a door by its number."""
    return f"door {number} is open"


TOOL = FunctionTool.from_defaults(open_door)


class Key(BaseModel):
    """What opens a door."""

    number: int
    is_old: bool


def test_a_chat_engine_evaluates_what_is_new() -> None:
    with MixedKVLLM(**GREEDY) as llm:
        chat = SimpleChatEngine.from_defaults(llm=llm, system_prompt=SYSTEM)
        assert RECALL.fact.answer in str(chat.chat(QUESTION))
        turns = [*TALK, chat.chat_history[-1], ChatMessage("And the key?")]
        pieces = list(chat.stream_chat("And the key?").response_gen)
        again = llm.chat(turns)
        assert "".join(pieces) == again.message.content
        first = llm.chat(TALK)
        assert usage(again)["cached_tokens"] >= usage(first)["prompt_tokens"]


def test_another_model_finds_it_in_the_store(tmp_path: Path) -> None:
    with MixedKVLLM(**GREEDY, store=tmp_path / "kv") as llm:
        first = llm.chat(TALK)
        assert usage(first)["cached_tokens"] == 0
    with MixedKVLLM(**GREEDY, store=tmp_path / "kv") as other:
        second = other.chat([*TALK, first.message, ChatMessage("And the key?")])
        assert usage(second)["cached_tokens"] >= usage(first)["prompt_tokens"]


def test_all_ways_to_ask_answer_alike(plain: MixedKVLLM) -> None:
    whole = plain.chat(TALK)
    assert whole.additional_kwargs["completion_tokens"] > 0
    streamed = list(plain.stream_chat(TALK))
    assert "".join(each.delta or "" for each in streamed) == whole.message.content
    assert streamed[-1].message.content == whole.message.content
    text = "The code of the mill is"
    completed = plain.complete(text)
    assert [each.text for each in plain.stream_complete(text)][-1] == completed.text

    async def in_asyncio() -> None:
        assert (await plain.achat(TALK)).message.content == whole.message.content
        pieces = [each.delta or "" async for each in await plain.astream_chat(TALK)]
        assert "".join(pieces) == whole.message.content
        assert (await plain.acomplete(text)).text == completed.text
        assert [each.text async for each in await plain.astream_complete(text)][-1] == completed.text

    asyncio.run(in_asyncio())
    stop = str(whole.message.content).split()[1]
    assert plain.chat(TALK, stop=[stop]).message.content == str(whole.message.content).partition(stop)[0]
    assert plain.predict(PromptTemplate("{q}"), q=QUESTION)


def test_who_leaves_a_stream_stops_it(plain: MixedKVLLM) -> None:
    engine = plain.engine
    assert engine is not None
    for _ in plain.stream_chat(TALK, max_tokens=1500, logit_bias={engine.llm.token_eos(): -100}):
        break
    gc.collect()
    wait_for(lambda: engine.idle)


def test_a_class_needs_no_tools_in_the_template(plain: MixedKVLLM) -> None:
    assert not plain.metadata.is_function_calling_model
    prompt = PromptTemplate("{question}")
    roomy = {"max_tokens": 200}
    assert isinstance(plain.structured_predict(Key, prompt, roomy, question=QUESTION), Key)
    found = asyncio.run(plain.astructured_predict(Key, prompt, roomy, question=QUESTION))
    assert isinstance(found, Key)
    with pytest.raises(ValidationError):  # cut off
        plain.structured_predict(Key, prompt, {"max_tokens": 3}, question=QUESTION)
    assert isinstance(plain.as_structured_llm(Key).chat(TALK, **roomy).raw, Key)


def test_calls_are_forced_and_follow_their_schema(with_tools: MixedKVLLM) -> None:
    assert with_tools.metadata.is_function_calling_model
    response = with_tools.chat_with_tools([TOOL], QUESTION, chat_history=TALK[:1], tool_required=True)
    (call,) = with_tools.get_tool_calls_from_response(response)
    assert call.tool_name == "open_door"
    assert isinstance(call.tool_kwargs["number"], int)
    *_, last = with_tools.stream_chat_with_tools([TOOL], QUESTION, chat_history=TALK[:1], tool_required=True)
    assert with_tools.get_tool_calls_from_response(last)[0].tool_kwargs == call.tool_kwargs
    done = with_tools.predict_and_call([TOOL], QUESTION, chat_history=TALK[:1], tool_required=True)
    assert str(done) == open_door(**call.tool_kwargs)
    result = ChatMessage("open", role="tool", additional_kwargs={"tool_call_id": call.tool_id})
    then = with_tools.chat(
        [*TALK, response.message, result], tools=[TOOL.metadata.to_openai_tool()], tool_choice="none"
    )
    assert usage(then)["cached_tokens"] >= usage(response)["prompt_tokens"] - 8  # where the answer begins
    text = with_tools.chat(TALK)
    with pytest.raises(ValueError, match="no call"):
        with_tools.get_tool_calls_from_response(text)
    assert with_tools.get_tool_calls_from_response(text, error_on_no_tool_call=False) == []


def test_its_programs_and_agents(with_tools: MixedKVLLM) -> None:
    program = FunctionCallingProgram.from_defaults(Key, prompt_template_str="{question}", llm=with_tools)
    assert isinstance(program(question=QUESTION), Key)
    agent = FunctionAgent(tools=[TOOL], llm=with_tools, system_prompt=SYSTEM)

    async def run() -> Any:
        return await agent.run(QUESTION)

    assert asyncio.run(run()).response.content


def test_messages_say_what_openais_say(plain: MixedKVLLM) -> None:
    blocks = [
        ThinkingBlock(content="hm"),
        TextBlock(text="I open it"),
        ToolCallBlock(tool_call_id="1", tool_name="open_door", tool_kwargs={"number": 3}),
    ]
    (out,) = openai_messages([ChatMessage(role=MessageRole.ASSISTANT, blocks=blocks)])
    function = {"name": "open_door", "arguments": json.dumps({"number": 3})}
    assert out == {
        "role": "assistant",
        "content": "I open it",
        "reasoning_content": "hm",
        "tool_calls": [{"id": "1", "type": "function", "function": function}],
    }
    with pytest.raises(ValueError, match="reads text"):
        plain.chat([ChatMessage(role="user", blocks=[ImageBlock(image=b"x")])])


def test_who_opens_closes() -> None:
    with MixedKVLLM(**GREEDY) as llm:
        other = MixedKVLLM(engine=llm.engine, **GREEDY)
        other.close()
        assert other.chat(TALK).message.content == llm.chat(TALK).message.content
    with pytest.raises(ClosedError):
        other.chat(TALK)


def test_a_program_ends_without_closing(tmp_path: Path) -> None:
    code = f"""
from llama_index.core.llms import ChatMessage
from mixedkv.frameworks.llama_index import MixedKVLLM
llm = MixedKVLLM(max_tokens=500, store={str(tmp_path)!r})
answer = llm.stream_chat([ChatMessage("Say something")])
print(next(answer).delta)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=PATIENCE)
    assert (done.returncode, done.stderr) == (0, "")
