"""What notebooks show: well formed, escaped, without scripts, of closed objects too."""

from __future__ import annotations

from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from mixedkv import Llama
from mixedkv.bundled import model_path
from mixedkv.card import bar, card
from mixedkv.engine import Engine, PromptCache
from mixedkv.store import KVStore

OPTIONS: dict[str, Any] = {"n_ctx": 1024, "n_threads": 1, "verbose": False}
HOSTILE = '<script>alert("1")</script>&'


class _Page(HTMLParser):
    """Tags that are open, and all texts."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[str] = []
        self.text = ""
        self.feed(html)
        assert not self.open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        assert not any(name.startswith("on") for name, _ in attrs)
        self.open.append(tag)
        self.tags.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data + "\n"


def page(shown: Any) -> _Page:
    found = _Page(shown._repr_html_())
    assert "script" not in found.tags
    return found


def test_texts_are_escaped() -> None:
    found = _Page(card(HOSTILE, [(HOSTILE, HOSTILE)], bar([(HOSTILE, 1, "red")], 2, HOSTILE)))
    assert found.text.count(HOSTILE) == 4
    assert "script" not in found.tags


def test_a_model_and_its_cache(tmp_path: Path) -> None:
    path = tmp_path / "<b>.gguf"
    path.symlink_to(model_path())
    with Llama(path, kv="mixed:threshold=64,group=16", **OPTIONS) as llm:
        llm.eval(list(range(10, 310)))
        stats = llm.kv.stats()
        found = page(llm)
        assert str(path) in found.text
        assert stats.kv in found.text
        assert f"sequence 0: 300 tokens, {stats.sequences[0].n_hot} of them F16" in found.text
        assert page(llm.kv).text == page(stats).text
        widths = [part.split("%")[0] for part in stats._repr_html_().split("width:")[1:] if "%" in part[:8]]
        assert sum(map(float, widths)) == pytest.approx(100 * 300 / 1024, abs=0.1)
    assert "closed" in page(llm).text
    with Llama(model_path(), kv="f16", **OPTIONS) as plain:
        plain.eval([1, 2, 3])
        assert "sequence 0: 3 tokens" in page(plain).text


def test_an_engine_and_a_store(tmp_path: Path) -> None:
    with Llama(model_path(), n_seq_max=8, kv_unified=True, **OPTIONS) as llm:
        with PromptCache(llm, KVStore(tmp_path / "kv"), parallel=2) as cache:
            cache.generate("Once upon a time", max_tokens=4)
            text = page(cache).text
            assert str(tmp_path / "kv") in text
            assert "2 answers at a time" in text
            assert "sequence 0: " in text
        with Engine(llm, parallel=2) as engine:
            assert "running" in page(engine).text
        assert "closed" in page(engine).text
