"""A server with an adapter whose layers are streamed: the answers are those of layers in memory."""

from __future__ import annotations

from pathlib import Path

import pytest

from mixedkv.bundled import model_path
from support.models.adapters import write_adapter
from support.servers.server import MODEL, Server, running

pytestmark = pytest.mark.full


@pytest.fixture(scope="module")
def adapter(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_adapter(tmp_path_factory.mktemp("adapter") / "odd.gguf", Path(model_path()), 3)


def answers(server: Server) -> list[str]:
    body = {"prompt": "The code of the", "max_tokens": 8, "temperature": 0}
    both = [server.post("/v1/completions", {**body, "model": name}) for name in (MODEL, "odd")]
    return [each["choices"][0]["text"] for each in both]


def test_an_adapter_has_streamed_layers_of_its_own(adapter: Path) -> None:
    options = ("--n-ctx", "512", "--lora", f"odd={adapter}")
    with running(*options) as resident, running(*options, "--stream-layers", "2") as streamed:
        assert answers(streamed) == answers(resident)
        assert len(set(answers(streamed))) == 2


def test_one_budget_is_not_that_of_two_models(adapter: Path) -> None:
    options = ("--n-ctx", "512", "--lora", f"odd={adapter}", "--memory", "1GB")
    with pytest.raises(RuntimeError, match="memory is not the budget of both"), running(*options):
        pass
