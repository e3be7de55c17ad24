"""The page of `cross_organ`: Dice inside, false alarms, which parts help, and outside sites."""

from __future__ import annotations

from collections.abc import Sequence

from benchmarks.accuracy.cross_organ.arms import (
    ARMS,
    FEDAVG,
    FEDPER,
    LOCAL,
    LONG_FEDAVG,
    LONG_WHOLE,
    NO_ADAPTER,
    NO_BANK,
    NO_PBL,
    NO_QUERY,
    SCRATCH,
    STARTS,
    TRAINED,
    TUNED,
    WHOLE,
    WHOLE_PBL,
    ZERO_SHOT,
)
from benchmarks.accuracy.cross_organ.plateau import plateau
from benchmarks.accuracy.cross_organ.scores import alarm_scores, dice_scores
from benchmarks.harness import scores as tables
from benchmarks.harness.cells import Cell, Row, key
from benchmarks.harness.scores import (
    FEWEST_PATIENTS,
    FEWEST_SEEDS,
    Difference,
    Scores,
    difference_of_sites,
)
from benchmarks.harness.tables import table

COMPARISONS = (
    *((WHOLE, arm) for arm in ARMS if arm != WHOLE),
    (FEDAVG, LOCAL),
    (FEDPER, LOCAL),
    (TUNED, FEDAVG),
    (TUNED, LOCAL),
)
CONTROLLED = ((LONG_WHOLE, WHOLE), (LONG_FEDAVG, FEDAVG), (LONG_WHOLE, LONG_FEDAVG))
PARTS = (
    (NO_QUERY, "query stage with its attention and bank"),
    (NO_BANK, "bank, the attention being left,"),
    (NO_ADAPTER, "adapter"),
    (NO_PBL, "perturbed loss"),
)
OUTSIDE_PAIRS = ((WHOLE, FEDAVG), (WHOLE, SCRATCH), (FEDAVG, SCRATCH), (WHOLE_PBL, WHOLE))
_WORDS = {"helps": "earns its keep", "harms": "does harm", "no difference shown": "is not shown to help"}


def sections(rows: Sequence[Row], cells: Sequence[Cell]) -> list[str]:
    """The page; `rows` are the finished ones of `cells`."""
    shown = comparable(rows, cells)
    parts = [about(rows, len(cells))]
    if len(shown) < len(rows):
        parts.append("What follows is of the seeds alone that every arm has finished.")
    return [*parts, *inside(shown), *plateau(shown), *twice_as_long(shown), *outside(shown)]


def comparable(rows: Sequence[Row], cells: Sequence[Cell]) -> list[Row]:
    """The rows of seeds that all arms have finished, and all rows while there is no such seed.

    Each seed tests other patients: means over different seeds are means over different patients.
    """
    finished = {key(row["cell"]) for row in rows}
    arms = [cell for cell in cells if cell["trained"] in TRAINED]
    unfinished = {cell["seed"] for cell in arms if key(cell) not in finished}
    return [row for row in rows if row["cell"]["seed"] not in unfinished] or list(rows)


def about(rows: Sequence[Row], cells: int) -> str:
    """The settings, and how to read the tables."""
    cell = rows[0]["cell"]
    method = ", ".join(f"{name} {value}" for name, value in cell["method"].items())
    train, val = cell["most"]
    return "\n\n".join(
        [
            f"Profile `{cell['profile']}`: {cell['size']}x{cell['size']}, at most {train} training and {val} "
            f"validation images per site, {method}. {len(rows)} of {cells} cells (seed and what is trained) "
            "are finished. All arms take as many steps at every site as FedOAP's two stages, and keep their "
            "last round. The learning rate was tuned for none of them.",
            "Dice of each image with a tumour, on its own grid, the mean over a patient's images. Patients "
            "are as the set names them; where it does not, images that look alike count as one's, "
            "duplicates among them (`benchmarks/accuracy/cross_organ/patients.py`), and other images stand "
            "for themselves. ± is the standard deviation over seeds, each of which tests other patients.",
            "Intervals are 95 %, paired bootstrap over patients, drawn within sites; a mean of sites weighs "
            "them alike. They know nothing of other trainings: *helps* and *harms* are said where the "
            "interval leaves zero out and every seed agrees in sign; nothing is corrected for the number of "
            f"comparisons. Fewer than {FEWEST_PATIENTS} patients at a site give no interval, and fewer than "
            f"{FEWEST_SEEDS} seeds no word.",
        ]
    )


def inside(rows: Sequence[Row]) -> list[str]:
    """Every arm at every site, the differences, the parts of FedOAP, and false alarms."""
    scores = dice_scores(rows)
    arms = [arm for arm in ARMS if arm in scores]
    if not arms:
        return []
    sites = tables.sites_of(scores)
    body = [
        [
            arm,
            *(tables.mean_at(scores[arm], [site]) for site in sites),
            tables.mean_of_sites(scores[arm], sites),
        ]
        for arm in arms
    ]
    parts = ["## Inside", f"Patients tested, over all seeds: {_counted(scores, sites)}."]
    parts.append(table(["arm", *sites, "mean of sites"], body))
    if pairs := [pair for pair in COMPARISONS if pair[0] in scores and pair[1] in scores]:
        differences = [_compared(scores, sites, *pair) for pair in pairs]
        parts.append(table(["difference", *sites, "mean of sites", "in a word"], differences))
    parts += [*keep(scores), *alarms(rows)]
    return parts


