"""What docs/examples has for operators: a dashboard and alerts, of metrics that there are; times of units."""

from __future__ import annotations

import configparser
import json
import re
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from mixedkv_server.http_server import _LONGEST_END
from mixedkv_server.settings import ServerSettings
from support import REPOSITORY
from support.servers.server import Server, running

yaml = pytest.importorskip("yaml", reason="needs the package PyYAML")

pytestmark = pytest.mark.full
EXAMPLES = REPOSITORY / "docs/examples"
DASHBOARD, ALERTS = EXAMPLES / "grafana-dashboard.json", EXAMPLES / "prometheus-alerts.yml"
CLIENTS = (REPOSITORY / "docs/clients.md").read_text("utf-8")
SPARE = 10.0  # seconds between the end of a server that hangs and its supervisor's SIGKILL


@pytest.fixture(scope="module")
def exposed(zoo_path: Callable[[str], Path]) -> Iterator[dict[str, set[str]]]:
    """The labels of each sample that a router with two models exposes."""
    model = str(zoo_path("llama-64"))
    with running("-m", f"one={model}", "-m", f"two={model}", "--n-ctx", "512", "--max-loaded", "2") as server:
        for name in ("one", "two"):
            server.post("/v1/completions", {"model": name, "prompt": "x", "max_tokens": 2})
        yield samples(server)


def samples(server: Server) -> dict[str, set[str]]:
    """The labels by name, as Prometheus' own parser reads them; a counter without a sample has none."""
    from prometheus_client.parser import text_string_to_metric_families

    text = server.request("GET", "/metrics")[1]
    found: dict[str, set[str]] = {}
    for family in text_string_to_metric_families(text):
        declared = family.name + ("_total" if family.type == "counter" else "")
        found.setdefault(declared, set())
        for sample in family.samples:
            found.setdefault(sample.name, set()).update(sample.labels)
    return found


def expressions() -> list[tuple[str, str]]:
    """Where an expression stands, and its text."""
    panels = json.loads(DASHBOARD.read_text("utf-8"))["panels"]
    found = [(panel["title"], target["expr"]) for panel in panels for target in panel["targets"]]
    for group in yaml.safe_load(ALERTS.read_text("utf-8"))["groups"]:
        found += [(rule["alert"], rule["expr"]) for rule in group["rules"]]
    return found


def test_every_metric_of_dashboard_and_alerts_is_exposed(exposed: dict[str, set[str]]) -> None:
    named = [(where, name) for where, text in expressions() for name in re.findall(r"mixedkv_\w+", text)]
    assert len(named) > 30
    assert [(where, name) for where, name in named if name not in exposed] == []


def test_labels_that_alerts_ask_for_exist() -> None:
    """Of counters that have no sample yet: as the code declares them."""
    from mixedkv_service.metrics import Metrics

    declared = {name: each._labelnames for name, each in Metrics().registry._names_to_collectors.items()}  # type: ignore[attr-defined]
    for where, text in expressions():
        for name, label in re.findall(r'(mixedkv_\w+)\{(\w+)=~?"', text.replace('job=~"$job",', "")):
            if label != "instance":
                assert label in declared[name], (where, name, label)


def test_names_follow_prometheus_and_nothing_is_exposed_twice(exposed: dict[str, set[str]]) -> None:
    assert [name for name in exposed if not re.fullmatch(r"mixedkv_[a-z0-9_]+", name)] == []
    assert [name for name in exposed if name.endswith("_created")] == []


@pytest.mark.needs("promtool")
def test_promtool_takes_the_alerts() -> None:
    done = subprocess.run(
        ["promtool", "check", "rules", str(ALERTS)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr + done.stdout


def units() -> list[tuple[str, float, float]]:
    """The supervisors' configurations on the pages: name, drain timeout, seconds until SIGKILL."""
    default = float(ServerSettings.model_fields["drain_timeout"].default)
    systemd = configparser.ConfigParser(strict=False)
    (block,) = re.findall(r"^```ini\n(.*?)^```", CLIENTS, re.M | re.S)
    systemd.read_string(block)
    (compose,) = [
        yaml.safe_load(each)["services"]["mixedkv"]
        for each in re.findall(r"^```yaml\n(.*?)^```", CLIENTS, re.M | re.S)
        if "stop_grace_period" in each
    ]
    deployment = next(yaml.safe_load_all((REPOSITORY / "docs/kubernetes.yaml").read_text("utf-8")))
    pod = deployment["spec"]["template"]["spec"]
    env: dict[str, Any] = {each["name"]: each["value"] for each in pod["containers"][0]["env"]}
    given = re.search(r"MIXEDKV_DRAIN_TIMEOUT=(\d+)", block)
    return [
        ("systemd", float(given[1]) if given else default, float(systemd["Service"]["TimeoutStopSec"])),
        (
            "compose",
            float(compose["environment"].get("MIXEDKV_DRAIN_TIMEOUT", default)),
            float(compose["stop_grace_period"].removesuffix("s")),
        ),
        (
            "kubernetes",
            float(env.get("MIXEDKV_DRAIN_TIMEOUT", default)),
            float(pod["terminationGracePeriodSeconds"]),
        ),
    ]


@pytest.mark.parametrize(("name", "drain", "kill"), units())
def test_supervisors_wait_for_the_drain_and_the_store(name: str, drain: float, kill: float) -> None:
    assert drain + _LONGEST_END + SPARE <= kill <= drain + _LONGEST_END + 60, name


def test_docker_run_waits_as_long_as_the_page_says() -> None:
    default = float(ServerSettings.model_fields["drain_timeout"].default)
    for text in (CLIENTS, (REPOSITORY / "Dockerfile").read_text("utf-8")):
        (seconds,) = re.findall(r"--stop-timeout (\d+)", text)
        assert float(seconds) >= default + _LONGEST_END + SPARE
