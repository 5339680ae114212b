"""`mixedkv serve` with a planted hang: the engine's thread stays in the scheduler while a file is there.

python stuck_child.py FILE [options of serve]
"""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

from mixedkv.cli.main import main
from mixedkv.engine.schedule.scheduler import Scheduler
from mixedkv_server import watchdog

_PLANTED = Path(sys.argv[1])
_admit = Scheduler.admit


def admit_for_ever(self: Scheduler[Any]) -> None:
    while self.waiting and _PLANTED.exists():
        time.sleep(0.01)
    _admit(self)


if __name__ == "__main__":
    Scheduler.admit = admit_for_ever  # type: ignore[method-assign]
    watchdog.LEAST_SECONDS = watchdog.FIRST_SECONDS = 1.0
    watchdog.TICK_SECONDS = 0.1
    sys.exit(main(["serve", *sys.argv[2:]]))
