"""Opens everything, serves until a signal comes, and closes everything in order."""

from __future__ import annotations

import asyncio
import gc
import json
import logging
import signal
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import llama_cpp
import uvicorn
from pydantic import ValidationError

from mixedkv.engine.answer import Answer
from mixedkv.engine.chat import tokenizer
from mixedkv.engine.connect.chunk_connector import ChunkConnector
from mixedkv.engine.connect.store_connector import StoreConnector
from mixedkv.engine.embed.embedder import Embedder
from mixedkv.engine.embed.embedding_context import EmbeddingContext, only_embeds
from mixedkv.engine.engine import Engine
from mixedkv.engine.sample.sampling_defaults import sampling_defaults
from mixedkv.engine.schedule.checkpoints import CheckpointLimits
from mixedkv.engine.schedule.request import SpeculationMode
from mixedkv.engine.turns import Turns
from mixedkv.errors import ClosedError, ModelChangedError
from mixedkv.model.fingerprint import model_parts
from mixedkv.model.gguf_file import ModelFile, n_mtp_layers, read_model_file, weight_type
from mixedkv.native import llama_cpp as _llama_cpp
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
from mixedkv.server.model_loading import load_draft_model, load_model, open_projector
from mixedkv.server.model_watch import ModelWatch
from mixedkv.server.models import ServedModel, served_models
from mixedkv.server.pools import Pools
from mixedkv.server.session_kv import SessionKV
from mixedkv.server.settings import IN_MEMORY, ServerSettings
from mixedkv.server.shutdown import end_within
from mixedkv.server.state import ServerState, session_quota
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
    if settings.warm_text and keys:
        raise ValueError("warm_text: with keys a prompt has a tenant: use warm, a file whose lines name it")
    warm += [WarmLine.model_validate({"prompt": text}) for text in settings.warm_text]
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
    """Load the models and start their engines. Closing the stack gives up what still runs, stores its KV and
    frees the models.
    """
    if not settings.verbose:
        tokenizer.silence()
    key = key_from_file(settings.store_key_file) if settings.store_key_file else None
    metrics_key = MetricsKey.load(settings.metrics_key_file) if settings.metrics_key_file else None
    models = [(model, read_model_file(model.path)) for model in served_models(settings)]
    keeps = settings.store or settings.store_remote or settings.warm or settings.warm_text
    if keeps and all(only_embeds(file) for _, file in models):
        raise ValueError(
            "store, store_remote, warm: this model generates nothing, it has no KV to keep: serve it without"
        )
    generating = [model.name for model, file in models if not only_embeds(file)]
    topics = _topics(settings, generating) if settings.kv_events else {}
    stores = [
        _open_store(settings, keys, key, stack) if not only_embeds(file) else None for _, file in models
    ]
    session_kv = SessionKV()
    shared = {
        "settings": settings,
        "delivery": Delivery(),
        "keys": keys,
        "metrics": Metrics(by_tenant=metrics_key is not None),
        "metrics_key": metrics_key,
        "contexts": ContextCacheManager(
            settings.sessions_url,
            session_kv,
            codec=RecordCodec(KeyCipher(key)) if key is not None else PLAIN,
            pending_seconds=settings.request_timeout + _REGISTER_SECONDS,
            quota=partial(session_quota, settings, keys),
        ),
        "session_kv": session_kv,
        "pools": Pools(),
    }
    turns = Turns()
    server: ServerState | None = None
    for (model, file), store in zip(models, stores, strict=True):
        parent = next(
            (each for each in (server.all if server else ()) if each.model_name == model.parent), None
        )
        opened = _open_model(model, file, parent, shared, store, turns, stack, first=server is None)
        if server is None:
            server = opened
        else:
            server.others[model.name] = opened
    assert server is not None
    if topics:
        engines = {topics[each.model_name]: each.engine for each in server.all if each.generates}
        stack.enter_context(_open_events(settings, engines))
    stack.enter_context(server.pools)
    return server


