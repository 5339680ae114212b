"""Certificates for TLS between processes of one machine."""

from __future__ import annotations

import datetime
import ipaddress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

_DAY = datetime.timedelta(days=1)


@dataclass(frozen=True)
class Certificate:
    cert: Path
    key: Path


class Authority:
    """Signs certificates for 127.0.0.1; `cert` is the file that others know it by."""

    def __init__(self, folder: Path, name: str = "authority") -> None:
        self._folder, self._name, self._key = folder, _name(name), ec.generate_private_key(ec.SECP256R1())
        rules = x509.BasicConstraints(ca=True, path_length=0)
        builder = _builder(self._name, self._name, self._key, _DAY).add_extension(rules, critical=True)
        self.cert = folder / f"{name}.pem"
        self.cert.write_bytes(builder.sign(self._key, hashes.SHA256()).public_bytes(_PEM))

    def sign(self, name: str, valid: datetime.timedelta = _DAY) -> Certificate:
        """Valid since two days ago, until `valid` from now."""
        key = ec.generate_private_key(ec.SECP256R1())
        address = x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address("127.0.0.1"))])
        builder = _builder(_name(name), self._name, key, valid).add_extension(address, critical=False)
        paths = Certificate(self._folder / f"{name}.cert.pem", self._folder / f"{name}.key.pem")
        paths.cert.write_bytes(builder.sign(self._key, hashes.SHA256()).public_bytes(_PEM))
        form, open_key = serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        paths.key.write_bytes(key.private_bytes(_PEM, form, open_key))
        return paths


_PEM = serialization.Encoding.PEM


def _name(text: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, text)])


def _builder(subject: x509.Name, issuer: x509.Name, key: Any, valid: datetime.timedelta) -> Any:
    now = datetime.datetime.now(datetime.timezone.utc)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - 2 * _DAY)
        .not_valid_after(now + valid)
    )
