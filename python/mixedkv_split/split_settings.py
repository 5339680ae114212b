"""Settings of a split server: the options of `mixedkv split serve`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from pydantic import model_validator
from pydantic_settings import SettingsConfigDict

from mixedkv.limits import INT32_MAX, MAX_SEQUENCES
from mixedkv_service.settings import SIZE, Gigabytes, ServiceSettings, option


class SplitSettings(ServiceSettings):
    """Everything `mixedkv split serve` can be told; docs/reference/cli.md says what each is.

    Raises:
        ValueError: a value is out of range or does not go with another; the message names the field.
    """

    model_config = SettingsConfigDict(env_prefix="MIXEDKV_SPLIT_")
    GROUPS: ClassVar[Mapping[str, str]] = {
        "cache": "kv n_ctx parallel idle_sessions n_batch threads",
        "network": "host port tls_cert tls_key client_ca metrics_port",
        "keys": "api_key_file allow_no_keys",
        "kept sessions": "store max_kv_size_gb max_age",
        "limits": "max_queue max_sessions max_streams session_ttl step_timeout idle_timeout drain_timeout",
    }
    IDLE: ClassVar[str] = "idle_sessions"

    body: str
    n_ctx: int = option(8192, "tokens of the cache, shared by all sessions", "N", 0, INT32_MAX)
    port: int = option(50051, "port to listen on; 0 takes a free one", "N", 0, 65535)
    n_batch: int = option(512, "most tokens evaluated in one step", "N", 32, 65536)
    idle_sessions: int = option(
        24, "most waiting sessions whose KV stays in the context", "N", 1, MAX_SEQUENCES - 1
    )
    client_ca: str = option(
        "", "PEM file of the certificates that sign those of clients; turns mutual TLS on", "FILE"
    )
    metrics_port: int = option(0, "port for Prometheus metrics; 0 is none", "N", 0, 65535)
    store: str = option(
        "", "folder for sessions that clients keep, each encrypted with its client's key", "DIR"
    )
    max_kv_size_gb: Gigabytes = option(
        10.0, "most disk space for that folder, in 10^9 bytes or as 20GiB", SIZE, 0, 1e9
    )
    max_sessions: int = option(256, "most sessions of a tenant that are remembered", "N", 1, 1_000_000)
    max_streams: int = option(64, "most streams of a tenant at a time", "N", 1, 100_000)
    session_ttl: float = option(
        3600.0, "seconds that a session is remembered after its last use", "S", 1, 1e6
    )
    step_timeout: float = option(600.0, "seconds that one message may take", "S", 0.01, 1e6)
    idle_timeout: float = option(3600.0, "seconds that a stream may wait for the client", "S", 0.01, 1e6)

    @model_validator(mode="after")
    def _go_together(self) -> SplitSettings:
        if self.client_ca and not self.tls_cert:
            raise ValueError("client_ca asks clients for certificates: give tls_cert and tls_key as well")
        return self

    @property
    def knows_clients(self) -> bool:
        return bool(self.api_key_file or self.client_ca)
