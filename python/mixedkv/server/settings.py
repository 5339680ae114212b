"""Settings of the server: one frozen dataclass, from the command line, the environment and a TOML file."""

from __future__ import annotations

import ipaddress
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from mixedkv.config import parse_kv
from mixedkv.limits import INT32_MAX, MAX_SEQUENCES

ENV_PREFIX = "MIXEDKV_"


def _option(
    default: Any, text: str, metavar: str = "", low: float | None = None, high: float | None = None
) -> Any:
    return field(default=default, metadata={"help": text, "metavar": metavar, "low": low, "high": high})


@dataclass(frozen=True, kw_only=True, slots=True)
class ServerSettings:
    """Everything `mixedkv serve` can be told; `options` tells what each field means.

    Raises:
        ValueError: a value is out of range or does not go with another; the message names the field.
    """

    model: str = _option("", "GGUF model (default: the bundled one)", "FILE")
    model_name: str = _option("", "its name for clients (default: the file's name)", "NAME")
    chat_format: str = _option("", "llama-cpp-python's chat format, for a model without a template", "NAME")
    kv: str = _option("mixed", "KV cache, as in `mixedkv run`", "SPEC")
    n_ctx: int = _option(
        0, "tokens of the cache, shared by all sequences (default: 8192 or the model's)", "N", 0, INT32_MAX
    )
    parallel: int = _option(8, "answers at a time", "N", 1, MAX_SEQUENCES - 1)
    idle_prefixes: int = _option(
        8, "sequences that hold the rows of finished requests", "N", 1, MAX_SEQUENCES - 1
    )
    n_batch: int = _option(512, "tokens in one step at most", "N", 32, 65536)
    threads: int = _option(0, "CPU threads (default: llama_cpp's choice)", "N", 0, 4096)
    n_gpu_layers: int = _option(0, "layers on a GPU, in a build that has one; -1 is all", "N", -1, 4096)
    slowdown: float = _option(
        2.0,
        "how much longer a step may take for running answers while prompts are evaluated",
        "X",
        1.05,
        1000,
    )
    reuse: str = _option(
        "exact",
        "exact: what equals an evaluation from the start; prefix: also where the F16 window has aged out",
        "HOW",
    )
    embeddings: bool = _option(False, "answer /v1/embeddings, in a second context on the same model")
    embedding_n_ctx: int = _option(
        0, "tokens of the longest input to embed (default: 2048 or the model's)", "N", 0, INT32_MAX
    )
    host: str = _option("127.0.0.1", "address to listen on", "HOST")
    port: int = _option(8000, "port to listen on; 0 takes a free one", "N", 0, 65535)
    api_key_file: str = _option("", "file of tenant:key lines, readable by its owner only", "FILE")
    allow_no_keys: bool = _option(False, "serve a public address without keys")
    store: str = _option("", "folder that keeps KV across restarts", "DIR")
    store_key_file: str = _option("", "file with the key that encrypts the store", "FILE")
    max_kv_size_gb: float = _option(10.0, "disk the store may take", "GB", 0.001, 1e6)
    max_ram_gb: float = _option(1.0, "memory the store may take", "GB", 0, 1e6)
    metadata_url: str = _option(
        "sqlite:", "where sessions are written down: redis://... or sqlite:PATH", "URL"
    )
    max_queue: int = _option(64, "requests that may wait", "N", 0, 100_000)
    request_timeout: float = _option(600.0, "seconds after which a request is given up", "S", 0.01, 1e6)
    read_timeout: float = _option(
        30.0, "seconds a client has to send a request's head, and as long for its body", "S", 0.01, 1e6
    )
    drain_timeout: float = _option(10.0, "seconds that running requests get at shutdown", "S", 0, 1e6)
    max_body_mb: float = _option(8.0, "largest request body", "MB", 0.001, 1024)
    max_connections: int = _option(1024, "connections at a time; more are answered 503", "N", 1, 1_000_000)
    warm: str = _option("", "file of JSON lines with prompts (or messages) to evaluate at the start", "FILE")
    verbose: bool = _option(False, "show llama.cpp's log")

    def __post_init__(self) -> None:
        for option in fields(self):
            _check(option.name, getattr(self, option.name), option.type, option.metadata)
        parse_kv(self.kv)
        if self.reuse not in ("exact", "prefix"):
            raise ValueError(f"reuse={self.reuse!r}: use exact or prefix")
        if self.parallel + self.idle_prefixes > MAX_SEQUENCES:
            raise ValueError(
                f"parallel={self.parallel} and idle_prefixes={self.idle_prefixes} are more than the "
                f"{MAX_SEQUENCES} sequences llama.cpp has: lower one"
            )
        if self.parallel > self.n_batch:
            raise ValueError(f"parallel={self.parallel} is more than n_batch={self.n_batch}: raise n_batch")
        if not (self.api_key_file or self.allow_no_keys or is_local(self.host)):
            raise ValueError(
                f"host={self.host} can be reached from elsewhere, and there are no keys: give api_key_file, "
                f"or allow_no_keys if that is what you want"
            )
        if self.store_key_file and not self.store:
            raise ValueError("store_key_file is given without store: there is nothing to encrypt")

    @property
    def local_only(self) -> bool:
        """Requests come from this machine, and nothing but that says who may make them."""
        return is_local(self.host) and not (self.api_key_file or self.allow_no_keys)

    @property
    def n_seq(self) -> int:
        return self.parallel + self.idle_prefixes


