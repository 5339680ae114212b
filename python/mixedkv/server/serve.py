"""Opens everything, serves until a signal comes, and closes everything in order."""

from __future__ import annotations

import asyncio
import gc
import json
import logging
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import uvicorn
from pydantic import ValidationError

from mixedkv.engine.answer import Answer
from mixedkv.engine.chat import tokenizer
from mixedkv.engine.embed.embedding_context import only_embeds, ranks
from mixedkv.engine.engine import Engine
from mixedkv.engine.turns import Turns
from mixedkv.model.gguf_file import ModelFile, read_model_file
from mixedkv.server import logs
from mixedkv.server.api.context import warm_job
from mixedkv.server.api.schemas import WarmRequest
from mixedkv.server.api_error import ApiError
from mixedkv.server.app import make_app
from mixedkv.server.delivery import Delivery
from mixedkv.server.group_loader import GroupLoader, Served, check_files, describe
from mixedkv.server.http.auth import Keys, MetricsKey
from mixedkv.server.http.connection import Connection
from mixedkv.server.http.request_id import RequestIds
from mixedkv.server.http.root_path import RootPath
from mixedkv.server.listening import TLS, listen, url
from mixedkv.server.metrics import Metrics
from mixedkv.server.model_watch import ignore_signal
from mixedkv.server.models import ServedModel, served_models
from mixedkv.server.pools import Pools
from mixedkv.server.residence import Check, ModelGroup, Residence
from mixedkv.server.session_kv import SessionKV
from mixedkv.server.settings import IN_MEMORY, ServerSettings
from mixedkv.server.shutdown import end_within
from mixedkv.server.state import ServerState, session_quota
from mixedkv.server.watchdog import Watchdog
from mixedkv.sessions import ContextCacheManager, explain
from mixedkv.sessions.record_codec import PLAIN, RecordCodec
from mixedkv.sizes import parse_duration
from mixedkv.store import KeySource, KVStore, key_from_file
from mixedkv.store.encryption import KeyCipher

if TYPE_CHECKING:
    from mixedkv.server.kv_events import KVEvents

try:
    import resource
except ImportError:  # Windows, which has no such limit
    resource = None  # type: ignore[assignment]

log = logging.getLogger("mixedkv.server")

_OWN_FILES = 256  # for the store, the metadata and connections that are being refused
_REGISTER_SECONDS = 60.0  # after the prompt of a session is evaluated
_LONGEST_END = 60.0  # seconds to store KV and close everything, after the drain timeout
_LAST_SECONDS = 2.0  # seconds for a client to take its answer, after the drain timeout
_CHECK_SECONDS = 0.2  # seconds between two looks whether a prompt is still to be warmed
_BACKLOG = 128  # connections that asyncio accepts at once, whatever their limit
_SWITCH_SECONDS = 0.0005  # the default, 5 ms, is as long as several steps of a small model


def serve(settings: ServerSettings) -> None:
    """Serve until SIGTERM or SIGINT. Running requests then get `drain_timeout` seconds, and KV is stored.

    Raises:
        ValueError, OSError: a file, address or store cannot be opened; the message says which.
    """
    logs.install()
    sys.setswitchinterval(_SWITCH_SECONDS)
    keys = Keys.load(settings.api_key_file) if settings.api_key_file else Keys()
    warm = read_warm_file(settings.warm, keys) if settings.warm else []
    if settings.warm_text and keys:
        raise ValueError("warm_text: with keys a prompt has a tenant: use warm, a file whose lines name it")
    warm += [WarmLine.model_validate({"prompt": text}) for text in settings.warm_text]
    with ExitStack() as stack:
        tls = TLS(settings.tls_cert, settings.tls_key) if settings.tls_cert else None
        listening = stack.enter_context(listen(settings))
        server = open_server(settings, keys, stack)
        signal.signal(signal.SIGTERM, _leave)  # while prompts are warmed: finished ones are stored
        if keys or tls:
            signal.signal(signal.SIGHUP, lambda *_: _reload(keys, tls))
        for body in warm:
            _warm(server, body)
        gc.freeze()  # these objects stay: collecting garbage among them takes 50 ms, and all streams wait
        _announce(server, url(listening, tls is not None))
        _Uvicorn(server, settings, tls).run(sockets=[listening])


