"""Prometheus metrics: the name, labels and unit of each.

A registry per app, not the library's global one: two apps in one process (as in the tests) never count each
other's requests. Label values are bounded by construction: route templates, never paths; models of the
store, never what a client wrote.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4, generate_latest
from prometheus_client.registry import Collector

if TYPE_CHECKING:
    from service.inference.admission import Admission
    from service.inference.sessions import SessionCache

SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)
JOB_SECONDS = (1.0, 5.0, 15.0, 60.0, 300.0, 900.0, 3600.0, 4 * 3600.0, 12 * 3600.0)


class _Drift(Collector):
    """Key usage's drift, read from the database at every scrape: all API processes report the same."""

    def __init__(self, read: Callable[[], Mapping[tuple[str, str], float]]) -> None:
        self._read = read

    def describe(self) -> list[Metric]:
        """Describe no metric: the registry asks at registration, which should not read the database."""
        return []

    def collect(self) -> Iterator[Metric]:
        """One sample per hospital and version with a recent scan."""
        family = GaugeMetricFamily(
            "locum_key_usage_drift",
            "How unlike the federation's training images a hospital's scans pick from a pool, 0 to 1.",
            labels=("hospital", "model"),
        )
        for labels, value in self._read().items():
            family.add_metric(labels, value)
        yield family


class _Watches(Collector):
    """The states of all watches, read from the database at every scrape."""

    def __init__(self, read: Callable[[], Mapping[tuple[str, str, str], int]]) -> None:
        self._read = read

    def describe(self) -> list[Metric]:
        """Describe no metric, as `_Drift`."""
        return []

    def collect(self) -> Iterator[Metric]:
        """One sample per hospital, model and scanner."""
        family = GaugeMetricFamily(
            "locum_watch_state",
            "The watch over a scanner's answers: 0 routine, 1 watch, 2 investigate.",
            labels=("hospital", "model", "scanner"),
        )
        for labels, value in self._read().items():
            family.add_metric(labels, value)
        yield family


class _Shown(Collector):
    """The metrics of a registry, filtered by labels."""

    def __init__(self, registry: CollectorRegistry, shown: Callable[[Mapping[str, str]], bool]) -> None:
        self._registry, self._shown = registry, shown

    def collect(self) -> Iterator[Metric]:
        """The same metrics, in the same order."""
        for metric in self._registry.collect():
            metric.samples = [sample for sample in metric.samples if self._shown(sample.labels)]
            yield metric


class Metrics:
    """The metrics of one API process.

    Attributes:
        requests: answers, by method, route template and status.
        request_seconds: from the first byte of the request to the last of its answer.
        inference_seconds: inside onnxruntime only, by model and execution provider.
        store_verified: when the store was last hashed from end to end, in seconds since the epoch.
        store_damaged: number of damaged versions found then.
        ready: 1 while `/health/ready` says so, by part.
        jobs: number by kind and state; every process reports all.
        job_seconds: from the first attempt's start to the end, by kind and final state.
        queue_messages: messages in Redis that no worker has taken.
        workers: worker processes, by state: running, or silent.
        webhooks_undelivered: messages on alarms that were tried twice or more; every process reports all.

    `watch_drift` provides `locum_key_usage_drift`, `watch_watches` `locum_watch_state`.
    """

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.requests = Counter(
            "locum_requests", "Answers sent.", ("method", "route", "status"), registry=self.registry
        )
        self.request_seconds = Histogram(
            "locum_request_seconds",
            "Time from request to the end of the answer.",
            ("method", "route"),
            buckets=SECONDS,
            registry=self.registry,
        )
        self.inference_seconds = Histogram(
            "locum_inference_seconds",
            "Time inside onnxruntime per scan.",
            ("model", "provider"),
            buckets=SECONDS,
            registry=self.registry,
        )
        self.store_verified = Gauge(
            "locum_store_verified_timestamp_seconds",
            "When every artefact was last hashed; 0 when never.",
            registry=self.registry,
        )
        self.store_damaged = Gauge(
            "locum_store_damaged_artefacts", "Versions found damaged then.", registry=self.registry
        )
        self.ready = Gauge(
            "locum_ready", "1 while this part of the service works.", ("part",), registry=self.registry
        )

        self.jobs = Gauge("locum_jobs", "Jobs in the database.", ("kind", "state"), registry=self.registry)
        self.job_seconds = Histogram(
            "locum_job_seconds",
            "Time from a job's first start to its end.",
            ("kind", "state"),
            buckets=JOB_SECONDS,
            registry=self.registry,
        )
        self.queue_messages = Gauge(
            "locum_queue_messages", "Messages that no worker has taken.", registry=self.registry
        )
        self.workers = Gauge("locum_workers", "Worker processes.", ("state",), registry=self.registry)
        self.webhooks_undelivered = Gauge(
            "locum_webhooks_undelivered",
            "Messages on alarms that were tried twice or more and not received.",
            registry=self.registry,
        )

    def watch_drift(self, read: Callable[[], Mapping[tuple[str, str], float]]) -> None:
        """Report every hospital's drift, from `read` at each scrape."""
        self.registry.register(_Drift(read))

    def watch_watches(self, read: Callable[[], Mapping[tuple[str, str, str], int]]) -> None:
        """Report the state of every watch, from `read` at each scrape."""
        self.registry.register(_Watches(read))

    def watch(self, admission: Admission, sessions: SessionCache) -> None:
        """Report admission and session cache, read at each scrape."""
        for name, text, value in (
            ("locum_inference_running", "Scans being segmented now.", lambda: admission.running),
            ("locum_inference_waiting", "Scans waiting for an inference slot.", lambda: admission.waiting),
            ("locum_inference_slots", "Scans that may be segmented at once.", lambda: admission.slots),
            ("locum_sessions_loaded", "Networks held in memory.", lambda: len(sessions)),
            ("locum_sessions_capacity", "Networks that may be held.", lambda: sessions.capacity),
        ):
            Gauge(name, text, registry=self.registry).set_function(value)

    def exposition(self, shown: Callable[[Mapping[str, str]], bool] | None = None) -> tuple[bytes, str]:
        """The text format and its content type; `shown` chooses samples by their labels."""
        registry = self.registry if shown is None else _Shown(self.registry, shown)
        return generate_latest(registry), CONTENT_TYPE_PLAIN_0_0_4
