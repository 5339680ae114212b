"""Finds where the messages of a chat end in the tokens of its prompt, so that KV is found by their ids."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

from mixedkv.native.detokenizer import Detokenizer

_MOST_SEARCHED = 16  # times the text, as each message that the template changes is looked for in all of it


def message_ends(
    messages: Sequence[tuple[str, str]], text: str, tokens: Sequence[int], detokenizer: Detokenizer
) -> list[tuple[str, int]]:
    """Return the ids of messages, and how many tokens the prompt has up to the end of each message's text.

    Messages whose text the template changes are left out.

    Args:
        messages: ids and texts of the last messages of the chat; "" for one without an id.
        text: the prompt.
        tokens: the prompt's; others may come before them.
    """
    if not any(name for name, _ in messages):
        return []
    ends = []
    until = counted = len(text)
    n_behind, left = 0, _MOST_SEARCHED * len(text)  # bytes; characters that may be searched
    for name, content in reversed(messages):  # the newest message is certainly in the text
        content = content.strip()
        at = text.rfind(content, 0, until) if content and left > 0 else -1
        left -= until - max(at, 0)
        if at < 0:
            continue
        if name:
            end = at + len(content)
            n_behind, counted = n_behind + len(text[end:counted].encode()), end
            ends.append((name, n_behind))
        until = at
    return _tokens_up_to(ends, tokens, detokenizer)


def _tokens_up_to(
    ends: list[tuple[str, int]], tokens: Sequence[int], detokenizer: Detokenizer
) -> list[tuple[str, int]]:
    """Return the tokens up to the end of each message, given the bytes after it, ascending."""
    behind = accumulate(len(detokenizer.name(token)) for token in reversed(tokens))
    found = []
    n, n_bytes = len(tokens), 0
    for message_id, end in ends:
        while n_bytes < end and n > 0:
            n_bytes = next(behind)
            n -= 1
        if n_bytes > end:  # the message's last token continues after its end
            found.append((message_id, n + 1))
        else:
            found.append((message_id, n))
    return found[::-1]
