"""A model for LlamaIndex that runs in this process: `pip install 'mixedkv[llamaindex]'`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

from llama_index.core.base.llms.types import (
    ChatMessage,
    ChatResponse,
    ChatResponseAsyncGen,
    ChatResponseGen,
    CompletionResponse,
    CompletionResponseAsyncGen,
    CompletionResponseGen,
    LLMMetadata,
    MessageRole,
    ToolCallBlock,
)
from llama_index.core.llms.callbacks import llm_chat_callback, llm_completion_callback
from llama_index.core.llms.function_calling import FunctionCallingLLM
from llama_index.core.llms.llm import ToolSelection
from llama_index.core.prompts import PromptTemplate
from llama_index.core.tools.types import BaseTool
from pydantic import BaseModel

from mixedkv.engine import Answer
from mixedkv.engine.text.answer_reader import ReadAnswer
from mixedkv.frameworks.engine_model import CONFIG, EngineModel
from mixedkv.frameworks.llama_index_messages import AnswerSoFar, answer_message, openai_messages

_N_OUTPUT = 256  # tokens that LlamaIndex leaves free for an answer where max_tokens does not say

_Model = TypeVar("_Model", bound=BaseModel)


class MixedKVLLM(EngineModel, FunctionCallingLLM):
    """A LlamaIndex model over an `Engine` in this process, which reuses the KV of earlier turns.

    >>> from mixedkv.frameworks.llama_index import MixedKVLLM
    >>> with MixedKVLLM(model="model.gguf", n_ctx=16384, store="kv-folder") as llm:
    ...     print(llm.chat([ChatMessage("What is a KV cache?")]).message.content)

    Settings are those of `EngineModel`. Calls also take `stop`, each sampling field, `tools`, `tool_choice`,
    `parallel_tool_calls` and `response_format`.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: a setting is wrong, see `Llama` and `Engine`.
    """

    model_config = CONFIG

    @classmethod
    def class_name(cls) -> str:
        """Return the name under which LlamaIndex knows this class."""
        return "MixedKVLLM"

    @property
    def metadata(self) -> LLMMetadata:
        """Return what LlamaIndex asks about a model: its context, and whether its template has tools."""
        assert self.engine is not None
        return LLMMetadata(
            context_window=self.engine.n_ctx,
            num_output=self.max_tokens or _N_OUTPUT,
            is_chat_model=True,
            is_function_calling_model=self.engine.tokenizer.takes_tools,
            model_name=self.model,
        )

    @llm_chat_callback()
    def chat(self, messages: Sequence[ChatMessage], **kwargs: Any) -> ChatResponse:
        """Answer a chat.

        Raises:
            ValueError: a setting is wrong, the prompt is too long, or a message has more than text.
        """
        answer = self.ask(openai_messages(messages), **kwargs)
        with self.waiting(answer):
            answer.result()
        return _response(answer, answer.message)

    @llm_chat_callback()
    async def achat(self, messages: Sequence[ChatMessage], **kwargs: Any) -> ChatResponse:
        """Answer a chat, as `chat` does."""
        answer = await self.aask(openai_messages(messages), **kwargs)
        with self.waiting(answer):
            await answer
        return _response(answer, answer.message)

    @llm_chat_callback()
    def stream_chat(self, messages: Sequence[ChatMessage], **kwargs: Any) -> ChatResponseGen:
        """Answer a chat piece by piece: each response has all that has come, and the new text as `delta`."""
        answer = self.ask(openai_messages(messages), **kwargs)

        def responses() -> ChatResponseGen:
            so_far = AnswerSoFar()
            with self.waiting(answer):
                for part in answer.parts():
                    yield so_far.add(part)
            yield _response(answer, answer.message, delta="")

        return responses()

    @llm_chat_callback()
    async def astream_chat(self, messages: Sequence[ChatMessage], **kwargs: Any) -> ChatResponseAsyncGen:
        """Answer a chat piece by piece, as `stream_chat` does."""
        answer = await self.aask(openai_messages(messages), **kwargs)

        async def responses() -> ChatResponseAsyncGen:
            so_far = AnswerSoFar()
            with self.waiting(answer):
                async for part in answer.aparts():
                    yield so_far.add(part)
            yield _response(answer, answer.message, delta="")

        return responses()

    @llm_completion_callback()
    def complete(self, prompt: str, formatted: bool = False, **kwargs: Any) -> CompletionResponse:
        """Go on with a text, without the chat template.

        Raises:
            ValueError: a setting is wrong, or the text is too long.
        """
        answer = self.submit(self._whole(prompt, formatted), **kwargs)
        with self.waiting(answer):
            text = answer.text
        return CompletionResponse(text=text, raw=_told(answer), additional_kwargs=_usage(answer))

    @llm_completion_callback()
    async def acomplete(self, prompt: str, formatted: bool = False, **kwargs: Any) -> CompletionResponse:
        """Go on with a text, as `complete` does."""
        answer = self.submit(self._whole(prompt, formatted), **kwargs)
        with self.waiting(answer):
            done = await answer
        return CompletionResponse(text=done.text, raw=_told(answer), additional_kwargs=_usage(answer))

    @llm_completion_callback()
    def stream_complete(self, prompt: str, formatted: bool = False, **kwargs: Any) -> CompletionResponseGen:
        """Go on with a text piece by piece: each response has all of it, and the new text as `delta`."""
        answer = self.submit(self._whole(prompt, formatted), **kwargs)

        def responses() -> CompletionResponseGen:
            text = ""
            with self.waiting(answer):
                for piece in answer:
                    text += piece
                    yield CompletionResponse(text=text, delta=piece)

        return responses()

    @llm_completion_callback()
    async def astream_complete(
        self, prompt: str, formatted: bool = False, **kwargs: Any
    ) -> CompletionResponseAsyncGen:
        """Go on with a text piece by piece, as `stream_complete` does."""
        answer = self.submit(self._whole(prompt, formatted), **kwargs)

        async def responses() -> CompletionResponseAsyncGen:
            text = ""
            with self.waiting(answer):
                async for piece in answer:
                    text += piece
                    yield CompletionResponse(text=text, delta=piece)

        return responses()

    def structured_predict(
        self,
        output_cls: type[_Model],
        prompt: PromptTemplate,
        llm_kwargs: dict[str, Any] | None = None,
        **prompt_args: Any,
    ) -> _Model:
        """Answer with an object of a Pydantic class; its schema constrains the tokens, with any model.

        Raises:
            pydantic.ValidationError: the answer was cut off, or the class asks for more than its schema says.
        """
        messages = self._extend_messages(prompt.format_messages(llm=self, **prompt_args))
        wanted = {"response_format": _format(output_cls), **(llm_kwargs or {})}
        return output_cls.model_validate_json(self.chat(messages, **wanted).message.content or "")

    async def astructured_predict(
        self,
        output_cls: type[_Model],
        prompt: PromptTemplate,
        llm_kwargs: dict[str, Any] | None = None,
        **prompt_args: Any,
    ) -> _Model:
        """Answer with an object of a Pydantic class, as `structured_predict` does."""
        messages = self._extend_messages(prompt.format_messages(llm=self, **prompt_args))
        wanted = {"response_format": _format(output_cls), **(llm_kwargs or {})}
        return output_cls.model_validate_json((await self.achat(messages, **wanted)).message.content or "")

    def get_tool_calls_from_response(
        self, response: ChatResponse, error_on_no_tool_call: bool = True, **kwargs: Any
    ) -> list[ToolSelection]:
        """Return the calls in a response.

        Raises:
            ValueError: there is none, and `error_on_no_tool_call`.
        """
        calls = [block for block in response.message.blocks if isinstance(block, ToolCallBlock)]
        if not calls and error_on_no_tool_call:
            raise ValueError("the answer has no call: use tool_required=True, or another prompt")
        return [
            ToolSelection(
                tool_id=call.tool_call_id or "",
                tool_name=call.tool_name,
                tool_kwargs=call.tool_kwargs if isinstance(call.tool_kwargs, dict) else {},
            )
            for call in calls
        ]

    def _prepare_chat_with_tools(
        self,
        tools: Sequence[BaseTool],
        user_msg: str | ChatMessage | None = None,
        chat_history: list[ChatMessage] | None = None,
        verbose: bool = False,
        allow_parallel_tool_calls: bool = False,
        tool_required: bool = False,
        **kwargs: Any,
    ) -> dict[str, Any]:
        if isinstance(user_msg, str):
            user_msg = ChatMessage(role=MessageRole.USER, content=user_msg)
        given = {name: value for name, value in kwargs.items() if value is not None}
        return {
            "messages": [*(chat_history or []), *([user_msg] if user_msg is not None else [])],
            "tools": [tool.metadata.to_openai_tool(skip_length_check=True) for tool in tools],
            "tool_choice": "required" if tool_required else "auto",
            "parallel_tool_calls": allow_parallel_tool_calls,
            **given,
        }

    def _whole(self, prompt: str, formatted: bool) -> str:
        if formatted or self.completion_to_prompt is None:
            return prompt
        return self.completion_to_prompt(prompt)


def _response(answer: Answer, said: ReadAnswer, delta: str | None = None) -> ChatResponse:
    return ChatResponse(
        message=answer_message(said), delta=delta, raw=_told(answer), additional_kwargs=_usage(answer)
    )


def _told(answer: Answer) -> dict[str, Any]:
    return {"finish_reason": answer.finish_reason, "usage": _usage(answer), "exact": answer.job.exact}


def _usage(answer: Answer) -> dict[str, int]:
    job = answer.job
    return {
        "prompt_tokens": job.n_given,
        "completion_tokens": job.n_answer,
        "total_tokens": job.n_given + job.n_answer,
        "cached_tokens": job.n_cached or 0,
    }


def _format(output_cls: type[BaseModel]) -> Mapping[str, Any]:
    schema = {"name": output_cls.__name__, "schema": output_cls.model_json_schema()}
    return {"type": "json_schema", "json_schema": schema}
