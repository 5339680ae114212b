"""Ingress and replicas together."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import AsyncIterator, Mapping, MutableMapping
from contextlib import AsyncExitStack, ExitStack, suppress
from typing import Any

from ray import serve
from ray.serve.config import RequestRouterConfig
from ray.serve.handle import DeploymentHandle
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from mixedkv.errors import ClosedError
from mixedkv.store import KVStore
from mixedkv_ray.prefix import Prefix, prefix_of
from mixedkv_server.app import make_app
from mixedkv_server.http.middleware import RequestIds
from mixedkv_server.serve import open_server
from mixedkv_server.settings import ENV_PREFIX, ServerSettings
from mixedkv_server.state import ServerState
from mixedkv_service.keys import Keys

_ROUTERS = {"prefix": "PrefixRouter", "random": "RandomRouter"}
_OWN = ("replicas", "routing", "beta", "cpus")
_SESSION = "x-session-id"
_AT_ONCE = 1000  # requests of an ingress
_ASGI = {"version": "3.0", "spec_version": "2.3"}


class Ingress:
    """Passes requests on and answers back. It reads of a body only what tells where its KV lies."""

    def __init__(self, engine: DeploymentHandle) -> None:
        self._engine = engine.options(stream=True, method_name="handle")

    async def __call__(self, request: Request) -> Response:
        body = await request.body()
        owner = request.headers.get("authorization", "")
        prefix = prefix_of(body, owner, request.headers.get(_SESSION, ""))
        scope = {name: request.scope[name] for name in ("type", "http_version", "method", "scheme", "path")}
        scope |= {name: request.scope.get(name) for name in ("query_string", "headers", "client", "server")}
        scope |= {"asgi": _ASGI, "root_path": "", "raw_path": request.scope["path"].encode()}
        answer = self._engine.remote(scope, body, prefix=prefix)
        start = await anext(answer)
        response = StreamingResponse(_parts(answer), start["status"])
        response.raw_headers = [(bytes(name), bytes(value)) for name, value in start["headers"]]
        return response


async def _parts(answer: Any) -> AsyncIterator[bytes]:
    """Yield the parts of an answer; a client that leaves before the end ends it."""
    try:
        async for message in answer:
            if part := message.get("body"):
                yield part
    finally:
        with suppress(Exception):
            answer.cancel()


def build(options: Mapping[str, Any]) -> serve.Application:
    """Build an application of Ray Serve.

    Args:
        options: those of `mixedkv serve`, by name; and `replicas`, a number or a range as 1-4, within which
            they are made and ended by how many requests wait; `routing`, "prefix", "ray" for Ray's own, to
            the less busy of two, or "random"; `beta`, what waiting counts beside evaluating when a replica
            is chosen; `cpus` of a replica.

    Raises:
        ValueError: an option is unknown or has a bad value, or the remote refuses us. A remote that does not
            answer is a warning, as everywhere.
    """
    own = {name: options[name] for name in _OWN if name in options}
    environ = {ENV_PREFIX + name.upper(): str(value) for name, value in options.items() if name not in own}
    known = ServerSettings.load({}, environ=environ)
    unknown = sorted(name for name in options if name not in _OWN and name not in ServerSettings.model_fields)
    if unknown:
        raise ValueError(f"{unknown[0]}: no option of mixedkv serve, nor one of {', '.join(_OWN)}")
    if known.kv_events:
        raise ValueError("kv_events: replicas cannot share an address; Ray's own router needs no events")
    if known.store_remote:  # what every replica would die of: a wrong URL, password or bucket
        KVStore(None, remote=known.store_remote).close()
    replicas = str(own.get("replicas", 1))
    scaling = _scaling(replicas, known.parallel)
    if scaling.get("num_replicas") != 1 and not (known.metadata_url or known.store):
        raise ValueError(
            f"replicas={replicas}: a session, or a response that is kept, would be found by the replica that "
            "made it alone: give metadata_url=redis://... (MIXEDKV_METADATA_URL), where all look, or "
            "metadata_url=sqlite: to go without"
        )
    engine = serve.deployment(
        EngineReplica,
        name="engine",
        max_ongoing_requests=known.parallel + known.max_queue,
        ray_actor_options={"num_cpus": float(own.get("cpus", max(1, known.threads)))},
        request_router_config=_router(str(own.get("routing", "prefix")), float(own.get("beta", 1.0))),
        graceful_shutdown_timeout_s=known.drain_timeout + 60,
        health_check_period_s=5,
        **scaling,
    )
    ingress = serve.deployment(
        Ingress, name="ingress", max_ongoing_requests=_AT_ONCE, ray_actor_options={"num_cpus": 0}
    )
    return ingress.bind(engine.bind(environ))


def _router(routing: str, beta: float) -> RequestRouterConfig:
    if routing == "ray":
        return RequestRouterConfig()
    if routing not in _ROUTERS:
        raise ValueError(f"routing={routing!r}: use prefix, ray for Ray's own, or random")
    name, options = _ROUTERS[routing], {"beta": beta} if routing == "prefix" else {}
    return RequestRouterConfig(
        request_router_class=f"mixedkv_ray.router:{name}", request_router_kwargs=options
    )


def _scaling(replicas: str, parallel: int) -> dict[str, Any]:
    low, _, high = replicas.partition("-")
    try:
        least, most = int(low), int(high or low)
    except ValueError:
        least = most = 0
    if not 1 <= least <= most:
        raise ValueError(f"replicas={replicas!r}: use a number, or a range as 1-4")
    if not high:
        return {"num_replicas": least}
    return {
        "autoscaling_config": {
            "min_replicas": least,
            "max_replicas": most,
            "target_ongoing_requests": max(1, parallel // 2),
        }
    }


def from_environ() -> dict[str, str]:
    """Return the options in this process's MIXEDKV_... variables; others with that beginning belong to other
    parts.
    """
    names = {name: ENV_PREFIX + name.upper() for name in (*ServerSettings.model_fields, *_OWN)}
    return {name: os.environ[variable] for name, variable in names.items() if variable in os.environ}


Message = dict[str, Any]


class EngineReplica:
    """Loads its model when it is made. When it goes, what it holds is stored, and sent to the remote.

    Args:
        environ: settings, as variables of the environment.
    """

    def __init__(self, environ: dict[str, str]) -> None:
        settings = ServerSettings.load({}, environ=environ)
        sys.setswitchinterval(0.0005)
        self._stack, self._seconds = ExitStack(), settings.drain_timeout
        self._begun: AsyncExitStack | None = None
        self._server: ServerState | None = None
        keys = Keys.of(settings.api_key_file, settings.api_key)
        self._server = open_server(settings, keys, self._stack)
        self._app = make_app(self._server)
        self._asgi = RequestIds(self._app, settings.access_log)

    async def handle(self, scope: Message, body: bytes, prefix: Prefix) -> AsyncIterator[Message]:
        """Yield the ASGI messages of an answer.

        Args:
            scope: of the request.
            prefix: for the router.
        """
        if self._begun is None:
            self._begun = AsyncExitStack()
            await self._begun.enter_async_context(self._app.router.lifespan_context(self._app))
        messages: asyncio.Queue[Message | None] = asyncio.Queue()
        gone, received = asyncio.Event(), iter([{"type": "http.request", "body": body, "more_body": False}])

        async def send(message: MutableMapping[str, Any]) -> None:
            await messages.put(dict(message))

        async def receive() -> Message:
            if (message := next(received, None)) is not None:
                return message
            await gone.wait()
            return {"type": "http.disconnect"}

        task = asyncio.create_task(self._asgi(scope, receive, send))
        task.add_done_callback(lambda _: messages.put_nowait(None))
        try:
            while (message := await messages.get()) is not None:
                yield message
            task.result()
        finally:
            gone.set()

    def check_health(self) -> None:
        """Check that the engine lives, as Ray Serve asks.

        Raises:
            ClosedError: the engine has ended; Ray Serve replaces the replica.
        """
        if self._server is None or not all(engine.alive for engine in self._server.engines):
            raise ClosedError("the engine has ended")

    async def __del__(self) -> None:
        """Shut down. Ray Serve calls it once, when no request is under way any more."""
        if self._server is not None:
            await self._server.drain(self._seconds)
        if self._begun is not None:
            await self._begun.aclose()
        await asyncio.to_thread(self._stack.close)
