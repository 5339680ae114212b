"""The process of one model: requests to it, its start and end, and its settings, made from the router's."""

from __future__ import annotations

import asyncio
import logging
import os
import re
import signal
import sys
import time
from collections import deque
from collections.abc import AsyncIterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import h11

from mixedkv.backoff import Backoff
from mixedkv.model.embedding_model import only_embeds
from mixedkv.model.gguf_file import ModelFile, n_mtp_layers
from mixedkv_server.logs import message_of, of_model
from mixedkv_server.models import ServedModel
from mixedkv_server.settings import IN_MEMORY, ServerSettings
from mixedkv_service.signals import holding_hangup

Headers = Sequence[tuple[bytes, bytes]]
ENDED = (OSError, h11.RemoteProtocolError)  # what is raised where the process ends in between
_READ_BYTES = 1 << 16


class Exchange:
    """A connection for one request. Closing it early cancels the request."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer
        self._http = h11.Connection(h11.CLIENT)

    @classmethod
    async def begin(
        cls, path: str, method: str, target: str, headers: Headers = (), body: bytes = b""
    ) -> Exchange:
        """Send a request to the Unix socket at `path`.

        Raises:
            OSError: nobody listens there.
        """
        exchange = cls(*await asyncio.open_unix_connection(path))
        try:
            await exchange._send(method, target, headers, body)
        except BaseException:
            exchange.close()
            raise
        return exchange

    async def head(self) -> h11.Response:
        """Wait for the status and the headers.

        Raises:
            OSError, h11.RemoteProtocolError: the process has ended.
        """
        while not isinstance(event := await self._next(), h11.Response):
            if isinstance(event, h11.ConnectionClosed):
                raise ConnectionResetError("the process has ended")
        return event

    async def parts(self) -> AsyncIterator[bytes]:
        """Yield the body as it comes. Raises as `head` does."""
        while isinstance(event := await self._next(), h11.Data):
            yield bytes(event.data)

    def close(self) -> None:
        self._writer.close()

    async def _send(self, method: str, target: str, headers: Headers, body: bytes) -> None:
        own = [(b"connection", b"close"), (b"content-length", str(len(body)).encode())]
        if not any(name == b"host" for name, _ in headers):
            own.append((b"host", b"localhost"))
        request = h11.Request(method=method, target=target, headers=[*headers, *own])
        for event in (request, h11.Data(data=body), h11.EndOfMessage()):
            self._writer.write(self._http.send(event) or b"")
        await self._writer.drain()

    async def _next(self) -> object:
        while (event := self._http.next_event()) is h11.NEED_DATA:
            self._http.receive_data(await self._reader.read(_READ_BYTES))
        return event


async def get(path: str, target: str, headers: Headers = ()) -> tuple[int, bytes]:
    """Return the status and the body of a GET. Raises as `Exchange.head` does."""
    exchange = await Exchange.begin(path, "GET", target, headers)
    try:
        head = await exchange.head()
        return head.status_code, b"".join([part async for part in exchange.parts()])
    finally:
        exchange.close()


log = logging.getLogger("mixedkv.server")

_FOLDERS = re.compile(r"(?<![\w.:/~])(?:~|\.{1,2})?/(?:[^\s/:;,'\"()]+/)*(?=[^\s/])")  # not those of a URL
_PASSWORD = re.compile(r"(?<=://)[^\s/@]+@")
_SOCKET = re.compile(r"\b\d+\.sock\b")
_CHILD = "mixedkv_server.model_child"
_LOOK_SECONDS = 0.05
_KEPT_LINES, _SHOWN_LINES, _SHOWN_LETTERS = 20, 3, 300  # of its log, where it could not be loaded
_ERROR = "mixedkv: error: "
_STEADY_SECONDS = 60.0  # a process that lived so long is started again at once
_FIRST_REST, _LONGEST_REST = 1.0, 60.0  # from the second end on
_LONGEST_END = 60.0  # seconds to store KV after the drain timeout


class ModelLoadError(Exception):
    """A model could not be loaded; the message says which, and why.

    Args:
        rest: seconds until it is tried again.
    """

    def __init__(self, message: str, rest: float = 0.0) -> None:
        super().__init__(message)
        self.rest = rest


class ModelProcess:
    """The process that serves one model and its adapters on a Unix socket that only this user can open.

    Args:
        settings: those of the process.

    Attributes:
        ready: whether it takes requests.
    """

    def __init__(self, name: str, settings: ServerSettings) -> None:
        self.name, self.socket, self.ready = name, settings.unix_socket, False
        self._settings = settings
        self._process: asyncio.subprocess.Process | None = None
        self._watch: asyncio.Task[None] | None = None
        self._log: deque[str] = deque(maxlen=_KEPT_LINES)
        self._ending = False
        self._n_failures, self._backoff = 0, Backoff(_FIRST_REST, _LONGEST_REST)

    @property
    def runs(self) -> bool:
        return self._process is not None and self._process.returncode is None

    async def start(self) -> None:
        """Start the process and wait until it takes requests.

        Raises:
            ModelLoadError: it ended before, or it ended so often that it has to rest.
        """
        if rest := self._backoff.left:
            raise self._failure(f"it ended {self._n_failures} times, the next try is in {rest:.0f} s: ")
        self._log.clear()
        self._ending = False
        try:
            with holding_hangup():
                self._process = await asyncio.create_subprocess_exec(
                    *(sys.executable, "-m", _CHILD, self.name),
                    stdin=asyncio.subprocess.PIPE,
                    stderr=asyncio.subprocess.PIPE,
                    start_new_session=True,  # Ctrl-C is handled by the router
                )
        except OSError as error:
            raise self._failure(f"no process: {error.strerror}; ") from None
        self._watch = asyncio.create_task(self._look_after(self._process))
        assert self._process.stdin is not None
        self._process.stdin.write(self._settings.model_dump_json().encode() + b"\n")
        while not await self._is_ready():
            if self._watch.done():
                raise self._failure()
            await asyncio.sleep(_LOOK_SECONDS)
        self.ready = True

    async def stop(self) -> None:
        """End the process in order: what runs may end, and KV is stored."""
        self.ready, self._ending = False, True
        if not self.runs or self._watch is None:
            return
        self.signal(signal.SIGTERM)
        with suppress(asyncio.TimeoutError):
            await asyncio.wait_for(asyncio.shield(self._watch), self._settings.drain_timeout + _LONGEST_END)
        self.signal(signal.SIGKILL)
        await self._watch

    def signal(self, number: int) -> None:
        if self._process is not None:
            with suppress(ProcessLookupError):
                self._process.send_signal(number)

    async def _is_ready(self) -> bool:
        try:
            return (await get(self.socket, "/ready"))[0] == 200
        except ENDED:
            return False

    async def _look_after(self, process: asyncio.subprocess.Process) -> None:
        """Print the log of the process until it ends. Count an end that `stop` did not ask for."""
        began = time.monotonic()
        assert process.stderr is not None
        while line := await _line(process.stderr):
            text = line.decode("utf-8", "replace").rstrip("\n")
            self._log.append(text)
            print(of_model(self.name, text, self._settings.log_format), file=sys.stderr, flush=True)
        code = await process.wait()
        self.ready = False
        seconds = time.monotonic() - began
        if self._ending or seconds >= _STEADY_SECONDS:
            self._n_failures = 0
            self._backoff.succeeded()
        if self._ending:
            return
        self._n_failures += 1
        if self._n_failures > 1:  # after the first one it is started at once
            self._backoff.failed()
        log.error("the process of the model %s ended with %d after %.0f s", self.name, code, seconds)

    def _failure(self, before: str = "") -> ModelLoadError:
        text = f"the model {self.name!r} could not be loaded: {before}{self._reason()}"
        return ModelLoadError(text, self._backoff.left)

    def _reason(self) -> str:
        """Return the last lines of its log, since clients read them."""
        lines = [message_of(line) for line in self._log if line.strip()][-_SHOWN_LINES:]
        if lines and lines[-1].startswith(_ERROR):
            lines = [lines[-1].removeprefix(_ERROR)]
        return without_folders("; ".join(lines) or "it wrote no log", self._files())[:_SHOWN_LETTERS]

    def _files(self) -> list[str]:
        """Return the paths of the settings."""
        given = self._settings
        files = [*given.model, *given.mmproj, *(each.partition("=")[2] for each in given.lora)]
        return [*files, given.draft_model, given.unix_socket, given.store, *_paths(given)]


def without_folders(text: str, files: Sequence[str] = ()) -> str:
    """Return a text for clients, in which files have their names alone, sockets none, and URLs no password.

    Args:
        files: paths that may have spaces in them; others are found where they have none.
    """
    for file in filter(None, files):
        text = text.replace(file, Path(file).name)
    text = text.replace(os.getcwd() + os.sep, "")
    return _SOCKET.sub("its socket", _FOLDERS.sub("", _PASSWORD.sub("", text)))


def _paths(settings: ServerSettings) -> list[str]:
    """Return the paths of files that a model's process reads besides those of its model."""
    names = ("api_key_file", "metrics_key_file", "store_key_file", "chat_format", "warm")
    return [str(getattr(settings, name)) for name in names]


