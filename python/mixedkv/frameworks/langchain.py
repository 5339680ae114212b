"""A chat model for LangChain that runs in this process: `pip install 'mixedkv[langchain]'`."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from operator import itemgetter
from typing import Any, Literal

from langchain_core.callbacks import AsyncCallbackManagerForLLMRun, CallbackManagerForLLMRun
from langchain_core.exceptions import OutputParserException
from langchain_core.language_models import LanguageModelInput
from langchain_core.language_models.chat_models import BaseChatModel
from langchain_core.messages import AIMessage, AIMessageChunk, BaseMessage, convert_to_openai_messages
from langchain_core.messages.ai import InputTokenDetails, UsageMetadata
from langchain_core.messages.tool import ToolCallChunk, tool_call_chunk
from langchain_core.output_parsers import JsonOutputParser, PydanticOutputParser
from langchain_core.outputs import ChatGeneration, ChatGenerationChunk, ChatResult, Generation
from langchain_core.runnables import Runnable, RunnableMap, RunnablePassthrough
from langchain_core.tools import BaseTool
from langchain_core.utils.function_calling import convert_to_json_schema, convert_to_openai_tool
from langchain_core.utils.pydantic import is_basemodel_subclass
from pydantic import Field

from mixedkv.engine import Answer
from mixedkv.engine.text.answer_reader import Part
from mixedkv.frameworks.engine_model import CONFIG, EngineModel

_OUTSIDE_TEXT = (
    "reasoning",
    "thinking",
    "tool_call",
    "tool_use",
    "function_call",
)  # blocks of earlier answers
_ONLY_TEXT = "messages: this chat model reads text: leave {} out, or ask `mixedkv serve --mmproj`"


class ChatMixedKV(EngineModel, BaseChatModel):
    """A LangChain chat model over an `Engine` in this process, which reuses the KV of earlier turns.

    >>> from mixedkv.frameworks.langchain import ChatMixedKV
    >>> with ChatMixedKV(model="model.gguf", n_ctx=16384, store="kv-folder") as model:
    ...     print(model.invoke("What is a KV cache?").content)

    Settings are those of `EngineModel`. Calls and `bind` also take `stop`, each sampling field, `tools`,
    `tool_choice`, `parallel_tool_calls` and `response_format`.

    Attributes:
        streaming: `invoke` streams inside, for callbacks that want tokens.
        max_retries: makes no difference: nothing is sent anywhere.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: a setting is wrong, see `Llama` and `Engine`.
    """

    model_config = CONFIG

    streaming: bool = False
    max_retries: int | None = Field(default=None, exclude=True)

    @property
    def _llm_type(self) -> str:
        return "mixedkv"

    @property
    def _identifying_params(self) -> dict[str, Any]:
        return self.model_dump(include=set(EngineModel.model_fields))

    def get_token_ids(self, text: str) -> list[int]:
        """Return the tokens of a text, as this model counts them."""
        if self.custom_get_token_ids is not None:
            return self.custom_get_token_ids(text)
        assert self.engine is not None
        return self.engine.tokenizer.tokenize(text, start=False)

    def _generate(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: CallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> ChatResult:
        answer = self.ask(_messages(messages), stop=stop, **kwargs)
        with self.waiting(answer):
            answer.result()
        return self._result(answer)

    async def _agenerate(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: AsyncCallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> ChatResult:
        answer = await self.aask(_messages(messages), stop=stop, **kwargs)
        with self.waiting(answer):
            await answer
        return self._result(answer)

    def _stream(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: CallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> Iterator[ChatGenerationChunk]:
        answer = self.ask(_messages(messages), stop=stop, **kwargs)
        with self.waiting(answer):
            for part in answer.parts():
                chunk = _chunk(part)
                if run_manager is not None:
                    run_manager.on_llm_new_token(part.content, chunk=chunk)
                yield chunk
        yield self._last_chunk(answer)

    async def _astream(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: AsyncCallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> AsyncIterator[ChatGenerationChunk]:
        answer = await self.aask(_messages(messages), stop=stop, **kwargs)
        with self.waiting(answer):
            async for part in answer.aparts():
                chunk = _chunk(part)
                if run_manager is not None:
                    await run_manager.on_llm_new_token(part.content, chunk=chunk)
                yield chunk
        yield self._last_chunk(answer)

    def bind_tools(
        self,
        tools: Sequence[dict[str, Any] | type | Callable[..., Any] | BaseTool],
        *,
        tool_choice: str | dict[str, Any] | bool | None = None,
        strict: bool | None = None,
        **kwargs: Any,
    ) -> Runnable[LanguageModelInput, AIMessage]:
        """Return this model with tools that it may call.

        Args:
            tool_choice: "auto", "none", "any" or "required" for at least one call, or the name of a tool.
            strict: makes no difference: calls always follow their schemas.
            **kwargs: for each call: parallel_tool_calls, stop, ...

        Raises:
            ValueError: there is no tool of the name `tool_choice`.
        """
        given = [convert_to_openai_tool(tool) for tool in tools]
        names = [tool["function"]["name"] for tool in given]
        name = tool_choice["function"]["name"] if isinstance(tool_choice, dict) else tool_choice
        if isinstance(name, str) and name not in ("auto", "none", "any", "required", *names):
            raise ValueError(f"tool_choice: there is no tool {name!r}: use one of {', '.join(names)}")
        if "ls_structured_output_format" in kwargs:  # one call has it all
            kwargs.setdefault("parallel_tool_calls", False)
        return self.bind(tools=given, tool_choice=name, **kwargs)

    def with_structured_output(
        self,
        schema: dict[str, Any] | type,
        *,
        include_raw: bool = False,
        method: Literal["json_schema", "function_calling", "json_mode"] = "json_schema",
        strict: bool | None = None,
        **kwargs: Any,
    ) -> Runnable[LanguageModelInput, Any]:
        """Return this model with answers that follow a schema.

        Args:
            schema: a Pydantic class, a TypedDict, a JSON schema, or a tool in OpenAI's form.
            include_raw: answer with a dict of `raw`, `parsed` and `parsing_error`.
            method: "json_schema" constrains the answer's tokens, with any model. "function_calling" forces a
                call, of which the chat template tells the model. "json_mode" takes any JSON object.
            strict: makes no difference: the schema is always followed.

        Raises:
            ValueError: there is no such method.
        """
        if method == "function_calling":
            return super().with_structured_output(schema, include_raw=include_raw, **kwargs)
        wanted: dict[str, Any] = {"type": "json_object"}
        if method == "json_schema":
            found = convert_to_json_schema(schema)
            wanted = {"type": "json_schema", "json_schema": {"name": found["title"], "schema": found}}
        elif method != "json_mode":
            raise ValueError(f"method={method!r}: use json_schema, function_calling or json_mode")
        how = {"kwargs": {"method": method}, "schema": schema}
        model = self.bind(response_format=wanted, ls_structured_output_format=how, **kwargs)
        parser: Runnable[Any, Any] = _WholeJson()
        if isinstance(schema, type) and is_basemodel_subclass(schema):
            parser = _WholeObject(pydantic_object=schema)
        if not include_raw:
            return model | parser
        parsed = RunnablePassthrough.assign(parsed=itemgetter("raw") | parser, parsing_error=lambda _: None)
        failed = RunnablePassthrough.assign(parsed=lambda _: None)
        return RunnableMap(raw=model) | parsed.with_fallbacks([failed], exception_key="parsing_error")

    def _result(self, answer: Answer) -> ChatResult:
        said = answer.message
        message = AIMessage(
            content=said.content,
            additional_kwargs={"reasoning_content": said.reasoning} if said.reasoning else {},
            response_metadata=self._told(answer),
            usage_metadata=_usage(answer),
        )
        calls = [
            _call(Part(index=i, id=c.id, name=c.name, arguments=c.arguments))
            for i, c in enumerate(said.calls)
        ]
        if calls:  # as the end of a stream: LangChain parses them, and keeps those that were cut off apart
            read = AIMessageChunk(content="", tool_call_chunks=calls)
            message.tool_calls, message.invalid_tool_calls = read.tool_calls, read.invalid_tool_calls
        return ChatResult(generations=[ChatGeneration(message=message)])

    def _last_chunk(self, answer: Answer) -> ChatGenerationChunk:
        message = AIMessageChunk(
            content="",
            response_metadata=self._told(answer),
            usage_metadata=_usage(answer),
            chunk_position="last",
        )
        return ChatGenerationChunk(message=message)

    def _told(self, answer: Answer) -> dict[str, Any]:
        return {
            "model_name": self.model,
            "model_provider": "mixedkv",
            "finish_reason": answer.finish_reason,
            "cached_exact": answer.job.exact,
        }


class _Whole:
    """Refuses JSON that was cut off, which LangChain would complete."""

    def parse_result(self, result: list[Generation], *, partial: bool = False) -> Any:
        message = getattr(result[0], "message", None)
        if not partial and message is not None and message.response_metadata["finish_reason"] == "length":
            raise OutputParserException(
                "the answer was cut off: use a larger max_tokens or n_ctx, or a maxLength in the schema",
                llm_output=result[0].text,
            )
        return super().parse_result(result, partial=partial)  # type: ignore[misc]


class _WholeJson(_Whole, JsonOutputParser):
    pass


class _WholeObject(_Whole, PydanticOutputParser[Any]):
    pass


def _messages(messages: Sequence[BaseMessage]) -> list[dict[str, Any]]:
    """Convert LangChain's messages to OpenAI's form; each result of a tool becomes one message.

    Raises:
        ValueError: one has more than text.
    """
    out: list[dict[str, Any]] = []
    for message in messages:
        for each in convert_to_openai_messages([message]):
            if not isinstance(each["content"], str):
                each["content"] = _text(each["content"])
            if thought := message.additional_kwargs.get("reasoning_content"):
                each["reasoning_content"] = thought
            out.append(each)
    return out


def _text(blocks: Sequence[dict[str, Any]]) -> str:
    for block in blocks:
        if block["type"] not in ("text", *_OUTSIDE_TEXT):
            raise ValueError(_ONLY_TEXT.format(repr(block["type"])))
    return "\n".join(block["text"] for block in blocks if block["type"] == "text")


def _chunk(part: Part) -> ChatGenerationChunk:
    message = AIMessageChunk(
        content=part.content,
        additional_kwargs={"reasoning_content": part.reasoning} if part.reasoning else {},
        tool_call_chunks=[_call(part)] if part.index >= 0 else [],
    )
    return ChatGenerationChunk(message=message)


def _call(part: Part) -> ToolCallChunk:
    return tool_call_chunk(name=part.name or None, args=part.arguments, id=part.id or None, index=part.index)


def _usage(answer: Answer) -> UsageMetadata:
    job = answer.job
    return UsageMetadata(
        input_tokens=job.n_given,
        output_tokens=job.n_answer,
        total_tokens=job.n_given + job.n_answer,
        input_token_details=InputTokenDetails(cache_read=job.n_cached or 0),
    )
