"""Options of the server that former releases had, and what says the same now; "" is nothing."""

from __future__ import annotations

GONE = {
    "temp": "sampling temperature=T",
    "top_k": "sampling top_k=K",
    "top_p": "sampling top_p=P",
    "min_p": "sampling min_p=P",
    "repeat_penalty": "sampling repeat_penalty=X",
    "seed": "sampling seed=N",
    "chat_template": "chat_format FILE, or NAME of a format",
    "chunks": "reuse chunks:NAME=X,...",
    "draft_model": "speculation FILE",
    "cors_origin": "allow URL",
    "allowed_host": "allow NAME",
    "kv_events_topic": "kv_events URL#TOPIC",
    "warm_text": 'warm FILE, with a line {"prompt": TEXT}',
    "max_sessions": "api_key_file FILE, in which a tenant's line has sessions=N",
    "max_sessions_mb": "api_key_file FILE, in which a tenant's line has session_mb=X",
    "max_checkpoint_gb": "",
}


def instead_of(field: str, given: str) -> str:
    """Return what is said of an option that has gone, "" for any other.

    Args:
        given: how it was named: as an option, a variable or a line of a file.
    """
    if field not in GONE:
        return ""
    name, _, value = GONE[field].partition(" ")
    what = f"write --{name.replace('_', '-')} {value}" if name else "leave it out"
    return f"there is no {given}: {what}"
