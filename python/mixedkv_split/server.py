"""`mixedkv split serve`: the engine on the body of a split model, behind gRPC."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from mixedkv._signals import remember_hangups
from mixedkv.engine.engine import Engine
from mixedkv.llama import Llama
from mixedkv.model.gguf_file import read_model_file
from mixedkv.sizes import parse_duration
from mixedkv_service.keys import Keys
from mixedkv_service.metrics import Metrics
from mixedkv_service.signals import ENDING, ignore_ends, reloading_at_hangup
from mixedkv_service.tls import TLS
from mixedkv_split import wire
from mixedkv_split.metrics_door import serve_metrics
from mixedkv_split.parts import BODY, ModelPart, read_part
from mixedkv_split.service import SplitService
from mixedkv_split.sessions import KeptSessions, Sessions
from mixedkv_split.split_settings import SplitSettings

log = logging.getLogger("mixedkv.split")

_OPTIONS = [
    ("grpc.max_receive_message_length", wire.MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", wire.MAX_MESSAGE_BYTES),
    # a peer that went away without a word is found out
    ("grpc.keepalive_time_ms", 30_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.http2.min_ping_interval_without_data_ms", 1_000),
    # and who never begins to speak: gRPC's own two minutes would hold a file for each
    ("grpc.server_handshake_timeout_ms", 10_000),
    ("grpc.so_reuseport", 0),  # a port that is taken is an error
]


def serve(settings: SplitSettings) -> None:
    """Serve until SIGTERM or Ctrl-C. Says on stderr where it listens. SIGHUP reads keys again, once it
    does.

    Raises:
        ValueError: the body or a file of keys or certificates cannot be used.
        OSError: a file cannot be read, or the port is taken.
    """
    remember_hangups()
    part = read_part(read_model_file(settings.body), BODY)
    keys = Keys.load(settings.api_key_file) if settings.api_key_file else Keys()
    credentials = read_credentials(settings)
    metrics = Metrics(by_tenant=bool(keys))
    with open_engine(settings, keys, metrics) as engine, reloading_at_hangup(lambda: _reload(keys)):
        asyncio.run(_serve(settings, engine, part, keys, credentials, metrics))


def _reload(keys: Keys) -> None:
    try:
        keys.reload()
    except (ValueError, OSError) as error:
        log.error("keys and limits: as before: %s", error)
    else:
        log.info("keys and limits: read again" if keys else "SIGHUP: there are no keys to read again")


@contextlib.contextmanager
def open_engine(settings: SplitSettings, keys: Keys, metrics: Metrics) -> Iterator[Engine]:
    """Open an engine on a body, and close it at the end."""
    with (
        Llama(
            settings.body,
            kv=settings.kv,
            n_ctx=settings.n_ctx,
            n_batch=settings.n_batch,
            n_seq_max=settings.n_seq,
            kv_unified=True,
            n_threads=settings.threads or None,
            n_threads_batch=settings.threads or None,
            verbose=False,
        ) as llm,
        Engine(
            llm,
            parallel=settings.parallel,
            max_queue=settings.max_queue,
            observer=metrics,
            limits=keys.limits,
        ) as engine,
    ):
        yield engine


async def start(
    settings: SplitSettings,
    engine: Engine,
    part: ModelPart,
    keys: Keys,
    credentials: grpc.ServerCredentials | None,
) -> tuple[grpc.aio.Server, int]:
    """Start the server; return it and the port that it listens on.

    Raises:
        OSError: the port is taken, or the folder of kept sessions cannot be used.
    """
    kept = None
    if settings.store:
        age = parse_duration(settings.max_age) if settings.max_age else None
        kept = KeptSessions(settings.store, settings.max_kv_size_gb, engine, keys.disk_share, age)
    server = grpc.aio.server(options=_OPTIONS)
    service = SplitService(
        engine,
        part,
        keys,
        Sessions(settings.max_sessions, settings.session_ttl),
        kept,
        max_streams=settings.max_streams,
        step_seconds=settings.step_timeout,
        idle_seconds=settings.idle_timeout,
    )
    wire.add_service(service, server)
    status = health.aio.HealthServicer()
    health_pb2_grpc.add_HealthServicer_to_server(status, server)
    for name in ("", wire.SERVICE_NAME):
        await status.set(name, health_pb2.HealthCheckResponse.SERVING)
    reflection.enable_server_reflection(
        (wire.SERVICE_NAME, health.SERVICE_NAME, reflection.SERVICE_NAME), server
    )
    port = _bind(server, settings, credentials)
    await server.start()
    return server, port


def _bind(
    server: grpc.aio.Server, settings: SplitSettings, credentials: grpc.ServerCredentials | None
) -> int:
    host = f"[{settings.host}]" if ":" in settings.host else settings.host
    address = f"{host}:{settings.port}"
    try:
        if credentials is None:
            return int(server.add_insecure_port(address))
        return int(server.add_secure_port(address, credentials))
    except RuntimeError as error:
        raise OSError(f"{address} cannot be listened on: {error}") from None


async def _serve(
    settings: SplitSettings,
    engine: Engine,
    part: ModelPart,
    keys: Keys,
    credentials: grpc.ServerCredentials | None,
    metrics: Metrics,
) -> None:
    over, loop = asyncio.Event(), asyncio.get_running_loop()
    async with contextlib.AsyncExitStack() as stack:
        if settings.metrics_port:
            door = serve_metrics(settings.host, settings.metrics_port, metrics.registry)
            await stack.enter_async_context(door)
        server, port = await start(settings, engine, part, keys, credentials)
        for number in ENDING:
            signal.signal(number, lambda *_: loop.call_soon_threadsafe(over.set))
        name = Path(settings.body).name
        print(f"mixedkv split: serving {name} on {settings.host}:{port}", file=sys.stderr)
        await over.wait()
        print(
            f"mixedkv split: shutting down, sessions have up to {settings.drain_timeout:g} s", file=sys.stderr
        )
        ignore_ends()  # what is kept is written after this, which a second signal must not cut off
        await server.stop(settings.drain_timeout)


def read_credentials(settings: SplitSettings) -> grpc.ServerCredentials | None:
    """Read the TLS credentials; None for a server without.

    Raises:
        ValueError: a file is not PEM, or the key is not the certificate's.
        OSError: a file cannot be read.
    """
    if not settings.tls_cert:
        return None
    TLS(settings.tls_cert, settings.tls_key)  # gRPC does not say what is wrong with them
    certificate, key = (Path(path).read_bytes() for path in (settings.tls_cert, settings.tls_key))
    ca = Path(settings.client_ca).read_bytes() if settings.client_ca else None
    if ca is not None and b"-----BEGIN" not in ca:
        raise ValueError(f"{settings.client_ca} is not a PEM file")
    return grpc.ssl_server_credentials([(key, certificate)], ca, require_client_auth=ca is not None)
