"""Settings of a split server."""

from __future__ import annotations

from dataclasses import dataclass, fields

from mixedkv.config import parse_kv
from mixedkv.hosts import is_local
from mixedkv.limits import INT32_MAX, MAX_SEQUENCES
from mixedkv.sizes import parse_duration

_RANGES = {
    "n_ctx": (0, INT32_MAX),
    "parallel": (1, MAX_SEQUENCES - 1),
    "idle_sessions": (1, MAX_SEQUENCES - 1),
    "n_batch": (32, 65536),
    "threads": (0, 4096),
    "port": (0, 65535),
    "metrics_port": (0, 65535),
    "max_queue": (0, 100_000),
    "max_sessions": (1, 1_000_000),
    "max_streams": (1, 100_000),
    "session_ttl": (1, 1e6),
    "step_timeout": (0.01, 1e6),
    "idle_timeout": (0.01, 1e6),
    "drain_timeout": (0, 1e6),
    "store_gb": (0, 1e9),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class SplitSettings:
    """Everything `mixedkv split serve` can be told; docs/reference/cli.md says what each is.

    Raises:
        ValueError: a value is out of range or does not go with another; the message names the field.
    """

    body: str
    kv: str = "mixed"
    n_ctx: int = 8192
    parallel: int = 8
    idle_sessions: int = 24
    n_batch: int = 512
    threads: int = 0
    host: str = "127.0.0.1"
    port: int = 50051
    tls_cert: str = ""
    tls_key: str = ""
    client_ca: str = ""
    api_key_file: str = ""
    allow_no_keys: bool = False
    metrics_port: int = 0
    store: str = ""
    store_gb: float = 10.0
    store_max_age: str = ""
    max_queue: int = 64
    max_sessions: int = 256
    max_streams: int = 64
    session_ttl: float = 3600.0
    step_timeout: float = 600.0
    idle_timeout: float = 3600.0
    drain_timeout: float = 10.0

    def __post_init__(self) -> None:
        parse_kv(self.kv)
        if self.store_max_age:
            parse_duration(self.store_max_age)
        for field in fields(self):
            low, high = _RANGES.get(field.name, (None, None))
            value = getattr(self, field.name)
            if low is not None and not low <= value <= high:
                raise ValueError(f"{field.name}={value}: use {low} to {high}")
        if self.parallel + self.idle_sessions > MAX_SEQUENCES:
            raise ValueError(
                f"parallel={self.parallel} and idle_sessions={self.idle_sessions} are more than the "
                f"{MAX_SEQUENCES} sequences llama.cpp has: lower one"
            )
        if self.parallel > self.n_batch:
            raise ValueError(f"parallel={self.parallel} is more than n_batch={self.n_batch}: raise n_batch")
        if bool(self.tls_cert) != bool(self.tls_key):
            raise ValueError("tls_cert and tls_key go together: give both, or none")
        if self.client_ca and not self.tls_cert:
            raise ValueError("client_ca asks clients for certificates: give tls_cert and tls_key as well")
        if not (self.api_key_file or self.client_ca or self.allow_no_keys or is_local(self.host)):
            raise ValueError(
                f"host={self.host} can be reached from elsewhere, and there are no keys: give api_key_file "
                f"or client_ca, or allow_no_keys if that is what you want"
            )
