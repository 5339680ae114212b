"""Bounds what compiling a constraint may take, whatever is in it: it is compiled on trial in a process that
is ended when that takes too long. A thread of llguidance's cannot be stopped.
"""

from __future__ import annotations

import hashlib
import json
import threading
from collections import OrderedDict
from pathlib import Path
from typing import Any

from mixedkv.work.processes import EndedError, KilledError, Task, processes

SECONDS = 3.0  # of a processor
STEP_SECONDS = 0.25  # of a processor, for a mask and a token: all answers wait for it
_STEPS = 4  # tokens
_BYTES = 4 << 30  # address space: a thread's stack and llguidance's arenas count
_KEPT = 1024  # constraints whose outcome is known
_PROGRAM = str(Path(__file__).with_name("trial_process.py"))

_known: OrderedDict[bytes, str] = OrderedDict()  # why a constraint is refused, "" if it is not
_knowing = threading.Lock()


def check(lark: str, names: list[str], limits: dict[str, Any]) -> None:
    """Refuse a grammar that takes too long to compile, too much memory, or too long for its first tokens.

    Args:
        names: names of the control tokens in it.
        limits: fields of llguidance's `LLParserLimits`.

    Raises:
        ValueError: it takes too much; the message says of what. Another time it may not, if that was found
            on the clock.
    """
    request = {
        "lark": lark,
        "names": names,
        "limits": limits,
        "step_seconds": STEP_SECONDS,
        "steps": _STEPS,
    }
    key = hashlib.sha256(json.dumps([request, SECONDS]).encode()).digest()
    with _knowing:
        refusal = _known.get(key)
        if refusal is not None:
            _known.move_to_end(key)
    if refusal is None:
        refusal = _try(request)
        with _knowing:
            _known[key] = refusal
            while len(_known) > _KEPT:
                _known.popitem(last=False)
    if refusal:
        raise ValueError(refusal)


def _try(request: dict[str, Any]) -> str:
    """Return why a constraint is refused, "" if it is not."""
    try:
        found, _ = processes.call(Task(_PROGRAM, "tried", SECONDS, _BYTES), request)
    except EndedError as error:
        return f"compiling {error}: use fewer patterns, alternatives and combinations"
    except KilledError as error:
        raise ValueError(f"compiling {error}") from None
    if found["slow"]:
        return f"a token of it takes more than {STEP_SECONDS:g} seconds: use fewer alternatives"
    return ""
