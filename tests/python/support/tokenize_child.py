"""Tokenizes texts that took llama.cpp's process with them, one vocabulary after the other.

    python tokenize_child.py FOLDER CHARACTERS PRE...

Writes a line before each text and one after all, so that the parent sees which of them ended the process.
"""

from __future__ import annotations

import sys
from pathlib import Path

from mixedkv import Llama
from support import zoo

RUNS = ("a", "A", "7", "!", " ", "\n", "é", "中", "\u0301", "\u3000", "aB", "a b ", "!\n", " \n", "\u3000\n")


def main(folder: Path, n: int, names: list[str]) -> None:
    for name in names:
        path = zoo.write_byte_vocabulary(folder / f"{name}.gguf", name)
        with Llama(path, vocab_only=True, verbose=False) as llm:
            for run in RUNS:
                text = ("x" + (run * n)[: n - 2] + ".").encode()
                print(name, ascii(run), len(text), flush=True)
                tokens = llm.tokenize(text, add_bos=False)
                # one for each byte; "whitespace" has none for a space
                assert len(tokens) == len(text) or name == "whitespace"
        path.unlink()
    print("all", flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3:])
