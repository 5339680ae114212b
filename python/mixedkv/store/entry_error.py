"""Why an entry cannot be used. Inside the store only: outside, it is a miss with a reason."""

from __future__ import annotations

from typing import Literal, get_args

Reason = Literal[
    "unknown",  # nothing stored begins like these tokens
    "window",  # what is stored lacks rows that a sliding window needs at that place
    "inexact",  # an exact restore was asked for
    "missing",  # the file is gone
    "damaged",  # the file or its row in the index is not what was written
    "version",  # of another version of the format
    "identity",  # of another model, setting or tenant, or another entry
    "key",  # encrypted with another master key
    "tokens",  # stored tokens are others than the index says
    "wrong",  # its rows are not what evaluating its tokens again gives
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
