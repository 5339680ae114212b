"""Several models and adapters behind one server: each by its name, with KV that no other one sees."""

from __future__ import annotations

import json
import re
import shutil
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import openai
import pytest
from pydantic import ValidationError

from mixedkv import Llama
from mixedkv.bundled import model_path
from mixedkv.bundled.corpus import make_recall
from mixedkv.chunks.gate import last_logits
from mixedkv_server.engines import speculation_of
from mixedkv_server.models import served_models
from mixedkv_server.settings import ServerSettings
from support.models.adapters import write_adapter
from support.patience import wait_for
from support.servers import prefork
from support.servers.server import MODEL, Server, running

pytestmark = pytest.mark.full

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
NAMES = ["base", "odd", "even", "second"]
RECALL = make_recall(seed=67_000, n_sentences=12)


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("models")
    return {
        "odd": write_adapter(folder / "odd.gguf", model_path(), 1, size=0.2),
        "even": write_adapter(folder / "even.gguf", model_path(), 2, size=0.2),
        "second": Path(shutil.copy(model_path(), folder / "second.gguf")),
    }


def options(files: dict[str, Path]) -> list[str]:
    """Of one model and its adapters."""
    return [
        *("--model", f"base={model_path()}", "--kv", "mixed", "--parallel", "4"),
        *("--lora", f"odd={files['odd']}", "--lora", f"even={files['even']}@0.5"),
        *("--n-ctx", "2048", "--model-n-ctx", "even=512"),
    ]


