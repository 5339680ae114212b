"""`sparse="top_p:0.99"`: the share of the attention that the pages which decoding reads are to hold."""

from __future__ import annotations

_METHOD = "top_p:"


def normal_sparse(value: str) -> str:
    """Return the setting as it is written: "" or "top_p:" and a share.

    Raises:
        TypeError: it is no text.
        ValueError: it is another method, or no share above 0 and at most 1.
    """
    if not isinstance(value, str):
        raise TypeError(f"sparse={value!r}: use text such as 'top_p:0.99', or '' for none")
    text = value.strip().lower()
    if not text:
        return ""
    try:
        share = float(text.removeprefix(_METHOD)) if text.startswith(_METHOD) else 0.0
    except ValueError:
        share = 0.0
    if not 0 < share <= 1:
        raise ValueError(f"sparse={value}: use top_p:SHARE with a share above 0 and at most 1, as top_p:0.99")
    return f"{_METHOD}{share}"


def top_p_of(value: str) -> float:
    """Return the share of a setting that `normal_sparse` made, 0 for none."""
    return float(value.removeprefix(_METHOD)) if value else 0.0
