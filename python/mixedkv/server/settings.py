"""Settings of the server: one frozen model, from the command line, the environment and a TOML file."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, ValidationError, ValidationInfo, field_validator, model_validator
from pydantic_settings import (
    BaseSettings,
    EnvSettingsSource,
    NoDecode,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
    TomlConfigSettingsSource,
)

from mixedkv.chunks import Reuse
from mixedkv.config import parse_kv
from mixedkv.hosts import is_local
from mixedkv.limits import INT32_MAX, MAX_SEQUENCES, MAX_SNAPSHOTS
from mixedkv.prompts.overflow import Overflow
from mixedkv.server.keep_alive import parse_keep_alive
from mixedkv.sessions.metadata_url import beside
from mixedkv.sizes import GB, MB, parse_duration, parse_size
from mixedkv.store.eviction import Eviction
from mixedkv.streaming.layer_choice import parse_layers

# Options that stay text here and are parsed where they are used.
_PARSED: dict[str, Callable[[str], object]] = {
    "kv": parse_kv,
    "stream_layers": parse_layers,
    "memory": parse_size,
    "max_age": parse_duration,
    "keep_alive": parse_keep_alive,
}
ENV_PREFIX = "MIXEDKV_"
IN_MEMORY = "sqlite:"
SIZE = "SIZE"  # placeholder for a size in --help

_ROOT_PATH = re.compile(r"(/[A-Za-z0-9_.~-]+)+")
_ORIGIN = re.compile(r"[a-z][a-z0-9+.-]*://[^/\s?#]+")
_WORDS = {  # parts of pydantic's messages, and our words for them
    "Input should be greater than or equal to": "use at least",
    "Input should be less than or equal to": "use at most",
    "Input should be": "use",
}


def _option(
    default: Any, text: str, metavar: str = "", low: float | None = None, high: float | None = None
) -> Any:
    return Field(default=default, description=text, ge=low, le=high, json_schema_extra={"metavar": metavar})


def _listed(value: Any) -> Any:
    """Split a list that is one text in the environment: at `:` as in PATH, or at `,` if it has `hf:...` in
    it.
    """
    if isinstance(value, str):
        between = "," if "hf:" in value else os.pathsep  # names of the hub have colons in them
        return tuple(part for part in value.split(between) if part)
    return tuple(value) if isinstance(value, list) else value


Several = Annotated[tuple[str, ...], NoDecode, BeforeValidator(_listed)]


def _in_units(unit: int) -> BeforeValidator:
    """Return what reads a size: a number of `unit` bytes, or a text that may name its own unit."""
    return BeforeValidator(
        lambda value: parse_size(value, unit, least=0) / unit if isinstance(value, str) else value
    )


Gigabytes = Annotated[float, _in_units(GB)]
Megabytes = Annotated[float, _in_units(MB)]


class ServerSettings(BaseSettings):
    """The options of `mixedkv serve`.

    Raises:
        ValueError: a value is out of range or conflicts with another; the message names the field.
    """

    model_config = SettingsConfigDict(
        frozen=True,
        strict=True,
        extra="forbid",
        allow_inf_nan=False,
        env_prefix=ENV_PREFIX,
        protected_namespaces=(),  # `model_name` is a name of ours
    )

    model: Several = _option(
        (),
        "GGUF file, hf:OWNER/REPO[:FILE] or smollm2; repeat for more models (default: the bundled one)",
        "[NAME=]FILE",
    )
    model_name: str = _option("", "name of the first model for clients (default: the file's name)", "NAME")
    model_n_ctx: Several = _option((), "--n-ctx of the model of that name; repeat for more", "NAME=N")
    lora: Several = _option(
        (), "LoRA adapter, served as a model of that name; repeat for more", "NAME=[MODEL=]FILE"
    )
    mmproj: Several = _option((), "image encoder of a model, by default of the first one", "[NAME=]FILE")
    lora_scale: Several = _option((), "strength of an adapter, e.g. 0.5 (default: 1)", "NAME=X")
    keep_alive: str = _option(
        "",
        "end a model's process after this long without requests, e.g. 5m; the next request that names the "
        "model starts it (default: never; one model without this has no process of its own)",
        "TIME",
    )
    max_loaded: int = _option(
        0,
        "most models in memory at a time; they are loaded when a request names them, and the least recently "
        "used one leaves (default: any number)",
        "N",
        0,
        10_000,
    )
    chat_format: str = _option("", "llama-cpp-python's chat format, for a model without a template", "NAME")
    chat_template: str = _option("", "Jinja chat template in place of the model's own", "FILE")
    kv: str = _option("mixed", "KV cache, as in `mixedkv run`", "SPEC")
    n_ctx: int = _option(
        0, "tokens of the cache, shared by all sequences (default: 8192 or the model's)", "N", 0, INT32_MAX
    )
    parallel: int = _option(8, "most answers generated at a time", "N", 1, MAX_SEQUENCES - 1)
    idle_prefixes: int = _option(
        8, "most finished requests whose KV stays in the context", "N", 1, MAX_SEQUENCES - 1
    )
    n_batch: int = _option(
        0,
        "most tokens evaluated in one step (default: 512; with streamed layers 2048, 1024 or 512, as fits)",
        "N",
        0,
        65536,
    )
    threads: int = _option(0, "CPU threads (default: llama_cpp's choice)", "N", 0, 4096)
    n_gpu_layers: int = _option(0, "layers on a GPU, in a build that has one; -1 is all", "N", -1, 4096)
    stream_layers: str = _option(
        "",
        "read layers from the file for each step: auto, all, ffn, a number, or keep_first=8,keep_last=2",
        "HOW",
    )
    memory: str = _option(
        "", "memory that this process may take, e.g. 6GiB; layers that do not fit are streamed", SIZE
    )
    slowdown: float = _option(
        2.0,
        "how much longer a step may take for running answers while prompts are evaluated",
        "X",
        1.05,
        1000,
    )
    checkpoints: int = _option(
        16, "most places in a sequence that later prompts can go on from; 0 keeps none", "N", 0, 4096
    )
    checkpoint_every: int = _option(
        0,
        "also keep a checkpoint every N tokens of a prompt; 0: only where messages begin and at the end",
        "N",
        0,
        INT32_MAX,
    )
    max_checkpoint_gb: Gigabytes = _option(
        1.0, "most memory for checkpoints, in 10^9 bytes or as 2GiB", SIZE, 0, 1e6
    )
    reuse: Reuse = _option(
        "exact",
        "which KV may be reused. exact: only KV that equals an evaluation from the start; prefix: also KV "
        "whose F16 window has aged out; chunks: also passages from other prompts, repaired",
        "HOW",
    )
    chunk_repair: Literal["", "none", "seam", "cacheblend", "query"] = _option(
        "", "how reused passages are repaired (default: as calibrated, else query)", "HOW"
    )
    chunk_ratio: float = _option(
        0.0, "share of the reused tokens that is evaluated again (0: as calibrated, else 0.15)", "X", 0, 1
    )
    chunk_overlap: int = _option(
        0,
        "tokens evaluated again at each edge of a passage (0: as calibrated, else 4, or 16 with seam)",
        "N",
        0,
        1024,
    )
    chunk_size: int = _option(64, "tokens of the shortest passage to reuse", "N", 32, INT32_MAX)
    chunk_boundary: int = _option(
        16,
        "most tokens by which a passage's edge moves to the end of a sentence; up to half of --chunk-size",
        "N",
        0,
        INT32_MAX,
    )
    chunk_max_kld: float = _option(
        0.25,
        "stop reusing passages when the median divergence of checked answers is above this, in nats",
        "X",
        1e-9,
        1e6,
    )
    chunk_check: float = _option(
        0.01,
        "share of answers from reused passages to evaluate exactly as well, when nothing else is to do",
        "X",
        0,
        1,
    )
    speculation: Literal["", "off", "prompt-lookup", "draft-model", "mtp"] = _option(
        "",
        "how to draft tokens, so that a step evaluates several tokens of an answer. prompt-lookup: text "
        "that repeats itself; draft-model: that, and a smaller model; mtp: that, and the model's own "
        "prediction layers (default: draft-model if there is one, else off)",
        "HOW",
    )
    draft_model: str = _option(
        "", "GGUF file of a smaller model with the same vocabulary, which drafts tokens", "FILE"
    )
    n_rs_seq: int = _option(
        0,
        "most tokens that a hybrid or recurrent model can take back, as rejected drafts are; each takes the "
        "memory of one more state for each sequence",
        "N",
        0,
        MAX_SNAPSHOTS,
    )
    temp: float | None = _option(
        None,
        "temperature for requests that set none (default: the model's, else llama-server's)",
        "T",
        0,
        100,
    )
    top_k: int | None = _option(None, "top_k for requests that set none; 0 is all tokens", "K", 0, INT32_MAX)
    top_p: float | None = _option(None, "top_p for requests that set none", "P", 0, 1)
    min_p: float | None = _option(None, "min_p for requests that set none", "P", 0, 1)
    repeat_penalty: float | None = _option(None, "repeat_penalty for requests that set none", "X", 0.01, 10)
    seed: int | None = _option(None, "seed for requests that set none (default: random)", "N", 0, 2**32 - 1)
    overflow: Overflow = _option(
        "refuse",
        "refuse: reject prompts that do not fit the context, and end answers there; slide: drop the middle",
        "HOW",
    )
    embeddings: bool = _option(False, "answer /v1/embeddings, in a second context on the same model")
    embedding_n_ctx: int = _option(
        0, "tokens of the longest input to embed (default: 2048 or the model's)", "N", 0, INT32_MAX
    )
    host: str = _option("127.0.0.1", "address to listen on", "HOST")
    port: int = _option(8000, "port to listen on; 0 takes a free one", "N", 0, 65535)
    unix_socket: str = _option("", "listen on this Unix socket instead; only its owner can connect", "PATH")
    root_path: str = _option("", "prefix of all paths, e.g. /llm; paths without it work too", "PATH")
    tls_cert: str = _option("", "PEM file of the certificate chain; turns TLS on", "FILE")
    tls_key: str = _option("", "PEM file of the certificate's key, without a password", "FILE")
    api_key_file: str = _option("", "file of tenant:key lines, readable by its owner only", "FILE")
    metrics_key_file: str = _option(
        "", "file with a key that /metrics then asks for; its numbers are by tenant", "FILE"
    )
    cors_origin: Several = _option(
        (),
        "origin of web pages that may call this server: https://chat.example.org, * for all; repeat for more",
        "URL",
    )
    allowed_host: Several = _option(
        (), "host name to accept besides localhost, on a server without keys; repeat for more", "NAME"
    )
    strict: bool = _option(
        False, "refuse unknown fields, and other names than the model's where one is served"
    )
    allow_no_keys: bool = _option(False, "allow anyone who can reach this address to use the server")
    store: str = _option("", "folder that keeps KV across restarts", "DIR")
    store_key_file: str = _option("", "file with the key that encrypts the store", "FILE")
    store_remote: str = _option(
        "",
        "server that keeps KV for several machines, behind the store: redis://..., or s3://bucket/prefix",
        "URL",
    )
    recheck: bool = _option(
        True,
        "check stored KV by evaluating some of its tokens again: before the first use of what another "
        "process stored, and while the server is idle; wrong entries are removed",
    )
    max_kv_size_gb: Gigabytes = _option(
        10.0, "most disk space for the store, in 10^9 bytes or as 20GiB", SIZE, 0.001, 1e6
    )
    max_ram_gb: Gigabytes = _option(1.0, "most memory for the store, in 10^9 bytes or as 2GiB", SIZE, 0, 1e6)
    eviction: Eviction = _option(
        "lru",
        "which KV leaves the store first, on disk and in memory: the least recently used (lru), the oldest, "
        "or what saves least time for its size (gdsf)",
    )
    max_age: str = _option(
        "", "at the start, remove stored KV that was not used for this long, e.g. 30d", "TIME"
    )
    kv_events: str = _option(
        "", "ZeroMQ address that tells routers what the context holds, as vLLM does: tcp://HOST:PORT", "URL"
    )
    kv_events_topic: str = _option("", "topic of these messages; {model} in it is a model's name", "NAME")
    metadata_url: str = _option(
        "",
        "database of sessions: redis://..., sqlite:PATH, or sqlite: for memory (default: "
        "sessions.sqlite3 in the store, else memory)",
        "URL",
    )
    max_sessions: int = _option(1000, "most sessions a tenant may have", "N", 0, 1_000_000)
    max_sessions_mb: Megabytes = _option(
        100.0, "largest size of a tenant's session records, in 10^6 bytes or as 64MiB", SIZE, 0, 1e6
    )
    max_queue: int = _option(64, "most requests of a tenant that may wait", "N", 0, 100_000)
    request_timeout: float = _option(600.0, "seconds after which a request is given up", "S", 0.01, 1e6)
    read_timeout: float = _option(
        30.0, "seconds a client has to send a request's head, and as long for its body", "S", 0.01, 1e6
    )
    drain_timeout: float = _option(
        10.0, "seconds that running requests may still take at shutdown", "S", 0, 1e6
    )
    max_body_mb: Megabytes = _option(8.0, "largest request body, in 10^6 bytes or as 8MiB", SIZE, 0.001, 1024)
    max_connections: int = _option(
        1024, "most connections at a time; while all are busy, others get 503", "N", 1, 1_000_000
    )
    warm_text: Several = _option(
        (),
        "text to evaluate at the start, so that prompts that begin with it are quick; without keys only",
        "TEXT",
    )
    warm: str = _option("", "file of JSON lines with prompts (or messages) to evaluate at the start", "FILE")
    restart_when_stuck: bool = _option(
        False,
        "end the process when the engine is stuck or the model's file has changed, for a supervisor to start "
        "it again",
    )
    access_log: bool = _option(False, "log a line for each answer: id, route, status, bytes, seconds")
    verbose: bool = _option(False, "show llama.cpp's log")

    @field_validator(*_PARSED)
    @classmethod
    def _can_be_parsed(cls, text: str, info: ValidationInfo) -> str:
        if text or info.field_name == "kv":
            _PARSED[str(info.field_name)](text)
        return text

    @field_validator("cors_origin")
    @classmethod
    def _are_origins(cls, origins: tuple[str, ...]) -> tuple[str, ...]:
        for origin in origins:
            if origin != "*" and not _ORIGIN.fullmatch(origin):
                raise ValueError("give scheme and host, and a port if it has one: https://chat.example.org")
        return origins

    @field_validator("root_path")
    @classmethod
    def _is_a_path(cls, path: str) -> str:
        if path and not _ROOT_PATH.fullmatch(path):
            raise ValueError("begin with a slash, end with none, and use letters, digits, - . _ ~ between")
        return path

    @model_validator(mode="after")
    def _go_together(self) -> ServerSettings:
        if self.parallel + self.idle_prefixes > MAX_SEQUENCES:
            raise ValueError(
                f"parallel={self.parallel} and idle_prefixes={self.idle_prefixes} are more than the "
                f"{MAX_SEQUENCES} sequences llama.cpp has: lower one"
            )
        if 0 < self.n_batch < 32:
            raise ValueError(f"n_batch={self.n_batch}: use 32 or more, or 0 for the default")
        if 0 < self.n_batch < self.parallel:
            raise ValueError(f"parallel={self.parallel} is more than n_batch={self.n_batch}: raise n_batch")
        if bool(self.tls_cert) != bool(self.tls_key):
            raise ValueError("tls_cert and tls_key go together: give both, or none")
        if self.tls_cert and self.unix_socket:
            raise ValueError("tls_cert and unix_socket: a Unix socket needs no TLS: leave one out")
        if not (self.api_key_file or self.allow_no_keys or self.unix_socket or is_local(self.host)):
            raise ValueError(
                f"host={self.host} can be reached from elsewhere, and there are no keys: give api_key_file, "
                f"or allow_no_keys if that is what you want"
            )
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
                "store_key_file is given without store or store_remote: there is nothing to encrypt"
            )
        return self

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        return (init_settings,)  # `ServerSettings(...)` is made of what is given and nothing else

    def sampling(self) -> dict[str, Any]:
        """Return the fields of `Sampling` that were given."""
        given = {
            "temperature": self.temp,
            "top_k": self.top_k,
            "top_p": self.top_p,
            "min_p": self.min_p,
            "repeat_penalty": self.repeat_penalty,
        }
        return {name: value for name, value in given.items() if value is not None}

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
        return is_local(self.host) and not (self.api_key_file or self.allow_no_keys or self.unix_socket)

    @property
    def sessions_url(self) -> str:
        """URL of the database of sessions: by default beside their KV."""
        if self.metadata_url:
            return self.metadata_url
        return f"sqlite:{beside(self.store)}" if self.store else IN_MEMORY

    @property
    def n_seq(self) -> int:
        return self.parallel + self.idle_prefixes


def load_settings(
    given: Mapping[str, Any], config: str | None = None, environ: Mapping[str, str] = os.environ
) -> ServerSettings:
    """Load settings from `given` (the command line), else from MIXEDKV_... variables, else from a TOML file.

    Raises:
        ValueError: an option is unknown or has a bad value; the message says where it came from.
        OSError: the file cannot be read.
    """
    config = config or environ.get(ENV_PREFIX + "CONFIG")
    file = _read_toml(config) if config else {}
    environment = _read_environ(environ)
    origins = (
        {name: f"{config}: {name}" for name in file}
        | {name: ENV_PREFIX + name.upper() for name in environment}
        | {name: "--" + name.replace("_", "-") for name in given}
    )
    try:
        return ServerSettings(**{**file, **environment, **given})
    except ValidationError as error:
        raise ValueError("; ".join(_explain(dict(one), origins) for one in error.errors())) from None


def _read_toml(path: str) -> dict[str, Any]:
    with Path(path).open("rb"):  # a missing file would count as an empty one
        pass
    try:
        values = TomlConfigSettingsSource(ServerSettings, path)()
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None
    values = {name.replace("-", "_"): value for name, value in values.items()}
    if unknown := sorted(values.keys() - ServerSettings.model_fields):
        raise ValueError(
            f"{path}: unknown option {unknown[0]!r}; known: {', '.join(ServerSettings.model_fields)}"
        )
    return values


def _read_environ(environ: Mapping[str, str]) -> dict[str, Any]:
    """Read options from MIXEDKV_... variables; other variables with that beginning belong to kernels and
    tests.
    """
    source = EnvSettingsSource(ServerSettings)
    source.env_vars = {name.lower(): value for name, value in environ.items() if name.isupper()}
    switches = {name for name, option in ServerSettings.model_fields.items() if option.annotation is bool}
    return {name: value or False if name in switches else value for name, value in source().items()}


def _explain(error: dict[str, Any], origins: Mapping[str, str]) -> str:
    """Explain one of pydantic's errors in a line: the origin of the value, the value, and what is needed."""
    cause = error.get("ctx", {}).get("error", "")
    if not error["loc"]:  # an error of several options, whose message names them
        return str(cause)
    origin = origins[error["loc"][0]]
    wanted = str(cause) or error["msg"]
    for theirs, ours in _WORDS.items():
        wanted = wanted.replace(theirs, ours)
    said = f"{error['loc'][0]}={error['input']!r}"
    if wanted.startswith(said):  # by who reads the value elsewhere too
        return f"{origin}={error['input']!r}{wanted.removeprefix(said)}"
    return f"{origin}={error['input']!r}: {wanted}"