@pytest.fixture(scope="module")
def server(files: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    store = tmp_path_factory.mktemp("store")
    second = ("--model", str(files["second"]), "--model-n-ctx", "second=1024")
    with running(*options(files), *second, "--store", str(store)) as server:
        yield server


def ask(server: Server, model: str | None, **body: Any) -> Any:
    fields = {"prompt": RECALL.prompt, "max_tokens": 8, "temperature": 0, "logprobs": 5, **body}
    return server.post(TEXT, fields if model is None else {**fields, "model": model})


def cached(answer: Any) -> int:
    return int(answer["usage"]["prompt_tokens_details"]["cached_tokens"])


def first(answer: Any) -> dict[str, float]:
    logprobs: dict[str, float] = answer["choices"][0]["logprobs"]["top_logprobs"][0]
    return logprobs


def test_they_are_listed(server: Server) -> None:
    for name in ("base", "second"):
        ask(server, name, max_tokens=1)
    found = server.request("GET", "/v1/models")[1]["data"]
    assert {each["id"]: each.get("parent") for each in found} == {
        "base": None, "odd": "base", "even": "base", "second": None,
    }  # fmt: skip
    assert found[0]["id"] == "base"
    assert {each["id"]: each["meta"]["n_ctx"] for each in found} == {
        "base": 2048, "odd": 2048, "even": 512, "second": 1024,
    }  # fmt: skip
    for name in NAMES:
        assert server.request("GET", f"/v1/models/{name}")[1]["id"] == name
        stats = server.request("GET", f"/v1/stats?model={name}")[1]
        assert (stats["model"], stats["requests"]["parallel"]) == (name, 4)
    assert [line.split()[2] for line in server.log.splitlines() if line.startswith("mixedkv serves")] == [
        "second",
        "even",
        "odd",
        "base",
    ]


def test_an_adapter_is_chosen_as_llama_server_does(server: Server) -> None:
    """By its place and the strength that it has."""
    listed = server.request("GET", "/lora-adapters?model=base")[1]
    told = [(each["id"], each["name"], each["scale"]) for each in listed]
    assert told == [(0, "odd", 1.0), (1, "even", 0.5)]
    answers = {name: first(ask(server, name, use_kv_cache=False)) for name in ("base", "odd", "even")}
    for lora, name in (
        ([], "base"),
        ([{"id": 0, "scale": 0.0}], "base"),
        ([{"id": 0, "scale": 1.0}], "odd"),
        ([{"id": 0, "scale": 0}, {"id": 1, "scale": 0.5}], "even"),
    ):
        for asked in ("base", "odd"):
            assert first(ask(server, asked, lora=lora, use_kv_cache=False)) == answers[name]
    body = {"prompt": RECALL.prompt, "n_predict": 2, "model": "base"}
    assert server.post("/completion", {**body, "lora": [{"id": 1, "scale": 0.5}]})["model"] == "even"
    for lora, says in (
        ([{"id": 2, "scale": 1}], "has 2 adapters"),
        ([{"id": 1, "scale": 1}], "scale 0.5"),
        ([{"id": 0, "scale": 1}, {"id": 1, "scale": 0.5}], "not mixed"),
        ([{"id": -1, "scale": 1}], "greater"),
    ):
        status, answer, _ = server.request("POST", "/completion", {**body, "lora": lora})
        assert (status, says in answer["error"]["message"]) == (400, True), answer


@pytest.mark.parametrize(
    ("given", "name"),
    [
        ("qwen2.5-coder", "qwen2.5-coder"),
        ("smollm2", "smollm2"),
        ("models/Qwen2.5-Coder-0.5B.Q8_0.gguf", "Qwen2.5-Coder-0.5B.Q8_0"),
        ("models/phi-3.5", "phi-3.5"),
        ("mine=models/phi-3.5.gguf", "mine"),
        ("ggml-org/Qwen2.5-GGUF:Q8_0=models/phi-3.5.gguf", "ggml-org/Qwen2.5-GGUF:Q8_0"),
    ],
)
def test_a_name_keeps_its_dots(monkeypatch: pytest.MonkeyPatch, given: str, name: str) -> None:
    monkeypatch.setattr("mixedkv_server.models.find_model", Path)
    settings = ServerSettings(model=(given,), lora=("models/v1.5.lora.gguf",))
    assert [each.name for each in served_models(settings)] == [name, "v1.5.lora"]


def test_an_adapter_answers_as_llama_cpp_has_it(server: Server, files: dict[str, Path]) -> None:
    """Each as a `Llama` by itself; without a name the first model."""
    answers = {name: first(ask(server, name, use_kv_cache=False)) for name in NAMES}
    assert answers["second"] == answers["base"] == first(ask(server, None, use_kv_cache=False))
    assert answers["odd"] != answers["base"] != answers["even"] != answers["odd"]
    own: dict[str, Any] = {"kv": "mixed", "n_ctx": 2048, "n_threads": 1, "verbose": False}

    def alone(name: str, scale: float) -> dict[str, float]:
        """Of the tokens that the server names."""
        path = str(files[name]) if name != "base" else None
        with Llama(model_path(), lora_path=path, lora_scale=scale, **own) as llm:
            llm.eval(llm.tokenize(RECALL.prompt.encode(), add_bos=True, special=True))
            logits = last_logits(llm).astype(float)
            logprobs = logits - np.log(np.exp(logits - logits.max()).sum()) - logits.max()
            names = {
                llm.detokenize([i], special=True).decode("utf-8", "ignore"): i for i in range(len(logits))
            }
            return {text: float(logprobs[names[text]]) for text in answers[name]}

    def distance(name: str, scale: float) -> float:
        given = alone(name, scale)
        return max(abs(given[text] - logprob) for text, logprob in answers[name].items())

    assert distance("base", 1.0) < 0.2 > distance("odd", 1.0)
    assert distance("even", 0.5) < 0.2 < distance("even", 1.0)


def test_kv_is_shared_with_nobody(server: Server) -> None:
    """Neither in contexts nor in the store."""
    text = {"prompt": make_recall(seed=67_001, n_sentences=12).prompt}
    for name in NAMES:
        answers = [ask(server, name, **text) for _ in range(2)]
        assert cached(answers[0]) == (0 if name != "second" else cached(answers[0]))
        assert cached(answers[1]) > 100
    server.wait_until_idle()


def test_the_metrics_name_adapters_that_answer(server: Server) -> None:
    def shown(running: str) -> bool:
        labels = f'{{max_lora="2",model="base",running_lora_adapters="{running}",waiting_lora_adapters=""}}'
        return f"mixedkv_lora_requests_info{labels}" in server.metrics()

    seen = threading.Event()

    def go_on() -> None:
        while not seen.is_set():
            ask(server, "odd", max_tokens=1000, ignore_eos=True)

    with ThreadPoolExecutor(1) as pool:
        answers = pool.submit(go_on)
        try:
            wait_for(lambda: shown("odd"))
        finally:
            seen.set()
        answers.result()
    wait_for(lambda: shown(""))


def test_all_at_once(server: Server) -> None:
    alone = {name: ask(server, name, use_kv_cache=False)["choices"][0]["text"] for name in NAMES}
    with ThreadPoolExecutor(8) as pool:
        jobs = [(name, pool.submit(ask, server, name, use_kv_cache=False)) for name in NAMES * 4]
    assert all(job.result()["choices"][0]["text"] == alone[name] for name, job in jobs)


def test_gauges_are_of_each_model(server: Server) -> None:
    for name in NAMES:
        ask(server, name)

    def all_stats() -> list[Any]:
        return [server.request("GET", f"/v1/stats?model={name}")[1] for name in NAMES]

    wait_for(lambda: not any((now["store"] or {}).get("waiting_to_be_stored") for now in all_stats()))
    stats = all_stats()
    assert [now["parent"] for now in stats] == ["", "base", "base", ""]
    text = server.metrics()

    def gauge(name: str, model: str, label: str) -> float:
        found = re.search(rf'^mixedkv_{name}{{model="{model}",{label}}} (.*)$', text, re.M)
        assert found
        return float(found[1])

    for model, its in (("base", stats[:3]), ("second", stats[3:])):
        for field, name, label in (
            ("tokens_cold", "kv_cache_rows", 'state="cold"'),
            ("bytes_cold", "kv_cache_bytes", 'tier="cold"'),
            ("sequences_idle", "kv_cache_sequences", 'state="idle"'),
        ):
            each = [now["cache"][field] for now in its]
            assert all(each)
            assert gauge(name, model, label) == sum(each)
        assert gauge("kv_cache_bytes", model, 'tier="disk"') == stats[0]["store"]["bytes_disk"] > 0


def test_each_has_its_own_context(server: Server) -> None:
    body = {"prompt": "The lamp lies in the market. " * 120, "max_tokens": 1}
    assert server.status("POST", TEXT, {**body, "model": "base"}) == 200
    for name in ("even", "second"):
        status, answer, _ = server.request("POST", TEXT, {**body, "model": name})
        assert status == 400
        assert answer["error"]["code"] == "context_length_exceeded"


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (TEXT, {"prompt": "a"}),
        (CHAT, {"messages": [{"role": "user", "content": "a"}]}),
        ("/v1/responses", {"input": "a"}),
        ("/v1/warm", {"prompt": "a"}),
        ("/v1/context", {"prompt": "a"}),
        ("/tokenize", {"content": "a"}),
        ("/v1/embeddings", {"input": "a"}),
    ],
)
def test_an_unknown_one_is_a_404(server: Server, path: str, body: Any) -> None:
    status, answer, _ = server.request("POST", path, {**body, "model": "third"})
    assert (status, answer["error"]["code"], answer["error"]["param"]) == (404, "model_not_found", "model")
    assert "'second'" in answer["error"]["message"]
    assert server.status("GET", "/v1/models/third") == 404