def _open_model(
    model: ServedModel,
    file: ModelFile,
    parent: ServerState | None,
    shared: dict[str, Any],
    store: KVStore | None,
    turns: Turns,
    stack: ExitStack,
    *,
    first: bool,
) -> ServerState:
    settings, keys = shared["settings"], shared["keys"]
    generates = not only_embeds(file)
    if parent is not None and not generates:
        raise ValueError(f"lora: {model.parent!r} only embeds texts, adapters are for models that answer")
    drafts = settings.draft_model and first
    files = [model.path, Path(settings.draft_model)] if drafts else [model.path]
    watch = stack.enter_context(ModelWatch(part.path for path in files for part in model_parts(path)))
    # the first one has to have such layers, of others those that have them use them
    mtp = settings.speculation == "mtp" and (first or n_mtp_layers(file) > 0)
    llm = stack.enter_context(
        load_model(settings, model, file, generates, parent.engine.llm if parent else None, mtp)
    )
    draft_model = stack.enter_context(load_draft_model(settings, llm)) if drafts else None
    connector = _connector(settings, store)
    engine = stack.enter_context(
        Engine(
            llm,
            parallel=settings.parallel,
            max_queue=settings.max_queue,
            slowdown=settings.slowdown,
            exact_only=settings.reuse != "prefix",
            connector=connector,
            observer=shared["metrics"],
            deliver=shared["delivery"],
            tokenizer=tokenizer.Tokenizer(
                llm, settings.chat_format, read_chat_template(settings.chat_template)
            ),
            limits=keys.limits,
            checkpoints=CheckpointLimits(
                settings.checkpoints, settings.checkpoint_every, int(settings.max_checkpoint_gb * 1e9)
            ),
            speculation=speculation_of(settings, drafts=draft_model is not None or mtp),
            draft_model=draft_model,
            turns=turns,
        )
    )
    watch.begin(partial(_stop_reading, engine))
    shared["session_kv"].add(engine, connector)
    embedder = _open_embedder(settings, engine, file, keys) if parent is None else None
    return ServerState(
        **shared,
        model_name=model.name,
        engine=engine,
        parent=model.parent,
        embedder=embedder,
        projector=parent.projector if parent is not None else open_projector(settings, model, llm),
        generates=generates,
        sampling={**sampling_defaults(file.metadata), **settings.sampling()},
        facts={
            "architecture": file.architecture,
            "n_params": int(llama_cpp.llama_model_n_params(_llama_cpp.model(llm))),
            "quantization": weight_type(file),
            "size_bytes": file.size,
            "n_ctx": engine.n_ctx if generates else None,
            "n_embd": embedder.context.n_embd if embedder and not embedder.context.ranks else None,
            "embedding_n_ctx": embedder.context.n_ctx if embedder is not None else None,
        },
    )


def speculation_of(settings: ServerSettings, drafts: bool) -> SpeculationMode:
    """Return the speculation mode of a model's answers; `drafts`: it has the draft model, which is the first
    one's, or MTP layers.
    """
    if settings.speculation in ("draft-model", "mtp") and not drafts:
        return "prompt-lookup"
    return settings.speculation or ("draft-model" if drafts else "off")


def _open_events(settings: ServerSettings, engines: Mapping[str, Engine]) -> KVEvents:
    try:
        from mixedkv.server.kv_events import KVEvents
    except ModuleNotFoundError as error:
        raise ValueError(
            f"kv_events needs {error.name}, which is not installed: pip install 'mixedkv[events]'"
        ) from None
    return KVEvents(settings.kv_events, engines)


def _topics(settings: ServerSettings, names: Sequence[str]) -> dict[str, str]:
    """Return the topics of KV events, by model: routers tell by them whose blocks they are."""
    topic = settings.kv_events_topic
    if len(names) > 1 and "{model}" not in topic:
        raise ValueError(
            f"kv_events_topic={topic!r}: {len(names)} models need topics of their own: put {{model}} in it, "
            "which stands for the name of each, as in kv@POD@{model}"
        )
    return {name: topic.replace("{model}", name) for name in names}


