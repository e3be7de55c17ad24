"""A site's own `dataset.json` (nnU-Net, Medical Segmentation Decathlon): what its mask values mean.

Sites of one federation may number the same labels differently. The values of a site's masks are mapped to the
task's by the labels' names, and a contradiction is a problem.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from typing import Any

from model_store.errors import TaskError
from model_store.task import Task

FILE = "dataset.json"
BACKGROUND, IGNORE = "background", "ignore"


@dataclass(frozen=True)
class Sidecar:
    """What a site's masks mean: task values by their own, labels that it does not have, and a note."""

    values: tuple[tuple[int, int], ...] = ()
    undrawn: tuple[str, ...] = ()
    note: str = ""


def labels_in(content: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """Label -> values. Raises ValueError, KeyError, TypeError or AttributeError for other content."""
    # The Decathlon maps values to names, nnU-Net names to values, or to several of nested labels.
    pairs = ((v, int(k)) if str(k).isdigit() else (k, v) for k, v in content["labels"].items())
    return {str(k): tuple(map(int, v)) if isinstance(v, list) else (int(v),) for k, v in pairs}


def channels_in(names: Mapping[str, str]) -> list[str]:
    """The channels' names in the order of their files, as nnU-Net takes it: by number where all keys are
    numbers, else as written."""
    numbered = all(key.isascii() and key.isdecimal() for key in names)
    return [str(names[key]) for key in (sorted(names, key=int) if numbered else names)]


def content_of(path: Path) -> Any:
    """What a dataset.json says, with or without a byte order mark. Raises OSError or ValueError."""
    return json.loads(path.read_text(encoding="utf-8-sig"))


def labels_of(folder: Path, problems: list[str]) -> dict[str, tuple[int, ...]] | None:
    """The labels of a site's dataset.json; None without the file. Problems are appended to `problems`."""
    path = folder / FILE
    if not path.is_file():
        return None
    try:
        return labels_in(content_of(path))
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        problems.append(
            f"{folder.name}/{FILE}: expected labels by name or by value, as nnU-Net and the Decathlon write "
            f"them; {type(error).__name__}: {error}. Correct the file, or remove it"
        )
        return None


def channels_of(folder: Path) -> tuple[str, ...]:
    """The channels' names of a site's dataset.json, nnU-Net's or the Decathlon's; empty where it has none."""
    try:
        content = content_of(folder / FILE)
        names = content.get("channel_names", content.get("modality", {}))
        return tuple(channels_in(names))
    except (OSError, ValueError, TypeError, AttributeError):
        return ()


def other_channels(named: Mapping[str, tuple[str, ...]]) -> list[str]:
    """Say which sites' dataset.json names other channels than that of the first site that names any."""
    said = {site: names for site, names in named.items() if names}
    if not said:
        return []
    first, expected = next(iter(said.items()))
    return [
        f"{site}/{FILE}: its channels are {', '.join(names)}, and those of {first} {', '.join(expected)}: "
        "check that these are the same kind of scan, in one order"
        for site, names in said.items()
        if [*map(_plain, names)] != [*map(_plain, expected)]
    ]


def unnamed(site: str, undrawn: Collection[str], labelled: Mapping[str, int]) -> list[str]:
    """Say which labels a site's masks have that its dataset.json does not name (`undrawn`)."""
    return [
        f"{site}/{FILE}: it does not name '{label}', and {labelled[label]} of the site's masks have its "
        "value, which is read so; correct the file, or the masks if it is something else there"
        for label in undrawn
        if labelled[label]
    ]


def compared(site: str, labels: Mapping[str, tuple[int, ...]], task: Task, problems: list[str]) -> Sidecar:
    """Map a site's labels to the task's, by name. Problems are appended to `problems`.

    A label that no name of the task has keeps its values, as far as no other label gets them.
    """
    names = {_plain(label): label for label in task.labels}
    known = {name: names[_plain(name)] for name in labels if _plain(name) in names}
    values, unnamed = dict[int, int](), dict[int, str]()
    for value in sorted({value for own in labels.values() for value in own}):
        own = [name for name, members in labels.items() if value in members]
        if own == [IGNORE]:
            if task.ignore:
                values[value] = task.ignore[0]
            else:
                problems.append(
                    f"{site}/{FILE}: value {value} is '{IGNORE}', and task '{task.name}' has no such value: "
                    f"add `ignore: {value}` to task.yaml"
                )
        elif own == [BACKGROUND]:
            values[value] = value if value in task.background else task.background[0]
        elif all(name in known or name == BACKGROUND for name in own):
            wanted = {known[name] for name in own if name in known}
            found = next((each for each in task.classes if {*each.labels} == wanted), None)
            if found is None:
                problems.append(
                    f"{site}/{FILE}: value {value} is {' and '.join(own)}, and no value of task "
                    f"'{task.name}' is; correct the file or task.yaml"
                )
            else:
                values[value] = value if value in found.values else min(found.values)
        else:
            unnamed[value] = " and ".join(own)
    taken = {wanted: value for value, wanted in values.items() if wanted not in task.background}
    problems += [
        f"{site}/{FILE}: value {value} is '{name}', and of task '{task.name}' it is "
        f"{_meaning(value, task)}, which is value {taken[value]} here; correct the names of the labels"
        for value, name in unnamed.items()
        if value in taken
    ]
    moved = {value: wanted for value, wanted in values.items() if value != wanted}
    said = []
    if moved:
        each = ", ".join(f"{value} ({_meaning(wanted, task)}) as {wanted}" for value, wanted in moved.items())
        said.append(f"its mask values are read by their names: {each}")
    if others := {value: name for value, name in unnamed.items() if value in task.mask_values}:
        each = ", ".join(f"{value} ('{name}') as {_meaning(value, task)}" for value, name in others.items())
        said.append(f"names that the task does not have are read by their values: {each}")
    undrawn = () if unnamed else tuple(label for label in task.labels if label not in known.values())
    note = f"{site}/{FILE}: {'; '.join(said)}" if said else ""
    return Sidecar(tuple(sorted(moved.items())), undrawn, note)


def together(sites: Mapping[str, Mapping[str, tuple[int, ...]] | None]) -> dict[str, tuple[int, ...]] | None:
    """All labels that the sites name, each with the values of the first that does; None where a site says
    none.

    Raises TaskError where two sites give one value different names.
    """
    names, union = dict[str, str](), dict[str, tuple[int, ...]]()
    for labels in sites.values():
        if labels is None:
            return None
        for name, values in labels.items():
            union.setdefault(names.setdefault(_plain(name), name), values)
    own = {site: {names[_plain(name)] for name in labels or ()} for site, labels in sites.items()}
    for one, other in combinations(union, 2):
        if {*union[one]} & {*union[other]} and not any({one, other} <= known for known in own.values()):
            first, second = (next(site for site in own if name in own[site]) for name in (one, other))
            raise TaskError(
                f"{second}/{FILE}: value {min({*union[one]} & {*union[other]})} is '{other}', and in that of "
                f"{first} it is '{one}': write a task.yaml with all labels, or correct the names"
            )
    return union or None


def _meaning(value: int, task: Task) -> str:
    if value in task.ignore:
        return IGNORE
    own = next((each.labels for each in task.classes if value in each.values), ())
    return " and ".join(own) or BACKGROUND


def _plain(name: str) -> str:
    return "".join(each for each in name.casefold() if each.isalnum())