async def _line(stream: asyncio.StreamReader) -> bytes:
    """Return the next line, or a part of one that is very long; b"" at the end."""
    try:
        return await stream.readuntil(b"\n")
    except asyncio.IncompleteReadError as error:
        return error.partial
    except asyncio.LimitOverrunError as error:
        return await stream.read(error.consumed or 1)


_PORT = re.compile(r"(tcp://.*:)(\d{1,5})")
_OF_THE_ROUTER = (  # settings that only the router follows
    *("host", "port", "root_path", "tls_cert", "tls_key", "allow", "access_log"),
    *("keep_alive", "max_loaded", "warm"),
)
_OF_KV = ("store", "store_key_file", "store_remote", "kv_events")  # settings for models that generate


def child_settings(
    settings: ServerSettings, members: Sequence[ServedModel], file: ModelFile, number: int, folder: Path
) -> ServerSettings:
    """Return the settings for a model and its adapters.

    Args:
        members: the model, then its adapters.
        file: the model's header.
        number: 0 for the first model, which has the draft model.
        folder: for the socket, and for sessions that are kept nowhere else.
    """
    model, adapters = members[0], members[1:]
    left_out = (*_OF_THE_ROUTER, *(_OF_KV if only_embeds(file) else ()))
    fields: dict[str, Any] = {name: getattr(settings, name) for name in settings.model_fields_set}
    for name in left_out:
        fields.pop(name, None)
    return ServerSettings(
        **fields
        | {
            "model": (str(model.path),),
            "model_name": model.name,
            "model_n_ctx": tuple(f"{each.name}={each.n_ctx}" for each in members if each.n_ctx),
            "lora": tuple(f"{each.name}={each.adapter}@{each.scale:.9f}" for each in adapters),
            "mmproj": (model.mmproj,) if model.mmproj else (),
            "speculation": _speculation(settings, file, number),
            "host": str(folder / f"{number}.sock"),
            "metadata_url": _sessions(settings, folder),
            "restart_when_stuck": True,
        }
        | _events(settings, model.name, number, only_embeds(file))
    )


def _speculation(settings: ServerSettings, file: ModelFile, number: int) -> str:
    """Return how a model drafts: by text that repeats itself where it lacks what the first model has."""
    lacks_layers = settings.speculation == "mtp" and not n_mtp_layers(file)
    if number and (lacks_layers or settings.draft_model):
        return "prompt-lookup"
    return settings.speculation


def _sessions(settings: ServerSettings, folder: Path) -> str:
    """Return the URL of the sessions, which all processes share."""
    if settings.sessions_url != IN_MEMORY:
        return settings.sessions_url
    return f"sqlite:{folder / 'sessions.sqlite3'}"


def _events(settings: ServerSettings, name: str, number: int, embeds: bool) -> dict[str, str]:
    """Return where a model tells its events: each process at a port of its own, from the given one on.

    Raises:
        ValueError: the address has no port to count from.
    """
    if not settings.kv_events or embeds:
        return {}
    where, mark, topic = settings.kv_events.partition("#")
    if number:
        if (found := _PORT.fullmatch(where)) is None:
            raise ValueError(f"kv_events={settings.kv_events!r}: several models need tcp://HOST:PORT")
        where = f"{found[1]}{int(found[2]) + number}"
    return {"kv_events": where + mark + topic.replace("{model}", name)}
