"""Makes docs/features.md: which features work together, found out by using both.

PYTHONPATH=tests/python python docs/tools/feature_table.py > docs/features.md
"""

from __future__ import annotations

import ast
import tempfile
from collections.abc import Iterator
from pathlib import Path

from mixedkv_server.settings import ServerSettings
from support import TESTS
from support.clients.llama_server.exceptions import table
from support.engine.feature_cross import FEATURES, Table, pairs

_HEAD = """# Features together

Which features can be used at the same time. `PYTHONPATH=tests/python python docs/tools/feature_table.py
> docs/features.md` makes this page by using every two of them in one engine, on tiny models; a test compares.

| cell | means |
|---|---|
| yes | both take effect; what is labelled exact is what an engine answers without its silent features |
| no | refused, or without effect, for the reason below |
| | they exclude each other: two kinds of cache, or of model |

| feature | is | silent |
|---|---|---|"""

# What one engine alone does not show, and the tests that do.
ELSEWHERE: dict[str, str] = {
    "Streaming, with Ctrl-C, a file that becomes shorter, and several answers": "streaming/test_streaming.py",
    "Sessions over HTTP, after a restart, of several tenants": "server/test_server_sessions.py",
    "Chunks over HTTP, beside exact requests": "server/test_server_chunks.py",
    "Images over HTTP, from the store": "server/test_server_images.py",
    "A remote store that fails, beside answers": "engine/test_remote_faults.py",
    "Encrypted stores, rekeyed while in use": "store/test_store_encryption.py",
    "Drafts of a draft model": "engine/test_draft_model.py",
    "Drafts of MTP layers": "engine/test_mtp.py",
    "Drafts on hybrid models, taken back": "engine/test_speculation_hybrid.py",
    "Chats that slide, stored and found again": "engine/test_overflow.py",
    "Checkpoints of hybrid models and sliding windows, in an engine": "engine/test_engine_checkpoints.py",
    "Embeddings beside answers": "server/test_server_embeddings.py",
    "Split models: sessions, restarts, several clients": "split/test_split_sessions_on_disk.py",
    "LoRA adapters as models of a server": "server/test_server_models.py",
    "Several models, each a process that starts on demand and leaves unused": "server/test_server_router.py",
    "Every operation on a cache with every other, and with faults": "kv/test_crossing.py",
}

_OF_LLAMA_SERVER = """
## llama-server's own tests

llama.cpp has tests of llama-server in Python. `PYTHONPATH=tests/python python -m
support.clients.llama_server.suite` takes them from the archive that the build fetches. It puts
`mixedkv serve` in llama-server's place and small models in those of the Hub, and runs them, as the nightly
tests do.
Those that fail are these. Where another one fails, or one of these passes, the nightly tests fail.
"""

# What `mixedkv serve` refuses before it loads anything.
REFUSED: tuple[dict[str, object], ...] = (
    {"speculation": "mtp", "memory": "1GiB"},
    {"speculation": "draft-model"},
    {"store_key_file": "key"},
)


def missing() -> list[str]:
    """Test files that the page names and that have no tests."""
    return [
        name
        for name in ELSEWHERE.values()
        if not (TESTS / name).exists()
        or not any(
            isinstance(node, ast.FunctionDef) and node.name.startswith("test_")
            for node in ast.walk(ast.parse((TESTS / name).read_text()))
        )
    ]


def page(folder: Path) -> Iterator[str]:
    """Raises AssertionError where two features say that they work together and do not."""
    table = Table(folder)
    found = {pair: table.cell(*pair) for pair in pairs()}
    yield _HEAD
    yield from (
        f"| {name} | {feature.what} | {'yes' if feature.silent else ''} |"
        for name, feature in FEATURES.items()
    )
    names = list(FEATURES)
    yield f"\n| | {' | '.join(names[:-1])} |"
    yield "|---|" + "---|" * (len(names) - 1)
    reasons: list[str] = []
    for i, a in enumerate(names[1:], 1):
        cells = []
        for b in names[:i]:
            reason = found[a, b]
            if reason and FEATURES[a].group and FEATURES[a].group == FEATURES[b].group:
                cells.append("")
                continue
            if reason and reason not in reasons:
                reasons.append(reason)
            cells.append(f"no ({reasons.index(reason) + 1})" if reason else "yes")
        yield f"| {a} | {' | '.join(cells)} |{' |' * (len(names) - 1 - i)}"
    yield "\nWhy not, in the words of the errors:\n"
    yield from (f"{i}. {reason}" for i, reason in enumerate(reasons, 1))
    yield from without_models()


def without_models() -> Iterator[str]:
    """The page's last sections, which need no engine to be made."""
    yield "\n## What a server refuses\n\n| asked for | answer |\n|---|---|"
    for given in REFUSED:
        asked = " ".join(f"{name}={value}" for name, value in given.items())
        yield f"| `{asked}` | {_refusal(given)} |"
    yield _OF_LLAMA_SERVER
    yield from table()
    yield "\n## Tested elsewhere\n\n| what | by |\n|---|---|"
    yield from (f"| {what} | `tests/python/{name}` |" for what, name in ELSEWHERE.items())


def _refusal(given: dict[str, object]) -> str:
    try:
        ServerSettings.load(given, environ={})
    except ValueError as error:
        return str(error)
    raise AssertionError(f"a server takes {given}")


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        print("\n".join(page(Path(folder))))
