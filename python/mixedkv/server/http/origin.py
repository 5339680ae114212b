"""Keeps pages of other sites off a server without keys: their scripts run in its users' browsers."""

from __future__ import annotations

from collections.abc import Sequence
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from mixedkv.hosts import is_local
from mixedkv.server.api_error import ApiError

_SHOWN = 100


class OwnPagesOnly:
    """Answers 403 to requests that only a page of another site sends. These have an `Origin` that is not the
    server's, or with `local_only` a `Host` that is not this machine, as with DNS rebinding. `hosts` are
    further names to accept; if there are some, no others are. Pages of `origins` may use the server, "*" are
    all. See https://fetch.spec.whatwg.org/#origin-header for when an `Origin` is sent.
    """

    def __init__(
        self, app: ASGIApp, local_only: bool, hosts: Sequence[str] = (), origins: Sequence[str] = ()
    ) -> None:
        self._app, self._checks_host = app, local_only or bool(hosts)
        self._hosts, self._origins = [host.lower() for host in hosts], origins

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        error = self._refusal(Headers(scope=scope)) if scope["type"] == "http" else None
        await (self._app if error is None else error.response())(scope, receive, send)

    def _refusal(self, headers: Headers) -> ApiError | None:
        host, origin = headers.get("host"), headers.get("origin")
        if self._checks_host and host and not (is_local(_name(host)) or _name(host) in self._hosts):
            return ApiError(
                403,
                f"this server without keys takes requests to 127.0.0.1, [::1] or localhost only, not to "
                f"{host[:_SHOWN]!r}: serve with --allowed-host {_name(host)[:_SHOWN]} if that is its name, "
                "with keys, or with --allow-no-keys if everybody who can reach it may use it",
                code="host_not_allowed",
            )
        if origin is None or "*" in self._origins or origin in self._origins:
            return None
        if origin.partition("://")[2] != host:
            return ApiError(
                403,
                f"this server without keys takes no requests from pages of other sites, here "
                f"{origin[:_SHOWN]!r}: serve with --cors-origin {origin[:_SHOWN]} if that site may "
                "use it, or with keys",
                code="origin_not_allowed",
            )
        return None


def _name(host: str) -> str:
    """Return the host without its port and without the brackets of an IPv6 address."""
    try:
        return urlsplit("//" + host).hostname or ""
    except ValueError:
        return ""
