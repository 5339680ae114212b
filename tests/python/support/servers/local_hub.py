"""A server on this machine that answers as the Hugging Face Hub does, and counts what it is asked."""

from __future__ import annotations

import hashlib
import json
import os
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote, urlsplit

from support.patience import PATIENCE

_COMMIT = "0123456789" * 4


class LocalHub(ThreadingHTTPServer):
    """Repositories of files.

    Attributes:
        repos: names of repositories, and of their files with what is in them.
        cut: bytes after which the next download breaks off; 0 for none.
        damage: whether files come with a byte changed.
        asked: method, path and the Range of each request.
    """

    daemon_threads = True

    def __init__(self, repos: Mapping[str, Mapping[str, bytes]]) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.repos = repos
        self.cut, self.damage = 0, False
        self.requests: list[tuple[str, str, str]] = []

    def environ(self, home: Path) -> dict[str, str]:
        """Variables of a process that uses this hub, with a cache of its own."""
        own = {
            "HF_ENDPOINT": f"http://127.0.0.1:{self.server_address[1]}",
            "HF_HOME": str(home),
            "HF_HUB_DISABLE_TELEMETRY": "1",
            "HF_HUB_DISABLE_XET": "1",
            "HF_HUB_ETAG_TIMEOUT": str(round(PATIENCE)),
            "HF_HUB_DOWNLOAD_TIMEOUT": str(round(PATIENCE)),
        }
        return {**{k: v for k, v in os.environ.items() if not k.startswith("HF_")}, **own}

    def downloads(self) -> list[tuple[str, str]]:
        """Path and Range of the files that were asked for."""
        return [
            (path, part) for method, path, part in self.requests if method == "GET" and "/resolve/" in path
        ]


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: LocalHub

    def log_message(self, *_: object) -> None:
        """Nothing."""

    def do_HEAD(self) -> None:
        self._answer(body=False)

    def do_GET(self) -> None:
        self._answer(body=True)

    def _answer(self, body: bool) -> None:
        path, expected = unquote(urlsplit(self.path).path), self.headers.get("Range", "")
        self.server.requests.append((self.command, path, expected))
        if path.startswith("/api/models/"):
            repo = "/".join(path.split("/")[3:5])
            if repo not in self.server.repos:
                self._send(401, b"{}", {"X-Error-Code": "RepoNotFound"}, body)
            elif "/tree/" in path:
                self._send(200, json.dumps(self._tree(repo)).encode(), {}, body)
            else:
                about = {
                    "id": repo,
                    "sha": _COMMIT,
                    "siblings": [{"rfilename": f} for f in self.server.repos[repo]],
                }
                self._send(200, json.dumps(about).encode(), {}, body)
            return
        repo, _, rest = path.removeprefix("/").partition("/resolve/")
        file = rest.partition("/")[2]
        data = self.server.repos.get(repo, {}).get(file)
        if data is None:
            self._send(404, b"", {"X-Error-Code": "EntryNotFound"}, body)
            return
        headers = {
            "X-Repo-Commit": _COMMIT,
            "ETag": f'"{hashlib.sha256(data).hexdigest()}"',
            "Accept-Ranges": "bytes",
        }
        if self.server.damage:
            data = data[:-1] + bytes([data[-1] ^ 1])
        status, begin = 200, 0
        if expected.startswith("bytes="):
            status, begin = 206, int(expected.removeprefix("bytes=").partition("-")[0])
            headers["Content-Range"] = f"bytes {begin}-{len(data) - 1}/{len(data)}"
        self._send(status, data[begin:], headers, body)

    def _tree(self, repo: str) -> list[dict[str, object]]:
        return [
            {"type": "file", "path": name, "size": len(data), "oid": hashlib.sha1(data).hexdigest()}
            for name, data in self.server.repos[repo].items()
        ]

    def _send(self, status: int, data: bytes, headers: Mapping[str, str], body: bool) -> None:
        self.send_response(status)
        for name, value in {"Content-Type": "application/json", **headers}.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        cut, self.server.cut = (
            (self.server.cut, 0)
            if body and status in (200, 206) and "resolve" in self.path
            else (0, self.server.cut)
        )
        if body:
            self.wfile.write(data[: cut or None])
        if cut:
            self.close_connection = True


@contextmanager
def local_hub(repos: Mapping[str, Mapping[str, bytes]]) -> Iterator[LocalHub]:
    """A hub that answers while the context lasts."""
    hub = LocalHub(repos)
    thread = threading.Thread(target=hub.serve_forever, daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        hub.shutdown()
        hub.server_close()
        thread.join()
