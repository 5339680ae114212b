"""Opens everything, serves until a signal comes, and closes everything in order."""

from __future__ import annotations

import asyncio
import gc
import json
import logging
import resource
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import uvicorn
from pydantic import ValidationError

from mixedkv.bundled import model_path
from mixedkv.engine import tokenizer
from mixedkv.engine.answer import Answer
from mixedkv.engine.checkpoints import CheckpointLimits
from mixedkv.engine.chunk_connector import ChunkConnector
from mixedkv.engine.embedder import Embedder
from mixedkv.engine.embedding_context import EmbeddingContext, only_embeds
from mixedkv.engine.engine import Engine
from mixedkv.engine.store_connector import StoreConnector
from mixedkv.errors import ClosedError, ModelChangedError
from mixedkv.limits import CELLS
from mixedkv.llama import Llama
from mixedkv.model.fingerprint import model_parts
from mixedkv.model.gguf_file import ModelFile, read_model_file
from mixedkv.server import logs
from mixedkv.server.api.context import warm_job
from mixedkv.server.api.schemas import WarmRequest
from mixedkv.server.api_error import ApiError
from mixedkv.server.app import make_app
from mixedkv.server.delivery import Delivery
from mixedkv.server.http.auth import Keys, MetricsKey
from mixedkv.server.http.connection import Connection
from mixedkv.server.http.request_id import RequestIds
from mixedkv.server.http.root_path import RootPath
from mixedkv.server.listening import TLS, listen, url
from mixedkv.server.metrics import Metrics
from mixedkv.server.model_watch import ModelWatch
from mixedkv.server.pools import Pools
from mixedkv.server.session_kv import SessionKV
from mixedkv.server.settings import IN_MEMORY, ServerSettings
from mixedkv.server.shutdown import end_within
from mixedkv.server.state import ServerState, session_quota
from mixedkv.sessions import ContextCacheManager, explain
from mixedkv.sessions.record_codec import PLAIN, RecordCodec
from mixedkv.store import KeySource, KVStore, key_from_file
from mixedkv.store.encryption import KeyCipher

log = logging.getLogger("mixedkv.server")

_DEFAULT_N_CTX = 8192
_OWN_FILES = 256  # of the store, the metadata and connections that are being refused
_REGISTER_SECONDS = 60.0  # after the prompt of a session is evaluated
_LONGEST_END = 60.0  # seconds for storing KV and closing everything, after the drain timeout
_LAST_SECONDS = 2.0  # for a client to take its answer, after the drain timeout
_BACKLOG = 128  # connections that asyncio accepts at once, whatever their limit
_SWITCH_SECONDS = 0.0005  # the interpreter's 5 ms would be several steps of a small model


def serve(settings: ServerSettings) -> None:
    """Serve until SIGTERM or SIGINT; running requests then get `drain_timeout` seconds. KV is stored.

    Raises:
        ValueError, OSError: something cannot be opened; the message says what.
    """
    logs.install()
    sys.setswitchinterval(_SWITCH_SECONDS)
    keys = Keys.load(settings.api_key_file) if settings.api_key_file else Keys()
    warm = read_warm_file(settings.warm, keys) if settings.warm else []
    with ExitStack() as stack:
        tls = TLS(settings.tls_cert, settings.tls_key) if settings.tls_cert else None
        listening = stack.enter_context(listen(settings))
        server = open_server(settings, keys, stack)
        signal.signal(signal.SIGTERM, _leave)  # while prompts are warmed: what is done is stored
        if keys or tls:
            signal.signal(signal.SIGHUP, lambda *_: _reload(keys, tls))
        for body in warm:
            _warm(server, body)
        gc.freeze()  # what is here stays: to look through it for garbage takes 50 ms, and all streams wait
        _announce(server, url(listening, tls is not None))
        _Uvicorn(server, settings, tls).run(sockets=[listening])


