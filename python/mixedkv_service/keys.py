"""Reads and checks keys. Each key names a tenant; tenants share nothing."""

from __future__ import annotations

import hashlib
import hmac
import os
import re
import stat
from collections.abc import Callable
from pathlib import Path

from mixedkv.sessions.metadata import Quota
from mixedkv.store import Share
from mixedkv.work.turns import TenantLimits

_TENANT = re.compile(r"(?!.*\.\.)[A-Za-z0-9][A-Za-z0-9_.-]{0,63}")  # the store refuses ".."
_KEY = re.compile(r"[\x21-\x7e]{16,512}")
_MAX_KEYS = 10_000
_SESSIONS, _SESSION_MB = 1000, 100  # of a tenant whose line says nothing else
_NO_LIMITS = TenantLimits()


_LIMITS = {  # smallest and largest value
    "weight": (1, 1000),
    "running": (1, 1_000_000),
    "queued": (0, 1_000_000),
    "kept": (0, 1_000_000),
    "sessions": (0, 1_000_000),
    "session_mb": (0, 1_000_000),
    "disk_mb": (0, 100_000_000),
}
_ENGINE = ("weight", "running", "queued", "kept")


class Keys:
    """The keys and limits of all tenants; without any, everybody is the tenant ""."""

    def __init__(self, path: str = "") -> None:
        self._path = path
        self._tenants: list[tuple[bytes, str]] = []
        self._limits: dict[str, TenantLimits] = {}
        self._kept: dict[str, dict[str, int]] = {}  # limits on what is kept after an answer
        self._listeners: list[Callable[[], None]] = []

    def __bool__(self) -> bool:
        return bool(self._tenants)

    @classmethod
    def load(cls, path: str) -> Keys:
        """Read a file of lines `tenant:key`, and after that limits like `weight=3`; `#` starts a comment. A
        tenant may have several keys.

        Raises:
            ValueError: the file can be read by others than its owner, or a line is wrong; the message has no
                keys.
            OSError: the file cannot be read.
        """
        keys = cls(path)
        keys.reload()
        return keys

    @classmethod
    def of(cls, path: str, key: str) -> Keys:
        """Return the keys of a file, see `load`, or a single one, whose tenant is `default`, or none.

        Raises:
            ValueError, OSError: as `load`; or the single key is too short.
        """
        if not key:
            return cls.load(path) if path else cls()
        if not _KEY.fullmatch(key):
            raise ValueError(
                "api_key: use 16 to 512 printable characters without spaces; `openssl rand -hex 16` makes "
                "some"
            )
        keys = cls()
        keys._tenants = [(_digest(key.encode()), "default")]
        return keys

    def reload(self) -> None:
        """Read the file again. If that fails as in `load`, nothing changes."""
        if not self._path:
            return
        by_key, limits = _read(self._path)
        self._tenants = [(_digest(key.encode()), tenant) for key, tenant in by_key.items()]
        self._limits = {
            tenant: TenantLimits(**{name: value for name, value in given.items() if name in _ENGINE})
            for tenant, given in limits.items()
        }
        self._kept = limits
        for listener in self._listeners:
            listener()

    def when_reloaded(self, listener: Callable[[], None]) -> None:
        """Call a function each time the file was read again, on the thread that read it."""
        self._listeners.append(listener)

    def limits(self, tenant: str) -> TenantLimits:
        return self._limits.get(tenant, _NO_LIMITS)

    def session_quota(self, tenant: str) -> Quota:
        """Return the limits of a tenant's sessions."""
        given = self._kept.get(tenant, {})
        return Quota(given.get("sessions", _SESSIONS), given.get("session_mb", _SESSION_MB) * 10**6)

    def disk_share(self, tenant: str) -> Share:
        """Return a tenant's share of the store's folder."""
        given = self._kept.get(tenant, {})
        most = given["disk_mb"] * 10**6 if "disk_mb" in given else None
        return Share(weight=given.get("weight", 1), max_bytes=most)

    def has(self, tenant: str) -> bool:
        return tenant in {name for _, name in self._tenants} if self._tenants else not tenant

    def tenant(self, authorization: str | None, api_key: str | None = None) -> str | None:
        """Return the tenant whose key a request has, in its header `Authorization: Bearer` or else in
        `x-api-key`; None for no valid key. Takes the same time for every key.
        """
        if not self._tenants:
            return ""
        sent, found = _sent(authorization, api_key), None
        for digest, tenant in self._tenants:
            if hmac.compare_digest(digest, sent):
                found = tenant
        return found


