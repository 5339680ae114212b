"""From tokens to text: what is held back, and what is released."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mixedkv.native.detokenizer import TextStream

pytestmark = pytest.mark.core


@given(
    st.text(alphabet="ab\u00e9\U0001f600", max_size=30),
    st.lists(st.text("ab\u00e9", min_size=1, max_size=4), max_size=3),
    st.data(),
)
def test_text_does_not_depend_on_where_tokens_end(text: str, stops: list[str], data: st.DataObject) -> None:
    encoded = text.encode()
    cuts = sorted(data.draw(st.lists(st.integers(0, len(encoded)), max_size=10)))
    pieces = [encoded[a:b] for a, b in zip([0, *cuts], [*cuts, len(encoded)], strict=True)]
    stream, released = TextStream(stops), []
    for piece in pieces:
        released.append(stream.feed(piece))
        if stream.stopped:
            break
    released.append(stream.finish())
    # the first stop string to be complete ends the text; of those complete at the same byte, the earliest
    ends = [encoded[:i].decode(errors="ignore") for i in cuts] + [text]
    expected = text
    for prefix in ends:
        found = [prefix.find(stop) for stop in stops if stop in prefix]
        if found:
            expected = prefix[: min(found)]
            break
    assert "".join(released) == expected


def test_what_may_become_a_stop_string_is_held_back() -> None:
    stream = TextStream(["STOP"])
    assert [stream.feed(piece) for piece in (b"a ST", b"AR ST", b"O")] == ["a ", "STAR ", ""]
    assert stream.finish() == "STO"


def test_an_unfinished_character_is_replaced_at_the_end_only() -> None:
    stream = TextStream()
    assert stream.feed(b"a\xf0\x9f") == "a"
    assert stream.finish() == "\ufffd"
