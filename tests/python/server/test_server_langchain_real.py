"""LangChain's own integration suite against SmolLM2 as it comes, whose chat template has no tools.

What 135 million parameters do not do is expected to fail, with the reason.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from support.servers.server import Server, running

pytestmark = [pytest.mark.nightly, pytest.mark.slow, pytest.mark.needs("real model")]

pytest.importorskip("langchain_openai", reason="needs the package langchain-openai")
pytest.importorskip("langchain_tests.integration_tests", reason="needs the package langchain-tests")

from support.clients.langchain_suite import ChatSuite, run_async_tests  # noqa: E402

MODEL = "smollm2"
_server: Server | None = None


@pytest.fixture(scope="module", autouse=True)
def server(real_model: Path) -> Iterator[Server]:
    global _server
    with running(
        "--model", str(real_model), "--model-name", MODEL, "--n-ctx", "8192", "--threads", "2"
    ) as _server:
        yield _server


class TestChat(ChatSuite):
    @property
    def chat_model_params(self) -> dict[str, Any]:
        assert _server is not None
        return {
            "model": MODEL,
            "base_url": f"{_server.url}/v1",
            "api_key": "unused",
            "max_retries": 0,
            "temperature": 0,
            "max_tokens": 512,
            "stream_usage": True,
            "frequency_penalty": 0.3,
        }

    @property
    def model_override_value(self) -> str:
        return MODEL


run_async_tests(TestChat)
