"""Tests of llama-server that `mixedkv serve` does not pass, and why."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

Kind = Literal["absent", "differs", "ours"]


@dataclass(frozen=True)
class Known:
    """Tests that fail for one reason.

    Attributes:
        kind: "absent" is not there on purpose, "differs" is another way on purpose, "ours" is to be mended.
        tests: `file::name`, or with `*` at the end all that begin so, of which one fails at least.
    """

    kind: Kind
    reason: str
    tests: tuple[str, ...]


FILES = (
    "test_basic",
    "test_chat_completion",
    "test_compat_anthropic",
    "test_compat_gcp",
    "test_compat_oai_responses",
    "test_completion",
    "test_ctx_shift",
    "test_embedding",
    "test_ignore_eos",
    "test_infill",
    "test_kv_keep_only_active",
    "test_lora",
    "test_mcp_servers",
    "test_metrics",
    "test_proxy",
    "test_rerank",
    "test_router",
    "test_security",
    "test_sleep",
    "test_slot_save",
    "test_speculative",
    "test_stream",
    "test_template",
    "test_tokenize",
    "test_tool_call",
    "test_tools_builtin",
    "test_vision_api",
)

EXCEPTIONS: tuple[Known, ...] = ()


def matches(name: str, test: str) -> bool:
    """Return whether an exception's name is that of a test."""
    return test.startswith(name[:-1]) if name.endswith("*") else test == name


def known(test: str) -> Known | None:
    """Return why a test fails, None if nobody knows."""
    return next((each for each in EXCEPTIONS if any(matches(name, test) for name in each.tests)), None)


def table() -> Iterator[str]:
    """Yield the lines of docs/features.md about them."""
    yield "| what the tests ask for | why not | tests |\n|---|---|---|"
    kinds = {"absent": "not there on purpose", "differs": "another way on purpose", "ours": "to be mended"}
    for kind, words in kinds.items():
        for each in (each for each in EXCEPTIONS if each.kind == kind):
            names = ", ".join(f"`{name}`" for name in each.tests)
            yield f"| {each.reason} | {words} | {names} |"
