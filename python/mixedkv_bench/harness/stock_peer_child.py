"""The process of `stock_peer`: one JSON request per line on stdin, one answer per line on stdout.

Run by its path, since importing the package mixedkv would load its library. A bare module stands in for the
package, so that the parts which measure can be imported without it.
"""

import json
import os
import signal
import sys
import types
from pathlib import Path

signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's: it closes our input

sys.path = [entry for entry in sys.path if Path(entry or ".").resolve() != Path(__file__).parent]
_PACKAGE = Path(__file__).resolve().parents[2]
sys.modules["mixedkv"] = types.ModuleType("mixedkv")
sys.modules["mixedkv"].__path__ = [str(_PACKAGE / "mixedkv")]

_answers = os.fdopen(os.dup(1), "w")
os.dup2(2, 1)  # what the library prints is no answer


def main() -> None:
    import llama_cpp

    from mixedkv_bench.harness.cache_settings import make_settings
    from mixedkv_bench.harness.contexts import Model
    from mixedkv_bench.harness.speed_run import Local, Work

    extra_buffers = sys.argv[2] == "1"
    try:
        model = Model(Path(sys.argv[1]), extra_buffers=extra_buffers)
    except ValueError as error:
        _answer(error=str(error))
        return
    _answer(peer_version=llama_cpp.__version__, peer_extra_buffers=extra_buffers)
    runners: list[Local] = []
    for line in sys.stdin:
        request = json.loads(line)
        try:
            if request["do"] == "open":
                flash = "on" if request["flash_attn"] else "off"
                (setting,) = make_settings([request["spec"]], flash)
                runners.append(Local(model, setting, Work(**request["work"])))
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