def test_the_header_names_a_model_before_the_body_does(server: Server) -> None:
    client = openai.OpenAI(base_url=server.url + "/v1", api_key="unused", max_retries=0)
    make = client.completions.create
    answer = make(model="base", prompt="The lamp", max_tokens=1, extra_headers={"X-Model-Id": "second"})
    assert answer.model == "second"
    with pytest.raises(openai.NotFoundError, match="'third'"):
        make(model="base", prompt="The lamp", max_tokens=1, extra_headers={"X-Model-Id": "third"})


def test_a_client_and_sessions(server: Server) -> None:
    client = openai.OpenAI(base_url=server.url + "/v1", api_key="unused")
    for name in NAMES:
        message: Any = {"role": "user", "content": "Where is the lamp?"}
        answer = client.chat.completions.create(model=name, messages=[message], max_tokens=4)
        assert answer.model == name
        body = {"model": name, "session_id": f"of-{name}", "prompt": "The lamp lies in the mill. " * 8}
        server.post("/v1/context", body)
        answer = ask(server, name, prompt=" And?", session_id=f"of-{name}")
        assert cached(answer) > 40
        assert server.status("DELETE", f"/v1/context/of-{name}") == 200


def test_after_a_restart_each_finds_its_own(files: dict[str, Path], tmp_path: Path) -> None:
    warm = tmp_path / "warm"
    warm.write_text(json.dumps({"model": "odd", "prompt": RECALL.prompt + " And"}) + "\n")
    store = ["--store", str(tmp_path / "store")]
    with running(*options(files), *store, "--warm", str(warm)) as server:
        assert cached(ask(server, "odd", prompt=RECALL.prompt + " And then")) > 100
        assert cached(ask(server, "base")) == 0
        assert server.stop() == 0
    with running(*options(files), *store) as server:
        assert cached(ask(server, "even")) == 0
        for name in ("odd", "base"):
            answer = ask(server, name)
            assert cached(answer) > 100
            assert answer["usage"]["prompt_tokens_details"]["cached_tier"] == "disk"


