"""Opens everything, serves until a signal comes, and closes everything in order."""

from __future__ import annotations

import gc
import logging
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

from fastapi import FastAPI

from mixedkv._signals import remember_hangups
from mixedkv.engine import Engine
from mixedkv.model.embedding_model import only_embeds
from mixedkv.model.gguf_file import read_model_file
from mixedkv.native import llama_cpp as _llama_cpp
from mixedkv.sessions import ContextCacheManager
from mixedkv.sessions.metadata import PLAIN, RecordCodec
from mixedkv.sizes import parse_duration
from mixedkv.store import KVStore, key_from_file
from mixedkv.store.encryption import KeyCipher, KeySource
from mixedkv_server import logs
from mixedkv_server.app import make_app
from mixedkv_server.engines import open_engines
from mixedkv_server.http_server import HTTPServer, Served, listen, url
from mixedkv_server.models import (
    Described,
    check_adapters,
    check_files,
    check_keeps,
    description,
    served_models,
)
from mixedkv_server.pending import Delivery
from mixedkv_server.pools import Pools
from mixedkv_server.router.router import Router, make_router_app
from mixedkv_server.settings import IN_MEMORY, ServerSettings
from mixedkv_server.state import ServerState, SessionKV
from mixedkv_server.warming import WarmLine, read_warm_file, warm
from mixedkv_server.watchdog import Watchdog
from mixedkv_service.keys import Keys, MetricsKey
from mixedkv_service.metrics import Metrics
from mixedkv_service.signals import ignore_ends, reloading_at_hangup
from mixedkv_service.tls import TLS

if TYPE_CHECKING:
    from mixedkv_server.kv_events import KVEvents

log = logging.getLogger("mixedkv.server")

_REGISTER_SECONDS = 60.0  # after the prompt of a session is evaluated
_SWITCH_SECONDS = 0.0005  # the default, 5 ms, is as long as several steps of a small model


def serve(settings: ServerSettings) -> None:
    """Serve until SIGTERM or SIGINT. Running requests then get `drain_timeout` seconds, and KV is stored.
    SIGHUP reads keys and the certificate again, once the server runs.

    Raises:
        ValueError, OSError: a file, address or store cannot be opened; the message says which.
    """
    remember_hangups()
    logs.install(settings.log_format)
    sys.setswitchinterval(_SWITCH_SECONDS)
    keys = Keys.of(settings.api_key_file, settings.api_key)
    lines = read_warm_file(settings.warm, keys) if settings.warm else []
    with ExitStack() as stack:
        tls = TLS(settings.tls_cert, settings.tls_key) if settings.tls_cert else None
        listening = stack.enter_context(listen(settings))
        serving = _route if settings.routed else _serve_here
        app, served, models = serving(settings, keys, lines, stack)
        stack.enter_context(reloading_at_hangup(lambda: _reload(keys, tls, served.reload)))
        gc.freeze()  # these objects stay: collecting garbage among them takes 50 ms, and all streams wait
        _announce(models, url(listening, tls is not None), settings.log_format)
        HTTPServer(app, served, tls).run(sockets=[listening])
    log.info("shut down: KV is stored, and all files are closed")


def _serve_here(
    settings: ServerSettings, keys: Keys, lines: Sequence[WarmLine], stack: ExitStack
) -> tuple[FastAPI, Served, Sequence[Described]]:
    server = open_server(settings, keys, stack)
    signal.signal(signal.SIGTERM, _leave)  # while prompts are warmed: finished ones are stored
    for line in lines:
        warm(server, line)
    return make_app(server), server, server.all


def _route(
    settings: ServerSettings, keys: Keys, lines: Sequence[WarmLine], stack: ExitStack
) -> tuple[FastAPI, Served, Sequence[Described]]:
    signal.signal(signal.SIGTERM, _leave)  # else its folder would stay
    router = Router(settings, keys, lines, stack)
    return make_router_app(router), router, router.model.all