def _stop_reading(engine: Engine) -> None:
    """Stop the engine, so that whoever waits for the model's file may have it."""
    error = ModelChangedError(
        "the model's file was changed, or opened to be: restart the server, and replace a model by renaming "
        "another file over it"
    )
    log.error("no more requests are taken: %s", error)
    engine.drain(0, error)
    with suppress(ClosedError):  # vectors that are being made
        engine.call(lambda: None).result()


def _open_embedder(settings: ServerSettings, engine: Engine, file: ModelFile, keys: Keys) -> Embedder | None:
    if not settings.embeddings and not only_embeds(file):
        return None
    context = EmbeddingContext(
        engine.llm, file, n_ctx=settings.embedding_n_ctx, n_batch=settings.n_batch or 512
    )
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
        ratio=settings.chunk_ratio or None,
        overlap_k=settings.chunk_overlap or None,
        chunk_size=settings.chunk_size,
        boundary_window=min(settings.chunk_boundary, settings.chunk_size // 2),
        max_kld=settings.chunk_max_kld,
        check=settings.chunk_check,
    )


def _open_store(
    settings: ServerSettings, keys: Keys, key: KeySource | None, stack: ExitStack
) -> KVStore | None:
    """Open the store of one model: all of them have the folder, and each has memory of its own."""
    if not (settings.store or settings.store_remote or settings.reuse == "chunks"):
        return None
    store = KVStore(
        settings.store or None,
        max_ram_bytes=int(settings.max_ram_gb * 1e9),
        max_kv_size_gb=settings.max_kv_size_gb,
        eviction=settings.eviction,
        max_age_seconds=parse_duration(settings.max_age) if settings.max_age else None,
        key=key,
        shares=keys.disk_share,
        # in memory sessions end with the process: nobody else may remove another one's
        session_owner="" if settings.sessions_url == IN_MEMORY else settings.sessions_url,
        remote=settings.store_remote or None,
        recheck=settings.recheck,
    )
    return stack.enter_context(store)


def read_chat_template(path: str) -> str:
    """Read a chat template from its file.

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
    """Read the prompts that are evaluated at the start.

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
    names = {each.model_name: each for each in server.all}
    if body.model is not None and body.model not in names:
        raise ValueError(f"{server.settings.warm}: the model {body.model!r} is not served here")
    server = names.get(body.model or "", server)
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
        engine = each.engine
        what = f"kv {engine.llm.kv.config}, {engine.n_ctx} tokens, {engine.parallel} at a time"
        if each.parent:
            what = f"an adapter on {each.parent}, {what}"
        if not each.generates and each.embedder is not None:
            context = each.embedder.context
            what = f"{'ranking' if context.ranks else 'embeddings'} only, {context.n_ctx} tokens"
        at = f" on {where}" if each is server else ""
        print(f"mixedkv serves {each.model_name} ({what}){at}", file=sys.stderr, flush=True)


class _Uvicorn(uvicorn.Server):
    """Tells the engine when a signal comes, so that waiting requests end and running ones finish."""

    def __init__(self, server: ServerState, settings: ServerSettings, tls: TLS | None) -> None:
        super().__init__(
            uvicorn.Config(
                RootPath(RequestIds(make_app(server), settings.access_log), settings.root_path),
                http=Connection.within(settings.read_timeout, settings.request_timeout, settings.root_path),
                ws="none",
                loop="asyncio",  # whatever else is installed
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
        """Capture signals as the base class does, without raising the signal again at the end.

        A shutdown in order exits 0. What follows is storing, which a second signal shall not cut off.
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
        if not await self._state.drain(seconds):
            log.warning("requests were cut off after %g seconds", seconds)
        # who does not take its answer holds nobody up
        patience = max(_LAST_SECONDS, end - time.monotonic())
        asyncio.get_running_loop().call_later(patience, self._abort_connections)
        await super().shutdown(sockets)

    def _abort_connections(self) -> None:
        for connection in list(self.server_state.connections):
            if isinstance(connection, Connection):
                connection.transport.abort()