@pytest.mark.nightly
def test_a_model_that_embeds_beside_one_that_answers(
    zoo_path: Callable[[str], Path], files: dict[str, Path], tmp_path: Path
) -> None:
    given = ["--model", str(model_path()), "--model", f"vectors={zoo_path('bert')}", "--n-ctx", "512"]
    with running(*given, "--store", str(tmp_path)) as server:
        assert server.post("/v1/embeddings", {"input": "a", "model": "vectors"})["model"] == "vectors"
        assert ask(server, None, prompt="The lamp")["model"] == MODEL
        for path, model, code in (
            (TEXT, "vectors", "generation_not_supported"),
            ("/v1/embeddings", MODEL, "embeddings_not_supported"),
        ):
            status, answer, _ = server.request(
                "POST", path, {"input" if "emb" in path else "prompt": "a", "model": model}
            )
            assert (status, answer["error"]["code"]) == (400, code)
        assert server.stop() == 0
    with (
        pytest.raises(RuntimeError, match="lora: 'vectors' only embeds texts"),
        running(*given, "--lora", f"odd=vectors={files['odd']}"),
    ):
        pass


# --- options ---


def settings(**given: Any) -> ServerSettings:
    return ServerSettings(**given)


def test_names_are_read(tmp_path: Path) -> None:
    found = served_models(settings(model=["a=/x/y.gguf", "/x/z.gguf"], lora=["b=c.gguf@0.5", "d=z=e.gguf@x"]))
    assert [(each.name, str(each.path), each.adapter, each.parent, each.scale) for each in found] == [
        ("a", "/x/y.gguf", "", "", 1.0),
        ("b", "/x/y.gguf", "c.gguf", "a", 0.5),
        ("z", "/x/z.gguf", "", "", 1.0),
        ("d", "/x/z.gguf", "e.gguf@x", "z", 1.0),  # a file of this name
    ]
    assert [each.name for each in served_models(settings())] == [MODEL]
    assert [each.name for each in served_models(settings(model="/x/y.gguf", model_name="m"))] == ["m"]
    two = settings(model="m.gguf", model_n_ctx=["b=4096"], lora=["b=b.gguf", "c=c.gguf"], n_ctx=8192)
    assert [(each.name, each.n_ctx) for each in served_models(two)] == [("m", 8192), ("b", 4096), ("c", 8192)]
    nameless = served_models(settings(model="m.gguf", lora=["/x/poet.gguf@0.5"]))[1]
    assert (nameless.name, nameless.adapter, nameless.scale) == ("poet", "/x/poet.gguf", 0.5)
    odd = tmp_path / "odd=name.gguf"
    odd.touch()
    assert served_models(settings(model=str(odd)))[0].path == odd
    several = ServerSettings.load({}, environ={"MIXEDKV_MODEL": "a.gguf:b.gguf", "MIXEDKV_LORA": "c=d.gguf"})
    assert [each.name for each in served_models(several)] == ["a", "c", "b"]


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"model": ["a.gguf", "/x/a.gguf"]}, "there are two 'a'"),
        ({"model": ["a.gguf"], "lora": ["a=b.gguf"]}, "there are two 'a'"),
        ({"model": ["b.gguf"], "lora": ["b.gguf"]}, "there are two 'b'"),
        ({"model_n_ctx": ["a=1024"]}, "no model or adapter is named 'a'"),
        ({"model_n_ctx": ["a"]}, "use NAME=N"),
        ({"model_n_ctx": [f"{MODEL}=-1"]}, "use NAME=N"),
    ],
)
def test_wrong_names_are_refused(given: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        served_models(settings(**given))


def test_the_draft_model_is_the_first_ones() -> None:
    given = settings(speculation="small.gguf")
    assert [speculation_of(given, drafts) for drafts in (True, False)] == ["draft-model", "prompt-lookup"]
    with pytest.raises(ValidationError, match="or the GGUF file of a smaller model"):
        settings(speculation="draft-model")


@pytest.mark.parametrize("content", ["", "model"])
@pytest.mark.nightly
def test_a_file_that_is_no_adapter_is_refused(tmp_path: Path, content: str) -> None:
    file = tmp_path / "adapter.gguf"
    if content == "model":
        shutil.copy(model_path(), file)
    options = ["--n-ctx", "512", "--lora", f"bad={file}"]
    says = r"adapter.gguf(: there is no such file| cannot be loaded: it is no LoRA adapter)"
    with pytest.raises(RuntimeError, match=says), running(*options):
        pass


# --- weights ---


def test_weights_are_there_once() -> None:
    small: dict[str, Any] = {"n_ctx": 512, "verbose": False}
    with Llama(model_path(), **small) as one:
        two = Llama(model_path(), kv="f16", weights=one, **small)
        assert two.model == one.model
        tokens = one.tokenize(b"The code of the mill is 4817.")
        one.eval(tokens)
        two.close()
        one.eval(tokens)
        three = Llama(model_path(), weights=one, **small)
    with pytest.raises(RuntimeError, match="closed"):
        three.eval(tokens)
    with pytest.raises(RuntimeError, match="closed"):
        Llama(model_path(), weights=one, **small)


@pytest.mark.nightly
def test_weights_of_another_file_are_refused(tmp_path: Path) -> None:
    other = shutil.copy(model_path(), tmp_path / "m.gguf")
    says = pytest.raises(ValueError, match="weights: this is a Llama of")
    with Llama(model_path(), n_ctx=512, verbose=False) as llm, says:
        Llama(other, weights=llm, n_ctx=512, verbose=False)


def test_a_template_that_takes_for_ever_is_an_error_at_the_start(tmp_path: Path) -> None:
    """It is tried before anything is served, in a time of its own."""
    template = tmp_path / "slow.jinja"
    template.write_text("{% for i in range(2000000000) %}{% endfor %}{{ messages[0].content }}")
    done = prefork.run(["serve", "--port", "0", "--n-ctx", "512", "--chat-format", str(template)])
    assert done.returncode == 2
    assert "chat template takes more than 10 seconds" in done.stderr
    assert "--chat-format" in done.stderr