def open_server(settings: ServerSettings, keys: Keys, stack: ExitStack) -> ServerState:
    """Load the model and start the engine. Closing the stack gives up what still runs, stores its KV and
    frees the model.
    """
    path = Path(settings.model) if settings.model else model_path()
    if not settings.verbose:
        tokenizer.silence()
    file = read_model_file(path)
    generates = not only_embeds(file)
    if not generates and (settings.store or settings.warm):
        raise ValueError("store, warm: this model only embeds texts, it has no KV to keep: serve it without")
    watch = stack.enter_context(ModelWatch(part.path for part in model_parts(path)))
    llm = stack.enter_context(_load(settings, path, file, generates))
    key = key_from_file(settings.store_key_file) if settings.store_key_file else None
    keeps = settings.store or (settings.reuse == "chunks" and generates)
    store = stack.enter_context(_open_store(settings, keys, key)) if keeps else None
    metrics_key = MetricsKey.load(settings.metrics_key_file) if settings.metrics_key_file else None
    metrics, delivery = Metrics(by_tenant=metrics_key is not None), Delivery()
    engine = stack.enter_context(
        Engine(
            llm,
            parallel=settings.parallel,
            max_queue=settings.max_queue,
            slowdown=settings.slowdown,
            exact_only=settings.reuse != "prefix",
            connector=_connector(settings, store),
            observer=metrics,
            deliver=delivery,
            tokenizer=tokenizer.Tokenizer(
                llm, settings.chat_format, read_chat_template(settings.chat_template)
            ),
            limits=keys.limits,
            checkpoints=CheckpointLimits(
                settings.checkpoints, settings.checkpoint_every, int(settings.max_checkpoint_gb * 1e9)
            ),
            speculation=settings.speculation,
        )
    )
    watch.begin(partial(_stop_reading, engine))
    embedder = _open_embedder(settings, engine, file, keys)
    session_kv = SessionKV(engine, store)
    pools = stack.enter_context(Pools())
    return ServerState(
        settings=settings,
        model_name=settings.model_name or path.stem,
        engine=engine,
        delivery=delivery,
        keys=keys,
        metrics=metrics,
        metrics_key=metrics_key,
        contexts=ContextCacheManager(
            settings.sessions_url,
            session_kv,
            codec=RecordCodec(KeyCipher(key)) if key is not None else PLAIN,
            pending_seconds=settings.request_timeout + _REGISTER_SECONDS,
            quota=partial(session_quota, settings, keys),
        ),
        session_kv=session_kv,
        pools=pools,
        embedder=embedder,
        generates=generates,
        facts={
            "architecture": file.architecture,
            "size_bytes": file.size,
            "n_ctx": engine.n_ctx if generates else None,
            "n_embd": embedder.context.n_embd if embedder is not None else None,
            "embedding_n_ctx": embedder.context.n_ctx if embedder is not None else None,
        },
    )


def _stop_reading(engine: Engine) -> None:
    """Who waits for the model's file may have it after this."""
    error = ModelChangedError(
        "the model's file was changed, or opened to be: restart the server, and replace a model by renaming "
        "another file over it"
    )
    log.error("no more requests are taken: %s", error)
    engine.drain(0, error)
    with suppress(ClosedError):  # vectors that are being made
        engine.call(lambda: None).result()


def _load(settings: ServerSettings, path: Path, file: ModelFile, generates: bool) -> Llama:
    n_ctx = settings.n_ctx or min(_DEFAULT_N_CTX, int(file.get("context_length", _DEFAULT_N_CTX)))
    llm = Llama(
        path,
        # what only embeds has no use for this context
        kv=settings.kv if generates else "f16",
        n_ctx=n_ctx if generates else CELLS,
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
        tokenizer.silence()  # Llama sets its own log
    return llm


def _open_embedder(settings: ServerSettings, engine: Engine, file: ModelFile, keys: Keys) -> Embedder | None:
    if not settings.embeddings and not only_embeds(file):
        return None
    context = EmbeddingContext(engine.llm, file, n_ctx=settings.embedding_n_ctx, n_batch=settings.n_batch)
    max_requests = settings.max_queue + settings.parallel
    return Embedder(
        engine, context, max_requests=max_requests, slowdown=settings.slowdown, limits=keys.limits
    )


def _connector(settings: ServerSettings, store: KVStore | None) -> StoreConnector | None:
    if store is None:
        return None
    if settings.reuse != "chunks":
        return StoreConnector(store)
    return ChunkConnector(
        store,
        repair=settings.chunk_repair or None,
        max_kld=settings.chunk_max_kld,
        check=settings.chunk_check,
    )


def _open_store(settings: ServerSettings, keys: Keys, key: KeySource | None) -> KVStore:
    return KVStore(
        settings.store or None,
        max_ram_bytes=int(settings.max_ram_gb * 1e9),
        max_kv_size_gb=settings.max_kv_size_gb,
        key=key,
        shares=keys.disk_share,
        # in memory sessions end with the process: nobody else may remove another one's
        session_owner="" if settings.sessions_url == IN_MEMORY else settings.sessions_url,
    )


def read_chat_template(path: str) -> str:
    """
    Raises:
        ValueError: the file cannot be read.
    """
    if not path:
        return ""
    try:
        return Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"chat_template={path}: {error}") from None


class WarmLine(WarmRequest):
    """A body of /v1/warm, and whose prompt it is."""

    tenant: str = ""


