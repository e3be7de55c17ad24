"""Three sets of different organs as one federation, with the images of a patient together.

Where a set does not name its patients, patients.json has a list of file names for every patient, or group of
near-duplicates, with several images. Images were compared at 128x128, grey, by correlation. The thresholds
were read off the sets, not derived (commit 57696fa04a has the code):

bladder_mri       slices in numbers. Neighbours of one patient correlate by over 0.97, no two of different
                  patients by over 0.69: any threshold between gives the same twelve patients.
breast_ultrasound near-duplicates, some with markers or shifted by a little: over 0.9, or over 0.5 in fine
                  structure. A repeat with a large shift is not found.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TypeAlias

from training.data.cases import Federation

# The site's name, and its folder in the data.
PLACES: Mapping[str, str] = {
    "bladder_mri": "tumour_organs/bladder_mri",
    "brain_flair": "brain_lgg_flair/HT",
    "breast_ultrasound": "breast_ultrasound/BUSI_tumour",
}
LISTS = Path(__file__).with_name("patients.json")
# site -> patients -> names of files
Groups: TypeAlias = Mapping[str, Sequence[Sequence[str]]]


def assemble(data: Path, root: Path) -> Path:
    """Make a folder of links to the sites, which loads as one federation. Returns `root`."""
    root.mkdir(parents=True, exist_ok=True)
    for name, place in PLACES.items():
        link, target = root / name, (data / place).resolve()
        if not link.is_symlink() or link.resolve() != target:
            # Created under another name and renamed: another run may be reading the link.
            aside = root / f".{name}.{os.getpid()}"
            aside.symlink_to(target)
            aside.replace(link)
    return root


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
                "use the set that the lists were made for"
            )
        cases = (replace(case, patient=patients.get(case.name, case.patient)) for case in site.cases)
        sites.append(replace(site, cases=tuple(cases)))
    return replace(federation, sites=tuple(sites))
