"""Settings that every door shares, read from the command line, the environment and a TOML file."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any, ClassVar, TypeVar

from pydantic import BeforeValidator, Field, ValidationError, ValidationInfo, field_validator, model_validator
from pydantic_settings import (
    BaseSettings,
    EnvSettingsSource,
    NoDecode,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
    TomlConfigSettingsSource,
)

from mixedkv.config import parse_kv
from mixedkv.hosts import is_local
from mixedkv.limits import INT32_MAX, MAX_SEQUENCES
from mixedkv.nearest_word import did_you_mean
from mixedkv.sizes import GB, MB, parse_duration, parse_size

SIZE = "SIZE"  # placeholder for a size in --help
_WORDS = (  # parts of pydantic's messages, and our words for them
    (re.compile(r"^Value error, "), ""),
    (re.compile(r"a valid dictionary or instance of \w+"), "an object"),
    (re.compile(r" after validation, not"), ", not"),
    (re.compile(r"^Extra inputs are not permitted"), "this field is not known: leave it out"),
)
_TAG, _FOUND, _TAGS = "Input tag '", "' found using ", " does not match any of the expected tags: "
_LONGEST_TAG = 100  # characters: it is the client's
_WORDS_OF_OPTIONS = (
    (re.compile("Input should be greater than or equal to"), "use at least"),
    (re.compile("Input should be less than or equal to"), "use at most"),
    (re.compile("Input should be"), "use"),
    (re.compile("'', "), ""),  # what an option is unless it is given
)
_HOST_AND_PORT = re.compile(r"[^:/]+:\d+")
_T = TypeVar("_T", bound="ServiceSettings")


def in_words(message: str, *, of_option: bool = False) -> str:
    """Return one of pydantic's messages for those who send requests, or who give options."""
    message = _tag_in_words(message)
    for theirs, ours in (*_WORDS, *(_WORDS_OF_OPTIONS if of_option else ())):
        message = theirs.sub(ours, message)
    return message


def _tag_in_words(message: str) -> str:
    """Say of the tag of a union that it is none of those there are. It may be a text of megabytes, which no
    pattern goes through.
    """
    found, _, tags = message.rpartition(_TAGS)
    if not (found and message.startswith(_TAG)):
        return message
    tag = found.rpartition(_FOUND)[0].removeprefix(_TAG)
    more = "..." if len(tag) > _LONGEST_TAG else ""
    return f"'{tag[:_LONGEST_TAG]}{more}' is none of {tags}"


