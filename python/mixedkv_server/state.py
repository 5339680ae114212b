"""State that the endpoints share: engines, the tenant of a request, and small checks."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol, TypeVar

from starlette.requests import Request
from starlette.responses import Response

from mixedkv import __version__
from mixedkv.engine import Embedder, Engine, StoreConnector
from mixedkv.errors import ClosedError, QueueFullError
from mixedkv.images.projector import Projector
from mixedkv.sessions import CacheSessionMetadata, ContextCacheManager
from mixedkv.store import KVStore
from mixedkv.store.results import MessageInfo
from mixedkv_server.api_error import ApiError, bad_request, from_engine, no_key
from mixedkv_server.http.middleware import DEADLINE, TENANT
from mixedkv_server.models import Described
from mixedkv_server.packing import json_chunks, packed
from mixedkv_server.pending import Delivery, unless_disconnected
from mixedkv_server.pools import LARGE, Pools
from mixedkv_server.watchdog import Watchdog
from mixedkv_service.keys import Keys, MetricsKey
from mixedkv_service.metrics import Metrics

_FINGERPRINT = f"mixedkv-{__version__}"
_T = TypeVar("_T")


@dataclass(kw_only=True)
class ServerState(Described):
    """One model of a running server with what all share, by default the model; the others are adapters on it.

    Args:
        store: store that keeps its KV; `connector`: between it and the engine, once that runs.
        others: the adapters by name; only in the model's state.

    Attributes:
        engine, embedder, projector: set when the model is loaded; adapters have its projector.
    """

    delivery: Delivery
    keys: Keys
    metrics: Metrics
    contexts: ContextCacheManager
    session_kv: SessionKV
    pools: Pools
    watchdog: Watchdog
    store: KVStore | None = None
    connector: StoreConnector | None = None
    metrics_key: MetricsKey | None = None
    ready: bool = False
    engine: Engine = field(init=False, repr=False)
    embedder: Embedder | None = field(init=False, repr=False)
    projector: Projector | None = field(default=None, repr=False)
    others: dict[str, ServerState] = field(default_factory=dict)

    @property
    def all(self) -> list[ServerState]:
        """All models of the server."""
        return [self, *self.others.values()]

    @property
    def engines(self) -> list[Engine]:
        """Engines of all models of the server."""
        return [each.engine for each in self.all]

    @property
    def stuck_seconds(self) -> float:
        """Seconds that an engine has been without a step while it is stuck; 0 if none is."""
        return self.watchdog.stuck_seconds

    def reload(self) -> None:
        """Do nothing, as there are no other processes."""

    async def drain(self, seconds: float) -> bool:
        """Refuse new requests and let the others finish, at all models; return whether they did within the
        time.
        """
        drains = [asyncio.to_thread(each.engine.drain, seconds) for each in self.all]
        drains += [each.embedder.drain(seconds) for each in self.all if each.embedder is not None]
        return all(await asyncio.gather(*drains))

    @property
    def fingerprint(self) -> str:
        """Fingerprint of the settings that answers are computed with, which tells if attention is sparse and
        if products with weights are others than usual.
        """
        sparse = getattr(self.engine.llm.kv.config, "sparse", "")
        said = {"sparse": sparse, "products": os.environ.get("MIXEDKV_WEIGHTS", "")}
        return "-".join([_FINGERPRINT, *(f"{name}-{value}" for name, value in said.items() if value)])


class SessionKV:
    """Removes a session's KV for `ContextCacheManager`: its rows in the contexts of all models, and its KV in
    their stores.

    Attributes:
        models: those that are loaded.
    """

    def __init__(self) -> None:
        self.models: list[ServerState] = []

    @property
    def _stores(self) -> list[KVStore]:
        return [each.store for each in self.models if each.store is not None]

    def messages(self, tenant: str, message_id: str | None) -> list[MessageInfo]:
        """Return the entries that a tenant's messages, or one of them, end in. Models may share a folder."""
        found = [info for store in self._stores for info in store.messages.entries(tenant, message_id)]
        return list({(info.message_id, info.entry): info for info in found}.values())

    def remove_message(self, tenant: str, message_id: str) -> int:
        """Remove a message's KV; return how many entries."""
        return sum(_remove_message(each, tenant, message_id) for each in self.models)

    def remove(self, entry: str | None = None, *, session: str | None = None, tenant: str = "") -> int:
        if session is not None:
            for each in (each for each in self.models if each.engine.alive):
                with suppress(ClosedError):  # it is being closed
                    each.engine.call(partial(each.engine.pool.forget, tenant, session)).result()
        return sum(store.remove(entry, session=session, tenant=tenant) for store in self._stores)

    def remove_orphans(self, living: Iterable[tuple[str, str]], before: float) -> int:
        known = list(living)
        return sum(store.remove_orphans(known, before) for store in self._stores)


def _remove_message(model: ServerState, tenant: str, message_id: str) -> int:
    if model.store is None:
        return 0
    with suppress(ClosedError):
        if model.connector is not None:
            return model.connector.forget_message(tenant, message_id)
    return model.store.messages.remove(message_id, tenant)


def server_state(request: Request) -> ServerState:
    return request.app.state.server  # type: ignore[no-any-return]


