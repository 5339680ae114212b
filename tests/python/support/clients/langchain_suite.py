"""LangChain's integration suite for chat models. What a small model cannot do is expected to fail."""

from __future__ import annotations

import asyncio
import functools
import inspect
from typing import Any

import langchain_openai
import pytest
from langchain_tests.integration_tests import ChatModelIntegrationTests

_loop = asyncio.new_event_loop()


class ChatSuite(ChatModelIntegrationTests):
    @pytest.fixture
    def benchmark(self) -> None:
        pytest.skip("measures with answers that were recorded")

    @property
    def chat_model_class(self) -> Any:
        return langchain_openai.ChatOpenAI

    @property
    def has_tool_choice(self) -> bool:
        return True

    @property
    def supports_json_mode(self) -> bool:
        return True

    @pytest.mark.xfail(reason="says in words which JSON is wanted: it gives some")
    def test_json_mode(self, model: Any) -> None:
        super().test_json_mode(model)

    @pytest.mark.xfail(reason="no call is forced: it answers in words")
    def test_agent_loop(self, model: Any) -> None:
        super().test_agent_loop(model)


def run_async_tests(suite: type) -> None:
    """Have a suite's asynchronous tests run, all in one loop, which some clients share."""
    for name, function in inspect.getmembers(suite, inspect.iscoroutinefunction):
        owner = next(each for each in suite.__mro__ if name in vars(each))  # the suite looks who overrides
        setattr(owner, name, _in_loop(function))


def _in_loop(function: Any) -> Any:
    @functools.wraps(function)
    def run(*args: Any, **options: Any) -> None:
        _loop.run_until_complete(function(*args, **options))

    return run