def open_server(settings: ServerSettings, keys: Keys, stack: ExitStack) -> ServerState:
    """Load the models and start their engines, or with loading on demand prepare for that. Closing the stack
    cancels running work, stores its KV and frees the models.
    """
    if not settings.verbose:
        tokenizer.silence()
    key = key_from_file(settings.store_key_file) if settings.store_key_file else None
    metrics_key = MetricsKey.load(settings.metrics_key_file) if settings.metrics_key_file else None
    models = [(model, read_model_file(model.path)) for model in served_models(settings)]
    embed = {model.name for model, file in models if only_embeds(file)}
    keeps = settings.store or settings.store_remote or settings.warm or settings.warm_text
    if keeps and len(embed) == len(models):
        raise ValueError(
            "store, store_remote, warm: this model generates nothing, it has no KV to keep: serve it without"
        )
    for model, _ in models:
        if model.parent in embed:
            raise ValueError(f"lora: {model.parent!r} only embeds texts, adapters are for models that answer")
    generating = [model.name for model, _ in models if model.name not in embed]
    topics = _topics(settings, generating) if settings.kv_events else {}
    stores = [
        _open_store(settings, keys, key, stack) if model.name not in embed else None for model, _ in models
    ]
    session_kv, metrics = SessionKV(), Metrics(by_tenant=metrics_key is not None)
    residence = stack.enter_context(_residence(settings, keys, metrics))
    shared: dict[str, Any] = {
        "settings": settings,
        "delivery": Delivery(),
        "keys": keys,
        "metrics": metrics,
        "metrics_key": metrics_key,
        "contexts": ContextCacheManager(
            settings.sessions_url,
            session_kv,
            codec=RecordCodec(KeyCipher(key)) if key is not None else PLAIN,
            pending_seconds=settings.request_timeout + _REGISTER_SECONDS,
            quota=partial(session_quota, settings, keys),
        ),
        "session_kv": session_kv,
        "pools": Pools(keys.limits),
        "residence": residence,
        "watchdog": Watchdog(lambda: server.engines, restart=settings.restart_when_stuck),
    }
    server = _describe_all(models, stores, shared)
    if settings.on_demand:
        ignore_signal()  # models are loaded on another thread then
    else:
        for group in residence.groups:
            residence.load_now(group)
    if topics:
        engines = {topics[each.model_name]: partial(_engine, each) for each in server.all if each.generates}
        stack.enter_context(_open_events(settings, engines))
    stack.enter_context(server.pools)
    stack.enter_context(server.watchdog)
    return server


def _describe_all(
    models: Sequence[tuple[ServedModel, ModelFile]],
    stores: Sequence[KVStore | None],
    shared: Mapping[str, Any],
) -> ServerState:
    """Return the default model and the others, none of which is loaded yet. Adapters are in the group of the
    model before them.
    """
    on_demand, residence, turns = shared["settings"].on_demand, shared["residence"], Turns()
    states: list[ServerState] = []
    for (model, file), store in zip(models, stores, strict=True):
        if not model.parent:
            loader = GroupLoader([], first=not states, turns=turns, file=None if on_demand else file)
            group = ModelGroup(model.name, loader)
            loader.on_change = partial(residence.unload_broken, group)
            residence.add(group)
        state = ServerState(
            **shared,
            model_name=model.name,
            path=model.path,
            parent=model.parent,
            group=group,
            store=store,
            generates=not only_embeds(file),
            ranks=ranks(file),
        )
        loader.members.append(Served(model, state, shared["session_kv"].add(store), store))
        states.append(state)
        if on_demand:
            check_files(model)
            describe(state, model, file)
    server, *others = states
    server.others.update({each.model_name: each for each in others})
    return server


def _residence(settings: ServerSettings, keys: Keys, metrics: Metrics) -> Residence:
    def most_waiting(tenant: str) -> int:
        queued = keys.limits(tenant).queued
        return settings.parallel + (settings.max_queue if queued is None else queued)

    return Residence(
        keep_alive=settings.keep_alive_seconds,
        max_loaded=settings.max_loaded,
        on_demand=settings.on_demand,
        most_waiting=most_waiting,
        counts=metrics,
    )


def _engine(state: ServerState) -> Engine | None:
    return state.loaded.engine if state.loaded is not None else None


def _open_events(settings: ServerSettings, engines: Mapping[str, Callable[[], Engine | None]]) -> KVEvents:
    try:
        from mixedkv.server.kv_events import KVEvents
    except ModuleNotFoundError as error:
        raise ValueError(
            f"kv_events needs {error.name}, which is not installed: pip install 'mixedkv[events]'"
        ) from None
    return KVEvents(settings.kv_events, engines)


def _topics(settings: ServerSettings, names: Sequence[str]) -> dict[str, str]:
    """Return the topics of KV events by model, from which routers know whose blocks they are."""
    topic = settings.kv_events_topic
    if len(names) > 1 and "{model}" not in topic:
        raise ValueError(
            f"kv_events_topic={topic!r}: {len(names)} models need topics of their own: put {{model}} in it, "
            "which stands for the name of each, as in kv@POD@{model}"
        )
    return {name: topic.replace("{model}", name) for name in names}


