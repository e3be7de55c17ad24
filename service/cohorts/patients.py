"""Map scan names to patients, and split scans with masks by patient."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from model_store.errors import TaskError
from model_store.scan import strip_suffix
from model_store.task import Task
from service.cohorts.files import label_of
from service.errors import AdaptationRejected

# One for training and one for validation.
FEWEST = 2


@dataclass(frozen=True)
class PatientSplit:
    """Names of scans, in order, with the patient of each; `with_target` are the patients that have one."""

    train: tuple[str, ...]
    validation: tuple[str, ...]
    patients: Mapping[str, str]
    with_target: frozenset[str]

    def count(self, names: Iterable[str]) -> int:
        """Count the patients of these scans."""
        return len({self.patients[name] for name in names})

    @property
    def deciding(self) -> int:
        """Count the validation patients with a target: only their Dice chooses the epoch."""
        return self.count(name for name in self.validation if self.patients[name] in self.with_target)


def shows_target(label_values: Iterable[int], task: Task) -> bool:
    """Return whether a mask with these values has a class besides background."""
    foreground = {value for task_class in task.classes[1:] for value in task_class.values}
    return not foreground.isdisjoint(label_values)


def other_values(
    label_values: Mapping[str, Iterable[int]], digests: Mapping[str, str], task: Task
) -> str | None:
    """Describe masks that have values besides 0 but no target; None if there are none.

    Such masks typically have the class indices of an answer instead of the task's own values. `digests` are
    those of the scans, by name.
    """
    found = {name: sorted({*values} - {0}) for name, values in label_values.items()}
    found = {name: values for name, values in found.items() if values and not shows_target(values, task)}
    if not found:
        return None
    name, values = next(iter(found.items()))
    wanted = ", ".join(str(value) for task_class in task.classes[1:] for value in task_class.values)
    count = "1 mask counts" if len(found) == 1 else f"{len(found)} masks count"
    return (
        f"{count} as drawn and without a target, in spite of values besides 0 "
        f"({label_of(digests[name])}: {', '.join(map(str, values))}): the target's are {wanted}; what "
        "/segment answers has class indices, to be replaced by these"
    )


def numbered(names: Sequence[str], task: Task) -> list[int]:
    """Number the patient of each scan, 0, 1, … by first appearance.

    A name without a patient counts as a patient of its own: without labels there is no reason to reject it.
    """
    numbers: dict[tuple[str, ...], int] = {}
    found = []
    for name in names:
        try:
            patient: tuple[str, ...] = (task.patient_of(strip_suffix(name)),)
        except TaskError:
            patient = ("unknown", name)
        found.append(numbers.setdefault(patient, len(numbers)))
    return found


def patients_with_masks(
    drawn: Mapping[str, bool], digests: Mapping[str, str], task: Task
) -> tuple[dict[str, str], frozenset[str]]:
    """The patient of each scan with a mask, and the patients who have a target, at least two.

    Args:
        drawn: names of the scans with a mask, and whether the mask has a target.
        digests: the digest of each of these scans; scans with equal digests belong to one patient.
        task: its rule finds the patient in the name of a scan without its suffix; without a rule every scan
            is a patient.

    Raises:
        AdaptationRejected: no masks, a name without a patient, or fewer than two patients with a target.
    """
    if not drawn:
        raise AdaptationRejected(
            f"no scan of the cohort has a mask, expected masks of at least {FEWEST} patients with a target: "
            "PUT /hospitals/HOSPITAL/cohorts/COHORT/scans/NAME/mask adds one; a form with scans has no place "
            "for them"
        )
    patients = _united({name: _patient(name, digests[name], task) for name in drawn}, digests)
    ill = {patients[name] for name, there in drawn.items() if there}
    if len(ill) < FEWEST:
        raise AdaptationRejected(
            f"masks of at least {FEWEST} patients must show a target, to learn from one and to validate on "
            f"another; found {len(ill)} among {len(drawn)} masks of {len({*patients.values()})} patients"
            f"{'' if task.patient is None else f' (a name tells the patient by {task.patient})'}: draw more"
        )
    return patients, frozenset(ill)


def split_by_patient(
    drawn: Mapping[str, bool], digests: Mapping[str, str], task: Task, share: float, seed: int
) -> PatientSplit:
    """Split about `share` of the patients off for validation, stratified by whether they have a target.

    The seed determines the split, with the names. The other arguments and errors are those of
    `patients_with_masks`.
    """
    patients, ill = patients_with_masks(drawn, digests, task)
    chosen = _some({*ill}, share, seed, least=1) | _some({*patients.values()} - ill, share, seed, least=0)
    names = sorted(drawn)
    return PatientSplit(
        train=tuple(name for name in names if patients[name] not in chosen),
        validation=tuple(name for name in names if patients[name] in chosen),
        patients=patients,
        with_target=ill,
    )


def same_bytes(names: Iterable[str], digests: Mapping[str, str]) -> list[list[str]]:
    """Group the names of scans with equal bytes; groups of one are left out."""
    groups: dict[str, list[str]] = {}
    for name in sorted(names):
        groups.setdefault(digests[name], []).append(name)
    return [group for group in groups.values() if len(group) > 1]


def _united(patients: dict[str, str], digests: Mapping[str, str]) -> dict[str, str]:
    """Merge patients that share a scan, by name of scan."""
    for group in same_bytes(patients, digests):
        one, others = patients[group[0]], {patients[name] for name in group}
        patients = {name: one if patient in others else patient for name, patient in patients.items()}
    return patients


def _some(patients: set[str], share: float, seed: int, least: int) -> set[str]:
    count = min(max(round(share * len(patients)), least), max(len(patients) - 1, 0))
    # Sorted by hash, because the order of names may follow dates or wards.
    order = sorted(patients, key=lambda patient: hashlib.sha256(f"{seed}/{patient}".encode()).digest())
    return set(order[:count])


def _patient(name: str, digest: str, task: Task) -> str:
    try:
        return task.patient_of(strip_suffix(name))
    except TaskError:
        raise AdaptationRejected(
            f"{label_of(digest)}: no patient in the name; task '{task.name}' expects {task.patient!r}. "
            "Upload it under such a name, or correct `patient` in task.yaml"
        ) from None
