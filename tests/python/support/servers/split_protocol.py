"""Writes python/mixedkv_split/split_pb2*.py from split.proto, after the protocol was changed:

python tests/python/support/servers/split_protocol.py
"""

from __future__ import annotations

import sys
from importlib import resources
from pathlib import Path

from grpc_tools import protoc

PYTHON = Path(__file__).parents[4] / "python"
NAMES = ("split_pb2.py", "split_pb2.pyi")


def generate(folder: Path) -> None:
    """Write the modules into `folder`/mixedkv_split."""
    common = resources.files("grpc_tools") / "_proto"
    arguments = [f"-I{PYTHON}", f"-I{common}"]
    arguments += [f"--{kind}_out={folder}" for kind in ("python", "pyi")]
    if protoc.main(["protoc", *arguments, "mixedkv_split/split.proto"]) != 0:
        sys.exit("protoc failed")


if __name__ == "__main__":
    generate(PYTHON)
