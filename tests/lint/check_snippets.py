"""Python of the pages has the types it says: mypy passes over it, as a user's editor would show it.

Run where mixedkv is installed. Pages are left out whose other packages are not, or say more than is true.
"""

from __future__ import annotations

import re
import sys
import tempfile
from pathlib import Path

from mypy import api

ROOT = Path(__file__).resolve().parents[2]
PAGES = [
    ROOT / "README.md",
    *(
        ROOT / "docs" / f"{name}.md"
        for name in ("quickstart", "choosing-a-cache", "python", "passages", "store", "streaming")
    ),
]
CONTINUED = ("python", "passages")  # each piece goes on where the one before it ended
WRONG = {  # what an editor has to show; if it does not, neither would it in a page
    'from mixedkv import Llama\nLlama("model.gguf", n_cxt=512)\n': "n_cxt",
    'from mixedkv import Llama\nLlama("model.gguf")("Hello", max_token=8)\n': "max_token",
    'from mixedkv import Llama\nprint(Llama("model.gguf")("Hi", stream=True)["choices"])\n': "not indexable",
}


def write_snippets(folder: Path) -> list[Path]:
    """Write each piece of Python of the pages into a file of its own."""
    files = []
    for page in PAGES:
        pieces = re.findall(r"^```python\n(.*?)^```", page.read_text("utf-8"), re.M | re.S)
        for i, piece in enumerate(["\n".join(pieces)] if page.stem in CONTINUED else pieces):
            files.append(folder / f"{page.stem.replace('-', '_')}_{i}.py")
            files[-1].write_text(piece, "utf-8")
    return files


def check(*files: Path) -> str:
    """Return what mypy finds wrong."""
    options = ["--config-file=", "--ignore-missing-imports", "--no-error-summary", "--cache-dir=/dev/null"]
    return api.run([*options, *map(str, files)])[0]


def main() -> int:
    with tempfile.TemporaryDirectory() as folder:
        for i, (text, said) in enumerate(WRONG.items()):
            wrong = Path(folder) / f"wrong_{i}.py"
            wrong.write_text(text)
            if said not in check(wrong):
                print(f"snippets: mypy does not see what is wrong with\n{text}")
                return 1
        files = write_snippets(Path(folder))
        if found := check(*files):
            print(found.replace(f"{folder}/", ""))
            return 1
    print(f"snippets: {len(files)} have the types they say")
    return 0


if __name__ == "__main__":
    sys.exit(main())
