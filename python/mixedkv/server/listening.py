"""Opens the address or the Unix socket that the server listens on, with TLS or without."""

from __future__ import annotations

import os
import socket
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from mixedkv.server.settings import ServerSettings


@contextmanager
def listen(settings: ServerSettings) -> Iterator[socket.socket]:
    """Open a bound socket. The file of a Unix socket is removed when it is closed.

    Raises:
        ValueError: the server cannot listen there.
    """
    if not settings.unix_socket:
        with _bind_address(settings.host, settings.port) as listening:
            yield listening
        return
    with _bind_path(settings.unix_socket) as listening:
        own = os.stat(settings.unix_socket).st_ino
        try:
            yield listening
        finally:
            with suppress(OSError):
                if os.stat(settings.unix_socket).st_ino == own:
                    os.unlink(settings.unix_socket)


def url(listening: socket.socket, tls: bool) -> str:
    """Return the server's URL as a client would write it."""
    if listening.family == socket.AF_UNIX:
        return f"unix:{listening.getsockname()}"
    host, port = listening.getsockname()[:2]
    return f"{'https' if tls else 'http'}://{f'[{host}]' if ':' in host else host}:{port}"


def _bind_address(host: str, port: int) -> socket.socket:
    family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    # asyncio sets TCP_NODELAY only where the protocol is named; without it a kept-alive client waits 40 ms
    listening = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    try:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind(address)
    except OSError as error:
        listening.close()
        raise ValueError(f"{host} port {port} cannot be listened on: {error.strerror}") from None
    return listening


def _bind_path(path: str) -> socket.socket:
    """Bind the socket for its owner only; `chmod` opens it to others."""
    _remove_stale(path)
    listening = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    before = os.umask(0o177)
    try:
        listening.bind(path)
    except OSError as error:
        listening.close()
        raise ValueError(f"host={path} cannot be listened on: {error.strerror or error}") from None
    finally:
        os.umask(before)
    return listening


def _remove_stale(path: str) -> None:
    """Remove the socket file of a server that was killed."""
    try:
        mode = os.lstat(path).st_mode
    except OSError:
        return
    if not stat.S_ISSOCK(mode):
        raise ValueError(f"host={path}: there is a file of that name: remove it, or choose another")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        try:
            probe.connect(path)
        except OSError:
            with suppress(OSError):
                os.unlink(path)
        else:
            raise ValueError(f"host={path}: another process listens there: choose another")
