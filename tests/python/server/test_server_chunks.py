"""`mixedkv serve --reuse chunks`: who may ask for it, what usage says, and what tenants see."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from mixedkv.bundled.corpus import make_recall
from support.patience import wait_for
from support.servers.server import MODEL, Server, key_file, running

pytestmark = pytest.mark.full

ANNA, BEN = "0123456789abcdef-anna", "0123456789abcdef-ben"
OPTIONS = ("--kv", "mixed:cold=q8_0", "--reuse", "chunks:repair=query,check=1")
DOCUMENTS = [" ".join(make_recall(64_000 + i, 14).journal) for i in range(3)]
PROMPT = f"{DOCUMENTS[2]} {DOCUMENTS[0]} {DOCUMENTS[1]} Question: What color is Mira's kite? Answer:"


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with running() as server:
        yield server


@pytest.fixture(scope="module")
def chunk_server() -> Iterator[Server]:
    with running(*OPTIONS) as server:
        yield server


def complete(server: Server, key: str = "", **options: Any) -> tuple[str, dict[str, Any]]:
    body = {"model": MODEL, "prompt": PROMPT, "temperature": 0, "max_tokens": 8, **options}
    answer = server.post("/v1/completions", body, key=key)
    return answer["choices"][0]["text"], answer["usage"]["prompt_tokens_details"]


def warm(server: Server, key: str = "") -> None:
    for document in DOCUMENTS:
        server.post("/v1/warm", {"prompt": document}, key=key)
    server.wait_until_idle(key)


@pytest.mark.nightly
def test_what_slid_is_no_passage() -> None:
    """Rows of the last turn, moved up: they are neither repaired nor checked."""
    words = [f"{word}{i}" for i, word in enumerate("\n".join(DOCUMENTS).split())]
    with running(*OPTIONS, "--overflow", "slide", "--n-ctx", "1024") as server:

        def n_tokens(n: int) -> int:
            return len(server.post("/tokenize", {"content": " ".join(words[:n])})["tokens"])

        n = next(n for n in range(40, len(words), 10) if n_tokens(n) > 900)
        usages = [complete(server, prompt=" ".join(words[:at]), max_tokens=1)[1] for at in (n, n + 60)]
        assert usages[1]["approximate_cached_tokens"] > 0
        assert "cached_repair" not in usages[1] or usages[1]["cached_repair"] is None
        server.wait_until_idle()
        assert server.stats()["store"]["chunks"]["waiting_to_be_checked"] == 0
        assert server.stats()["store"]["chunks"]["checked"] == 0


def test_passages_are_labelled_checked_and_one_tenants(tmp_path: Path) -> None:
    keys = str(key_file(tmp_path, f"anna:{ANNA}", f"ben:{BEN}"))
    with running(*OPTIONS, "--api-key-file", keys) as server:
        warm(server, ANNA)
        cold, others = complete(server, BEN)
        assert (others["cached_tokens"], others["cached_exact"]) == (0, True)
        assert "approximate_cached_tokens" not in others
        _, found = complete(server, ANNA)
        assert found["approximate_cached_tokens"] > 150
        assert found["cached_exact"] is False
        assert found["cached_tokens"] > 100  # the first document, which stands where it stood
        assert found["cached_repair"] == "query"
        text, exact = complete(server, ANNA, reuse="exact")
        assert exact["cached_exact"] is True
        assert "approximate_cached_tokens" not in exact
        assert text == cold
        wait_for(lambda: "mixedkv_chunk_checks_total 1.0" in server.metrics(key=ANNA))
        chunks, metrics = server.stats(ANNA)["store"]["chunks"], server.metrics(key=ANNA)
        assert (chunks["checked"], chunks["off"]) == (1, "")
        assert "mixedkv_chunk_reuse_off 0.0" in metrics
        assert f"mixedkv_approximate_cache_hits_total {found['approximate_cached_tokens']}.0" in metrics


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"reuse": "chunks"}, "start it with --reuse chunks"),
        ({"reuse": "magic"}, "reuse"),
        ({"reuse": "exact", "use_kv_cache": False}, "exclude each other"),
    ],
)
def test_what_is_refused(server: Server, options: dict[str, Any], match: str) -> None:
    body = {"model": MODEL, "prompt": "a", "max_tokens": 1, **options}
    status, answer, _ = server.request("POST", "/v1/completions", body)
    assert status == 400
    assert match in answer["error"]["message"]
    assert answer["error"]["param"] == "reuse"


@pytest.mark.nightly
def test_a_cache_that_cannot_is_refused_at_the_start() -> None:
    with pytest.raises(RuntimeError, match="fused attention"), running("--kv", "f16", *OPTIONS[2:]):
        pass


@pytest.mark.nightly
def test_how_passages_are_found_and_repaired_can_be_said(tmp_path: Path) -> None:
    options = "chunks:repair=query,check=1,chunk_size=32,ratio=.3,overlap_k=8"
    with running(*OPTIONS[:3], options) as server:
        warm(server)
        _, found = complete(server)
        assert found["approximate_cached_tokens"] > 0
        assert server.stats()["store"]["chunks"]["method"] == "query 30%"
    with pytest.raises(RuntimeError, match="32"), running(*OPTIONS[:3], "chunks:chunk_size=2"):
        pass


@pytest.mark.nightly
def test_a_request_says_how_its_passages_are_repaired() -> None:
    with running(*OPTIONS[:3], "chunks:repair=seam,check=0") as server:
        warm(server)

        def repaired(**chunks: Any) -> tuple[str, int]:
            _, found = complete(server, chunks=chunks)
            return found.get("cached_repair", ""), found.get("approximate_cached_tokens", 0)

        assert complete(server)[1]["cached_repair"] == "seam 16+16"
        kept = {
            share: repaired(repair="query", ratio=share)  # the prompt is in the context with other rows
            for share in (0.15, 0.5)
        }
        assert [name for name, _ in kept.values()] == ["query", "query 50%"]
        assert kept[0.5][1] < 0.7 * kept[0.15][1]
        assert repaired(overlap_k=4)[0] == "seam 4+4"
        assert repaired(chunk_size=64)[1] > 100
        assert repaired(chunk_size=300) == ("", 0)  # the beginning is exact, and no passage is long enough


@pytest.mark.parametrize(
    ("options", "param", "match"),
    [
        ({"chunks": {"repair": "magic"}}, "chunks.repair", "'query'"),
        ({"chunks": {"ratio": 2}}, "chunks.ratio", "less than or equal to 1"),
        ({"chunks": {"ratio": 0.5, "repair": "seam"}}, "chunks.ratio", "use cacheblend or query"),
        ({"chunks": {"overlap_k": 3, "repair": "none"}}, "chunks.overlap_k", "repair='none' has none"),
        ({"chunks": {"chunk_size": 32}}, "chunks.chunk_size", "from 64 to"),
        ({"chunks": {"boundary_window": 40}}, "chunks.boundary_window", "half of chunk_size"),
        ({"chunks": {}, "reuse": "exact"}, "chunks", "reuse='exact': leave one out"),
        ({"chunks": {}, "use_kv_cache": False}, "chunks", "reuse=False: leave one out"),
        ({"chunks": {}, "prompt_logprobs": 1}, "chunks", "leave one out"),
    ],
)
def test_what_a_request_cannot_ask_of_passages(
    chunk_server: Server, options: dict[str, Any], param: str, match: str
) -> None:
    body = {"model": MODEL, "prompt": "a", "max_tokens": 1, **options}
    status, answer, _ = chunk_server.request("POST", "/v1/completions", body)
    assert (status, answer["error"]["param"]) == (400, param), answer
    assert match in answer["error"]["message"]
