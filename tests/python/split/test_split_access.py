"""TLS, certificates of clients, keys, health and reflection; and who must stay outside."""

from __future__ import annotations

import contextlib
import datetime
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from mixedkv_service.keys import Keys
from mixedkv_split import split_pb2 as pb
from mixedkv_split import wire
from mixedkv_split.client import SplitClient, SplitServerError, tls
from mixedkv_split.export import Exported
from mixedkv_split.head import Head
from mixedkv_split.server import read_credentials
from mixedkv_split.split_settings import SplitSettings
from support.patience import PATIENCE, wait_for
from support.servers import split_servers
from support.servers.certificates import Authority, Certificate

pytestmark = pytest.mark.full

_KEY = "anna-has-this-key-0"
Code = grpc.StatusCode


@pytest.fixture(scope="module")
def authority(folder: Path) -> Authority:
    return Authority(folder)


@contextmanager
def _serving(parts: Exported, certificate: Certificate, ca: Path | None = None) -> Iterator[str]:
    settings = SplitSettings(
        body=str(parts.body),
        tls_cert=str(certificate.cert),
        tls_key=str(certificate.key),
        client_ca=str(ca or ""),
    )
    with split_servers.running(parts.body, credentials=read_credentials(settings)) as server:
        yield server.address


def _answers(head: Head, address: str, credentials: grpc.ChannelCredentials | None) -> bool:
    with SplitClient(head, address, credentials=credentials) as client:
        return bool(list(client.generate("the rain", max_tokens=4, temperature=0)))


def _code(head: Head, address: str, credentials: grpc.ChannelCredentials | None) -> Code:
    with pytest.raises(grpc.RpcError) as refused:
        _answers(head, address, credentials)
    return refused.value.code()


def test_tls(parts: Exported, head: Head, authority: Authority, folder: Path) -> None:
    with _serving(parts, authority.sign("server")) as address:
        assert _answers(head, address, tls(str(authority.cert)))
        assert _code(head, address, None) == Code.UNAVAILABLE
        stranger = Authority(folder, "stranger")
        assert _code(head, address, tls(str(stranger.cert))) == Code.UNAVAILABLE


def test_clients_with_certificates(parts: Exported, head: Head, authority: Authority, folder: Path) -> None:
    mine = authority.sign("client")
    ca = str(authority.cert)
    with _serving(parts, authority.sign("server"), authority.cert) as address:
        assert _answers(head, address, tls(ca, str(mine.cert), str(mine.key)))
        assert _code(head, address, tls(ca)) == Code.UNAVAILABLE
        others = Authority(folder, "other").sign("others-client")
        assert _code(head, address, tls(ca, str(others.cert), str(others.key))) == Code.UNAVAILABLE
        old = authority.sign("old-client", valid=-datetime.timedelta(days=1))
        assert _code(head, address, tls(ca, str(old.cert), str(old.key))) == Code.UNAVAILABLE


def test_an_expired_certificate_of_the_server(parts: Exported, head: Head, authority: Authority) -> None:
    with _serving(parts, authority.sign("old-server", valid=-datetime.timedelta(days=1))) as address:
        assert _code(head, address, tls(str(authority.cert))) == Code.UNAVAILABLE


def test_keys(parts: Exported, head: Head, folder: Path) -> None:
    path = folder / "keys"
    path.write_text(f"anna:{_KEY}\n")
    path.chmod(0o600)
    with split_servers.running(parts.body, keys=Keys.load(str(path))) as server:
        with SplitClient(head, server.address, key=_KEY) as client:
            assert list(client.generate("the rain", max_tokens=4, temperature=0))
        for key in ("", "nobody-has-this-key"):
            with pytest.raises(grpc.RpcError) as refused:
                SplitClient(head, server.address, key=key)
            assert refused.value.code() == Code.UNAUTHENTICATED


def test_a_key_does_not_travel_in_the_open(head: Head) -> None:
    with pytest.raises(ValueError, match="key: give credentials"):
        SplitClient(head, "203.0.113.1:50051", key=_KEY)


def test_another_models_head_or_version_is_told(parts: Exported, head: Head, folder: Path) -> None:
    other = split_servers.split(split_servers.write("qwen3", folder), folder)
    with split_servers.running(parts.body) as server:
        with (
            Head(other.head, n_threads=1) as others,
            pytest.raises(ValueError, match="body of another model: use the head"),
        ):
            SplitClient(others, server.address)
        with grpc.insecure_channel(server.address) as channel:
            stub: Any = wire.Stub(channel)
            with pytest.raises(grpc.RpcError) as refused:
                stub.Describe(pb.DescribeRequest(version=2, pair=head.pair))
        assert refused.value.code() == Code.UNIMPLEMENTED


