"""The page of `instance_adaptive`: means, differences, and what the keys learned."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import mean

from benchmarks.accuracy.instance_adaptive.arms import (
    BATCH,
    CLASSIFYING,
    FEDAVG,
    FROZEN,
    HEAD,
    POOL,
    RANDOM,
    SEGMENTING,
    SINGLE,
    unpacked,
)
from benchmarks.harness.cells import Cell, Row
from benchmarks.harness.scores import Scores, add, difference, difference_by_seed, mean_at, sites_of
from benchmarks.harness.tables import mean_and_spread, table, verdict

_AGAINST = {
    "classification": (FEDAVG, SINGLE, BATCH, RANDOM),
    "segmentation": (FROZEN, HEAD, SINGLE, RANDOM),
}
_ARMS = {"classification": CLASSIFYING, "segmentation": SEGMENTING}


def sections(rows: Sequence[Row], cells: Sequence[Cell]) -> list[str]:
    """The page; `rows` are the finished ones of `cells`."""
    parts = [f"{len(rows)} of {len(cells)} cells are finished."]
    for part, what in (("classification", "accuracy"), ("segmentation", "foreground Dice per patient")):
        own = [row for row in rows if row["cell"]["part"] == part]
        groups = _groups(own)
        if groups:
            parts += [
                f"## {part.capitalize()}",
                _settings([row["cell"] for row in own]),
                f"Mean {what} over all sites' test images, then mean ± deviation over seeds.",
                _means(part, groups),
                "The pool per instance less another arm, paired by image or patient, with its 95 % interval "
                "(bootstrap within sites, seeds averaged first). It *helps* or *harms* where the interval "
                "leaves zero out and every seed agrees.",
                _differences(part, groups),
                "What the keys learned. Entropy of the entries' use (1: all alike), entries that no test "
                "image picks, and how much the first pick tells of the site, and of the style (0: nothing, "
                "1: all). Of random entries, these are the drawn ones.",
                _keys(groups),
            ]
    return parts


def _settings(cells: Sequence[Cell]) -> str:
    """All settings of the cells of a part."""
    by_set = {cell["set"]: cell for cell in cells}
    names = [name for name in cells[0] if name not in ("part", "set", "styles", "seed")]
    shown = []
    for name in names:
        texts = {set_: _text(name, cell[name]) for set_, cell in by_set.items()}
        same = len(set(texts.values())) == 1
        shown += [texts[cells[0]["set"]]] if same else [f"{what} on {set_}" for set_, what in texts.items()]
    return f"Settings (`pool`: how pools are trained; `tuning`: arms without one): {'; '.join(shown)}."


def _text(name: str, value: object) -> str:
    if isinstance(value, Mapping):
        return f"{name}: {', '.join(f'{k} {v}' for k, v in value.items())}"
    return f"{name} {value}"


def _groups(rows: Sequence[Row]) -> dict[str, list[Row]]:
    """Rows by column: the set, and the number of styles."""
    groups: dict[str, list[Row]] = {}
    for row in rows:
        cell = row["cell"]
        styles = f", {cell['styles']} styles" if "styles" in cell else ""
        groups.setdefault(f"{cell['set']}{styles}", []).append(row)
    return groups


def scores_of(rows: Sequence[Row]) -> Scores:
    """Scores by arm, seed and image or patient."""
    scores: Scores = {}
    for row in rows:
        for arm, sites in unpacked(row["result"]).items():
            for site, answers in sites.items():
                add(scores, arm, row["cell"]["seed"], site, answers)
    return scores


def _means(part: str, groups: Mapping[str, Sequence[Row]]) -> str:
    scores = {name: scores_of(rows) for name, rows in groups.items()}
    body = [
        [arm, *(mean_at(found[arm], sites_of(found)) for found in scores.values())] for arm in _ARMS[part]
    ]
    return table(["arm", *groups], body)


def _differences(part: str, groups: Mapping[str, Sequence[Row]]) -> str:
    body = []
    for name, rows in groups.items():
        scores = scores_of(rows)
        for other in _AGAINST[part]:
            found = difference(scores[POOL], scores[other], sites_of(scores))
            if found is None:
                continue
            said = verdict(found, difference_by_seed(scores[POOL], scores[other]))
            body.append([name, other, str(found), said])
    return table(["set", "against", "difference", "the pool"], body)


def _keys(groups: Mapping[str, Sequence[Row]]) -> str:
    body = []
    for name, rows in groups.items():
        for arm in (POOL, RANDOM):
            found = [row["result"]["keys"][arm] for row in rows]
            style = [keys["by_style"] for keys in found if "by_style" in keys]
            body.append(
                [
                    name,
                    arm,
                    mean_and_spread([keys["entropy"] for keys in found], 2),
                    f"{mean(keys['dead'] for keys in found):.1f}",
                    mean_and_spread([keys["by_site"] for keys in found], 2),
                    mean_and_spread(style, 2),
                ]
            )
    return table(["set", "arm", "entropy", "dead keys", "tells the site", "tells the style"], body)
