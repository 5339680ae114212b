"""Ends requests whose key was removed while they were at work."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from starlette.datastructures import Headers
from starlette.types import Scope

from mixedkv_server.api_error import ApiError
from mixedkv_service.keys import Keys

ENDING = "mixedkv.ending"  # in a request's scope


class Ending:
    """Waits for the removal of a request's key.

    Attributes:
        revoked: has the error once the key was removed.
    """

    def __init__(self) -> None:
        self.revoked: asyncio.Future[ApiError] = asyncio.get_running_loop().create_future()

    def then(self, end: Callable[[ApiError], None]) -> None:
        """Call `end` when the key is removed."""
        self.revoked.add_done_callback(lambda revoked: end(revoked.result()))


class WithKeys:
    """The requests at work, each with the tenant whose key it had when it came."""

    def __init__(self, keys: Keys) -> None:
        self._keys = keys
        self._at_work: dict[Ending, tuple[Headers, str | None]] = {}
        self._loop: asyncio.AbstractEventLoop | None = None
        keys.when_reloaded(self._look_soon)

    def tenant(self, headers: Headers) -> str | None:
        """Return the tenant whose key a request has, None without a valid key."""
        return self._keys.tenant(headers.get("authorization"), headers.get("x-api-key"))

    def enter(self, scope: Scope, headers: Headers, tenant: str | None) -> Ending:
        """Begin to watch the key of a request."""
        self._loop = asyncio.get_running_loop()
        ending = scope[ENDING] = Ending()
        self._at_work[ending] = headers, tenant
        return ending

    def leave(self, ending: Ending) -> None:
        """End what `enter` began."""
        del self._at_work[ending]

    def _look_soon(self) -> None:
        """Look at all requests on the event loop, as keys are read in the handler of a signal."""
        if self._loop is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._look)

    def _look(self) -> None:
        for ending, (headers, tenant) in list(self._at_work.items()):
            if not ending.revoked.done() and self.tenant(headers) != tenant:
                ending.revoked.set_result(_key_removed())


def _key_removed() -> ApiError:
    return ApiError(401, "the key of this request was removed while it was at work", code="invalid_api_key")
