"""GET /, the chat page, /stats, the cache's contents, and the files of both pages."""

from __future__ import annotations

from pathlib import Path

from fastapi import APIRouter, Request
from starlette.responses import RedirectResponse, Response

from mixedkv.server.api_error import ApiError
from mixedkv.server.state import server_state

router = APIRouter(include_in_schema=False)
_FOLDER = Path(__file__).parents[1] / "page"
_KINDS = {".html": "text/html", ".css": "text/css", ".js": "text/javascript"}
_FILES = {path.name: path for path in _FOLDER.glob("*") if path.suffix in _KINDS}
_CHAT_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src data:; "
    "base-uri 'none'; form-action 'none'; require-trusted-types-for 'script'; trusted-types 'none'; "
)
_HEADERS = {
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}


@router.get("/")
async def chat(request: Request) -> Response:
    """Return the chat page, or the statistics if no model generates text."""
    if not any(each.generates for each in server_state(request).all):
        return RedirectResponse("stats")
    return _file("chat.html", _CHAT_POLICY)


@router.get("/stats")
async def stats() -> Response:
    return _file("stats.html")  # the page's <meta> has the rest of its policy


@router.get("/page/{name}")
async def part(name: str) -> Response:
    return _file(name if name.endswith((".css", ".js")) else "")


def _file(name: str, policy: str = "") -> Response:
    if name not in _FILES:
        raise ApiError(404, "the page has no such file")
    # not a FileResponse, which would also answer thousands of ranges
    path = _FILES[name]
    kind = f"{_KINDS[path.suffix]}; charset=utf-8"
    headers = {**_HEADERS, "Content-Security-Policy": policy + "frame-ancestors 'none'"}
    return Response(path.read_bytes(), media_type=kind, headers=headers)
