"""Paths that are taken beside the plain ones: under a prefix, and without `/v1`."""

from __future__ import annotations

from starlette.types import ASGIApp, Receive, Scope, Send


def without(root: str, path: str) -> str:
    """Return a path without the root, which it may begin with."""
    return path[len(root) :] if root and (path == root or path.startswith(root + "/")) else path


class RootPath:
    """Serves every path both with the root before it and without it. ASGI has the root in `path` and
    `root_path`.
    """

    def __init__(self, app: ASGIApp, root: str) -> None:
        self._app, self._root = app, root

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and self._root:
            path = self._root + without(self._root, scope["path"])
            scope = {**scope, "path": path, "root_path": self._root}
        await self._app(scope, receive, send)


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
