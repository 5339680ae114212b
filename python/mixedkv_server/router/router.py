"""The application of a router: it lists models, and passes requests on to the processes that they name."""

from __future__ import annotations

import asyncio
import json
import math
import tempfile
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, asynccontextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import quote

import h11
from fastapi import FastAPI, Request
from prometheus_client import (
    CONTENT_TYPE_LATEST,
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    generate_latest,
)
from prometheus_client.core import Metric
from prometheus_client.parser import text_string_to_metric_families
from starlette.responses import JSONResponse, Response
from starlette.routing import Match, Route
from starlette.types import Receive, Scope, Send

from mixedkv import __version__
from mixedkv.errors import ClosedError, QueueFullError
from mixedkv.model.gguf_file import ModelFile, read_model_file
from mixedkv_server.api.info import check_metrics_key
from mixedkv_server.api_error import ApiError, from_engine
from mixedkv_server.app import App, add_middleware, all_routes, include_endpoints
from mixedkv_server.compat import APIS
from mixedkv_server.compat.foreign_api import RoutedFields
from mixedkv_server.http.json_body import SaidOnce, parse_in_turn
from mixedkv_server.http.middleware import without
from mixedkv_server.models import (
    ServedModel,
    check_adapters,
    check_files,
    check_keeps,
    description,
    served_models,
)
from mixedkv_server.pending import Disconnected, or_disconnect
from mixedkv_server.router.model_process import (
    ENDED,
    Exchange,
    ModelLoadError,
    ModelProcess,
    child_settings,
    get,
)
from mixedkv_server.router.processes import Processes, RoutedModel, routed
from mixedkv_server.settings import ServerSettings
from mixedkv_server.state import model_of, tenant
from mixedkv_server.warming import WarmLine, write_warm_file
from mixedkv_service.keys import Keys, MetricsKey
from mixedkv_service.metrics import SECONDS, http_counter

_NOT_PASSED = (  # of this connection, checked by the router, or said by it
    *(b"connection", b"keep-alive", b"te", b"trailer", b"transfer-encoding", b"upgrade", b"expect"),
    *(b"content-length", b"origin", b"x-request-id", b"date"),
)


async def forward(request: Request) -> Response:
    """Answer with what the model's process answers, as it comes. The process is started where need be."""
    owner, path = tenant(request), without(request.scope.get("root_path", ""), request.url.path)
    requested = await _read(request, path)
    name = _without_tag(requested.model or request.query_params.get("model"))
    model = routed(model_of(request, name, generates=False))
    if (answer := requested.unload_answer(path, model)) is not None:
        model.processes.let_go(model.place, owner)
        return answer
    try:
        await or_disconnect(request, model.processes.use(model.place, owner, requested.seconds))
    except ModelLoadError as error:
        wait = {"Retry-After": str(max(1, math.ceil(error.rest)))}
        raise ApiError(503, str(error), param="model", code="model_not_loaded", headers=wait) from None
    except (QueueFullError, ClosedError) as error:
        raise from_engine(error) from None
    return await pass_on(request, model, partial(model.processes.release, model.place, owner))


async def pass_on(request: Request, model: RoutedModel, release: Callable[[], None]) -> Response:
    """Return the answer of a process that is ready; `release` is called at its end.

    Raises:
        ApiError: 503, the process has ended.
        Disconnected: the client disconnected.
    """
    path = without(request.scope.get("root_path", ""), request.scope["path"])
    query = request.scope["query_string"].decode("ascii", "replace")
    target = quote(path) + (f"?{query}" if query else "")
    headers = [each for each in request.scope["headers"] if each[0] not in _NOT_PASSED]
    exchange = None
    try:
        exchange = await Exchange.begin(
            model.place.process.socket, request.method, target, headers, await request.body()
        )
        return Passed(model, exchange, await or_disconnect(request, exchange.head()), release)
    except BaseException as error:
        if exchange is not None:
            exchange.close()
        release()
        if isinstance(error, ENDED):
            raise _ended(model) from None
        raise


