"""Send a run's figures to TensorBoard and MLflow. An observer never changes, slows or stops a run.

Both get one value per round, with the round as the step, under the same names: `PHASE/METRIC/SITE` (such as
`train/loss/birch`), `PHASE/bytes/sent/SITE`, `PHASE/bytes/received/SITE`, `PHASE/seconds` and
`PHASE/sites/dropped`. Beside a score of a round is `PHASE/val_patients/SITE`, the patients that the site
validates on; a note says where these are few. RUN/history.jsonl remains the record.
"""

from __future__ import annotations

import math
import os
import queue
import re
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType, TracebackType
from typing import Any, Protocol

from training.data.cases import few_patients
from training.engine.history import Observer, RoundEntry, SiteEntry
from training.errors import ConfigurationError
from training.progress.state import is_score

_MOST_PENDING = 1000  # rounds that wait for a slow server
_GOODBYE_S = 10.0
# Of MLflow: metrics in one call, and characters of a name.
_MOST_IN_BATCH = 1000
_LONGEST_KEY = 250
# Defaults of MLflow's client here: it gives up a server that is gone soon, and sends no telemetry.
_MLFLOW = {
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "2",
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "0",
    "MLFLOW_DISABLE_TELEMETRY": "true",
}


class Log(Protocol):
    """A place for figures."""

    name: str

    def write(self, entry: RoundEntry, scalars: Mapping[str, float]) -> None:
        """Write the figures of a round. May raise; the run goes on without them."""

    def close(self, *, succeeded: bool) -> None:
        """Write what is pending."""


def scalars_of(entry: RoundEntry, validated: Mapping[str, int] = MappingProxyType({})) -> dict[str, float]:
    """Return the figures of a round by name; values that are not finite are left out.

    `validated` has the number of each site's validation patients, which its scores rest on.
    """
    found = {f"{entry.phase}/seconds": entry.seconds, f"{entry.phase}/sites/dropped": len(entry.dropped)}
    for site, part in entry.sites.items():
        found |= {f"{entry.phase}/{metric}/{site}": value for metric, value in part.metrics.items()}
        if site in validated and any(map(is_score, part.metrics)):
            found[f"{entry.phase}/val_patients/{site}"] = validated[site]
        found[f"{entry.phase}/bytes/sent/{site}"] = sum(part.sent.values())
        found[f"{entry.phase}/bytes/received/{site}"] = sum(part.received.values())
    return {name: float(value) for name, value in found.items() if math.isfinite(value)}


def few_notes(validated: Mapping[str, int]) -> dict[str, str]:
    """Return a note for each site that validates on few patients, by the name under which a log has it."""
    return {
        f"locum.few_patients/{site}": f"{site} validates on {few}: its scores say little of other patients"
        for site, count in validated.items()
        if (few := few_patients(count))
    }


class TensorBoard:
    """Writes event files into a folder, with `notes` as texts.

    Raises ConfigurationError without the extra `tensorboard`.
    """

    name = "TensorBoard"

    def __init__(self, folder: Path, notes: Mapping[str, str] = MappingProxyType({})) -> None:
        try:
            from tensorboardX import SummaryWriter
        except ImportError as error:
            raise ConfigurationError(
                "TensorBoard's files cannot be written", [f"{error}; pip install 'locum[tensorboard]'"]
            ) from error
        self._writer: Any = SummaryWriter(str(folder))
        for name, text in notes.items():
            self._writer.add_text(name, text, 0)

    def write(self, entry: RoundEntry, scalars: Mapping[str, float]) -> None:
        """Write and flush the figures of a round."""
        for name, value in scalars.items():
            self._writer.add_scalar(name, value, entry.round + 1)
        self._writer.flush()

    def close(self, *, succeeded: bool) -> None:  # noqa: ARG002
        """Close the file."""
        self._writer.close()