def open_server(settings: ServerSettings, keys: Keys, stack: ExitStack) -> ServerState:
    """Load a model with its adapters and start their engines. Closing the stack cancels running work, stores
    its KV and frees the model.

    Raises:
        ValueError: the settings name several models, or do not fit the model.
    """
    if settings.routed:
        raise ValueError("model, keep_alive, max_loaded: one model can be served here, which stays loaded")
    if not settings.verbose:
        _llama_cpp.silence_log()
    key = key_from_file(settings.store_key_file) if settings.store_key_file else None
    metrics_key = MetricsKey.load(settings.metrics_key_file) if settings.metrics_key_file else None
    models = served_models(settings)
    for model in models:
        check_files(model)
    file = read_model_file(models[0].path)
    embeds = only_embeds(file)
    check_keeps(settings, [file])
    check_adapters(models, file)
    topics = _topics(settings, [] if embeds else [model.name for model in models])
    stores = [None if embeds else _open_store(settings, keys, key, stack) for _ in models]
    session_kv = SessionKV()
    shared: dict[str, Any] = {
        "delivery": Delivery(),
        "keys": keys,
        "metrics": Metrics(by_tenant=metrics_key is not None),
        "metrics_key": metrics_key,
        "contexts": ContextCacheManager(
            settings.sessions_url,
            session_kv,
            codec=RecordCodec(KeyCipher(key)) if key is not None else PLAIN,
            pending_seconds=settings.request_timeout + _REGISTER_SECONDS,
            quota=keys.session_quota,
        ),
        "session_kv": session_kv,
        "pools": Pools(keys.limits),
        "watchdog": Watchdog(lambda: server.engines, restart=settings.restart_when_stuck),
    }
    states = [
        ServerState(**description(settings, model, file), **shared, store=store)
        for model, store in zip(models, stores, strict=True)
    ]
    server = states[0]
    server.others.update({each.model_name: each for each in states[1:]})
    open_engines(states, models, file, stack)
    if topics:
        engines = {topics[each.model_name]: each.engine for each in states}
        stack.enter_context(_open_events(settings, engines))
    stack.enter_context(server.pools)
    stack.enter_context(server.watchdog)
    return server


def _open_events(settings: ServerSettings, engines: Mapping[str, Engine]) -> KVEvents:
    try:
        from mixedkv_server.kv_events import KVEvents
    except ModuleNotFoundError as error:
        raise ValueError(
            f"kv_events needs {error.name}, which is not installed: pip install 'mixedkv[events]'"
        ) from None
    return KVEvents(settings.kv_events.partition("#")[0], engines)


def _topics(settings: ServerSettings, names: Sequence[str]) -> dict[str, str]:
    """Return the topics of KV events by model, from which routers know whose blocks they are."""
    if not settings.kv_events:
        return {}
    topic = settings.kv_events.partition("#")[2]
    if len(names) > 1 and "{model}" not in topic:
        raise ValueError(
            f"kv_events={settings.kv_events}: {len(names)} models need topics of their own: put {{model}} "
            "into it, which stands for the name of each, as in #kv@POD@{model}"
        )
    return {name: topic.replace("{model}", name) for name in names}


def _open_store(
    settings: ServerSettings, keys: Keys, key: KeySource | None, stack: ExitStack
) -> KVStore | None:
    """Open the store of one model. All stores share the folder, and each has memory of its own."""
    if not (settings.store or settings.store_remote or settings.reuses_chunks):
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


def _reload(keys: Keys, tls: TLS | None, then: Callable[[], None]) -> None:
    if not (keys or tls):
        log.info("SIGHUP: there are no keys and no certificate to read again")
    for what, part in {"keys and limits": keys or None, "certificate": tls}.items():
        if part is not None:
            try:
                part.reload()
            except (ValueError, OSError) as error:
                log.error("%s: as before: %s", what, error)
            else:
                log.info("%s: read again", what)
    then()


def _leave(*_: Any) -> None:
    ignore_ends()
    raise SystemExit(0)


def _announce(models: Sequence[Described], where: str, form: logs.LogFormat) -> None:
    for each in reversed(models):
        what = (
            f"kv {each.kv}, {each.facts['n_ctx']} tokens, {each.parallel or each.settings.parallel} at a time"
        )
        if each.size:
            what += f", {each.size}"
        if each.parent:
            what = f"an adapter on {each.parent}, {what}"
        if not each.generates:
            what = f"{'ranking' if each.ranks else 'embeddings'} only"
            if n_ctx := each.facts["embedding_n_ctx"]:
                what += f", {n_ctx} tokens"
        if not each.loaded:
            what += ", loaded on demand"
        at = f" on {where}" if each is models[0] else ""
        line = f"mixedkv serves {each.model_name} ({what}){at}"
        if form == "json":
            log.info("%s", line)
        else:  # what a person waits for, and tests and scripts look for, begins a line
            print(line, file=sys.stderr, flush=True)