class Passed(Response):
    """An answer that is passed on as it comes. Who disconnects cancels it."""

    def __init__(
        self, model: RoutedModel, exchange: Exchange, head: h11.Response, release: Callable[[], None]
    ) -> None:
        self._model, self._exchange, self._release = model, exchange, release
        self.status_code, self.background, self.body = head.status_code, None, b""
        self.raw_headers = [(name, value) for name, value in head.headers if name not in _PER_CONNECTION]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await or_disconnect(Request(scope, receive), self._pass(send))
        except Disconnected:
            pass
        finally:
            self._exchange.close()
            self._release()

    async def _pass(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        last = b""
        try:
            async for part in self._exchange.parts():
                await send({"type": "http.response.body", "body": part, "more_body": True})
        except ENDED:
            last = self._last_words()
        await send({"type": "http.response.body", "body": last})

    def _last_words(self) -> bytes:
        """Return the event of a stream that says that the process has ended.

        Raises:
            Disconnected: there is no way to say it but to end the connection.
        """
        error, kind = _ended(self._model), self.headers.get("content-type", "")
        if kind.startswith("text/event-stream"):
            return f"data: {json.dumps(error.body())}\n\n".encode()
        if kind.startswith("application/x-ndjson"):
            return f"{json.dumps({'error': error.message})}\n".encode()
        raise Disconnected


_PER_CONNECTION = (b"connection", b"keep-alive", b"transfer-encoding", b"date", b"x-request-id")


async def _read(request: Request, path: str) -> RoutedFields:
    kinds = (kind for api in APIS for begin, kind in api.routed.items() if path.startswith(begin))
    kind, body = next(kinds, RoutedFields), await request.body()
    if not body:
        return kind()
    return (await parse_in_turn(request, kind, body, False))[0]


def _without_tag(name: str | None) -> str | None:
    for api in APIS:
        name = name.removesuffix(api.model_tag) if name else None
    return name


def _ended(model: RoutedModel) -> ApiError:
    return ApiError(
        503,
        f"the process of the model {model.model_name!r} ended before its answer: ask again, which starts it",
        code="model_ended",
    )


_METRICS_SECONDS = 5.0
_OWN = (  # endpoints that the router answers as a server of one model does
    *("/v1/models", "/v1/models/{model:path}", "/", "/stats", "/docs", "/page/{name}"),
    *(path for api in APIS for path in api.about_models),
)


class Router:
    """Several models, each in a process of its own.

    Args:
        warm: prompts to evaluate whenever their model is loaded, which then is at the start.
        stack: closing it removes the folder of the sockets.

    Raises:
        ValueError, OSError: a model, file or setting is wrong; the message says which.
    """

    def __init__(
        self, settings: ServerSettings, keys: Keys, warm: Sequence[WarmLine], stack: ExitStack
    ) -> None:
        self.settings, self.keys, self.ready = settings, keys, False
        self._closing: asyncio.Future[None] | None = None
        self.metrics = RouterMetrics()
        path = settings.metrics_key_file
        self.metrics_key = MetricsKey.load(path) if path else None
        self._folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="mixedkv-")))
        groups = _groups(settings)
        self._warm = _by_group(settings, groups, warm)
        processes = [self._process(i, *group) for i, group in enumerate(groups)]
        self.processes = Processes(
            processes,
            keep_alive=settings.keep_alive_seconds,
            max_loaded=settings.max_loaded,
            most_waiting=self._most_waiting,
            counts=self.metrics,
        )
        places = zip(groups, self.processes.places, strict=True)
        models = [
            RoutedModel(**description(settings, each, file), processes=self.processes, place=place)
            for (members, file), place in places
            for each in members
        ]
        self.model = models[0]
        self.model.others.update({each.model_name: each for each in models[1:]})

    @property
    def stuck_seconds(self) -> float:
        return 0.0

    async def begin(self) -> None:
        """Start the models that have prompts to be warm. What does not start is in the log."""
        for number in sorted(self._warm):
            with suppress(ModelLoadError, ClosedError):
                place = self.processes.places[number]
                await self.processes.use(place, "")
                self.processes.release(place, "")
        self.ready = True

    async def drain(self, seconds: float) -> bool:
        """Refuse new requests, and let the processes finish the others and end; return whether they did
        within the time.
        """
        self.ready = False
        self._closing = asyncio.ensure_future(self.processes.close())
        done, _ = await asyncio.wait({self._closing}, timeout=seconds)
        return bool(done) or not any(place.users for place in self.processes.places)

    async def end(self) -> None:
        """Wait until all processes have stored their KV and ended."""
        await (self._closing or self.processes.close())

    def reload(self) -> None:
        self.processes.reload()

    async def metrics_text(self, headers: Sequence[tuple[bytes, bytes]]) -> bytes:
        """Return the metrics of the router and of all processes that answer."""
        places = [place for place in self.processes.places if place.process.ready]
        texts = await asyncio.gather(*(_metrics(place.process, headers) for place in places))
        named = {place.name: text for place, text in zip(places, texts, strict=True) if text}
        return self.metrics.expose(sum(place.process.runs for place in self.processes.places), named)

    def _process(self, number: int, members: Sequence[ServedModel], file: ModelFile) -> ModelProcess:
        settings = child_settings(self.settings, members, file, number, self._folder)
        if lines := self._warm.get(number):
            path = write_warm_file(self._folder / f"{number}.warm", lines)
            settings = settings.model_copy(update={"warm": path})
        return ModelProcess(members[0].name, settings)

    def _most_waiting(self, tenant: str) -> int:
        queued = self.keys.limits(tenant).queued
        return self.settings.parallel + (self.settings.max_queue if queued is None else queued)


