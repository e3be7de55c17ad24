"""Read and check the folders of a segmentation federation, of slices or of volumes."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from model_store.errors import TaskError
from model_store.task import Task
from training.data.cases import (
    Case,
    Federation,
    Layout,
    Site,
    digest_of_cases,
    digest_of_sites,
    shortened,
    untrainable,
)
from training.data.consistency import Seen
from training.data.segmentation.infer_task import infer_task, inferred_in_words, with_labels
from training.data.segmentation.inspection import Look, labelled, look_at
from training.data.segmentation.layout import find_sites, read_site
from training.data.segmentation.sidecar import channels_of, labels_of, other_channels, together, unnamed
from training.errors import FederationError


def load_masks(root: Path, task: Task | None, by_value: bool = False) -> Federation:
    """Read and check a federation of images with masks. Without `task`, the task is inferred.

    Raises FederationError; its `.problems` lists all problems, each with its file.
    """
    problems: list[str] = []
    inferred = task is None
    folders = find_sites(root, problems)
    if task is None:
        try:
            task = infer_task(root, [read_site(folder, None, []) for folder in folders], by_value=by_value)
            if named := together({folder.name: labels_of(folder, []) for folder in folders}):
                task = with_labels(task, named)
        except TaskError as error:
            for folder in folders:
                read_site(folder, None, problems)
            raise untrainable(root, [*problems, str(error)]) from error
    sites = [read_site(folder, task, problems) for folder in folders]
    looks = look_at(sites, task)
    problems += [problem for look in looks for problem in look.problems]
    if problems:
        raise untrainable(root, problems)
    found = labelled(looks, task)
    drawn = {label for own in found.values() for label, masks in own.items() if masks}
    if not drawn:
        values = ", ".join(f"{name} ({', '.join(map(str, used))})" for name, used in task.labels.items())
        raise untrainable(
            root,
            [
                f"no mask of any site has a pixel of {values}: there is nothing to learn; correct the masks, "
                "or the values in task.yaml"
            ],
        )
    sites = [
        replace(
            _described(site, looks, found[site.name]),
            undrawn=undrawn_of(found[site.name], drawn, task),
        )
        for site in sites
    ]
    if channels := other_channels({folder.name: channels_of(folder) for folder in folders}):
        sites[0] = replace(sites[0], notes=(*sites[0].notes, *channels))
    unlabelled = tuple(label for label in task.labels if label not in drawn)
    digest = digest_of_sites(task, sites)
    return Federation(root, task, tuple(sites), inferred, digest, _repeated(looks), unlabelled)


def load_masks_of_site(folder: Path, task: Task) -> Site:
    """Read and check the folder of one site. Raises FederationError."""
    problems: list[str] = []
    site = read_site(folder, task, problems)
    looks = look_at([site], task)
    problems += [problem for look in looks for problem in look.problems]
    if problems:
        raise FederationError(f"{folder} cannot be trained on:", problems)
    found = labelled(looks, task)[site.name]
    # What others draw is not known here: what the site says it does not draw is all.
    said = tuple(label for label in site.undrawn if not found[label])
    return replace(_described(site, looks, found), undrawn=said)


def undrawn_of(labelled: Mapping[str, int], drawn: Collection[str], task: Task) -> tuple[str, ...]:
    """The labels that a site does not draw, of which `drawn` some site does: none of its masks has them.

    A site of which no mask has any label may
    have looked for all of them: it trains on background.
    """
    if task.absent == "background" or not any(labelled.values()):
        return ()
    return tuple(label for label, masks in labelled.items() if not masks and label in drawn)


def _described(site: Site, looks: Sequence[Look], found: Mapping[str, int]) -> Site:
    rows = (
        (look.case.name, look.case.patient, look.case.split or "", look.digest, *_mapped(look.case))
        for look in looks
        if look.site == site.name
    )
    own = [look for look in looks if look.site == site.name]
    return replace(
        site,
        digest=digest_of_cases(rows),
        empty=not any(found.values()),
        labelled=found,
        notes=(
            *site.notes,
            *unnamed(site.name, site.undrawn, found),
            *shortened([note for look in own for note in look.notes]),
        ),
        seen=Seen.together(look.seen for look in own if look.seen is not None),
    )


def _mapped(case: Case) -> tuple[str, ...]:
    """What a case's mask is read as, for a digest; nothing where it is read as it is."""
    return (str(case.values),) if case.values else ()


def _repeated(looks: Sequence[Look]) -> tuple[tuple[str, ...], ...]:
    """Find identical images of different patients: a split by patient may put them on both sides."""
    same: dict[str, list[Look]] = {}
    for look in looks:
        same.setdefault(look.image, []).append(look)
    return tuple(
        tuple(f"{look.site}/{look.case.image.parent.name}/{look.case.name}" for look in group)
        for group in same.values()
        if len({(look.site, look.case.patient) for look in group}) > 1
    )


def _expected(root: Path) -> bool:  # noqa: ARG001
    """Where no other layout is found, there should be masks."""
    return True


MASKS = Layout(_expected, load_masks, load_masks_of_site, inferred_in_words)