class MLflow:
    """Sends figures to an MLflow server, or another store of runs, by MLflow's own client.

    A resumed run continues the same MLflow run. Raises ConfigurationError without the extra `mlflow`, and for
    a URI that MLflow does not know.
    """

    name = "MLflow"

    def __init__(self, uri: str, experiment: str, run: str, tags: Mapping[str, str]) -> None:
        for name, value in _MLFLOW.items():
            os.environ.setdefault(name, value)
        try:
            from mlflow.entities import Metric
            from mlflow.exceptions import MlflowException
            from mlflow.tracking import MlflowClient
        except ImportError as error:
            raise ConfigurationError(
                "figures cannot be sent to MLflow", [f"{error}; pip install 'locum[mlflow]'"]
            ) from error
        try:
            self._client: Any = MlflowClient(tracking_uri=uri)
        except MlflowException as error:
            raise ConfigurationError("figures cannot be sent to MLflow", [str(error).strip()]) from error
        self._metric: Any = Metric
        self._experiment, self._name = experiment, run
        self._tags = {_key(name): value for name, value in tags.items()} | {"locum.run": run}
        self._run: str | None = None

    def write(self, entry: RoundEntry, scalars: Mapping[str, float]) -> None:
        """Send the figures of a round."""
        now, step = int(time.time() * 1000), entry.round + 1
        metrics = [self._metric(_key(name), value, now, step) for name, value in scalars.items()]
        for first in range(0, len(metrics), _MOST_IN_BATCH):
            self._client.log_batch(self._run_id(), metrics=metrics[first : first + _MOST_IN_BATCH])

    def close(self, *, succeeded: bool) -> None:
        """Set the status of the MLflow run."""
        self._client.set_terminated(self._run_id(), "FINISHED" if succeeded else "KILLED")

    def _run_id(self) -> str:
        if self._run is None:
            client = self._client
            known = client.get_experiment_by_name(self._experiment)
            experiment = known.experiment_id if known else client.create_experiment(self._experiment)
            found = client.search_runs([experiment], f"tags.`locum.run` = '{self._name}'", max_results=1)
            run = found[0] if found else client.create_run(experiment, tags=self._tags, run_name=self._name)
            self._run = str(run.info.run_id)
        return self._run


def _key(name: str) -> str:
    """Return a name as MLflow takes it: sites and labels may have other characters."""
    return re.sub(r"[^/\w.\- ]", "_", name)[:_LONGEST_KEY]


class WithLogs:
    """An observer that forwards events to another one, and each round to logs, in a thread of their own.

    An error of a log is reported once as a warning; the log then gets no more. Use it as a context manager.
    """

    def __init__(
        self, observer: Observer, logs: Sequence[Log], validated: Mapping[str, int] = MappingProxyType({})
    ) -> None:
        """`validated` has the number of each site's validation patients."""
        self._observer = observer
        self._logs = list(logs)
        self._validated = validated
        self._pending: queue.Queue[RoundEntry | None] = queue.Queue(_MOST_PENDING)
        self._failed: list[str] = []
        self._succeeded = False
        self._thread = threading.Thread(target=self._write, daemon=True)

    def __enter__(self) -> WithLogs:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._succeeded = error is None
        try:
            self._pending.put(None, timeout=_GOODBYE_S)
        except queue.Full:
            self._failed.append("logs: the last rounds were not written, a server is too slow")
        else:
            self._thread.join(_GOODBYE_S)
        self._report()

    def round_started(self, phase: str, round: int, rounds: int, sites: tuple[str, ...]) -> None:
        """Forward."""
        self._observer.round_started(phase, round, rounds, sites)

    def site_finished(self, phase: str, round: int, site: str, entry: SiteEntry) -> None:
        """Forward."""
        self._observer.site_finished(phase, round, site, entry)

    def round_finished(self, entry: RoundEntry) -> None:
        """Forward, and hand the round to the logs' thread."""
        self._observer.round_finished(entry)
        try:
            self._pending.put_nowait(entry)
        except queue.Full:
            self._failed.append("logs: rounds are left out, a server is too slow")
        self._report()

    def warning(self, message: str) -> None:
        """Forward."""
        self._observer.warning(message)

    def _report(self) -> None:
        while self._failed:
            self._observer.warning(self._failed.pop(0))

    def _write(self) -> None:
        while (entry := self._pending.get()) is not None:
            self._each(lambda log, entry=entry: log.write(entry, scalars_of(entry, self._validated)))  # type: ignore[misc]
        self._each(lambda log: log.close(succeeded=self._succeeded))

    def _each(self, action: Callable[[Log], None]) -> None:
        for log in list(self._logs):
            try:
                action(log)
            except Exception as error:
                self._logs.remove(log)
                self._failed.append(f"{log.name} gets no more figures of this run: {error}")