def make_router_app(router: Router) -> FastAPI:
    """Return the application of a router. Its schema has the endpoints of all models."""
    app = App(_lifespan)
    app.state.router, app.state.server, app.state.said = router, router.model, SaidOnce()
    for route in all_routes():
        if route.path not in _OWN:
            endpoint = _ROUTER_S.get(route.path, forward)
            app.router.routes.append(_Route(route.path, endpoint, methods=sorted(route.methods or ())))
    include_endpoints(app)  # after those, so that only `_OWN` are reached
    add_middleware(app, router.settings, router.keys, router.metrics.http)
    return app


class _Route(Route):
    """A route whose path is counted, as FastAPI's are."""

    def matches(self, scope: Scope) -> tuple[Match, Scope]:
        match, found = super().matches(scope)
        return match, {**found, "route": self}


@asynccontextmanager
async def _lifespan(app: FastAPI) -> AsyncIterator[None]:
    router: Router = app.state.router
    begun = asyncio.create_task(router.begin())
    yield
    await router.end()
    await begun


async def _health(request: Request) -> Response:
    """Answer 200, and which models are in memory."""
    models = {each.model_name: "loaded" if each.loaded else "not loaded" for each in _models(request)}
    return JSONResponse({"status": "ok", "version": __version__, "models": models})


async def _ready(request: Request) -> Response:
    if not request.app.state.router.ready:
        raise ApiError(503, "the server is starting or shutting down", code="not_ready")
    return JSONResponse({"status": "ready"})


async def _text_of_metrics(request: Request) -> Response:
    router: Router = request.app.state.router
    check_metrics_key(router.metrics_key, request)
    headers = [each for each in request.scope["headers"] if each[0] in (b"authorization", b"x-api-key")]
    return Response(await router.metrics_text(headers), media_type=CONTENT_TYPE_LATEST)


async def _stats(request: Request) -> Response:
    """Return a model's statistics, which neither loads it nor keeps it."""
    tenant(request)
    model = routed(model_of(request, request.query_params.get("model"), generates=False))
    if not model.loaded:
        message = f"the model {model.model_name!r} is not loaded, so it has no statistics: ask it first"
        raise ApiError(503, message, param="model", code="model_not_loaded")
    return await pass_on(request, model, lambda: None)


