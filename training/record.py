"""The record of a run as one JSON file: its settings, the history of its rounds, and what was published.

It contains no weights, no images and no patients' names.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, JsonValue, ValidationError, computed_field, model_validator

from model_store.durable import write_durably
from model_store.manifest import ImportedWeights, ModelManifest
from model_store.task import Task
from training.data.cases import RemoteSite, Site
from training.engine.history import RoundEntry, defended, final_changes, never_found
from training.errors import TrainingError
from training.paired import Paired
from training.publish import software
from training.run import Result
from training.verdict import Verdict, verdict_of

RECORD_FILE = "record.json"


class _Strict(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class SiteRecord(_Strict):
    """A site's size, files and patients by split, and what its scans and masks hold, as far as it is known.

    `masks` has how many masks have each label, `undrawn` the labels that it does not draw. `intensities` are
    the 1st, 50th and 99th percentile, `spacing` is in mm, both medians over its scans.
    """

    name: str
    files: dict[str, int]
    patients: dict[str, int]
    masks: dict[str, int] = {}
    undrawn: tuple[str, ...] = ()
    intensities: tuple[float, ...] = ()
    spacing: tuple[float, ...] = ()


class PublishedRecord(_Strict):
    """An artefact that the run published. For a composite, `role` is its kind."""

    reference: str
    digest: str
    kind: str
    role: str
    site: str | None
    metrics: dict[str, float]


class PairedRecord(_Strict):
    """What a model changes against `base` on the same test patients, by site and of all sites together.

    `model` is `personal` or `cluster`, `base` empty for the model that all share; `label` is empty for all.
    """

    model: str
    base: str
    label: str
    sites: dict[str, Paired]
    together: Paired | None


class RunRecord(_Strict):
    """A finished run. `details` is set by the method; `weights` from elsewhere are what it began with.

    `verdict` and `paired` are computed from the rest, and are in the JSON for programs.
    """

    schema_version: int = 1
    run: str
    method: str
    task: Task
    task_inferred: bool
    data: str
    sites: tuple[SiteRecord, ...]
    left_out: tuple[str, ...]
    config: dict[str, JsonValue]
    settings: dict[str, JsonValue]
    rounds: tuple[RoundEntry, ...]
    published: tuple[PublishedRecord, ...] = ()
    warnings: tuple[str, ...] = ()
    details: dict[str, JsonValue] = {}
    weights: ImportedWeights | None = None
    software: dict[str, str] = {}

    @classmethod
    def of(cls, result: Result, warnings: Sequence[str] = ()) -> RunRecord:
        """Make the record of a finished run.

        `warnings` are those that were displayed before it; those of its rounds are added.
        """
        run = result.run
        return cls(
            run=run.id,
            method=run.method,
            task=run.federation.task,
            task_inferred=run.federation.inferred,
            data=run.federation.digest,
            sites=tuple(_site_record(site) for site in run.sites()),
            left_out=run.settings.leave_out,
            config=run.config.model_dump(mode="json"),
            settings=run.settings.model_dump(mode="json"),
            rounds=result.history,
            published=tuple(
                PublishedRecord(
                    reference=str(artefact),
                    digest=artefact.digest,
                    kind=artefact.manifest.kind,
                    role=artefact.manifest.role
                    if isinstance(artefact.manifest, ModelManifest)
                    else artefact.manifest.kind,
                    site=artefact.manifest.site if isinstance(artefact.manifest, ModelManifest) else None,
                    metrics=artefact.manifest.metrics,
                )
                for artefact in result.artefacts
            ),
            warnings=(*warnings, *defended(result.history), *never_found(result.history)),
            details=dict(result.publication.details),
            weights=run.config.descent().weights,
            software=software(),
        )

    @property
    def said(self) -> Verdict:
        """How good the model is, for whom it is worse, and what to do next."""
        return verdict_of(self.task, {site.name: site.patients for site in self.sites}, self.rounds)

    @computed_field  # type: ignore[prop-decorator]
    @property
    def verdict(self) -> tuple[str, ...]:
        """The sentences of it."""
        return self.said.sentences

    @computed_field  # type: ignore[prop-decorator]
    @property
    def paired(self) -> tuple[PairedRecord, ...]:
        """What other models than the shared one change on the same test patients."""
        return tuple(
            PairedRecord(
                model=each.model,
                base=each.base,
                label=each.label,
                sites=each.by_site,
                together=each.together,
            )
            for each in final_changes(self.rounds)
        )

    @model_validator(mode="before")
    @classmethod
    def _without_computed(cls, content: Any) -> Any:
        computed = cls.model_computed_fields
        return (
            {k: v for k, v in content.items() if k not in computed} if isinstance(content, dict) else content
        )

    @property
    def seconds(self) -> float:
        """Time spent in rounds, over all starts of a resumed run."""
        return sum(entry.seconds for entry in self.rounds)

    def traffic(self) -> dict[str, dict[str, int]]:
        """Sum the bytes of the whole run by direction (`sent` and `received` by the sites) and group."""
        sent: Counter[str] = Counter()
        received: Counter[str] = Counter()
        for entry in self.rounds:
            for site in entry.deliveries.values():
                sent.update(site.sent)
                received.update(site.received)
        return {"sent": dict(sent), "received": dict(received)}

    def write(self, path: Path) -> Path:
        """Write the record as JSON, atomically."""
        write_durably(path, (self.model_dump_json(indent=1) + "\n").encode())
        return path

    @classmethod
    def read(cls, path: Path) -> RunRecord:
        """Read the file that `write` wrote. Raises TrainingError naming the file."""
        try:
            return cls.model_validate_json(path.read_bytes())
        except (OSError, ValidationError) as error:
            raise TrainingError(f"{path} is not the record of a run: {error}") from error


def _site_record(site: Site[Any] | RemoteSite) -> SiteRecord:
    counts = site.counts
    own = SiteRecord(name=site.name, files=dict(counts.files), patients=dict(counts.patients))
    if isinstance(site, RemoteSite):
        return own
    held: dict[str, Any] = {"masks": dict(site.labelled), "undrawn": site.undrawn}
    if site.seen is not None:
        held |= {"intensities": site.seen.intensities, "spacing": site.seen.spacing}
    return own.model_copy(update=held)