def _open_store(
    settings: ServerSettings, keys: Keys, key: KeySource | None, stack: ExitStack
) -> KVStore | None:
    """Open the store of one model. All stores share the folder, and each has memory of its own."""
    in_memory = settings.on_demand and settings.max_ram_gb  # it also keeps the KV of unloaded models
    if not (settings.store or settings.store_remote or settings.reuse == "chunks" or in_memory):
        return None
    store = KVStore(
        settings.store or None,
        max_ram_bytes=int(settings.max_ram_gb * 1e9),
        max_kv_size_gb=settings.max_kv_size_gb,
        eviction=settings.eviction,
        max_age_seconds=parse_duration(settings.max_age) if settings.max_age else None,
        key=key,
        shares=keys.disk_share,
        # sessions in memory end with the process: their KV is not another process's to remove
        session_owner="" if settings.sessions_url == IN_MEMORY else settings.sessions_url,
        remote=settings.store_remote or None,
        recheck=settings.recheck,
    )
    return stack.enter_context(store)


class WarmLine(WarmRequest):
    """A line of a warm file: a body of /v1/warm and its tenant."""

    tenant: str = ""


def read_warm_file(path: str, keys: Keys) -> list[WarmLine]:
    """Read the file of prompts to evaluate at the start.

    Raises:
        ValueError: a line is not a WarmLine, or its tenant has no key; the message has the line's number.
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
    """Evaluate one line of `--warm`, before the event loop runs."""
    names = {each.model_name: each for each in server.all}
    if body.model is not None and body.model not in names:
        raise ValueError(f"{server.settings.warm}: the model {body.model!r} is not served here")
    server = names.get(body.model or "", server)
    server.residence.load_now(server.group)
    evaluate = partial(_evaluate, server, body)
    evaluate(lambda: None)
    loader = server.group.loader
    assert isinstance(loader, GroupLoader)
    loader.warm.append(evaluate)


def _evaluate(server: ServerState, body: WarmLine, check: Check) -> None:
    """Evaluate a prompt. An exception from `check` ends that."""
    try:
        job = warm_job(server, body, body.tenant)
    except ApiError as error:
        raise ValueError(f"{server.settings.warm}: {error.message}") from None
    answer = Answer(server.engine, job)
    try:
        server.engine.submit_jobs([job], force=True)
        while True:
            with suppress(TimeoutError):
                answer.result(_CHECK_SECONDS)
                return
            check()
    except Exception as error:
        raise ValueError(f"{server.settings.warm}: {error}") from None
    finally:
        answer.cancel()


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
    """Raise the limit on open files, which often is 1024. Return how many connections leave enough for the
    store.
    """
    if resource is None:
        return wanted
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
    for each in reversed(server.all):
        what = f"kv {each.kv}, {each.facts['n_ctx']} tokens, {each.settings.parallel} at a time"
        if each.parent:
            what = f"an adapter on {each.parent}, {what}"
        if not each.generates and each.embedder is not None:
            context = each.embedder.context
            what = f"{'ranking' if context.ranks else 'embeddings'} only, {context.n_ctx} tokens"
        elif not each.generates:
            what = f"{'ranking' if each.ranks else 'embeddings'} only"
        if each.loaded is None:
            what += ", loaded on demand"
        at = f" on {where}" if each is server else ""
        print(f"mixedkv serves {each.model_name} ({what}){at}", file=sys.stderr, flush=True)


class _Uvicorn(uvicorn.Server):
    """Tells the engine about a signal, so that waiting requests end and running ones finish."""

    def __init__(self, server: ServerState, settings: ServerSettings, tls: TLS | None) -> None:
        super().__init__(
            uvicorn.Config(
                RootPath(RequestIds(make_app(server), settings.access_log), settings.root_path),
                http=Connection.within(settings.read_timeout, settings.request_timeout, settings.root_path),
                ws="none",
                loop="asyncio",  # whatever other implementations are installed
                log_config=None,  # for its tracebacks to go through `logs`
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
        """Capture signals like the base class, but do not raise the signal again at the end.

        An orderly shutdown exits with 0. KV is stored after it, which a second signal must not cut off.
        """
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self.handle_exit)
        try:
            yield
        finally:
            for number in (signal.SIGINT, signal.SIGTERM):
                signal.signal(number, signal.SIG_IGN)

    def handle_exit(self, sig: int, frame: Any) -> None:
        """Stop the server. A second signal changes nothing, as `drain_timeout` limits the remaining time."""
        if not self.should_exit:
            stuck = self._state.watchdog.stuck_seconds  # then nothing ends, however long it may take
            end_within(_LAST_SECONDS if stuck else self._state.settings.drain_timeout + _LONGEST_END)
        self.should_exit = True

    async def shutdown(self, sockets: Any = None) -> None:
        self._state.ready = False
        seconds = self._state.settings.drain_timeout
        end = time.monotonic() + seconds
        if not await self._state.drain(seconds):
            log.warning("requests were cut off after %g seconds", seconds)
        # a client that does not take its answer delays nobody
        patience = max(_LAST_SECONDS, end - time.monotonic())
        asyncio.get_running_loop().call_later(patience, self._abort_connections)
        await super().shutdown(sockets)

    def _abort_connections(self) -> None:
        for connection in list(self.server_state.connections):
            if isinstance(connection, Connection):
                connection.transport.abort()
