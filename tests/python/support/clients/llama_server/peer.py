"""Stands for llama-server and for the Hub in llama-server's tests, which import this.

`LLAMA_SERVER_MODELS` is the folder of the models, `LLAMA_CPP` that of llama.cpp.
"""

from __future__ import annotations

import functools
import http.server
import os
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from support.servers.prefork import Forked

_MODELS = Path(os.environ["LLAMA_SERVER_MODELS"])
_LLAMA_CPP = Path(os.environ["LLAMA_CPP"])
_SAME = (  # options that are written alike
    *("--port", "--host", "--ctx-size", "--parallel", "-ctk", "-ctv"),
    *("--alias", "--api-key", "--n-gpu-layers", "--reasoning", "--chat-template-kwargs"),
)
_LEAST_BATCH = 32  # which is refused below
_SWITCHES = {
    "--jinja": ["--jinja"],
    "--swa-full": ["--swa-full"],
    "--embedding": ["--embeddings"],
    "--context-shift": ["--overflow", "slide"],
}
_WITHOUT_VALUE = (  # that say nothing here, or nothing that `mixedkv serve` could do
    *("--offline", "--cont-batching", "--reranking", "--metrics", "--kv-unified", "--slots", "--no-slots"),
    *("--no-jinja", "--verbose", "--backend_sampling", "--no-ui", "--no-models-autoload", "--no-mmproj"),
    *("--ui-mcp-proxy", "--no-cache-idle-slots"),
)
_INSTEAD: dict[str, Callable[[str], list[str]]] = {  # as the errors for these options say
    "--lora": lambda file: ["--lora", f"shakespeare={file}"],
    "--slot-save-path": lambda folder: ["--store", folder],
    "--model-draft": lambda file: ["--speculation", file],
    "--chat-template": lambda given: ["--chat-format", _template(given)],
    "--chat-template-file": lambda file: ["--chat-format", str(_LLAMA_CPP / file.replace("../../../", ""))],
    "--sleep-idle-seconds": lambda seconds: ["--keep-alive", f"{seconds}s"],
    "--cache-ram": lambda mib: ["--max-ram-gb", f"{mib}MiB"],
    "--models-max": lambda n: ["--max-loaded", n],
    "--cors-origins": lambda site: ["--allow", site],
}
_ROUTED = {
    "ggml-org/tinygemma3-GGUF:Q8_0": "tiny.gguf",
    "ggml-org/test-model-stories260K:F32": "tiny.gguf",
    "ggml-org/test-model-stories260K-infill:F32": "fim.gguf",
}


class _Some:
    """Equals each number above 0: how many tokens a text has differs by the vocabulary."""

    def __eq__(self, other: object) -> bool:
        return isinstance(other, int) and other > 0

    __hash__ = None  # type: ignore[assignment]


SOME = _Some()


def start(server: Any, words: Sequence[str], environ: Mapping[str, str]) -> Forked:
    """Start the server that llama-server's `words` ask for; its log goes where the test wants it."""
    command = _command(server, list(words))
    print("mixedkv serve", *command)
    environ = {**environ, "HF_HUB_OFFLINE": "1"}
    process = Forked(["serve", "--threads", "1", *command], environ)
    log = open(server.log_path, "w") if server.log_path else sys.stdout  # noqa: SIM115
    threading.Thread(target=_copy, args=(process, log), daemon=True).start()
    return process


def _copy(process: Forked, log: Any) -> None:
    for line in process.stderr:
        log.write(line)
        log.flush()


def body(server: Any, path: str, given: Any) -> Any:
    """Return a body that says what llama-server is told at its start: --n-predict and --verbose."""
    if not isinstance(given, dict):
        return given
    generates = path.rpartition("/")[2] in ("completion", "completions", "infill")
    lengths = ("n_predict", "max_tokens", "max_completion_tokens")
    if generates and (server.n_predict or -1) > 0 and not any(name in given for name in lengths):
        given = {**given, "n_predict": server.n_predict}
    if generates and server.debug and not given.get("stream"):
        given = {**given, "verbose": True}
    return given


def _command(server: Any, words: list[str]) -> list[str]:
    out: list[str] = []
    sampling: list[str] = []
    named: dict[str, str] = {}
    left_out: list[str] = []
    while words:
        word = words.pop(0)
        if word in _SWITCHES:
            out += _SWITCHES[word]
        elif word in _WITHOUT_VALUE:
            left_out.append(word)
        else:
            value = words.pop(0) if words else ""
            if word in ("--batch-size", "--ubatch-size"):
                out += [word, str(max(_LEAST_BATCH, int(value)))]
            elif word in _SAME:
                out += [word, value]
            elif word in ("--temp", "--seed"):
                sampling.append(f"{'temperature' if word == '--temp' else 'seed'}={value}")
            elif word in ("--hf-repo", "--hf-file", "--model"):
                named[word] = value
            elif word in _INSTEAD:
                out += _INSTEAD[word](value)
    out += _models(server, named, "--no-mmproj" not in left_out)
    if any(name in named.get("--hf-file", "") for name in ("bert", "jina")):
        out = [word for word in out if word != "--embeddings"]  # a model that only embeds says so itself
    return [*out, "--sampling", ",".join(sampling)] if sampling else out


def _models(server: Any, named: Mapping[str, str], sees: bool) -> list[str]:
    if not (named or server.model_file):
        pairs = (f"{name}={_MODELS / file}" for name, file in _ROUTED.items())
        return [word for pair in pairs for word in ("-m", pair)]
    name = " ".join(named.values())
    kinds = {"bert-bge": "bert.gguf", "jina-reranker": "ranker.gguf", "infill": "fim.gguf"}
    file = next((file for kind, file in kinds.items() if kind in name), "tiny.gguf")
    sight = ["--mmproj", str(_MODELS / "mmproj-mlp-256.gguf")] if sees and "gemma3" in name else []
    return ["-m", named.get("--model") or str(_MODELS / file), *sight]


def _template(given: str) -> str:
    """Return a name of a template as it is here, or a file with the text of one."""
    if " " not in given:
        return {"llama3": "llama-3"}.get(given, given)
    with tempfile.NamedTemporaryFile("w", suffix=".jinja", delete=False) as file:
        file.write(given)
    return file.name


def file_of(url: str) -> str:
    """Return the file in the place of one that a test downloads."""
    if "shakespeare" in url:
        return str(_MODELS / "lora.gguf")
    if "stories15M" in url:
        return str(_MODELS / "tiny.gguf")
    raise LookupError(f"nothing stands for {url}")


class _Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *_: Any) -> None:
        pass


_SITE = http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(_Quiet, directory=str(_MODELS)))
URL = f"http://127.0.0.1:{_SITE.server_port}"  # where the images are


@contextmanager
def site() -> Iterator[None]:
    """Serve the images of tests."""
    with _SITE:
        threading.Thread(target=_SITE.serve_forever, daemon=True).start()
        try:
            yield
        finally:
            _SITE.shutdown()
