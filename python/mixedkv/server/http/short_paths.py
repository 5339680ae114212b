"""Accepts paths without `/v1`, from clients whose base URL lacks it, and HEAD wherever GET is."""

from __future__ import annotations

from starlette.types import ASGIApp, Receive, Scope, Send

from mixedkv.server.http.root_path import without

_SHORT = (  # first parts of such paths
    "chat",
    "completions",
    "embeddings",
    "messages",
    "models",
    "rerank",
    "reranking",
    "responses",
)


class ShortPaths:
    """Treats `/chat/completions` as `/v1/chat/completions` and so on, and HEAD as GET: uvicorn leaves the
    body out.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            root = scope.get("root_path", "")
            path = without(root, scope["path"])
            if path.removeprefix("/").partition("/")[0] in _SHORT:
                scope = {**scope, "path": f"{root}/v1{path}"}
            if scope["method"] == "HEAD":
                scope = {**scope, "method": "GET"}
        await self._app(scope, receive, send)
