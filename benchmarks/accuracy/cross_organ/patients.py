"""Group the images of `cross_organ` by patient, by their similarity, where the set does not name patients.

    python -m benchmarks.accuracy.cross_organ.patients --data ../shared/data

writes patients.json beside this file, which the benchmark reads: a list of file names for every patient (or
near-duplicate) with several images. An image in no list keeps the patient that the task reads.

Images are compared at 128x128, grey, by correlation. The thresholds were read off the sets, not derived:

bladder_mri       slices in numbers. A patient's neighbours correlate by over 0.97, no two of different
                  patients by over 0.69: any threshold between gives the same twelve patients, one of whom
                  follows another without a gap in the numbers (1348, 1349).
breast_dce_mri    no two of different patients over 0.55, and 22 of the 25 images in one chain over 0.9: they
                  show one tumour, in two sweeps.
breast_ultrasound near-duplicates, some with markers or shifted by a little. There are fewest pairs just above
                  0.9, and those that were inspected were duplicates. Shadows make different patients alike:
                  below 0.9 duplicates are found by fine structure only, where different patients do not
                  reach 0.5. A repeat with a large shift is not found.
brain_mri_t1ce    slices in numbers, their patients unknown. Neighbours below 0.6 look like other patients
                  (0.55 and less); some above may be too, which only reduces the number of patients.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, TypeAlias

import numpy as np
import typer
from numpy.typing import NDArray
from PIL import Image, ImageFilter
from scipy.sparse.csgraph import connected_components

from benchmarks.accuracy.cross_organ.data import SITES, number_order
from training.data.cases import Federation

LISTS = Path(__file__).with_suffix(".json")
# site -> patients -> names of files
Groups: TypeAlias = Mapping[str, Sequence[Sequence[str]]]
_SIDE = 128
# An image's fine structure is the difference of two blurs with these radii, in pixels.
_FINE = (2, 8)


@dataclass(frozen=True)
class Rule:
    """When two images are one patient's: they correlate by more than `whole`, or in fine structure by `fine`.

    With `neighbours` only images next to each other in the order of numbers are compared.
    """

    whole: float
    fine: float | None = None
    neighbours: bool = False


RULES: Mapping[str, Rule] = {
    "bladder_mri": Rule(0.9),
    "brain_mri_t1ce": Rule(0.6, neighbours=True),
    "breast_dce_mri": Rule(0.9),
    "breast_ultrasound": Rule(0.9, fine=0.5),
}


def groups(paths: Sequence[Path], rule: Rule) -> list[list[str]]:
    """The names of images that belong together, directly or through others, in the order of numbers."""
    ordered = sorted(paths, key=lambda path: number_order(path.name))
    wholes, fines = zip(*map(_pictures, ordered), strict=True)
    alike = _correlations(wholes) > rule.whole
    if rule.fine is not None:
        alike |= _correlations(fines) > rule.fine
    if rule.neighbours:
        alike &= np.eye(len(ordered), k=1, dtype=bool)
    _, labels = connected_components(alike, directed=False)
    together = (
        [path.name for path, own in zip(ordered, labels, strict=True) if own == n] for n in set(labels)
    )
    return sorted((group for group in together if len(group) > 1), key=lambda group: number_order(group[0]))


def read() -> Groups:
    """The recorded lists."""
    found: Groups = json.loads(LISTS.read_text(encoding="utf-8"))
    return found


def regrouped(federation: Federation, lists: Groups) -> Federation:
    """The same images, with each list of images as one patient, named after its first image.

    Raises ValueError for a listed file that its site does not have: the lists belong to other data.
    """
    sites = []
    for site in federation.sites:
        patients = {name: group[0] for group in lists.get(site.name, ()) for name in group}
        if missing := sorted(patients.keys() - {case.name for case in site.cases}):
            raise ValueError(
                f"site '{site.name}' has no {missing[0]} ({len(missing)} files of {LISTS.name} are missing): "
                "make the lists again with python -m benchmarks.accuracy.cross_organ.patients"
            )
        cases = (replace(case, patient=patients.get(case.name, case.patient)) for case in site.cases)
        sites.append(replace(site, cases=tuple(cases)))
    return replace(federation, sites=tuple(sites))


def digest(federation: Federation) -> str:
    """A digest of every image's patient: rows computed with other patients are other rows."""
    hasher = hashlib.sha256()
    for site in federation.sites:
        for case in site.cases:
            hasher.update("\0".join((site.name, case.name, case.patient, "")).encode())
    return hasher.hexdigest()[:16]


def _pictures(path: Path) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """The image and its fine structure, as vectors of mean 0 and norm 1."""
    with Image.open(path) as image:
        whole = image.convert("L").resize((_SIDE, _SIDE), Image.Resampling.BILINEAR)
    near, far = (np.asarray(whole.filter(ImageFilter.GaussianBlur(radius)), float) for radius in _FINE)
    return _unit(np.asarray(whole, float)), _unit(near - far)


def _unit(pixels: NDArray[np.float64]) -> NDArray[np.float64]:
    centred: NDArray[np.float64] = pixels.ravel() - pixels.mean()
    # An image of a single grey value is similar to no other.
    return centred / max(float(np.linalg.norm(centred)), 1e-12)


def _correlations(units: Sequence[NDArray[np.float64]]) -> NDArray[np.float64]:
    stacked = np.stack(units)
    products: NDArray[np.float64] = stacked @ stacked.T
    return products


def main(
    data: Annotated[Path, typer.Option(help="As --data of `run cross_organ`.")],
) -> None:
    """Compare the images of every set that has a rule, and write the lists."""
    lines = []
    for site, rule in RULES.items():
        found = groups(list((data / SITES[site] / "images").iterdir()), rule)
        rows = ",\n".join(f"    {json.dumps(group)}" for group in found)
        lines.append(f"  {json.dumps(site)}: [\n{rows}\n  ]")
        print(f"{site}: {sum(map(len, found))} images of {len(found)} patients")
    LISTS.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")


if __name__ == "__main__":
    typer.run(main)
