"""TLS and Unix sockets, with real clients."""

from __future__ import annotations

import datetime
import ipaddress
import signal
import socket
import ssl
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from mixedkv_server.settings import ServerSettings
from mixedkv_service.tls import TLS
from support.patience import PATIENCE, wait_for
from support.servers.server import MODEL, Server, running

pytestmark = pytest.mark.full

PROMPT: dict[str, Any] = {"model": MODEL, "prompt": "The code of the", "max_tokens": 4, "temperature": 0}


def write_certificate(folder: Path, serial: int, password: bytes = b"") -> tuple[Path, Path]:
    """For 127.0.0.1, signed by itself."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "localhost")])
    now = datetime.datetime.now(datetime.timezone.utc)
    address = x509.IPAddress(ipaddress.ip_address("127.0.0.1"))
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(serial)
        .not_valid_before(now - datetime.timedelta(days=1))
        .not_valid_after(now + datetime.timedelta(days=1))
        .add_extension(x509.SubjectAlternativeName([address]), critical=False)
        .sign(key, hashes.SHA256())
    )
    cert, pem = folder / "cert.pem", folder / "key.pem"
    cert.write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
    how = serialization.BestAvailableEncryption(password) if password else serialization.NoEncryption()
    pem.write_bytes(key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, how))
    return cert, pem


def serial_of(server: Server) -> int:
    """Of the certificate that a new connection gets."""
    text = ssl.get_server_certificate(("127.0.0.1", server.port), timeout=PATIENCE)
    return x509.load_pem_x509_certificate(text.encode()).serial_number


@pytest.fixture
def tls_server(tmp_path: Path) -> Iterator[Server]:
    cert, key = write_certificate(tmp_path, 7)
    server = Server("--tls-cert", str(cert), "--tls-key", str(key))
    server.tls = ssl.create_default_context(cafile=str(cert))
    try:
        yield server.wait_until_ready()
    finally:
        server.stop(signal.SIGKILL)


def test_a_client_that_trusts_the_certificate_is_served(tls_server: Server) -> None:
    assert tls_server.url.startswith("https://")
    with httpx.Client(verify=tls_server.tls) as trusting:
        client = openai.OpenAI(base_url=f"{tls_server.url}/v1", api_key="unused", http_client=trusting)
        pieces = list(client.completions.create(**PROMPT, stream=True))
        assert pieces
        whole = client.completions.create(**PROMPT)
    assert "".join(piece.choices[0].text for piece in pieces) == whole.choices[0].text


@pytest.mark.filterwarnings("ignore:ssl.TLSVersion")  # it is deprecated: that is the point
def test_others_are_not(tls_server: Server) -> None:
    with pytest.raises(httpx.ConnectError, match="certificate"):
        httpx.get(f"{tls_server.url}/health", timeout=PATIENCE)
    with pytest.raises(httpx.TransportError):
        httpx.get(f"http://127.0.0.1:{tls_server.port}/health", timeout=PATIENCE)
    with socket.create_connection(("127.0.0.1", tls_server.port), PATIENCE) as silent:
        silent.sendall(b"\x16\x03\x01 no handshake")
        assert tls_server.status("GET", "/health") == 200
    old = ssl.create_default_context()
    old.check_hostname, old.verify_mode = False, ssl.CERT_NONE
    old.maximum_version = ssl.TLSVersion.TLSv1_1
    refused = pytest.raises((ssl.SSLError, ConnectionError))
    with socket.create_connection(("127.0.0.1", tls_server.port), PATIENCE) as plain, refused:
        old.wrap_socket(plain)
    assert "Traceback" not in tls_server.log


def test_a_renewed_certificate_is_taken_at_sighup(tls_server: Server, tmp_path: Path) -> None:
    assert serial_of(tls_server) == 7
    (tmp_path / "key.pem").write_text("no key")
    tls_server.process.send_signal(signal.SIGHUP)
    wait_for(lambda: "certificate: as before" in tls_server.log)
    assert serial_of(tls_server) == 7
    write_certificate(tmp_path, 8)
    tls_server.process.send_signal(signal.SIGHUP)
    wait_for(lambda: serial_of(tls_server) == 8)


def refusal(*options: str) -> str:
    command = [sys.executable, "-m", "mixedkv", "serve", "--port", "0", *options]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=PATIENCE, stdin=subprocess.DEVNULL, check=False
    )
    assert done.returncode != 0
    assert "Traceback" not in done.stderr
    return done.stderr


@pytest.mark.nightly
def test_what_cannot_be_served_says_why(tmp_path: Path) -> None:
    assert "--tls-cert and --tls-key go together" in refusal("--tls-cert", "x")
    assert "a Unix socket needs no TLS" in refusal("--tls-cert", "x", "--tls-key", "y", "--host", "./z")
    cert, key = (str(path) for path in write_certificate(tmp_path, 1))
    with pytest.raises(ValueError, match=r"missing\.pem: No such file"):
        TLS(cert, str(tmp_path / "missing.pem"))
    with pytest.raises(ValueError, match="give a PEM certificate and its key"):
        TLS(key, key)
    (tmp_path / "other").mkdir()
    _, other = write_certificate(tmp_path / "other", 2)
    with pytest.raises(ValueError, match=r"(?i)mismatch.*give a PEM certificate and its key"):
        TLS(cert, str(other))
    _, locked = write_certificate(tmp_path / "other", 2, password=b"secret")
    with pytest.raises(ValueError, match="has a password: give a key without"):
        TLS(cert, str(locked))


def test_a_unix_socket_serves_its_owner(tmp_path: Path) -> None:
    path = tmp_path / "s"
    with socket.socket(socket.AF_UNIX) as left_behind:  # by a server that was killed
        left_behind.bind(str(path))
    server = Server("--host", str(path))
    try:
        with httpx.Client(transport=httpx.HTTPTransport(uds=str(path)), base_url="http://any.name") as client:
            wait_for(lambda: " on unix:" in server.log or server.process.poll() is not None)
            wait_for(lambda: _ready(client))
            assert stat.S_IMODE(path.stat().st_mode) == 0o600
            answer = client.post("/v1/completions", json=PROMPT, timeout=PATIENCE)
            assert answer.json()["usage"]["completion_tokens"] > 0
        assert "another process listens there" in refusal("--host", str(path))
        assert server.stop() == 0
        assert not path.exists()
    finally:
        server.stop(signal.SIGKILL)


def _ready(client: httpx.Client) -> bool:
    try:
        return client.get("/ready").status_code == 200
    except httpx.TransportError:
        return False


@pytest.mark.nightly
def test_a_path_that_is_taken_or_too_long_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    assert "there is a file of that name" in refusal("--host", str(tmp_path / "file"))
    assert (tmp_path / "file").read_text() == "mine"
    assert "cannot be listened on" in refusal("--host", str(tmp_path / ("x" * 120)))


# --- a path before all others ---


@pytest.mark.nightly
def test_a_root_path_is_served_with_and_without() -> None:
    with running("--n-ctx", "512", "--root-path", "/llm/a") as server:
        for root in ("/llm/a", ""):
            assert server.status("GET", f"{root}/health") == 200
            body = {"prompt": "a", "max_tokens": 1}
            assert server.post(f"{root}/v1/completions", body)["object"] == "text_completion"
            assert server.status("GET", f"{root}/v1/nothing") == 404
            assert server.status("GET", f"{root}/") == 200
        assert server.status("GET", "/llm/health") == 404
        assert server.status("GET", "/llm/abc/health") == 404
        assert server.request("GET", "/llm/a/openapi.json")[1]["servers"] == [{"url": "/llm/a"}]
        routes = server.metrics()
        assert 'path="/v1/completions",status="200"' in routes
        assert "llm" not in routes


@pytest.mark.parametrize("path", ["llm", "/", "/llm/", "/l m", "//llm", "/../x?"])
def test_a_root_path_that_is_none_is_refused(path: str) -> None:
    with pytest.raises(ValueError, match="begin with a slash"):
        ServerSettings.load({"root_path": path}, environ={})
