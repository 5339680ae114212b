"""`ChatMixedKV` in this process: LangChain's own suites, KV that is reused, and how it ends.

The bundled model has never seen a tool. Its template is that of a model that has, and where a test forces a
call the engine forces it.
"""

from __future__ import annotations

import asyncio
import gc
import subprocess
import sys
from collections.abc import Iterator
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel, ValidationError

from mixedkv.bundled.corpus import make_recall
from mixedkv.errors import ClosedError
from support.patience import PATIENCE, wait_for
from support.recorded import TEMPLATES

pytest.importorskip("langchain_core", reason="needs the package langchain-core")
pytest.importorskip("langchain_tests", reason="needs the package langchain-tests")

from langchain_core.exceptions import OutputParserException
from langchain_core.messages import (
    AIMessage,
    AIMessageChunk,
    BaseMessage,
    HumanMessage,
    SystemMessage,
    ToolMessage,
)
from langchain_tests.unit_tests import ChatModelUnitTests

from mixedkv.frameworks.langchain import ChatMixedKV
from support.langchain_suite import SmallModelSuite, run_async_tests

TEMPLATE = (TEMPLATES / "qwen2.5.jinja").read_text("utf-8")
RECALL = make_recall(seed=53_001, n_sentences=40)  # long enough to be stored
SYSTEM, QUESTION = " ".join(RECALL.journal), RECALL.fact.question
TALK: list[BaseMessage] = [SystemMessage(SYSTEM), HumanMessage(QUESTION)]
GREEDY: dict[str, Any] = {"temperature": 0, "max_tokens": 12, "n_ctx": 2048, "parallel": 2}

_opened: ChatMixedKV | None = None


@pytest.fixture(scope="module", autouse=True)
def with_tools() -> Iterator[ChatMixedKV]:
    """Open a model whose template has tools, for all of the integration suite."""
    global _opened
    with ChatMixedKV(n_ctx=8192, chat_template=TEMPLATE, temperature=0, max_tokens=200, seed=1) as _opened:
        yield _opened


@pytest.fixture
def model() -> Iterator[ChatMixedKV]:
    with ChatMixedKV(**GREEDY) as model:
        yield model


class TestUnits(ChatModelUnitTests):
    @property
    def chat_model_class(self) -> Any:
        return ChatMixedKV

    @property
    def chat_model_params(self) -> dict[str, Any]:
        return {"n_ctx": 256, "parallel": 1}

    @property
    def standard_chat_model_params(self) -> dict[str, Any]:
        """All but the key: a setting that does nothing is refused."""
        given = super().standard_chat_model_params
        return {name: value for name, value in given.items() if name != "api_key"}

    @pytest.fixture
    def snapshot(self) -> None:
        """Stand in for a plugin that only a serialisable model needs."""

    @pytest.fixture
    def benchmark(self) -> None:
        pytest.skip("measures how long a model takes to load")


@pytest.mark.slow
class TestIntegration(SmallModelSuite):
    @property
    def chat_model_class(self) -> Any:
        return ChatMixedKV

    @property
    def chat_model_params(self) -> dict[str, Any]:
        """Strings and objects end soon, which a model that does not know what it says would not do."""
        assert _opened is not None
        assert _opened.engine is not None
        tokens = [_opened.engine.tokenizer.tokenize(text, start=False) for text in ('"', "}")]
        return {
            "engine": _opened.engine,
            "temperature": 0,
            "max_tokens": 256,
            "seed": 1,
            "parallel_tool_calls": False,
            "options": {"logit_bias": {token: 30 for (token,) in tokens}},
        }

    @property
    def supports_model_override(self) -> bool:
        return False

    @property
    def supported_usage_metadata_details(self) -> Any:
        return {"invoke": ["cache_read_input"], "stream": ["cache_read_input"]}

    def invoke_with_cache_read_input(self, *, stream: bool = False) -> AIMessage:
        model = ChatMixedKV(**self.chat_model_params)
        model.invoke(TALK)
        if not stream:
            return model.invoke(TALK)
        said = AIMessageChunk("")
        for chunk in model.stream(TALK):
            said += chunk
        return said


