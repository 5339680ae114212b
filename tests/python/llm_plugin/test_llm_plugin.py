"""The plugin for `llm`: its command and its Python API, with the real package."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from mixedkv.bundled import model_path
from mixedkv.bundled.corpus import make_recall
from support.models.families import template_path
from support.patience import PATIENCE, wait_for
from support.servers.server import children, running

llm = pytest.importorskip("llm", reason="needs the Python package llm")

pytestmark = pytest.mark.full

NAME = "mixedkv/bundled"
RECALL = make_recall(seed=53_001, n_sentences=40)  # long enough to be stored
SYSTEM, QUESTION = " ".join(RECALL.journal), RECALL.fact.question
GREEDY = ["-m", NAME, "-o", "temperature", "0", "-o", "max_tokens", "12"]


@pytest.fixture
def environ(tmp_path: Path) -> dict[str, str]:
    return {**os.environ, "LLM_USER_PATH": str(tmp_path)}


def tool(environ: dict[str, str], *args: str, code: int = 0) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "llm", *args],
        env=environ,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=PATIENCE,
    )
    assert done.returncode == code, (done.stdout, done.stderr)
    return done.stdout if code == 0 else done.stderr


def test_models_are_listed_and_nothing_is_loaded_for_it(environ: dict[str, str], tmp_path: Path) -> None:
    code = """
import llm, sys
print("\\n".join(model.model_id for model in llm.get_models()))
assert "mixedkv" not in sys.modules
"""
    given = {**environ, "MIXEDKV_LLM_MODELS": f"mine={model_path()}"}
    done = subprocess.run(
        [sys.executable, "-c", code], env=given, capture_output=True, text=True, timeout=PATIENCE
    )
    assert {NAME, "mixedkv/smollm2", "mixedkv/mine"} <= set(done.stdout.split()), done.stderr


def test_a_conversation_goes_on_in_another_process(environ: dict[str, str]) -> None:
    first = tool(environ, *GREEDY, "--system", SYSTEM, QUESTION)
    second = tool(environ, *GREEDY, "-c", "And the key?")
    system = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": QUESTION}]
    body: dict[str, Any] = {"temperature": 0, "max_tokens": 12}
    with running("--n-ctx", "2048") as server:
        expected = server.post("/v1/chat/completions", {**body, "messages": system})
        text = expected["choices"][0]["message"]["content"]
        assert first == text + "\n"
        turns = [*system, {"role": "assistant", "content": text}, {"role": "user", "content": "And the key?"}]
        then = server.post("/v1/chat/completions", {**body, "messages": turns})
        assert second == then["choices"][0]["message"]["content"] + "\n"
    logged = json.loads(tool(environ, "logs", "--json", "-n", "2"))
    assert {each["model"] for each in logged} == {NAME}
    old, new = sorted(logged, key=lambda each: str(each["datetime_utc"]))
    assert old["input_tokens"] == expected["usage"]["prompt_tokens"]
    cached = new["token_details"]
    cached = json.loads(cached) if isinstance(cached, str) else cached
    assert cached["cached_tokens"] >= old["input_tokens"]  # of the disk: the first process is gone


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    monkeypatch.setenv("LLM_USER_PATH", str(tmp_path))
    monkeypatch.setenv("MIXEDKV_CHAT_FORMAT", str(template_path("Qwen-Qwen2.5-7B-Instruct")))
    before = set(children(os.getpid()))
    model = llm.get_model(NAME)
    yield model
    for server in model._servers.values():
        server.stop()
    model._servers.clear()
    wait_for(lambda: set(children(os.getpid())) <= before)


def test_its_python_api(model: Any) -> None:
    import openai

    options: dict[str, Any] = {"temperature": 0, "max_tokens": 40, "keep": False}
    response = model.prompt(QUESTION, **options)
    pieces = list(response)
    assert len(pieces) > 1
    assert "".join(pieces) == response.text() == model.prompt(QUESTION, stream=False, **options).text()
    assert 0 < response.usage().output <= 40
    schema = {"type": "object", "properties": {"n": {"enum": [1, 2]}}, "required": ["n"]}
    assert json.loads(model.prompt(QUESTION, schema=schema, **options).text())["n"] in (1, 2)
    assert len(model._servers) == 1

    def add(a: int, b: int) -> int:
        """Add two numbers."""
        return a + b

    with_tools = model.prompt(QUESTION, tools=[add], **options)
    assert with_tools.text()
    assert with_tools.usage().input > response.usage().input
    with pytest.raises(openai.BadRequestError, match="temperature"):
        model.prompt(QUESTION, temperature=-1).text()


def test_what_is_wrong_is_said(environ: dict[str, str]) -> None:
    said = tool(environ, "-m", NAME, "-o", "kv", "nonsense", "x", code=1)
    assert "nonsense" in said
    assert "names no cache" in said
    missing = {**environ, "MIXEDKV_LLM_MODELS": "none=/does/not/exist.gguf"}
    assert "No such file" in tool(missing, "-m", "mixedkv/none", "x", code=1)


def test_a_base_model_continues_or_is_given_a_format(environ: dict[str, str], zoo_path) -> None:
    base = ["-m", "mixedkv/base", "-o", "max_tokens", "4", "-o", "temperature", "0", "-o", "n_ctx", "512"]
    given = {**environ, "MIXEDKV_LLM_MODELS": f"base={zoo_path('llama-64')}"}
    assert tool(given, *base, "On Monday").strip()
    assert tool(given, *base, "-o", "chat_format", "chatml", "On Monday").strip()
    assert "-o chat_format chatml" in tool(given, *base, "--schema", "name, age int", "On Monday", code=1)