def twice_as_long(rows: Sequence[Row]) -> list[str]:
    """Test results of the controls against their arms and each other, on the seeds that have them."""
    scores = dice_scores(rows)
    pairs = [pair for pair in CONTROLLED if pair[0] in scores and pair[1] in scores]
    if not pairs:
        return []
    sites = tables.sites_of(scores)
    differences = [_compared(scores, sites, *pair) for pair in pairs]
    return [
        "In test, on the same seeds:",
        table(["difference", *sites, "mean of sites", "in a word"], differences),
    ]


def _compared(scores: Scores, sites: Sequence[str], first: str, second: str) -> list[str]:
    of_sites = [_difference(scores, first, second, [site]) for site in sites]
    together = _difference(scores, first, second, sites)
    shown = [str(found) if found else "–" for found in (*of_sites, together)]
    return [f"{first} − {second}", *shown, together.verdict if together else "–"]


def keep(scores: Scores) -> list[str]:
    """Whether each part of FedOAP helps: the difference to the arm without it, in the mean of sites."""
    sites = tables.sites_of(scores)
    lines = []
    for arm, name in PARTS:
        if found := _difference(scores, WHOLE, arm, sites):
            word = _WORDS.get(found.verdict, f"cannot be judged ({found.verdict})")
            each = ", ".join(f"{value:+.3f}" for value in found.each)
            lines.append(f"- The {name} {word}: {found} Dice (by seed {each}).")
    return ["Which parts earn their keep, in the mean of sites:", "\n".join(lines)] if lines else []


def alarms(rows: Sequence[Row]) -> list[str]:
    """False alarms on images without a tumour; the sites that have such images."""
    scores = alarm_scores(rows)
    sites = tables.sites_of(scores)
    if not sites:
        return []
    body = [[arm, *(tables.mean_at(scores[arm], [site]) for site in sites)] for arm in ARMS if arm in scores]
    return [
        "False positives: share of the images without a tumour in which more than specks (a thousandth of "
        "the image) of one is found, the mean over patients. Other sites have no such images.",
        table(["arm", *sites], body),
    ]


def outside(rows: Sequence[Row]) -> list[str]:
    """Outside sites, by what they start from and how many images they label."""
    cell = rows[0]["cell"]
    budgets = [ZERO_SHOT, *map(str, cell["budgets"])]
    by_budget = {budget: dice_scores(rows, "outside", budget) for budget in budgets}
    sites = sorted({site for scores in by_budget.values() for site in tables.sites_of(scores)})
    if not sites:
        return []
    parts = [
        "## From outside",
        "Dice on test images of hospitals that no federation had: as they come, and after "
        f"{cell['joining']['steps']} steps in batches of {cell['joining']['batch']} on a few labelled "
        "images, about a fifth of them, of other patients, to choose the epoch by. All train with the plain "
        f"loss, but `{WHOLE_PBL}`, which joins as the product does; `{FEDAVG}` is that of `{TUNED}`, of as "
        "many rounds as FedOAP's first stage. No patient with a labelled image is tested.",
        "Patients are distinguished by looks alone here. Of the 25 images of breast_dce_mri 22 show one "
        "tumour of one patient: labelling some to find it in others would be to remember it, so that this "
        "set is for zero-shot only, and what is said of joining rests on brain_mri_t1ce alone.",
    ]
    for site in sites:
        own = [budget for budget in budgets if site in tables.sites_of(by_budget[budget])]
        names = ["zero-shot" if budget == ZERO_SHOT else f"{budget} images" for budget in own]
        body = [
            [start, *(_at(by_budget[budget], start, site) for budget in own)]
            for start in STARTS
            if any(_has(by_budget[budget], start, site) for budget in own)
        ]
        largest = max(own, key=lambda budget: tables.count_patients(by_budget[budget], site))
        parts += [
            f"### {site}",
            f"Patients tested, over all seeds: {_counted(by_budget[largest], [site])}.",
            table(["begins with", *names], body),
        ]
        pairs = []
        for first, second in OUTSIDE_PAIRS:
            found = [_difference(by_budget[budget], first, second, [site]) for budget in own]
            if any(found):
                shown = (f"{each} {each.verdict}" if each else "–" for each in found)
                pairs.append([f"{first} − {second}", *shown])
        if pairs:
            parts.append(table(["difference", *names], pairs))
    return parts


def _counted(scores: Scores, sites: Sequence[str]) -> str:
    return ", ".join(f"{tables.count_patients(scores, site)} of {site}" for site in sites)


def _has(scores: Scores, arm: str, site: str) -> bool:
    return any(own == site for by in scores.get(arm, {}).values() for own, _ in by)


def _at(scores: Scores, arm: str, site: str) -> str:
    return tables.mean_at(scores[arm], [site]) if arm in scores else "–"


def _difference(scores: Scores, first: str, second: str, sites: Sequence[str]) -> Difference | None:
    if first not in scores or second not in scores:
        return None
    return difference_of_sites(scores[first], scores[second], sites)
