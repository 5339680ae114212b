"""The process of one model behind a router: `python -m mixedkv.server.model_child NAME`.

The first line of its input has its settings as JSON. When the input ends, the router has ended: it does too.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from functools import partial

from mixedkv.server.serve import serve
from mixedkv.server.settings import ServerSettings
from mixedkv.server.shutdown import end_within

_SECONDS = 60.0  # to store KV once the router is gone, after the drain timeout


def main() -> int:
    signal.signal(signal.SIGHUP, signal.SIG_IGN)  # until the keys are read
    settings = ServerSettings.model_validate_json(sys.stdin.buffer.readline())
    ends = partial(_end_with_the_router, settings.drain_timeout + _SECONDS)
    threading.Thread(target=ends, name="mixedkv-router", daemon=True).start()
    try:
        serve(settings)
    except (ValueError, OSError, MemoryError, RuntimeError) as error:
        text = f"{error.filename}: {error.strerror}" if isinstance(error, OSError) else str(error)
        print(f"mixedkv: error: {' '.join(text.split())}", file=sys.stderr)
        return 1
    return 0


def _end_with_the_router(seconds: float) -> None:
    while os.read(0, 1):  # a thread that reads sys.stdin would keep its lock when the process ends
        pass
    end_within(seconds)
    os.kill(os.getpid(), signal.SIGTERM)


if __name__ == "__main__":
    sys.exit(main())
