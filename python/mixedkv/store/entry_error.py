"""The reasons why an entry cannot be used. Callers of the store see a miss with a reason instead."""

from __future__ import annotations

from typing import Literal, get_args

Reason = Literal[
    "unknown",  # nothing stored begins like these tokens
    "window",  # the stored entry lacks rows that a sliding window needs there
    "inexact",  # an exact restore was asked for, and only an inexact one is possible
    "missing",  # the file is gone
    "damaged",  # the file or its row in the index is not what was written
    "version",  # of another version of the format
    "identity",  # of another model, setting or tenant, or another entry
    "key",  # encrypted with another master key
    "tokens",  # the file has other tokens than the index says
    "wrong",  # evaluating its tokens again gives other rows
    "refused",  # the cache does not take it
    "index",  # the index cannot be read
]
REASONS: tuple[str, ...] = get_args(Reason)

EXPLAINED = {
    "unknown": "nothing stored begins like this",
    "window": "what is stored lacks rows of a sliding window there, or a recurrent state",
    "inexact": "what is stored is exact at another place only",
    "key": "what is stored is encrypted with another key",
    "index": "the index cannot be read",
}


class EntryError(Exception):
    """An entry that cannot be used; `reason` says in one word why, the message in a line."""

    def __init__(self, reason: Reason, message: str) -> None:
        super().__init__(message)
        self.reason: Reason = reason

    def __str__(self) -> str:
        return f"{self.reason}: {super().__str__()}"
