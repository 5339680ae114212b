"""Tokenizes texts that took llama.cpp's process with them, one vocabulary after the other.

    python tokenize_child.py FOLDER CHARACTERS PRE...

Writes a line before each text and one after all, so that the parent sees which of them ended the process.
"""

from __future__ import annotations

import sys
from pathlib import Path

from mixedkv import Llama
from support.models import zoo

LETTERS = ("a", "7", "!", " ", "\n", "中")
RUNS = (*LETTERS, "A", "é", "\u0301", "\u3000", "aB", "a b ", "!\n", " \n", "\u3000\n")

NOT_BYTES = (
    "gemma4",
    "granite-embed-multi-311m",
    "sarvam-moe",
    "whitespace",
)  # they have words or characters
LONG = 1 << 17  # each vocabulary takes seconds beyond it


def main(folder: Path, n: int, names: list[str]) -> None:
    for name in names:
        path = zoo.write_byte_vocabulary(folder / f"{name}.gguf", name)
        with Llama(path, vocab_only=True, verbose=False) as llm:
            for run in RUNS if n <= LONG else LETTERS:
                text = ("x" + (run * n)[: n - 2] + ".").encode()
                print(name, ascii(run), len(text), flush=True)
                tokens = llm.tokenize(text, add_bos=False)
                assert len(tokens) == len(text) or name in NOT_BYTES
        path.unlink()
    print("all", flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3:])
