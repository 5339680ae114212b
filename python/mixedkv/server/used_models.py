"""Keeps the models of a request in memory until it is answered."""

from __future__ import annotations

import time

from starlette.requests import Request
from starlette.types import ASGIApp, Receive, Scope, Send

from mixedkv.errors import ClosedError, QueueFullError
from mixedkv.server.api_error import ApiError, from_engine
from mixedkv.server.pending import or_disconnect
from mixedkv.server.residence import ModelGroup, ModelLoadError, Residence, Residency

_USED = "mixedkv.used_models"  # in a request's scope


class UsedModels:
    """The model groups that one request uses.

    Attributes:
        seconds: seconds that the request has waited for models to be loaded.
    """

    def __init__(self, residence: Residence) -> None:
        self._residence = residence
        self._used: dict[str, tuple[ModelGroup, str]] = {}
        self.seconds = 0.0

    async def add(self, request: Request, group: ModelGroup, tenant: str, keep_alive: float | None) -> None:
        """Wait until a group is in memory, unless the client disconnects first.

        Raises:
            ApiError: 503, it cannot be loaded, or the server is shutting down; 429, too many requests wait
                for it.
            Disconnected: the client disconnected.
        """
        if group.name in self._used:
            return
        began = time.perf_counter()
        try:
            if group.place is Residency.IN:
                await self._use(group, tenant, keep_alive)
            else:
                await or_disconnect(request, self._use(group, tenant, keep_alive))
        except ModelLoadError as error:
            raise ApiError(503, str(error), param="model", code="model_not_loaded") from None
        except (QueueFullError, ClosedError) as error:
            raise from_engine(error) from None
        self.seconds += time.perf_counter() - began

    async def _use(self, group: ModelGroup, tenant: str, keep_alive: float | None) -> None:
        await self._residence.use(group, tenant, keep_alive)
        self._used[group.name] = group, tenant

    def release(self) -> None:
        """Release the models of a request that was answered."""
        for used in self._used.values():
            self._residence.release(*used)
        self._used.clear()


class ModelUse:
    """Releases the models of a request at its end, also of a stream."""

    def __init__(self, app: ASGIApp, residence: Residence) -> None:
        self._app, self._residence = app, residence

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        used = scope[_USED] = UsedModels(self._residence)
        try:
            await self._app(scope, receive, send)
        finally:
            used.release()


def used_models(request: Request) -> UsedModels:
    """Return the models that a request uses."""
    return request.scope[_USED]  # type: ignore[no-any-return]
