"""The metrics of a router: its own, and those of all models with a label `model`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import Metric
from prometheus_client.parser import text_string_to_metric_families

from mixedkv.doors.metrics import SECONDS, http_counter


class RouterMetrics:
    """Counts starts and ends of models' processes, and answers."""

    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        r: Any = {"registry": self._registry}
        self.http = http_counter(self._registry)
        self._loaded = Gauge("mixedkv:models_loaded", "Models in memory, adapters not counted.", **r)
        self._loads = Counter("mixedkv:model_loads", "Models that were loaded.", ["model"], **r)
        self._unloads = Counter("mixedkv:model_unloads", "Models that were unloaded.", ["model"], **r)
        self._failures = Counter(
            "mixedkv:model_load_failures", "Models that could not be loaded.", ["model"], **r
        )
        self._seconds = Histogram(
            "mixedkv:model_load_seconds", "Seconds to load a model.", buckets=SECONDS, **r
        )

    def model_loaded(self, name: str, seconds: float) -> None:
        self._loads.labels(name).inc()
        self._seconds.observe(seconds)

    def model_unloaded(self, name: str) -> None:
        self._unloads.labels(name).inc()

    def model_failed(self, name: str) -> None:
        self._failures.labels(name).inc()

    def expose(self, n_loaded: int, texts: Mapping[str, str]) -> bytes:
        """Return Prometheus' text.

        Args:
            n_loaded: number of processes that run.
            texts: that of each model by its name.
        """
        self._loaded.set(n_loaded)
        merged = CollectorRegistry()
        merged.register(_Merged([*self._registry.collect(), *_labelled(texts)]))
        return generate_latest(merged)


class _Merged:
    """A collector of families, those of one name together."""

    def __init__(self, families: Iterable[Metric]) -> None:
        self._families: dict[str, Metric] = {}
        for family in families:
            first = self._families.setdefault(family.name, family)
            if first is not family:
                first.samples += family.samples

    def collect(self) -> Iterable[Metric]:
        return self._families.values()


def _labelled(texts: Mapping[str, str]) -> Iterator[Metric]:
    for model, text in texts.items():
        for family in text_string_to_metric_families(text):
            family.samples = [
                sample._replace(labels={"model": model, **sample.labels}) for sample in family.samples
            ]
            yield family