_ROUTER_S = {"/health": _health, "/ready": _ready, "/metrics": _text_of_metrics, "/v1/stats": _stats}


def _models(request: Request) -> list[RoutedModel]:
    router: Router = request.app.state.router
    return router.model.all


def _groups(settings: ServerSettings) -> list[tuple[list[ServedModel], ModelFile]]:
    """Return each model with its adapters, and its header.

    Raises:
        ValueError, OSError: a model or adapter is wrong; the message says which.
    """
    groups: list[tuple[list[ServedModel], ModelFile]] = []
    for model in served_models(settings):
        check_files(model)
        if not model.parent:
            groups.append(([], read_model_file(model.path)))
        groups[-1][0].append(model)
    for members, file in groups:
        check_adapters(members, file)
    check_keeps(settings, [file for _, file in groups])
    return groups


def _by_group(
    settings: ServerSettings,
    groups: Sequence[tuple[Sequence[ServedModel], ModelFile]],
    lines: Sequence[WarmLine],
) -> dict[int, list[WarmLine]]:
    """Return the prompts to be warm by the number of their group.

    Raises:
        ValueError: the model of one is not served.
    """
    numbers = {model.name: i for i, (members, _) in enumerate(groups) for model in members}
    found: dict[int, list[WarmLine]] = {}
    for line in lines:
        if line.model is not None and line.model not in numbers:
            raise ValueError(f"{settings.warm}: the model {line.model!r} is not served here")
        found.setdefault(numbers.get(line.model or "", 0), []).append(line)
    return found


async def _metrics(process: ModelProcess, headers: Sequence[tuple[bytes, bytes]]) -> str:
    """Return the metrics of a process; "" if it does not answer."""
    try:
        status, text = await asyncio.wait_for(get(process.socket, "/metrics", headers), _METRICS_SECONDS)
    except (*ENDED, asyncio.TimeoutError):
        return ""
    return text.decode() if status == 200 else ""


class RouterMetrics:
    """Counts starts and ends of models' processes, and answers."""

    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        r: Any = {"registry": self._registry}
        self.http = http_counter(self._registry)
        self._loaded = Gauge("mixedkv_models_loaded", "Models in memory, adapters not counted.", **r)
        self._loads = Counter("mixedkv_model_loads", "Models that were loaded.", ["model"], **r)
        self._unloads = Counter("mixedkv_model_unloads", "Models that were unloaded.", ["model"], **r)
        self._failures = Counter(
            "mixedkv_model_load_failures", "Models that could not be loaded.", ["model"], **r
        )
        self._seconds = Histogram(
            "mixedkv_model_load_seconds", "Seconds to load a model.", buckets=SECONDS, **r
        )

    def model_loaded(self, name: str, seconds: float) -> None:
        self._loads.labels(name).inc()
        self._seconds.observe(seconds)

    def model_unloaded(self, name: str) -> None:
        self._unloads.labels(name).inc()

    def model_failed(self, name: str) -> None:
        self._failures.labels(name).inc()

    def expose(self, n_loaded: int, texts: Mapping[str, str]) -> bytes:
        """Return Prometheus' text.

        Args:
            n_loaded: number of processes that run.
            texts: that of each model by its name.
        """
        self._loaded.set(n_loaded)
        merged = CollectorRegistry()
        merged.register(_Merged([*self._registry.collect(), *_labelled(texts)]))
        return generate_latest(merged)


class _Merged:
    """A collector of families, those of one name together."""

    def __init__(self, families: Iterable[Metric]) -> None:
        self._families: dict[str, Metric] = {}
        for family in families:
            first = self._families.setdefault(family.name, family)
            if first is not family:
                first.samples += family.samples

    def collect(self) -> Iterable[Metric]:
        return self._families.values()


def _labelled(texts: Mapping[str, str]) -> Iterator[Metric]:
    for model, text in texts.items():
        for family in text_string_to_metric_families(text):
            family.samples = [
                sample._replace(labels={"model": model, **sample.labels}) for sample in family.samples
            ]
            yield family
