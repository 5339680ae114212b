"""Bearer keys. Each names a tenant; tenants share nothing."""

from __future__ import annotations

import hashlib
import hmac
import os
import re
import stat
from pathlib import Path

_TENANT = re.compile(r"(?!.*\.\.)[A-Za-z0-9][A-Za-z0-9_.-]{0,63}")  # the store refuses ".."
_KEY = re.compile(r"[\x21-\x7e]{16,512}")
_MAX_KEYS = 10_000


class Keys:
    """The keys of all tenants; without any, everybody is the tenant ""."""

    def __init__(self, by_key: dict[str, str] | None = None) -> None:
        self._tenants = [(_digest(key.encode()), tenant) for key, tenant in (by_key or {}).items()]

    def __bool__(self) -> bool:
        return bool(self._tenants)

    @classmethod
    def load(cls, path: str) -> Keys:
        """Read a file of `tenant:key` lines; `#` starts a comment line. A tenant may have several keys.

        Raises:
            ValueError: others than the owner can read the file, or a line is wrong; keys are not repeated.
            OSError: the file cannot be read.
        """
        with Path(path).open(encoding="utf-8") as file:
            mode = os.fstat(file.fileno()).st_mode
            if mode & (stat.S_IRWXG | stat.S_IRWXO):
                raise ValueError(f"{path} can be read by others (mode {stat.S_IMODE(mode):o}): chmod 600 it")
            try:
                lines = file.read().splitlines()
            except UnicodeDecodeError:
                raise ValueError(f"{path} is not UTF-8 text") from None
        keys: dict[str, str] = {}
        for number, line in enumerate(lines, 1):
            if line.strip() and not line.lstrip().startswith("#"):
                tenant, key = _parse(path, number, line)
                if key in keys:
                    raise ValueError(f"{path}, line {number}: this key is there already")
                keys[key] = tenant
        if not 1 <= len(keys) <= _MAX_KEYS:
            raise ValueError(f"{path} has {len(keys)} keys: 1 to {_MAX_KEYS} are needed")
        return cls(keys)

    def tenant(self, authorization: str | None) -> str | None:
        """Whose key an Authorization header carries; None if nobody's. Takes the same time for every key."""
        if not self._tenants:
            return ""
        scheme, _, key = (authorization or "").partition(" ")
        wanted = _digest(key.strip().encode("utf-8", "surrogateescape"))
        found = None
        for digest, tenant in self._tenants:
            if hmac.compare_digest(digest, wanted):
                found = tenant
        return found if scheme.lower() == "bearer" else None


def _parse(path: str, number: int, line: str) -> tuple[str, str]:
    tenant, colon, key = line.strip().partition(":")
    if not (colon and _TENANT.fullmatch(tenant) and _KEY.fullmatch(key)):
        raise ValueError(
            f"{path}, line {number}: write tenant:key, a tenant of letters, digits and _ . - without .., "
            f"a key of 16 to 512 printable characters without spaces"
        )
    return tenant, key


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()
