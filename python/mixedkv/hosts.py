"""Addresses of hosts, for what listens and for what connects."""

from __future__ import annotations

import ipaddress


def is_local(host: str) -> bool:
    """Return whether an address can be reached from this machine only."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