run_async_tests(TestIntegration)


def cached(message: AIMessage) -> int:
    assert message.usage_metadata is not None
    return message.usage_metadata["input_token_details"]["cache_read"]


def tokens_of(message: AIMessage) -> int:
    assert message.usage_metadata is not None
    return message.usage_metadata["input_tokens"]


def test_the_second_turn_evaluates_what_is_new(model: ChatMixedKV) -> None:
    first = model.invoke(TALK)
    assert RECALL.fact.answer in str(first.content)
    assert cached(first) == 0
    second = model.invoke([*TALK, first, HumanMessage("And the key?")])
    assert cached(second) >= tokens_of(first)
    assert second.response_metadata["cached_exact"]


def test_another_model_finds_it_in_the_store(tmp_path: Path) -> None:
    with ChatMixedKV(**GREEDY, store=tmp_path / "kv") as model:
        first = model.invoke(TALK)
    turns = [*TALK, first, HumanMessage("And the key?")]
    with ChatMixedKV(**GREEDY) as alone, ChatMixedKV(**GREEDY, store=str(tmp_path / "kv")) as other:
        second = other.invoke(turns)
        assert cached(second) >= tokens_of(first)
        assert second.content == alone.invoke(turns).content


def test_a_stream_is_the_answer_in_pieces(model: ChatMixedKV) -> None:
    whole = model.invoke(TALK)
    pieces = list(model.stream(TALK))
    assert len(pieces) > 2
    assert "".join(str(piece.content) for piece in pieces) == whole.content

    async def in_asyncio() -> str:
        return "".join([str(piece.content) async for piece in model.astream(TALK)])

    assert asyncio.run(in_asyncio()) == whole.content
    assert asyncio.run(model.ainvoke(TALK)).content == whole.content
    stop = str(whole.content).split()[1]
    assert model.invoke(TALK, stop=[stop]).content == str(whole.content).partition(stop)[0]


def test_who_leaves_a_stream_stops_it(model: ChatMixedKV) -> None:
    engine = model.engine
    assert engine is not None
    endless = model.bind(max_tokens=1500, logit_bias={engine.llm.token_eos(): -100})
    for _ in endless.stream(TALK):
        break
    gc.collect()
    wait_for(lambda: engine.idle)

    async def leave() -> None:
        asking = asyncio.ensure_future(endless.ainvoke(TALK))
        while engine.idle and not asking.done():
            await asyncio.sleep(0.01)
        asking.cancel()

    asyncio.run(leave())
    wait_for(lambda: engine.idle)
    late = model.model_copy(update={"timeout": 0.05})
    with pytest.raises(TimeoutError, match=r"0\.05 seconds"):
        late.bind(**endless.kwargs).invoke(TALK)
    wait_for(lambda: engine.idle)


class Key(BaseModel):
    """What opens a door."""

    number: int
    is_old: bool


def test_a_schema_needs_no_tools_in_the_template(model: ChatMixedKV) -> None:
    roomy = model.model_copy(update={"max_tokens": 200})
    assert isinstance(roomy.with_structured_output(Key).invoke(TALK), Key)
    raw = roomy.with_structured_output(Key.model_json_schema(), include_raw=True).invoke(TALK)
    assert raw["parsed"].keys() == {"number", "is_old"}
    assert raw["parsing_error"] is None
    short = model.model_copy(update={"max_tokens": 3})
    with pytest.raises(OutputParserException, match="cut off"):
        short.with_structured_output(Key.model_json_schema()).invoke(TALK)
    with pytest.raises(ValueError, match="method="):
        model.with_structured_output(Key, method="xml")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="tools"):
        model.bind_tools([Key]).invoke(TALK)


