"""What the examples for Kubernetes name is there: options, paths, ports and metrics."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from mixedkv_server.settings import ServerSettings
from support.servers.server import running

yaml = pytest.importorskip("yaml", reason="PyYAML is not installed")

pytestmark = pytest.mark.full
DOCS = Path(__file__).parents[3] / "docs"


def read(name: str) -> dict[tuple[str, str], Any]:
    """Objects by kind and name."""
    found = {}
    for one in yaml.safe_load_all((DOCS / name).read_text()):
        assert one["apiVersion"]
        found[one["kind"], one["metadata"]["name"]] = one
    return found


def containers(deployment: Any) -> list[Any]:
    pod = deployment["spec"]["template"]
    assert deployment["spec"]["selector"]["matchLabels"] == pod["metadata"]["labels"]
    volumes = {volume["name"] for volume in pod["spec"].get("volumes", [])}
    every: list[Any] = pod["spec"]["containers"] + pod["spec"].get("initContainers", [])
    assert all(mount["name"] in volumes for one in every for mount in one.get("volumeMounts", []))
    return every


def test_the_replicas() -> None:
    objects = read("kubernetes.yaml")
    replica, keys = containers(objects["Deployment", "mixedkv"])
    environ = {variable["name"]: variable["value"] for variable in replica["env"]}
    settings = ServerSettings.load({}, environ=environ)
    assert len(settings.model_fields_set) == len(environ)  # others are not looked at
    ports = {port["name"]: port["containerPort"] for port in replica["ports"]}
    assert (ports["http"], ports["events"]) == (settings.port, int(settings.kv_events.rpartition(":")[2]))
    mounts = {mount["mountPath"] for one in (replica, keys) for mount in one["volumeMounts"]}
    for file in (settings.store_key_file, settings.api_key_file, settings.store, *settings.model):
        assert str(Path(file).parent) in mounts | {"/"}
    for url in (settings.store_remote, settings.metadata_url):
        host, _, port = url.partition("//")[2].partition("/")[0].partition(":")
        (served,) = objects["Service", host]["spec"]["ports"]
        assert served["port"] == int(port)
        (valkey,) = containers(objects["Deployment", host])
        assert valkey["ports"] == [{"containerPort": int(port)}]
    grace = objects["Deployment", "mixedkv"]["spec"]["template"]["spec"]["terminationGracePeriodSeconds"]
    assert grace > settings.drain_timeout + 60  # seconds in which KV is stored


def test_the_router() -> None:
    objects, replicas = read("kubernetes-router.yaml"), read("kubernetes.yaml")
    pool = objects["InferencePool", "mixedkv"]["spec"]
    deployment = replicas["Deployment", "mixedkv"]["spec"]["template"]
    assert pool["selector"]["matchLabels"] == deployment["metadata"]["labels"]
    (replica,) = deployment["spec"]["containers"]
    assert pool["targetPorts"] == [{"number": replica["ports"][0]["containerPort"]}]
    picker = pool["endpointPickerRef"]
    assert objects["Service", picker["name"]]["spec"]["ports"][0]["port"] == picker["port"]["number"]
    (epp,) = containers(objects["Deployment", picker["name"]])
    assert epp["args"][:2] == ["--pool-name", "mixedkv"]
    config = yaml.safe_load(objects["ConfigMap", "mixedkv-epp"]["data"][Path(epp["args"][-1]).name])
    plugins = {plugin["type"]: plugin.get("parameters") for plugin in config["plugins"]}
    for one in config["schedulingProfiles"][0]["plugins"]:
        assert one["pluginRef"] in plugins
    (engine,) = plugins["core-metrics-extractor"]["engineConfigs"]
    with running() as server:
        text = server.metrics()
        names = {line.split()[2] for line in text.splitlines() if line.startswith("# TYPE")}
        assert {name for spec, name in engine.items() if spec.endswith("Spec") and name} <= names
        for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
            assert server.status("GET", replica[probe]["httpGet"]["path"]) == 200