def tenant(request: Request) -> str:
    """Return the tenant whose key the request has, as `BodyLimit` found.

    Raises:
        ApiError: 401, the request has no valid key.
    """
    found: str | None = request.scope[TENANT]
    if found is None:
        raise no_key()
    return found


async def check_generates(request: Request) -> None:  # FastAPI runs others in a thread
    """Refuse a model that generates no text.

    Raises:
        ApiError: 400, the model only embeds; 401 before that.
    """
    tenant(request)
    server = server_state(request)
    if not any(each.generates for each in server.all):
        raise _only_embeds(server)


def model_of(
    request: Request, name: str | None, *, generates: bool = True, exact: bool = False
) -> ServerState:
    """Return the model of a name; the default one for None. A server with one model ignores the name, unless
    it is strict. The header X-Model-Id takes precedence over the body.

    Args:
        generates: the model has to generate text.
        exact: the model has to have that name, even on a server with one model.

    Raises:
        ApiError: 404, there is no such model; 400, it only embeds.
    """
    server = server_state(request)
    if not exact:
        name = request.headers.get("x-model-id") or name
    found = server if name in (None, server.model_name) else server.others.get(str(name))
    if found is None and not (exact or server.others or server.settings.strict):
        request.app.state.said.other_model(server.model_name)
        found = server
    if found is None:
        names = ", ".join(repr(each.model_name) for each in server.all)
        raise ApiError(
            404,
            f"the model {str(name)[:100]!r} is not served here; this server has {names}",
            param="model",
            code="model_not_found",
        )
    if generates and not found.generates:
        raise _only_embeds(found)
    return found


def adapters(request: Request) -> list[ServerState]:
    """Return the adapters on the model of this process, in the order of `--lora`."""
    return [each for each in server_state(request).all if each.parent]


class AdapterChoice(Protocol):
    """An adapter by its place among `adapters`, and its strength."""

    id: int
    scale: float


def adapter_of(
    request: Request, name: str | None, lora: Sequence[AdapterChoice] | None, **options: bool
) -> ServerState:
    """Return the model of a request, as `model_of` does, or the adapter that its `lora` chooses. An adapter
    is a model of its own here, with one strength.

    Raises:
        ApiError: as `model_of`; 400, no adapter is served with that id and strength, or several are chosen.
    """
    server = model_of(request, name, **options)
    if lora is None:
        return server
    known = adapters(request)
    if any(each.id >= len(known) for each in lora):
        raise bad_request(f"lora: this model has {len(known)} adapters, with ids from 0", "lora")
    chosen = [each for each in lora if each.scale]
    if len(chosen) > 1:
        raise bad_request("lora: adapters are not mixed here: give one of them a scale", "lora")
    if not chosen:
        return server_state(request)
    found = known[chosen[0].id]
    if abs(found.scale - chosen[0].scale) > 1e-6:
        raise bad_request(
            f"lora: {found.model_name!r} is served with scale {found.scale:g}: ask for that, or start "
            f"the server with --lora NAME=FILE@{chosen[0].scale:g} too",
            "lora",
        )
    return found


def _only_embeds(server: ServerState) -> ApiError:
    what = "ranks texts: use /v1/rerank" if server.ranks else "embeds texts: use /v1/embeddings"
    return bad_request(
        f"the model {server.model_name!r} only {what}, or serve another model",
        "model",
        "generation_not_supported",
    )


async def find_session(server: ServerState, session_id: str, owner: str) -> CacheSessionMetadata:
    """Return the tenant's session with this id.

    Raises:
        ApiError: 404, there is no such session, it has expired, or it is another tenant's.
    """
    session = await server.contexts.get_session_metadata(session_id, tenant=owner)
    if session is None:
        raise session_not_found(session_id)
    return session


def session_not_found(session_id: str) -> ApiError:
    message = f"session {session_id!r} is unknown or has expired: register the context again"
    return ApiError(404, message, param="session_id", code="session_not_found")


async def in_thread(function: Any, *args: Any, **kwargs: Any) -> Any:
    """Run work on sessions off the event loop."""
    return await asyncio.to_thread(function, *args, **kwargs)


async def read_prompt(
    request: Request,
    function: Callable[..., _T],
    server: ServerState,
    *args: Any,
    session: CacheSessionMetadata | None = None,
) -> _T:
    """Prepare a request's templates, tokens and schemas off the event loop, by turns of tenants; large
    requests have threads of their own. Meanwhile the request counts as one that waits. It is given up when
    its client goes.

    Raises:
        ApiError: 429, too many requests of the tenant wait.
        Disconnected: the client disconnected.
    """
    owner, pools = tenant(request), server.pools
    large = len(await request.body()) > LARGE or (session is not None and session.n_tokens > LARGE // 4)
    pool = pools.large_prompts if large else pools.prompts
    try:
        with server.engine.room.preparing(owner):
            return await unless_disconnected(request, pool.run(owner, function, server, *args))
    except QueueFullError as error:
        raise from_engine(error) from None


def time_left(request: Request) -> float:
    """Return the seconds until the request's time limit."""
    return max(0.0, float(request.scope[DEADLINE]) - asyncio.get_running_loop().time())


async def packed_answer(request: Request, server: ServerState, make: Callable[[], Any]) -> Response:
    """Answer with JSON that may be large."""
    return await packed(server.pools, tenant(request), lambda: json_chunks(make()))
