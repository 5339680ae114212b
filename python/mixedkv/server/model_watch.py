"""Notices when a model's file is changed in place. It is mapped, so a file that is cut short would end the
process.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import threading
from collections.abc import Callable, Iterable
from pathlib import Path

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

log = logging.getLogger("mixedkv.server")

_SECONDS = 0.2  # seconds between two looks
_HAS_LEASES = hasattr(fcntl, "F_SETLEASE")  # Linux


def ignore_signal() -> None:
    """Ignore the signal about a program that waits for a file, as files are polled instead. Call it on the
    main thread; files can then be watched from any thread.
    """
    if _HAS_LEASES and threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGIO, signal.SIG_IGN)


class ModelWatch:
    """Holds a lease on each file: a program that opens one for writing has to wait until the model is no
    longer read, for at most 45 seconds (/proc/sys/fs/lease-break-time). Renaming another file over it changes
    nothing. If there are no leases, size and time of change are polled. That is so on systems other than
    Linux, on some file systems, with another user's file, with a file that is open for writing already, and
    off the main thread before `ignore_signal`. See
    https://man7.org/linux/man-pages/man2/F_GETLEASE.2const.html.

    Use it as a context manager, from before the files are loaded until they are not needed any more.
    """

    def __init__(self, paths: Iterable[str | Path]) -> None:
        self._paths = [Path(path) for path in paths]
        self._files: list[int] = []
        self._leased: list[int] = []
        self._before: list[tuple[int, int]] = []
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None

    def __enter__(self) -> ModelWatch:
        # off the main thread the signal cannot be ignored, and would end the process
        ignore_signal()
        can_lease = _HAS_LEASES and signal.getsignal(signal.SIGIO) is signal.SIG_IGN
        for path in self._paths:
            file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            self._files.append(file)
            if not can_lease:
                continue
            try:
                fcntl.fcntl(file, fcntl.F_SETLEASE, fcntl.F_RDLCK)
                self._leased.append(file)
            except OSError as error:
                log.info("no lease on a model's file (%s): it is looked at instead", error.strerror)
        self._before = self._now()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        if self._thread is not None:
            self._thread.join()
        self._release()

    def begin(self, stop: Callable[[], None]) -> None:
        """Call `stop` once, on a thread, when a file changes or is about to. Nothing may read the file after
        that.
        """
        self._thread = threading.Thread(target=self._watch, args=(stop,), name="mixedkv-model", daemon=True)
        self._thread.start()

    def _watch(self, stop: Callable[[], None]) -> None:
        while not self._ended.wait(_SECONDS):
            if self._changes():
                try:
                    stop()
                finally:
                    self._give_way()
                return

    def _changes(self) -> bool:
        broken = (fcntl.fcntl(file, fcntl.F_GETLEASE) == fcntl.F_UNLCK for file in self._leased)
        return any(broken) or self._now() != self._before

    def _now(self) -> list[tuple[int, int]]:
        """Return the size and time of change of each file."""
        return [(info.st_size, info.st_mtime_ns) for info in map(os.fstat, self._files)]

    def _give_way(self) -> None:
        for file in self._leased:
            with contextlib.suppress(OSError):
                fcntl.fcntl(file, fcntl.F_SETLEASE, fcntl.F_UNLCK)
        self._leased.clear()

    def _release(self) -> None:
        self._give_way()
        for file in self._files:
            os.close(file)
        self._files.clear()
