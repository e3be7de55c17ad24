"""A run on a network: what the hospitals are to train together, its folder, and the run to resume.

`network.json` in the folder has the run's id, which stays when the run is resumed, and what each hospital
announced.
"""

from __future__ import annotations

import hashlib
import json
import secrets
from dataclasses import dataclass, replace
from pathlib import Path

from model_store.durable import write_durably
from model_store.task import Task
from training.algorithm import Algorithm
from training.config import MethodConfig, RunConfig
from training.engine.folder import RunFolder
from training.errors import ConfigurationError
from training.methods.registry import method as find_method
from training.network.kits import Kit
from training.network.messages import (
    PROTOCOL,
    Announcement,
    Invitation,
    configuration_digest,
    plan_digest,
    settings_of,
    versions,
)

NETWORK_FILE = "network.json"


@dataclass(frozen=True)
class NetworkRun:
    """What the operator asks hospitals to train. `sites` are the hospitals that take part."""

    sites: tuple[str, ...]
    method: str
    config: MethodConfig
    settings: RunConfig
    task: Task

    @property
    def id(self) -> str:
        """A short name for the run's folder, which is known before the hospitals join.

        It depends on the hospitals that take part, not on the names of those that are left out.
        """
        content = self.settings.model_copy(update={"leave_out": ()}).model_dump(mode="json")
        digest = configuration_digest(self.method, self.config, content, self.task)
        return "network-" + hashlib.sha256("\0".join((digest, *sorted(self.sites))).encode()).hexdigest()[:16]

    def algorithm(self) -> Algorithm:
        """Build the method for the task."""
        return find_method(self.method).build(self.config, self.task)

    def invitation(self, id_: str) -> Invitation:
        """What hospitals are asked to train, in the run with this id. Its nonce is none."""
        shared = settings_of(self.settings)
        return Invitation(
            protocol=PROTOCOL,
            software=versions(),
            run=id_,
            method=self.method,
            config=self.config.model_dump(mode="json"),
            settings=shared,
            task=self.task.model_dump(mode="json"),
            plan_digest=plan_digest(self.algorithm()),
            configuration_digest=configuration_digest(self.method, self.config, shared, self.task),
            nonce="-",
        )


class NetworkRecord:
    """The file `network.json` of a run's folder: a new run's id is drawn at random.

    Until a round is committed nothing depends on what the hospitals announced: they join again.
    """

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._path = folder / NETWORK_FILE
        found = json.loads(self._path.read_text()) if self._path.exists() else {}
        self.id: str = found.get("run") or secrets.token_hex(32)
        self.began = RunFolder(folder).checkpoint() is not None
        sites = found.get("sites", {}) if self.began else {}
        self.announced = {name: Announcement.model_validate(said) for name, said in sites.items()}

    def write(self) -> None:
        """Write it to disk, so that a resumed run need not wait for every hospital."""
        sites = {name: said.model_dump(mode="json") for name, said in self.announced.items()}
        write_durably(self._path, json.dumps({"run": self.id, "sites": sites}).encode())


def run_to_resume(run: NetworkRun, kit: Kit, folders: Path, folder: Path | None) -> tuple[Path, NetworkRun]:
    """Find the run to resume: its folder, and the run with its hospitals, those revoked since included.

    It is looked for in `folder` if the operator named one, otherwise among the runs in `folders` of which the
    hospitals and the settings give the folder's name. Without such a run, a new one begins.
    Raises ConfigurationError, which lists the runs found, when none or several have these hospitals.
    """
    own = folder or folders / run.id
    places = sorted(folders.glob("network-*")) if folder is None else [folder]
    runs = {place: replace(run, sites=names) for place in places if (names := _joined(place))}
    if folder is None:
        runs = {place: found for place, found in runs.items() if found.id == place.name}
    possible = {*run.sites} | kit.revoked_sites()
    fitting = {place: found for place, found in runs.items() if {*run.sites} <= {*found.sites} <= possible}
    if own in fitting:
        return own, fitting[own]
    if not runs or (own not in runs and (own / NETWORK_FILE).exists()):
        return own, run
    if len(fitting) == 1:
        return next(iter(fitting.items()))
    raise ConfigurationError(
        f"expected one run of {', '.join(run.sites)} to resume, found",
        [
            *(f"{place}: a run of {', '.join(found.sites)}" for place, found in runs.items()),
            "name hospitals that came later with --leave-out, choose a run with --run, or begin a new one "
            "without --resume",
        ],
    )


def _joined(folder: Path) -> tuple[str, ...]:
    """The hospitals of a run with a checkpoint, before which all of them joined; none of another folder."""
    record = folder / NETWORK_FILE
    if not record.exists() or RunFolder(folder).checkpoint() is None:
        return ()
    return tuple(sorted(json.loads(record.read_text())["sites"]))
