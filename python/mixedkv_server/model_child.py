"""The process of one model behind a router: `python -m mixedkv_server.model_child NAME`.

The first line of its input has its settings as JSON. When the input ends, the router has ended: it does too.
"""

from __future__ import annotations

import os
import shutil
import signal
import sys
import threading
from functools import partial
from pathlib import Path

from mixedkv_server.http_server import end_within
from mixedkv_server.serve import serve
from mixedkv_server.settings import ServerSettings

_SECONDS = 60.0  # to store KV once the router is gone, after the drain timeout


def main() -> int:
    settings = ServerSettings.model_validate_json(sys.stdin.buffer.readline())
    gone = threading.Event()
    ends = partial(_end_with_the_router, gone, settings.drain_timeout + _SECONDS)
    threading.Thread(target=ends, name="mixedkv-router", daemon=True).start()
    try:
        serve(settings)
    except (ValueError, OSError, MemoryError, RuntimeError) as error:
        text = f"{error.filename}: {error.strerror}" if isinstance(error, OSError) else str(error)
        print(f"mixedkv: error: {' '.join(text.split())}", file=sys.stderr)
        return 1
    finally:
        if gone.is_set():  # killed, or it would have removed its folder, which has sessions in it
            shutil.rmtree(Path(settings.unix_socket).parent, ignore_errors=True)
    return 0


def _end_with_the_router(gone: threading.Event, seconds: float) -> None:
    while os.read(0, 1):  # a thread that reads sys.stdin would keep its lock when the process ends
        pass
    gone.set()
    end_within(seconds)
    os.kill(os.getpid(), signal.SIGTERM)


if __name__ == "__main__":
    sys.exit(main())
