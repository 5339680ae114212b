"""Finds where the messages of a chat end in its prompt, for those that have a `message_id`."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

from mixedkv.engine.text.detokenizer import Detokenizer
from mixedkv.server.api.chat_message import Message


def message_ends(
    messages: Sequence[Message], text: str, tokens: Sequence[int], detokenizer: Detokenizer
) -> list[tuple[str, int]]:
    """Return the ids of messages, and how many tokens the prompt has up to the end of each message's text.

    Messages whose text the template changes are left out.

    Args:
        messages: the last messages of the chat.
        text: the prompt.
        tokens: the prompt's; others may come before them.
    """
    if not any(message.message_id for message in messages):
        return []
    ends = []
    until = len(text)
    for message in reversed(messages):  # the newest message is certainly in the text
        content = message.text.strip()
        at = text.rfind(content, 0, until) if content else -1
        if at < 0:
            continue
        if message.message_id:
            ends.append((message.message_id, len(text[at + len(content) :].encode())))
        until = at
    return _tokens_up_to(ends, tokens, detokenizer)


def _tokens_up_to(
    ends: list[tuple[str, int]], tokens: Sequence[int], detokenizer: Detokenizer
) -> list[tuple[str, int]]:
    """Return the tokens up to the end of each message, given the bytes after it, ascending."""
    behind = accumulate(len(detokenizer.name(token)) for token in reversed(tokens))
    found = []
    n, n_bytes = len(tokens), 0
    for message_id, wanted in ends:
        while n_bytes < wanted and n > 0:
            n_bytes = next(behind)
            n -= 1
        if n_bytes > wanted:  # the message's last token continues after its end
            found.append((message_id, n + 1))
        else:
            found.append((message_id, n))
    return found[::-1]
