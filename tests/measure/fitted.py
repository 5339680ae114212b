"""Starts `mixedkv serve -m MODEL` in control groups of some sizes: what it chooses, and a long prompt.

    python tests/measure/fitted.py --gib 2 --gib 8 --gib 24 --tokens 18000 gemma3

Each group lies below this process's own (cgroup version 1 or 2; needs the right to make one) and is removed
afterwards. The prompt is this project's own sources. Prints the server's line, the status and the usage, the
most memory that the group held, and how often its limit was met.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from mixedkv.model.named_model import find_measured_model
from mixedkv.native.memory import _GROUPS, _PROC, _own_groups

_OPEN = urllib.request.build_opener(urllib.request.ProxyHandler({})).open
_SOURCES = Path(__file__).parents[2] / "python"


@contextmanager
def group(gib: float) -> Iterator[Path]:
    """Make a control group of so much memory; it is removed at the end."""
    _, (limits, _, _), own = next(each for each in _own_groups(_PROC, _GROUPS) if each[2].is_dir())
    folder = own / f"fitted-{os.getpid()}"
    folder.mkdir()
    try:
        (folder / limits[0]).write_text(str(int(gib * (1 << 30))))
        yield folder
    finally:
        time.sleep(0.5)  # the kernel forgets processes that ended
        folder.rmdir()


@contextmanager
def serving(folder: Path, args: list[str]) -> Iterator[str]:
    """Serve in a group; its first lines are printed. The value is its address."""
    command = [sys.executable, "-m", "mixedkv", "serve", "--port", "0", *args]
    process = subprocess.Popen(
        command,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: (folder / "cgroup.procs").write_text(str(os.getpid())),
    )
    try:
        address = ""
        for line in process.stderr or ():
            print("   ", line.rstrip())
            if found := re.search(r"http://[\d.:]+", line):
                address = found[0]
                break
        threading.Thread(
            target=lambda: [print("   ", line.rstrip()) for line in process.stderr], daemon=True
        ).start()
        yield address
    finally:
        process.terminate()
        print(f"    ended with {process.wait(90)}")


def ask(address: str, n_tokens: int) -> None:
    """Send a prompt of so many tokens, and print what came."""
    sources = "".join(path.read_text() for path in sorted(_SOURCES.rglob("*.py")))
    tokens = post(f"{address}/tokenize", {"content": sources[: n_tokens * 8]})["tokens"][:n_tokens]
    began = time.monotonic()
    answer = post(f"{address}/v1/completions", {"prompt": tokens, "max_tokens": 16, "temperature": 0})
    print(f"    {time.monotonic() - began:.0f} s: {json.dumps(answer.get('usage', answer))}")


def post(url: str, body: object) -> dict[str, object]:
    request = urllib.request.Request(url, json.dumps(body).encode(), {"content-type": "application/json"})
    try:
        return json.load(_OPEN(request, timeout=3000))
    except urllib.error.HTTPError as error:
        return {"status": error.code, **json.load(error)}


def number(folder: Path, *names: str) -> int:
    return int(next((folder / name).read_text() for name in names if (folder / name).exists()))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model")
    parser.add_argument("options", nargs="*", help="of serve, behind --")
    parser.add_argument("--gib", type=float, action="append")
    parser.add_argument("--tokens", type=int, default=18_000)
    args = parser.parse_args()
    path = str(find_measured_model(args.model))
    for gib in args.gib or (2, 8, 24):
        print(f"{args.model} in {gib:g} GiB", flush=True)
        with group(gib) as folder:
            with serving(folder, ["-m", path, *args.options]) as address:
                if args.tokens and address:
                    ask(address, args.tokens)
                most = number(folder, "memory.max_usage_in_bytes", "memory.peak")
            print(f"    most held: {most / (1 << 20):,.0f} MiB, with pages of files", flush=True)


if __name__ == "__main__":
    main()