def test_more_streams_than_a_tenant_may_have(parts: Exported, head: Head) -> None:
    with (
        split_servers.running(parts.body, max_streams=2) as server,
        SplitClient(head, server.address, patience=0.0) as client,
    ):
        open_streams = [client.session() for _ in range(2)]
        for session in open_streams:
            next(session.generate_tokens([3, 4], max_tokens=9, temperature=0))
        with pytest.raises(grpc.RpcError) as refused:
            list(client.generate("the rain", max_tokens=4))
        assert refused.value.code() == Code.RESOURCE_EXHAUSTED
        open_streams[0].close()

        def is_room() -> bool:  # the server sees a moment later that it was closed
            with contextlib.suppress(grpc.RpcError):
                return bool(list(client.generate("the rain", max_tokens=4, temperature=0)))
            return False

        wait_for(is_room)
        open_streams[1].close()


def test_a_client_that_sends_nothing_is_let_go(parts: Exported) -> None:
    silence = threading.Event()

    def nothing() -> Iterator[pb.Vectors]:
        silence.wait(PATIENCE)
        return
        yield

    with (
        split_servers.running(parts.body, idle_timeout=0.2) as server,
        grpc.insecure_channel(server.address) as channel,
    ):
        stub: Any = wire.Stub(channel)
        with pytest.raises(grpc.RpcError) as refused:
            next(stub.Evaluate(nothing()))
        silence.set()
        assert refused.value.code() == Code.DEADLINE_EXCEEDED


def test_health(parts: Exported) -> None:
    with split_servers.running(parts.body) as server, grpc.insecure_channel(server.address) as channel:
        stub: Any = health_pb2_grpc.HealthStub(channel)
        for name in ("", "mixedkv.split.v1.Split"):
            answer = stub.Check(health_pb2.HealthCheckRequest(service=name))
            assert answer.status == health_pb2.HealthCheckResponse.SERVING


def test_a_client_without_our_code_learns_the_service_by_reflection(parts: Exported, head: Head) -> None:
    """As grpcurl does: names, descriptors, then a call made of them."""
    name = "mixedkv.split.v1.Split"
    with split_servers.running(parts.body) as server, grpc.insecure_channel(server.address) as channel:
        stub: Any = reflection_pb2_grpc.ServerReflectionStub(channel)

        def ask(**question: str) -> Any:
            request = reflection_pb2.ServerReflectionRequest(**question)
            return next(stub.ServerReflectionInfo(iter([request])))

        services = ask(list_services="").list_services_response.service
        assert name in [service.name for service in services]
        pool = descriptor_pool.DescriptorPool()
        for data in ask(file_containing_symbol=name).file_descriptor_response.file_descriptor_proto:
            pool.Add(descriptor_pb2.FileDescriptorProto.FromString(data))
        method = pool.FindServiceByName(name).FindMethodByName("Describe")
        request = message_factory.GetMessageClass(method.input_type)(version=1)
        answer = message_factory.GetMessageClass(method.output_type)
        call = channel.unary_unary(
            f"/{name}/Describe",
            request_serializer=lambda message: message.SerializeToString(),
            response_deserializer=answer.FromString,
        )
        assert (call(request).pair, call(request).width) == (head.pair, head.width)


def test_a_split_server_needs_no_web_framework() -> None:
    program = "import sys, mixedkv_split.server; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert not {"fastapi", "starlette", "uvicorn"} & set(done.stdout.split())


def test_its_settings_come_from_the_environment_too(tmp_path: Path) -> None:
    settings = SplitSettings.load({"body": "b.gguf"}, None, {"MIXEDKV_SPLIT_PORT": "7", "MIXEDKV_PORT": "8"})
    assert (settings.port, settings.n_ctx, settings.n_seq) == (7, 8192, 32)
    with pytest.raises(ValueError, match="client_ca asks clients for certificates"):
        SplitSettings(body="b.gguf", client_ca="ca.pem")


def test_a_stream_of_a_key_that_is_removed_ends(parts: Exported, head: Head, tmp_path: Path) -> None:
    path = tmp_path / "keys"
    path.write_text(f"anna:{_KEY}\n")
    path.chmod(0o600)
    keys = Keys.load(str(path))
    with (
        split_servers.running(parts.body, keys=keys) as server,
        SplitClient(head, server.address, key=_KEY) as client,
        client.session() as session,
    ):
        stream = session.generate("The lamp", max_tokens=200, temperature=0)
        next(stream)
        path.write_text("ben:another-key-0123456789\n")
        keys.reload()
        with pytest.raises(SplitServerError, match="key"):
            list(stream)
