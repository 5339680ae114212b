"""Opens everything, serves until a signal comes, and closes everything in order."""

from __future__ import annotations

import asyncio
import json
import logging
import signal
import socket
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import uvicorn
from pydantic import ValidationError

from mixedkv.bundled import model_path
from mixedkv.conversation import ContextCacheManager, explain
from mixedkv.llama import Llama
from mixedkv.model_file import read_model_file
from mixedkv.server import language
from mixedkv.server.api_context import warm_job
from mixedkv.server.app import make_app
from mixedkv.server.auth import Keys
from mixedkv.server.engine import Engine
from mixedkv.server.errors import ApiError
from mixedkv.server.jobs import Event, Failed
from mixedkv.server.metrics import Metrics
from mixedkv.server.persist import Keeper, SessionRows
from mixedkv.server.schemas import WarmRequest
from mixedkv.server.serving import Serving
from mixedkv.server.settings import ServerSettings
from mixedkv.store import KVStore, key_from_file

log = logging.getLogger("mixedkv.server")

_DEFAULT_N_CTX = 8192
_SWITCH_SECONDS = 0.0005  # the interpreter's 5 ms would be several steps of a small model


def serve(settings: ServerSettings) -> None:
    """Serve until SIGTERM or SIGINT; running requests then get `drain_timeout` seconds. KV is stored.

    Raises:
        ValueError, OSError: something cannot be opened; the message says what.
    """
    logging.basicConfig(level=logging.INFO, format="%(levelname)s: %(message)s", stream=sys.stderr)
    logging.getLogger("httpx").setLevel(logging.WARNING)
    sys.setswitchinterval(_SWITCH_SECONDS)
    keys = Keys.load(settings.api_key_file) if settings.api_key_file else Keys()
    warm = read_warm_file(settings.warm) if settings.warm else []
    with ExitStack() as stack:
        listening = stack.enter_context(_listen(settings.host, settings.port))
        server = open_server(settings, keys)
        stack.callback(close_server, server)
        for body in warm:
            _warm(server, body)
        _announce(server, listening)
        _Uvicorn(server, settings).run(sockets=[listening])


def open_server(settings: ServerSettings, keys: Keys) -> Serving:
    """Load the model and start the engine."""
    path = Path(settings.model) if settings.model else model_path()
    if not settings.verbose:
        language.silence()
    file = read_model_file(path)
    llm = Llama(
        path,
        kv=settings.kv,
        n_ctx=settings.n_ctx or min(_DEFAULT_N_CTX, int(file.get("context_length", _DEFAULT_N_CTX))),
        n_seq_max=settings.n_seq,
        kv_unified=True,
        n_batch=settings.n_batch,
        n_ubatch=settings.n_batch,
        n_threads=settings.threads or None,
        n_threads_batch=settings.threads or None,
        n_gpu_layers=settings.n_gpu_layers,
        verbose=settings.verbose,
    )
    if not settings.verbose:
        language.silence()  # Llama sets its own log
    metrics = Metrics()
    try:
        engine = Engine(
            llm,
            parallel=settings.parallel,
            max_queue=settings.max_queue,
            slowdown=settings.slowdown,
            exact_only=settings.reuse == "exact",
            observe=metrics,
        )
        words = language.Language(llm, settings.chat_format)
    except BaseException:
        llm.close()
        raise
    engine.start()
    try:
        store = _open_store(settings, engine)
        keeper = Keeper(engine, store) if store is not None else None
        contexts = ContextCacheManager(settings.metadata_url, SessionRows(engine, store))
    except BaseException:
        engine.close()
        raise
    return Serving(
        settings=settings,
        model_name=settings.model_name or path.stem,
        engine=engine,
        language=words,
        keys=keys,
        metrics=metrics,
        contexts=contexts,
        keeper=keeper,
        facts={"architecture": file.architecture, "size_bytes": file.size, "n_ctx": engine.n_ctx},
    )


def _open_store(settings: ServerSettings, engine: Engine) -> KVStore | None:
    if not settings.store:
        return None
    if not engine.pool.can_cut:
        raise ValueError(
            "store: this model keeps more than rows of tokens (recurrent layers), serve it without"
        )
    return KVStore(
        settings.store,
        max_ram_bytes=int(settings.max_ram_gb * 1e9),
        max_kv_size_gb=settings.max_kv_size_gb,
        key=key_from_file(settings.store_key_file) if settings.store_key_file else None,
    )


def close_server(server: Serving) -> None:
    """Give up what still runs, store its KV, free the model."""
    server.engine.drain(0)
    if server.keeper is not None:
        server.keeper.close()
    server.engine.close()


def read_warm_file(path: str) -> list[WarmRequest]:
    """One body of /v1/warm per line.

    Raises:
        ValueError: a line is not one; the message has its number.
    """
    bodies = []
    for number, line in enumerate(Path(path).read_text(encoding="utf-8").splitlines(), 1):
        if line.strip():
            try:
                bodies.append(WarmRequest.model_validate(json.loads(line)))
            except ValidationError as error:
                raise ValueError(f"{path}, line {number}: {explain(error)}") from None
            except ValueError:
                raise ValueError(f"{path}, line {number}: not JSON") from None
    return bodies


def _warm(server: Serving, body: WarmRequest) -> None:
    """Before the event loop runs: the engine delivers on its own thread, between two calls."""
    try:
        job = warm_job(server, body, "")
    except ApiError as error:
        raise ValueError(f"{server.settings.warm}: {error.message}") from None
    events: list[Event] = []
    job.deliver = events.append
    server.engine.submit([job], force=True)
    while not events:
        server.engine.call(lambda: None).result()
    if isinstance(events[-1], Failed):
        raise ValueError(f"{server.settings.warm}: {events[-1].error}")


def _listen(host: str, port: int) -> socket.socket:
    family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    # asyncio sets TCP_NODELAY only where the protocol is named; without it a kept-alive client waits 40 ms
    listening = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    try:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind(address)
    except OSError as error:
        listening.close()
        raise ValueError(f"{host} port {port} cannot be listened on: {error.strerror}") from None
    return listening


def _announce(server: Serving, listening: socket.socket) -> None:
    host, port = listening.getsockname()[:2]
    host = f"[{host}]" if ":" in host else host
    kv = server.engine.llm.kv.config
    print(
        f"mixedkv serves {server.model_name} (kv {kv}, {server.engine.n_ctx} tokens, "
        f"{server.engine.parallel} at a time) on http://{host}:{port}",
        file=sys.stderr,
        flush=True,
    )


class _Uvicorn(uvicorn.Server):
    """Tells the engine when a signal comes, so that waiting requests end and running ones finish."""

    def __init__(self, server: Serving, settings: ServerSettings) -> None:
        super().__init__(
            uvicorn.Config(
                make_app(server),
                log_level="warning",
                access_log=False,  # paths have session ids in them
                server_header=False,
                limit_concurrency=settings.max_connections,
                timeout_graceful_shutdown=None,
                h11_max_incomplete_event_size=65536,
            )
        )
        self._serving = server

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """As in the base class, without raising the signal again at the end: a shutdown in order exits 0."""
        numbers = (signal.SIGINT, signal.SIGTERM)
        before = {number: signal.signal(number, self.handle_exit) for number in numbers}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    async def shutdown(self, sockets: Any = None) -> None:
        self._serving.ready = False
        seconds = self._serving.settings.drain_timeout
        if not await asyncio.to_thread(self._serving.engine.drain, seconds):
            log.warning("requests were cut off after %g seconds", seconds)
        await super().shutdown(sockets)
