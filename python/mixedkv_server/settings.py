"""Settings of the server: the options of `mixedkv serve`."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar, Literal, cast, get_args

from pydantic import ValidationError, field_validator, model_validator

from mixedkv import system
from mixedkv.chunks.passages import parse_chunks
from mixedkv.hosts import is_local
from mixedkv.limits import INT32_MAX, MAX_SEQUENCES, MAX_SNAPSHOTS
from mixedkv.prefix.sequences import Reuse
from mixedkv.prompts.content_marks import ContentTokens
from mixedkv.prompts.overflow import Overflow
from mixedkv.sessions.metadata import beside
from mixedkv.sizes import parse_duration, parse_size
from mixedkv.store.eviction import Eviction
from mixedkv.streaming.layer_choice import parse_layers
from mixedkv_server.fields import SamplingFields, check_variables
from mixedkv_server.logs import LogFormat
from mixedkv_service.settings import SIZE, Gigabytes, Megabytes, ServiceSettings, Several, in_words, option

_ZERO = re.compile(r"-?0+(\.0+)?(ms|min|[smhd])?", re.ASCII)


def parse_keep_alive(value: object) -> float:
    """Return the seconds of a number or of a text such as "10m" or "1h30m"; below zero is infinity.

    Raises:
        ValueError: the value is neither.
    """
    if isinstance(value, int | float) and not isinstance(value, bool) and not math.isnan(value):
        return math.inf if value < 0 else float(value)
    text = value.strip() if isinstance(value, str) else ""
    if _ZERO.fullmatch(text):
        return 0.0
    try:
        seconds = parse_duration(text.removeprefix("-"))
    except ValueError:
        raise ValueError(
            f'{str(value)[:50]!r} is not a time: use seconds, a text such as "10m" or "1h30m", 0, or -1 for '
            "ever"
        ) from None
    return math.inf if text.startswith("-") else seconds


Reasoning = Literal["auto", "on", "off"]
ENV_PREFIX = "MIXEDKV_"
IN_MEMORY = "sqlite:"
_DRAFTERS = ("", "off", "prompt-lookup", "mtp")
_ROOT_PATH = re.compile(r"(/[A-Za-z0-9_.~-]+)+")
_ORIGIN = re.compile(r"\*|[a-z][a-z0-9+.-]*://[^/\s?#]+")
_HOST = re.compile(r"[^/:\s*]+")


def parse_reuse(text: str) -> tuple[Reuse, dict[str, Any]]:
    """Return which KV may be reused, and options of passages: of "chunks:repair=query,ratio=0.15".

    Raises:
        ValueError: it is unknown, or an option is out of range.
    """
    kind, colon, options = text.partition(":")
    if kind not in get_args(Reuse) or (colon and kind != "chunks"):
        raise ValueError("use exact, prefix, chunks, or chunks:repair=query,ratio=0.15")
    return cast(Reuse, kind), parse_chunks(options)


def parse_sampling(text: str) -> dict[str, Any]:
    """Return settings of sampling by name: of "temperature=0.7,top_k=40".

    Raises:
        ValueError: one is unknown or out of range.
    """
    given = {name.strip(): value for name, _, value in (part.partition("=") for part in text.split(","))}
    try:
        return SamplingFields.model_validate(given).model_dump(exclude_none=True)
    except ValidationError as error:
        first = error.errors()[0]
        raise ValueError(f"{first['loc'][0]}: {in_words(first['msg'], of_option=True)}") from None


def parse_variables(text: str) -> dict[str, Any]:
    """Return variables of a chat template: of a JSON object.

    Raises:
        ValueError: it is none, or a name cannot be a variable's.
    """
    try:
        found = json.loads(text)
    except ValueError as error:
        raise ValueError(f"it is no JSON ({error}): give an object of variables") from None
    if not isinstance(found, dict):
        raise ValueError('give an object of variables, as {"enable_thinking": false}')
    check_variables(found)
    return found


def _check_drafter(text: str) -> None:
    if text not in _DRAFTERS and not text.endswith(".gguf") and not Path(text).is_file():
        raise ValueError("use off, prompt-lookup, mtp, or the GGUF file of a smaller model")


class ServerSettings(ServiceSettings):
    """The options of `mixedkv serve`.

    Raises:
        ValueError: a value is out of range or conflicts with another; the message names the field.
    """

    PARSED: ClassVar[Mapping[str, Any]] = {
        **ServiceSettings.PARSED,
        "stream_layers": parse_layers,
        "memory": parse_size,
        "keep_alive": parse_keep_alive,
        "reuse": parse_reuse,
        "sampling": parse_sampling,
        "chat_template_kwargs": parse_variables,
        "speculation": _check_drafter,
    }
    GROUPS: ClassVar[Mapping[str, str]] = {
        "models": "model model_name model_n_ctx lora mmproj keep_alive max_loaded chat_format content_tokens",
        "cache": "kv n_ctx swa_full parallel idle_prefixes overflow",
        "machine": "threads threads_batch n_batch n_ubatch n_gpu_layers stream_layers memory",
        "reuse of KV": "reuse store store_key_file store_remote recheck max_kv_size_gb max_ram_gb eviction "
        "max_age warm",
        "answers": "sampling speculation n_rs_seq reasoning reasoning_budget chat_template_kwargs strict "
        "embeddings embedding_n_ctx",
        "network": "host port root_path tls_cert tls_key allow",
        "keys and sessions": "api_key_file api_key metrics_key_file allow_no_keys metadata_url",
        "limits": "max_queue request_timeout read_timeout drain_timeout max_body_mb max_connections",
        "operation": "kv_events restart_when_stuck access_log log_format verbose",
    }
    IDLE: ClassVar[str] = "idle_prefixes"

    model: Several = option(
        (),
        "GGUF file, hf:OWNER/REPO[:FILE] or smollm2; repeat for more models (default: the bundled one)",
        "[NAME=]FILE",
    )
    model_name: str = option("", "name of the first model for clients (default: the file's name)", "NAME")
    model_n_ctx: Several = option((), "--n-ctx of the model of that name; repeat for more", "NAME=N")
    lora: Several = option(
        (),
        "LoRA adapter, served as a model of that name, with its strength, e.g. @0.5; repeat for more",
        "[NAME=[MODEL=]]FILE[@X]",
    )
    mmproj: Several = option((), "image encoder of a model, by default of the first one", "[NAME=]FILE")
    keep_alive: str = option(
        "",
        "end a model's process after this long without requests, e.g. 5m; the next request that names the "
        "model starts it (default: never; one model without this has no process of its own)",
        "TIME",
    )
    max_loaded: int = option(
        0,
        "most models in memory at a time; they are loaded when a request names them, and the least recently "
        "used one leaves (default: any number)",
        "N",
        0,
        10_000,
    )
    chat_format: str = option(
        "", "llama-cpp-python's chat format, or a file with a Jinja template, in place of the model's", "NAME"
    )
    content_tokens: ContentTokens = option(
        "text",
        "text: control tokens in the messages of a chat are text, as all that messages hold; special: they "
        "are read as control tokens, so that a message can end its turn",
        "HOW",
    )
    n_ctx: int = option(
        0,
        "tokens of the cache, shared by all sequences (default, as with --fit: as many as fit into the "
        "memory that is free, up to the model's)",
        "N",
        0,
        INT32_MAX,
    )
    swa_full: bool = option(
        False,
        "keep all rows of layers with a sliding window (default: with --reuse chunks and --overflow slide)",
    )
    idle_prefixes: int = option(
        8, "most finished requests whose KV stays in the context", "N", 1, MAX_SEQUENCES - 1
    )
    n_batch: int = option(
        0,
        "most tokens evaluated in one step (default: 512; with streamed layers 2048, 1024 or 512, as fits)",
        "N",
        0,
        65536,
    )
    n_ubatch: int = option(
        0, "most tokens that layers compute at a time, at most a step (default: a step)", "N", 0, 65536
    )
    n_gpu_layers: int | None = option(
        None, "layers on a GPU, in a build that has one; -1 is all (default: as many as fit)", "N", -1, 4096
    )
    stream_layers: str = option(
        "",
        "read layers from the file for each step: auto, all, ffn, a number, or keep_first=8,keep_last=2",
        "HOW",
    )
    memory: str = option(
        "", "memory that this process may take, e.g. 6GiB; layers that do not fit are streamed", SIZE
    )
    reuse: str = option(
        "exact",
        "which KV may be reused. exact: only KV that equals an evaluation from the start; prefix: also KV "
        "whose F16 window has aged out; chunks: also passages from other prompts, repaired, with options as "
        "chunks:repair=query,ratio=0.15,overlap_k=4,chunk_size=64,boundary_window=16,max_kld=0.25,check=0.01",
        "HOW",
    )
    speculation: str = option(
        "",
        "how to draft tokens, so that a step evaluates several tokens of an answer. prompt-lookup: text "
        "that repeats itself; mtp: that, and the model's own prediction layers; a GGUF file: that, and a "
        "smaller model with the same vocabulary (default: off)",
        "HOW",
    )
    n_rs_seq: int = option(
        0,
        "most tokens that a hybrid or recurrent model can take back, as rejected drafts are; each takes the "
        "memory of one more state for each sequence",
        "N",
        0,
        MAX_SNAPSHOTS,
    )
    sampling: str = option(
        "",
        "sampling of requests that do not set it: temperature=0.7,top_k=40,seed=1 (default: what the model's "
        "file recommends, else llama-server's)",
        "NAME=X,...",
    )
    reasoning: Reasoning = option(
        "auto",
        "off: models do not think before they answer, where their templates can turn that off; on, auto: as "
        "the template has it. A request's own reasoning_effort, think or thinking goes before",
        "HOW",
    )
    reasoning_budget: int = option(
        -1,
        "tokens after which a thought is ended, where the request does not say; 0 ends it at once (default: "
        "-1, never)",
        "N",
        -1,
        INT32_MAX,
    )
    chat_template_kwargs: str = option(
        "",
        "variables of the chat template as a JSON object, for requests that do not set them, e.g. "
        '{"enable_thinking": false}',
        "JSON",
    )
    overflow: Overflow = option(
        "refuse",
        "refuse: reject prompts that do not fit the context, and end answers there; slide: drop the middle",
        "HOW",
    )
    embeddings: bool = option(False, "answer /v1/embeddings, in a second context on the same model")
    embedding_n_ctx: int = option(
        0, "tokens of the longest input to embed (default: 2048 or the model's)", "N", 0, INT32_MAX
    )
    host: str = option(
        "127.0.0.1",
        "address to listen on; PATH.sock is a Unix socket, to which only its owner can connect",
        "HOST",
    )
    root_path: str = option("", "prefix of all paths, e.g. /llm; paths without it work too", "PATH")
    threads_batch: int = option(0, "CPU threads for prompts (default: as many as --threads)", "N", 0, 4096)
    api_key: str = option(
        "",
        "the one key of all clients. Other users of the machine see it in the list of processes, but not as "
        "MIXEDKV_API_KEY or in a file",
        "KEY",
    )
    metrics_key_file: str = option(
        "", "file with a key that /metrics then asks for; its numbers are by tenant", "FILE"
    )
    allow: Several = option(
        (),
        "site whose web pages may call this server (https://chat.example.org, * for all), or a name of the "
        "server besides localhost, where it has no keys; repeat for more",
        "SITE|HOST",
    )
    strict: bool = option(
        False, "refuse unknown fields, and other names than the model's where one is served"
    )
    store_key_file: str = option("", "file with the key that encrypts the store", "FILE")
    store_remote: str = option(
        "",
        "server that keeps KV for several machines, behind the store: redis://..., or s3://bucket/prefix",
        "URL",
    )
    recheck: bool = option(
        True,
        "check stored KV before the first use of what another process stored, by evaluating some of its "
        "tokens again; wrong entries are removed",
    )
    max_ram_gb: Gigabytes = option(1.0, "most memory for the store, in 10^9 bytes or as 2GiB", SIZE, 0, 1e6)
    eviction: Eviction = option(
        "lru",
        "which KV leaves the store first, on disk and in memory: the least recently used (lru), the oldest, "
        "or what saves least time for its size (gdsf)",
    )
    kv_events: str = option(
        "",
        "ZeroMQ address that tells routers what the context holds, as vLLM does, and the topic of its "
        "messages, in which {model} is a model's name: tcp://HOST:PORT#TOPIC",
        "URL",
    )
    metadata_url: str = option(
        "",
        "database of sessions: redis://..., sqlite:PATH, or sqlite: for memory (default: "
        "sessions.sqlite3 in the store, else memory)",
        "URL",
    )
    request_timeout: float = option(600.0, "seconds after which a request is given up", "S", 0.01, 1e6)
    read_timeout: float = option(
        30.0, "seconds a client has to send a request's head, and as long for its body", "S", 0.01, 1e6
    )
    max_body_mb: Megabytes = option(8.0, "largest request body, in 10^6 bytes or as 8MiB", SIZE, 0.001, 1024)
    max_connections: int = option(
        1024, "most connections at a time; while all are busy, others get 503", "N", 1, 1_000_000
    )
    warm: str = option("", "file of JSON lines with prompts (or messages) to evaluate at the start", "FILE")
    restart_when_stuck: bool = option(
        False,
        "end the process when the engine is stuck or the model's file has changed, for a supervisor to start "
        "it again",
    )
    access_log: bool = option(
        False,
        "log a line for each answer: id, route, status, bytes, seconds (but none for a health check or "
        "/metrics that is answered with 200)",
    )
    log_format: LogFormat = option(
        "text", "text: lines to read; json: an object on each line, for a log collector", "HOW"
    )
    verbose: bool = option(False, "show llama.cpp's log")

    @field_validator("allow")
    @classmethod
    def _are_sites_or_hosts(cls, names: tuple[str, ...]) -> tuple[str, ...]:
        if not all(_ORIGIN.fullmatch(name) or _HOST.fullmatch(name) for name in names):
            raise ValueError(
                "give a site with its scheme, and its port if it has one: https://chat.example.org; or the "
                "name of a host alone: host.docker.internal"
            )
        return names

    @field_validator("root_path")
    @classmethod
    def _is_a_path(cls, path: str) -> str:
        if path and not _ROOT_PATH.fullmatch(path):
            raise ValueError("begin with a slash, end with none, and use letters, digits, - . _ ~ between")
        return path

    @model_validator(mode="after")
    def _go_together(self) -> ServerSettings:
        if self.api_key and self.api_key_file:
            raise ValueError("api_key and api_key_file: give one; a file may have many keys")
        if self.tls_cert and self.unix_socket:
            raise ValueError("tls_cert and host: a Unix socket needs no TLS: leave one out")
        if not system.HAS_UNIX_SOCKETS and (self.unix_socket or self.routed):
            name = "host" if self.unix_socket else "model, keep_alive, max_loaded"
            raise ValueError(
                f"{name}: this needs Unix sockets, which this system lacks. Serve one model at an address "
                "(host=127.0.0.1)"
            )
        if self.speculation == "mtp" and (self.stream_layers or self.memory):
            raise ValueError("speculation=mtp and stream_layers or memory: leave one out")
        if self.store_key_file and not system.HAS_OWNERS:
            raise ValueError("store_key_file: this system does not tell who may read a file: leave it out")
        if self.store_key_file and not (self.store or self.store_remote):
            raise ValueError(
                "store_key_file: there is nothing to encrypt, give store_remote or a folder for the store too"
            )
        return self

    @property
    def default_sampling(self) -> dict[str, Any]:
        """Fields of `Sampling` for requests that do not set them."""
        return parse_sampling(self.sampling) if self.sampling else {}

    @property
    def template_variables(self) -> dict[str, Any]:
        """Variables of chat templates that requests do not set."""
        return parse_variables(self.chat_template_kwargs) if self.chat_template_kwargs else {}

    @property
    def reuses_chunks(self) -> bool:
        return self.reuse.startswith("chunks")

    @property
    def draft_model(self) -> str:
        """File of the smaller model that drafts, "" if there is none."""
        return "" if self.speculation in _DRAFTERS else self.speculation

    @property
    def origins(self) -> list[str]:
        """Sites whose pages may call this server. With keys these are all, unless some are named: a page has
        no key unless its user gives it one. Behind a Unix socket who connects there decides.
        """
        named = [name for name in self.allow if _ORIGIN.fullmatch(name)]
        has_keys = bool(self.api_key_file or self.api_key)
        return named or (["*"] if has_keys and not self.unix_socket else [])

    @property
    def hosts(self) -> list[str]:
        """Names of the server besides localhost."""
        return [name for name in self.allow if not _ORIGIN.fullmatch(name)]

    @property
    def unix_socket(self) -> str:
        """Path of the Unix socket to listen on, "" for an address."""
        return self.host if "/" in self.host or self.host.endswith(".sock") else ""

    @property
    def knows_clients(self) -> bool:
        return bool(self.api_key_file or self.api_key or self.unix_socket)

    @property
    def routed(self) -> bool:
        """True if models are processes behind a router, which start when requests name them."""
        return bool(len(self.model) > 1 or self.keep_alive or self.max_loaded)

    @property
    def keep_alive_seconds(self) -> float:
        """Seconds that a model stays in memory after its last request."""
        return parse_keep_alive(self.keep_alive) if self.keep_alive else math.inf

    @property
    def local_only(self) -> bool:
        """True if the server has no keys and only requests from this machine can reach it."""
        return is_local(self.host) and not (self.api_key_file or self.api_key or self.allow_no_keys)

    @property
    def sessions_url(self) -> str:
        """URL of the database of sessions: by default beside their KV."""
        if self.metadata_url:
            return self.metadata_url
        return f"sqlite:{beside(self.store)}" if self.store else IN_MEMORY
