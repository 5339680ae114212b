"""The process of `stock_peer`: one JSON request per line on stdin, one answer per line on stdout.

It runs on the library that llama_cpp came with, so nothing here may import mixedkv, whose library would be a
second one. It is run by its path, as llama_cpp must be imported before the package mixedkv_bench.
"""

import json
import os
import signal
import sys
from dataclasses import dataclass
from pathlib import Path

signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's: it closes our input
sys.path = [entry for entry in sys.path if Path(entry or ".").resolve() != Path(__file__).parent]

import llama_cpp  # noqa: E402

from mixedkv_bench.harness.contexts import LoadedModel  # noqa: E402
from mixedkv_bench.harness.speed_run import Local, SpeedWork  # noqa: E402

_answers = os.fdopen(os.dup(1), "w")
os.dup2(2, 1)  # what the library prints is no answer


@dataclass(frozen=True, kw_only=True)
class StockCache:
    """One of llama.cpp's own caches."""

    flash_attn: bool
    type_k: str
    type_v: str
    type_ids: tuple[int, int]
    window: None = None

    def check_context(self, n_ctx: int) -> None:
        """Accept any context: this cache fits all."""

    def native(self) -> None:
        """Leave everything to llama.cpp."""


def main() -> None:
    extra_buffers = sys.argv[2] == "1"
    try:
        model = LoadedModel(Path(sys.argv[1]), extra_buffers=extra_buffers)
    except ValueError as error:
        _answer(error=str(error))
        return
    _answer(peer_version=llama_cpp.__version__, peer_extra_buffers=extra_buffers)
    runners: list[Local] = []
    for line in sys.stdin:
        request = json.loads(line)
        try:
            if request["do"] == "open":
                runners.append(Local(model, StockCache(**request["cache"]), SpeedWork(**request["work"])))
                _answer(id=len(runners) - 1, **runners[-1].facts)
            elif request["do"] == "measure":
                prompt, generated = runners[request["id"]].measure()
                _answer(prompt=prompt, generated=generated)
            else:
                runners[request["id"]].close()
                _answer()
        except ValueError as error:
            _answer(error=str(error))


def _answer(**values: object) -> None:
    print(json.dumps(values), file=_answers, flush=True)


main()