def open_door(number: int) -> str:
    """Open a door by its number."""
    return f"door {number} is open"


def test_a_call_and_its_result_go_on_from_kv(with_tools: ChatMixedKV) -> None:
    forced = with_tools.bind_tools([open_door], tool_choice="open_door")
    called = forced.invoke(TALK)
    (call,) = called.tool_calls
    assert call["name"] == "open_door"
    assert called.response_metadata["finish_reason"] == "tool_calls"
    said = AIMessageChunk("")
    for chunk in forced.stream(TALK):
        said += chunk
    assert [each["args"] for each in said.tool_calls] == [call["args"]]
    result = ToolMessage(open_door(**call["args"]), tool_call_id=call["id"])
    then = with_tools.bind_tools([open_door], tool_choice="none").invoke([*TALK, called, result])
    assert not then.tool_calls
    assert cached(then) >= tokens_of(called) - 8  # where the answer begins
    with pytest.raises(ValueError, match="no tool 'close_door'"):
        with_tools.bind_tools([open_door], tool_choice="close_door")


def test_thoughts_are_apart_and_can_be_sent_back() -> None:
    thinks = (TEMPLATES / "deepseek-r1.jinja").read_text("utf-8")  # begins a thought, which lasts
    with ChatMixedKV(**GREEDY, chat_template=thinks) as model:
        thought = model.invoke(TALK)
        assert thought.content == ""
        (block,) = thought.content_blocks
        assert block["type"] == "reasoning"
        said = AIMessageChunk("")
        for chunk in model.stream(TALK):
            said += chunk
        assert said.content_blocks == thought.content_blocks
        newer = ChatMixedKV(engine=model.engine, **GREEDY, output_version="v1")
        blocks = newer.invoke(TALK)
        assert isinstance(blocks.content, list)
        newer.invoke([*TALK, blocks, HumanMessage("And the key?")])


def test_what_is_wrong_is_said(model: ChatMixedKV) -> None:
    with pytest.raises(ValidationError, match="temprature"):
        ChatMixedKV(temprature=0)  # type: ignore[call-arg]
    with pytest.raises(FileNotFoundError):
        ChatMixedKV(model="/does/not/exist.gguf")
    picture = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AA=="}}
    with pytest.raises(ValueError, match="reads text"):
        model.invoke([HumanMessage([{"type": "text", "text": "?"}, picture])])
    with pytest.raises(ValueError, match="temperature"):
        model.invoke("?", temperature=-1)


def test_who_opens_closes() -> None:
    with ChatMixedKV(**GREEDY) as model:
        other = ChatMixedKV(engine=model.engine, **GREEDY)
        other.close()
        copy = model.model_copy(update={"max_tokens": 3})
        assert copy.engine is deepcopy(model).engine is model.engine
        assert other.invoke("?").content == model.invoke("?").content
    with pytest.raises(ClosedError):
        copy.invoke("?")
    model.close()


def test_a_long_batch_waits(model: ChatMixedKV) -> None:
    short = model.model_copy(update={"max_tokens": 1})
    assert len(asyncio.run(short.abatch(["?"] * 300))) == 300


def test_a_forgotten_model_is_closed() -> None:
    model = ChatMixedKV(**GREEDY)
    other = ChatMixedKV(engine=model.engine, **GREEDY)
    engine = model.engine
    assert engine is not None
    del model
    gc.collect()
    assert other.invoke("?").content
    del other
    gc.collect()
    wait_for(lambda: not engine.alive)


def test_a_program_ends_without_closing(tmp_path: Path) -> None:
    code = f"""
from mixedkv.frameworks.langchain import ChatMixedKV
model = ChatMixedKV(max_tokens=500, store={str(tmp_path)!r})
answer = model.stream("Say something")
print(next(answer).content)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=PATIENCE)
    assert (done.returncode, done.stderr) == (0, "")