def option(
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


class ServiceSettings(BaseSettings):
    """The options of every door. Text that is parsed where it is used is checked by `PARSED`.

    Raises:
        ValueError: a value is out of range or conflicts with another; the message names the field.
    """

    model_config = SettingsConfigDict(
        frozen=True,
        strict=True,
        extra="forbid",
        allow_inf_nan=False,
        env_prefix="MIXEDKV_",
        protected_namespaces=(),  # `model_name` is a name of ours
    )
    PARSED: ClassVar[Mapping[str, Callable[[str], object]]] = {"kv": parse_kv, "max_age": parse_duration}
    GROUPS: ClassVar[Mapping[str, str]] = {}  # of --help: titles, and the names of their options
    IDLE: ClassVar[str] = ""  # the field with the number of sequences that wait in the context

    kv: str = option("mixed", "KV cache, as in `mixedkv run`", "SPEC")
    n_ctx: int = option(0, "tokens of the cache, shared by all sequences", "N", 0, INT32_MAX)
    parallel: int = option(8, "most answers generated at a time", "N", 1, MAX_SEQUENCES - 1)
    n_batch: int = option(0, "most tokens evaluated in one step", "N", 0, 65536)
    threads: int = option(0, "CPU threads (default: llama_cpp's choice)", "N", 0, 4096)
    host: str = option("127.0.0.1", "address to listen on", "HOST")
    port: int = option(8000, "port to listen on; 0 takes a free one", "N", 0, 65535)
    tls_cert: str = option("", "PEM file of the certificate chain; turns TLS on", "FILE")
    tls_key: str = option("", "PEM file of the certificate's key, without a password", "FILE")
    api_key_file: str = option("", "file of tenant:key lines, readable by its owner only", "FILE")
    allow_no_keys: bool = option(False, "allow anyone who can reach this address to use the server")
    store: str = option("", "folder that keeps KV across restarts", "DIR")
    max_kv_size_gb: Gigabytes = option(
        10.0, "most disk space for the store, in 10^9 bytes or as 20GiB", SIZE, 0.001, 1e6
    )
    max_age: str = option(
        "", "at the start, remove stored KV that was not used for this long, e.g. 30d", "TIME"
    )
    max_queue: int = option(64, "most requests of a tenant that may wait", "N", 0, 100_000)
    drain_timeout: float = option(
        10.0, "seconds that running requests may still take at shutdown", "S", 0, 1e6
    )

    @field_validator("*")
    @classmethod
    def _can_be_parsed(cls, value: Any, info: ValidationInfo) -> Any:
        parse = cls.PARSED.get(str(info.field_name))
        if parse is not None and (value or info.field_name == "kv"):
            parse(value)
        return value

    @model_validator(mode="after")
    def _belong_together(self: _T) -> _T:
        idle = getattr(self, self.IDLE)
        if self.parallel + idle > MAX_SEQUENCES:
            raise ValueError(
                f"parallel={self.parallel} and {self.IDLE}={idle} are more than the {MAX_SEQUENCES} "
                "sequences llama.cpp has: lower one"
            )
        if 0 < self.n_batch < 32:
            raise ValueError(f"n_batch={self.n_batch}: use 32 or more, or 0 for the default")
        if 0 < self.n_batch < self.parallel:
            raise ValueError(f"parallel={self.parallel} is more than n_batch={self.n_batch}: raise n_batch")
        if bool(self.tls_cert) != bool(self.tls_key):
            raise ValueError("tls_cert and tls_key go together: give both, or none")
        if _HOST_AND_PORT.fullmatch(self.host):
            raise ValueError(f"host={self.host!r}: give the port by itself, as port")
        if not (self.knows_clients or self.allow_no_keys or is_local(self.host)):
            raise ValueError(
                f"host={self.host} can be reached from elsewhere, and there are no keys: give api_key_file, "
                "or allow_no_keys if everybody who can reach it may use it"
            )
        return self

    @property
    def knows_clients(self) -> bool:
        """True if not everybody who reaches the server may use it."""
        return bool(self.api_key_file)

    @property
    def n_seq(self) -> int:
        """Sequences of the context."""
        return self.parallel + int(getattr(self, self.IDLE))

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        return (init_settings,)  # a constructor makes settings of what is given and nothing else

    @classmethod
    def load(
        cls: type[_T],
        given: Mapping[str, Any],
        config: str | None = None,
        environ: Mapping[str, str] = os.environ,
    ) -> _T:
        """Load settings from `given` (the command line), else from variables of the environment, else from a
        TOML file.

        Raises:
            ValueError: an option is unknown or has a bad value; the message says where it came from.
            OSError: the file cannot be read.
        """
        prefix = str(cls.model_config["env_prefix"])
        config = config or environ.get(prefix + "CONFIG")
        file = cls._read_toml(config) if config else {}
        environment = cls._read_environ(environ)
        origins = (
            {name: f"{config}: {name}" for name in file}
            | {name: prefix + name.upper() for name in environment}
            | {name: "--" + name.replace("_", "-") for name in given}
        )
        try:
            return cls(**{**file, **environment, **given})
        except ValidationError as error:
            raise ValueError("; ".join(_explain(dict(one), origins) for one in error.errors())) from None

    @classmethod
    def _read_toml(cls, path: str) -> dict[str, Any]:
        with Path(path).open("rb"):  # a missing file would count as an empty one
            pass
        try:
            values = TomlConfigSettingsSource(cls, path)()
        except ValueError as error:
            raise ValueError(f"{path}: {error}") from None
        values = {name.replace("-", "_"): value for name, value in values.items()}
        for name in sorted(values.keys() - cls.model_fields):
            hint = did_you_mean(name, map(repr, cls.model_fields))
            raise ValueError(f"{path}: unknown option {name!r}{hint}: use the names of --help, as 'n_ctx'")
        return values

    @classmethod
    def _read_environ(cls, environ: Mapping[str, str]) -> dict[str, Any]:
        """Read options from the environment; others of its variables are of kernels and tests."""
        source = EnvSettingsSource(cls)
        source.env_vars = {name.lower(): value for name, value in environ.items() if name.isupper()}
        switches = {name for name, field in cls.model_fields.items() if field.annotation is bool}
        return {name: value or False if name in switches else value for name, value in source().items()}


def _explain(error: dict[str, Any], origins: Mapping[str, str]) -> str:
    """Explain one of pydantic's errors in a line: the origin of the value, the value, and what is needed."""
    cause = error.get("ctx", {}).get("error", "")
    if not error["loc"]:  # an error of several options, whose message names them
        return str(cause)
    origin = origins[error["loc"][0]]
    expected = in_words(str(cause) or error["msg"], of_option=True)
    given = error["input"]
    value = ", ".join(map(str, given)) if isinstance(given, list | tuple) else repr(given)
    said = f"{error['loc'][0]}={value}"
    if expected.startswith(said):  # by who reads the value elsewhere too
        return f"{origin}={value}{expected.removeprefix(said)}"
    return f"{origin}={value}: {expected}"