def is_local(host: str) -> bool:
    """Whether an address can be reached from this machine only."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def load_settings(
    given: Mapping[str, Any],
    config: str | None = None,
    environ: Mapping[str, str] = os.environ,
) -> ServerSettings:
    """Settings from `given` (the command line), else from MIXEDKV_... variables, else from a TOML file.

    Raises:
        ValueError: an option is unknown or has a bad value; the message says where it came from.
        OSError: the file cannot be read.
    """
    config = config or environ.get(ENV_PREFIX + "CONFIG")
    values = {**(_read_toml(config) if config else {}), **_read_environ(environ), **given}
    return ServerSettings(**values)


def option_fields() -> list[Any]:
    return list(fields(ServerSettings))


def parse_value(kind: Any, text: str) -> Any:
    """A value from text, for the type of a field ("int", "float", "bool", "str")."""
    if kind == "bool":
        if text.lower() in ("1", "true", "yes", "on"):
            return True
        if text.lower() in ("0", "false", "no", "off", ""):
            return False
        raise ValueError(f"{text!r} is neither true nor false")
    try:
        return {"int": int, "float": float, "str": str}[kind](text)
    except ValueError:
        raise ValueError(f"{text!r} is not a {'whole number' if kind == 'int' else 'number'}") from None


def _read_toml(path: str) -> dict[str, Any]:
    if sys.version_info >= (3, 11):
        import tomllib
    else:
        import tomli as tomllib  # of the extra `server`
    try:
        values = tomllib.loads(Path(path).read_text(encoding="utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{path}: {error}") from None
    values = {name.replace("-", "_"): value for name, value in values.items()}
    known = {option.name: option.type for option in fields(ServerSettings)}
    if unknown := sorted(values.keys() - known):
        raise ValueError(f"{path}: unknown option {unknown[0]!r}; known: {', '.join(known)}")
    return {
        name: float(value) if known[name] == "float" and type(value) is int else value
        for name, value in values.items()
    }


def _read_environ(environ: Mapping[str, str]) -> dict[str, Any]:
    """Other MIXEDKV_ variables belong to other parts (kernels, tests): only options are read."""
    values = {}
    for option in fields(ServerSettings):
        name = ENV_PREFIX + option.name.upper()
        if name in environ:
            try:
                values[option.name] = parse_value(option.type, environ[name])
            except ValueError as error:
                raise ValueError(f"{name}: {error}") from None
    return values


def _check(name: str, value: Any, kind: Any, limits: Mapping[str, Any]) -> None:
    expected = {"int": int, "float": (int, float), "bool": bool, "str": str}[kind]
    if not isinstance(value, expected) or (isinstance(value, bool) and kind != "bool"):
        raise ValueError(f"{name}={value!r}: a value of type {kind} is needed")
    low, high = limits["low"], limits["high"]
    if low is not None and not low <= value <= high:
        raise ValueError(f"{name}={value}: use {low} to {high}")