class MetricsKey:
    """The key of /metrics, whose numbers are then by tenant."""

    def __init__(self, key: str) -> None:
        self._digest = _digest(key.encode())

    @classmethod
    def load(cls, path: str) -> MetricsKey:
        """Read the key from its file.

        Raises:
            ValueError: the file can be read by others than its owner, or does not have one key.
            OSError: the file cannot be read.
        """
        lines = _lines(path)
        if len(lines) != 1 or not _KEY.fullmatch(lines[0]):
            raise ValueError(f"{path}: write one key, of 16 to 512 printable characters without spaces")
        return cls(lines[0])

    def opens(self, authorization: str | None, api_key: str | None = None) -> bool:
        return hmac.compare_digest(self._digest, _sent(authorization, api_key))


def _read(path: str) -> tuple[dict[str, str], dict[str, dict[str, int]]]:
    """Read the tenant of each key, and the limits of each tenant that has some."""
    keys: dict[str, str] = {}
    limits: dict[str, dict[str, int]] = {}
    for number, line in enumerate(_lines(path), 1):
        if line.strip() and not line.lstrip().startswith("#"):
            where = f"{path}, line {number}"
            first, *rest = line.split()
            tenant, key = _parse(where, first)
            if key in keys:
                raise ValueError(f"{where}: this key is there already")
            keys[key] = tenant
            for text in rest:
                _add_limit(where, text, limits.setdefault(tenant, {}))
    if not 1 <= len(keys) <= _MAX_KEYS:
        raise ValueError(f"{path} has {len(keys)} keys: 1 to {_MAX_KEYS} are needed")
    return keys, limits


def _lines(path: str) -> list[str]:
    with Path(path).open(encoding="utf-8") as file:
        mode = os.fstat(file.fileno()).st_mode
        if mode & (stat.S_IRWXG | stat.S_IRWXO):
            raise ValueError(f"{path} can be read by others (mode {stat.S_IMODE(mode):o}): chmod 600 it")
        try:
            return file.read().splitlines()
        except UnicodeDecodeError:
            raise ValueError(f"{path} is not UTF-8 text") from None


def _parse(where: str, text: str) -> tuple[str, str]:
    tenant, colon, key = text.partition(":")
    if not (colon and _TENANT.fullmatch(tenant) and _KEY.fullmatch(key)):
        raise ValueError(
            f"{where}: write tenant:key. The tenant has letters, digits and _ . - but no .., "
            f"a key of 16 to 512 printable characters without spaces"
        )
    return tenant, key


def _add_limit(where: str, text: str, limits: dict[str, int]) -> None:
    name, _, value = text.partition("=")
    if name not in _LIMITS:
        raise ValueError(f"{where}: after tenant:key come limits, of {', '.join(_LIMITS)}, like weight=3")
    low, high = _LIMITS[name]
    if not (value.isascii() and value.isdigit() and len(value) < 10 and low <= int(value) <= high):
        raise ValueError(f"{where}: {name} is a whole number from {low} to {high}")
    if name in limits:
        raise ValueError(f"{where}: {name} is there already for this tenant")
    limits[name] = int(value)


def _sent(authorization: str | None, api_key: str | None) -> bytes:
    """Return the digest of the key that a request carries; nobody's without one."""
    scheme, _, key = (authorization or "").partition(" ")
    if scheme.lower() != "bearer":
        key = api_key or ""
    return _digest(key.strip().encode("utf-8", "surrogateescape"))


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()