def read_warm_file(path: str, keys: Keys) -> list[WarmLine]:
    """
    Raises:
        ValueError: a line is not a WarmLine, or its tenant has no key; the message has its number.
    """
    lines = []
    for number, line in enumerate(Path(path).read_text(encoding="utf-8").splitlines(), 1):
        if line.strip():
            try:
                body = WarmLine.model_validate(json.loads(line))
            except ValidationError as error:
                raise ValueError(f"{path}, line {number}: {explain(error)}") from None
            except ValueError:
                raise ValueError(f"{path}, line {number}: not JSON") from None
            if not keys.has(body.tenant):
                remedy = "one of the key file's" if keys else "none, since there are no keys"
                raise ValueError(f"{path}, line {number}: tenant={body.tenant!r}: use {remedy}")
            lines.append(body)
    return lines


def _warm(server: ServerState, body: WarmLine) -> None:
    """Before the event loop runs."""
    try:
        job = warm_job(server, body, body.tenant)
    except ApiError as error:
        raise ValueError(f"{server.settings.warm}: {error.message}") from None
    answer = Answer(server.engine, job)
    try:
        server.engine.submit_jobs([job], force=True)
        answer.result()
    except Exception as error:
        raise ValueError(f"{server.settings.warm}: {error}") from None


def _reload(keys: Keys, tls: TLS | None) -> None:
    for what, part in {"keys and limits": keys or None, "certificate": tls}.items():
        if part is not None:
            try:
                part.reload()
            except (ValueError, OSError) as error:
                log.error("%s: as before: %s", what, error)
            else:
                log.info("%s: read again", what)


def _leave(*_: Any) -> None:
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    raise SystemExit(0)


def _allow_connections(wanted: int) -> int:
    """Raise the limit on open files, which often is 1024; how many connections leave enough for the store."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    need = wanted + _OWN_FILES
    if soft != resource.RLIM_INFINITY and soft < need:
        soft = need if hard == resource.RLIM_INFINITY else min(need, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    if soft == resource.RLIM_INFINITY or soft >= need:
        return wanted
    allowed = max(1, soft - _OWN_FILES)
    log.warning("max_connections is %d, since this process may open %d files only", allowed, soft)
    return allowed


def _announce(server: ServerState, where: str) -> None:
    engine = server.engine
    what = f"kv {engine.llm.kv.config}, {engine.n_ctx} tokens, {engine.parallel} at a time"
    if not server.generates and server.embedder is not None:
        what = f"embeddings only, {server.embedder.context.n_ctx} tokens"
    print(
        f"mixedkv serves {server.model_name} ({what}) on {where}",
        file=sys.stderr,
        flush=True,
    )


class _Uvicorn(uvicorn.Server):
    """Tells the engine when a signal comes, so that waiting requests end and running ones finish."""

    def __init__(self, server: ServerState, settings: ServerSettings, tls: TLS | None) -> None:
        super().__init__(
            uvicorn.Config(
                RootPath(RequestIds(make_app(server), settings.access_log), settings.root_path),
                http=Connection.within(settings.read_timeout, settings.request_timeout, settings.root_path),
                ws="none",
                log_config=None,  # its tracebacks go through `logs`
                log_level="error",  # a warning for each malformed request would fill the log
                access_log=False,  # paths have session ids in them; `RequestIds` writes routes
                server_header=False,
                limit_concurrency=_allow_connections(settings.max_connections),
                backlog=_BACKLOG,
                timeout_graceful_shutdown=int(settings.drain_timeout + 2 * _LAST_SECONDS) + 1,
                h11_max_incomplete_event_size=65536,
            )
        )
        if tls is not None:
            self.config.load()
            self.config.ssl = tls.context
        self._state = server

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """As in the base class, without raising the signal again at the end: a shutdown in order exits 0.
        What follows is storing, which a second signal shall not cut off.
        """
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self.handle_exit)
        try:
            yield
        finally:
            for number in (signal.SIGINT, signal.SIGTERM):
                signal.signal(number, signal.SIG_IGN)

    def handle_exit(self, sig: int, frame: Any) -> None:
        """A second signal changes nothing: `drain_timeout` bounds what is still to be done."""
        if not self.should_exit:
            end_within(self._state.settings.drain_timeout + _LONGEST_END)
        self.should_exit = True

    async def shutdown(self, sockets: Any = None) -> None:
        self._state.ready = False
        seconds = self._state.settings.drain_timeout
        end = time.monotonic() + seconds
        drains = [asyncio.to_thread(self._state.engine.drain, seconds)]
        if self._state.embedder is not None:
            drains.append(self._state.embedder.drain(seconds))
        if not all(await asyncio.gather(*drains)):
            log.warning("requests were cut off after %g seconds", seconds)
        # who does not take its answer holds nobody up
        patience = max(_LAST_SECONDS, end - time.monotonic())
        asyncio.get_running_loop().call_later(patience, self._abort_connections)
        await super().shutdown(sockets)

    def _abort_connections(self) -> None:
        for connection in list(self.server_state.connections):
            if isinstance(connection, Connection):
                connection.transport.abort()
