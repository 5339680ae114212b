"""Settings of the server: the options of `mixedkv serve`."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any, ClassVar, Literal

from pydantic import field_validator, model_validator

from mixedkv.chunks.passages import parse_chunks
from mixedkv.doors.settings import SIZE, DoorSettings, Gigabytes, Megabytes, Several, option
from mixedkv.hosts import is_local
from mixedkv.limits import INT32_MAX, MAX_SEQUENCES, MAX_SNAPSHOTS, RANGES
from mixedkv.prompts.overflow import Overflow
from mixedkv.sessions.metadata import beside
from mixedkv.sizes import parse_size
from mixedkv.start.sequences import Reuse
from mixedkv.store.eviction import Eviction
from mixedkv.streaming.layer_choice import parse_layers

_UNITS = {"ms": 0.001, "s": 1, "m": 60, "min": 60, "h": 3600, "d": 86_400}
_PART = re.compile(r"(\d{1,12}(?:\.\d{1,9})?)(ms|min|[smhd])", re.ASCII)
_NUMBER = re.compile(r"-?\d{1,12}(\.\d{1,9})?", re.ASCII)
_HELP = 'use seconds, a text such as "10m" or "1h30m", 0, or -1 for ever'


def parse_keep_alive(value: object) -> float:
    """Return the seconds of a number or of a text such as "10m" or "1h30m"; below zero is infinity.

    Raises:
        ValueError: the value is neither.
    """
    if isinstance(value, str):
        return _read(value.strip())
    if isinstance(value, bool) or not isinstance(value, int | float) or math.isnan(value):
        raise ValueError(f"{str(value)[:50]!r} is not a time: {_HELP}")
    return math.inf if value < 0 else float(value)


def _read(text: str) -> float:
    if _NUMBER.fullmatch(text):
        return parse_keep_alive(float(text))
    parts = text.removeprefix("-")
    seconds = [float(number) * _UNITS[unit] for number, unit in _PART.findall(parts)]
    if not parts or _PART.sub("", parts):
        raise ValueError(f"{text[:50]!r} is not a time: {_HELP}")
    return math.inf if text.startswith("-") and sum(seconds) > 0 else sum(seconds)


ENV_PREFIX = "MIXEDKV_"
IN_MEMORY = "sqlite:"
SAMPLING = ("temperature", "top_k", "top_p", "min_p", "repeat_penalty")  # that an operator may set
_TEMP = {"temperature": "temp"}  # llama-server's word

_ROOT_PATH = re.compile(r"(/[A-Za-z0-9_.~-]+)+")
_ORIGIN = re.compile(r"[a-z][a-z0-9+.-]*://[^/\s?#]+")


class ServerSettings(DoorSettings):
    """The options of `mixedkv serve`.

    Raises:
        ValueError: a value is out of range or conflicts with another; the message names the field.
    """

    PARSED: ClassVar[Mapping[str, Any]] = {
        **DoorSettings.PARSED,
        "stream_layers": parse_layers,
        "memory": parse_size,
        "keep_alive": parse_keep_alive,
        "chunks": parse_chunks,
    }
    GROUPS: ClassVar[Mapping[str, str]] = {
        "models": "model model_name model_n_ctx lora mmproj keep_alive max_loaded chat_format chat_template",
        "cache": "kv n_ctx swa_full parallel idle_prefixes max_checkpoint_gb overflow",
        "machine": "threads threads_batch n_batch n_ubatch n_gpu_layers stream_layers memory",
        "reuse of KV": "reuse chunks store store_key_file store_remote recheck max_kv_size_gb max_ram_gb "
        "eviction max_age warm warm_text",
        "drafts": "speculation draft_model n_rs_seq",
        "answers": "temp top_k top_p min_p repeat_penalty seed strict embeddings embedding_n_ctx",
        "network": "host port root_path tls_cert tls_key cors_origin allowed_host",
        "keys and sessions": "api_key_file api_key metrics_key_file allow_no_keys metadata_url max_sessions "
        "max_sessions_mb",
        "limits": "max_queue request_timeout read_timeout drain_timeout max_body_mb max_connections",
        "operation": "kv_events kv_events_topic restart_when_stuck access_log verbose",
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
    chat_format: str = option("", "llama-cpp-python's chat format, for a model without a template", "NAME")
    chat_template: str = option("", "Jinja chat template in place of the model's own", "FILE")
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
    max_checkpoint_gb: Gigabytes = option(
        1.0, "most memory for checkpoints, in 10^9 bytes or as 2GiB", SIZE, 0, 1e6
    )
    reuse: Reuse = option(
        "exact",
        "which KV may be reused. exact: only KV that equals an evaluation from the start; prefix: also KV "
        "whose F16 window has aged out; chunks: also passages from other prompts, repaired",
        "HOW",
    )
    chunks: str = option(
        "",
        "with --reuse chunks, how passages are found and repaired: repair=query, ratio=0.15, overlap_k=4, "
        "chunk_size=64, boundary_window=16, max_kld=0.25, check=0.01",
        "NAME=X,...",
    )
    speculation: Literal["", "off", "prompt-lookup", "draft-model", "mtp"] = option(
        "",
        "how to draft tokens, so that a step evaluates several tokens of an answer. prompt-lookup: text "
        "that repeats itself; draft-model: that, and a smaller model; mtp: that, and the model's own "
        "prediction layers (default: draft-model if there is one, else off)",
        "HOW",
    )
    draft_model: str = option(
        "", "GGUF file of a smaller model with the same vocabulary, which drafts tokens", "FILE"
    )
    n_rs_seq: int = option(
        0,
        "most tokens that a hybrid or recurrent model can take back, as rejected drafts are; each takes the "
        "memory of one more state for each sequence",
        "N",
        0,
        MAX_SNAPSHOTS,
    )
    temp: float | None = option(
        None,
        "temperature for requests that set none (default: the model's, else llama-server's)",
        "T",
        *RANGES["temperature"],
    )
    top_k: int | None = option(None, "top_k for requests that set none; 0 is all", "K", *RANGES["top_k"])
    top_p: float | None = option(None, "top_p for requests that set none", "P", *RANGES["top_p"])
    min_p: float | None = option(None, "min_p for requests that set none", "P", *RANGES["min_p"])
    repeat_penalty: float | None = option(
        None, "repeat_penalty for requests that set none", "X", *RANGES["repeat_penalty"]
    )
    seed: int | None = option(None, "seed for requests that set none (default: random)", "N", *RANGES["seed"])
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
    cors_origin: Several = option(
        (),
        "origin of web pages that may call this server: https://chat.example.org, * for all; repeat for more",
        "URL",
    )
    allowed_host: Several = option(
        (), "host name to accept besides localhost, on a server without keys; repeat for more", "NAME"
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
        "", "ZeroMQ address that tells routers what the context holds, as vLLM does: tcp://HOST:PORT", "URL"
    )
    kv_events_topic: str = option("", "topic of these messages; {model} in it is a model's name", "NAME")
    metadata_url: str = option(
        "",
        "database of sessions: redis://..., sqlite:PATH, or sqlite: for memory (default: "
        "sessions.sqlite3 in the store, else memory)",
        "URL",
    )
    max_sessions: int = option(1000, "most sessions a tenant may have", "N", 0, 1_000_000)
    max_sessions_mb: Megabytes = option(
        100.0, "largest size of a tenant's session records, in 10^6 bytes or as 64MiB", SIZE, 0, 1e6
    )
    request_timeout: float = option(600.0, "seconds after which a request is given up", "S", 0.01, 1e6)
    read_timeout: float = option(
        30.0, "seconds a client has to send a request's head, and as long for its body", "S", 0.01, 1e6
    )
    max_body_mb: Megabytes = option(8.0, "largest request body, in 10^6 bytes or as 8MiB", SIZE, 0.001, 1024)
    max_connections: int = option(
        1024, "most connections at a time; while all are busy, others get 503", "N", 1, 1_000_000
    )
    warm_text: Several = option(
        (),
        "text to evaluate at the start, so that prompts that begin with it are quick; without keys only",
        "TEXT",
    )
    warm: str = option("", "file of JSON lines with prompts (or messages) to evaluate at the start", "FILE")
    restart_when_stuck: bool = option(
        False,
        "end the process when the engine is stuck or the model's file has changed, for a supervisor to start "
        "it again",
    )
    access_log: bool = option(False, "log a line for each answer: id, route, status, bytes, seconds")
    verbose: bool = option(False, "show llama.cpp's log")

    @field_validator("cors_origin")
    @classmethod
    def _are_origins(cls, origins: tuple[str, ...]) -> tuple[str, ...]:
        for origin in origins:
            if origin != "*" and not _ORIGIN.fullmatch(origin):
                raise ValueError("give scheme and host, and a port if it has one: https://chat.example.org")
        return origins

    @field_validator("allowed_host")
    @classmethod
    def _are_hosts(cls, hosts: tuple[str, ...]) -> tuple[str, ...]:
        if any("/" in host for host in hosts):
            raise ValueError("give the host's name alone: host.docker.internal")
        return hosts

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
        if self.speculation == "draft-model" and not self.draft_model:
            raise ValueError("speculation=draft-model needs a draft model: give draft_model too")
        if self.speculation == "mtp" and self.draft_model:
            raise ValueError("speculation=mtp needs no draft model: leave draft_model out")
        if self.speculation == "mtp" and (self.stream_layers or self.memory):
            raise ValueError("speculation=mtp and stream_layers or memory: leave one out")
        if self.chat_format and self.chat_template:
            raise ValueError("chat_format and chat_template both say how chats are written: give one")
        if self.store_key_file and not (self.store or self.store_remote):
            raise ValueError(
                "store_key_file: there is nothing to encrypt, give store_remote or a folder for the store too"
            )
        return self

    def sampling(self) -> dict[str, Any]:
        """Return the fields of `Sampling` that were given."""
        given = {name: getattr(self, _TEMP.get(name, name)) for name in SAMPLING}
        return {name: value for name, value in given.items() if value is not None}

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
