"""A routing space (IOP-FL): adapted to unlabeled scans by weighing its models, layer by layer."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from model_store.manifest import SCAN_GRAPH, SHIFT_GRAPH, RoutingSpaceManifest
from personalization.options.adaptation import RoutingOptions
from personalization.options.presets import AUTO, FOR_COHORTS, SCAN_FALLBACK
from service.jobs.sections import Forest, HeatMap, Interval, Row, Section, Table, figure, heat_map, number
from service.kinds.kind import ArtefactKind, HospitalAdaptation, Parts, ScanAdaptation, Words
from service.kinds.masks import BY_MASKS

_TEXT = (
    "Percent of each layer's weights, normalised per layer, from the image to the mask. Each model began "
    "with an equal part, {} %."
)


def sections(result: Mapping[str, Any], epochs: Sequence[Mapping[str, Any]]) -> tuple[Section, ...]:
    """The dose and its shift, what the federation's practice expected, the routing coefficients, and what
    each stage cost.

    Coefficients are those of the candidate, else of the latest epoch that reported some.
    """
    return (
        *_dose(result.get("dose")),
        *_practice(result.get("playbook")),
        *_routing(result, epochs),
        *_cost(result.get("milliseconds")),
    )


def _dose(found: Any) -> tuple[Section, ...]:
    """How far the scans are, the dose that this asked for, and what that did at the members."""
    try:
        shift, doses = float(found["shift"]), tuple(map(float, found["doses"]))
        members, practised = int(found["members"]), found.get("practised")
        rows = tuple(
            Row(name=name, cells=(figure(100 * dose),))
            for name, dose in zip(("first", "middle", "last"), doses, strict=True)
        )
        changes = {} if practised is None else practised["changes"]
        forest = tuple(
            Interval(name=str(name), value=float(mean), low=float(low), high=float(high))
            for name, (mean, low, high) in changes.items()
        )
        largest = None if practised is None else float(practised["largest"])
    except (KeyError, TypeError, ValueError):
        return ()
    said = (
        f"The squared distance of these scans from the global model's statistics is {shift:.2f} times what "
        f"is usual between hospitals, by the {members} members' own scans. Up to 1 nothing is moved.",
        "The share of the way to these scans' statistics that batch norm moves, by thirds of its layers, in "
        "percent. Few slices get less of it.",
        *(() if largest is None else (f"The largest distance that the members practised is {largest:.1f}.",)),
    )
    section = Section(
        title="How far these scans are from the members'",
        sentences=said,
        body=Table(columns=("layers", "dose"), figures=1, rows=rows),
    )
    if not forest:
        return (section,)
    text = (
        "Change of Dice by the dose that the distance asks for, as its gate serves it, when each member "
        "played the hospital from outside: mean, lowest and highest of its episodes."
    )
    title = "What this did at the members"
    return section, Section(title=title, sentences=(text,), body=Forest(rows=forest))


def _practice(found: Any) -> tuple[Section, ...]:
    """The recipes that were tried and the members that practised the chosen one, where an earlier release
    chose among them; else none."""
    try:
        tried = {each["recipe"]: (float(each["predicted"]), float(each["bound"])) for each in found["tried"]}
        predicted, bound = tried[found["recipe"]]
        members = [
            Interval(name=str(name), value=float(mean), low=float(low), high=float(high))
            for name, (mean, low, high) in found["members"].items()
        ]
        recipe, promise = str(found["recipe"]), str(found["promise"])
    except (KeyError, TypeError, ValueError):
        return ()
    here = Interval(
        name="this hospital, predicted", value=predicted, low=bound, high=max(predicted, bound), own=True
    )
    text = (
        f"Change of Dice by “{recipe}”: at the members when they played the hospital from outside (mean, "
        "lowest and highest of their episodes), and as predicted here from the scans alone, with its lower "
        "bound."
    )
    rows = tuple(
        Row(name=name, cells=tuple(map(figure, values)), mark="taken" if name == recipe else "")
        for name, values in tried.items()
    )
    return (
        Section(
            title="What the federation's practice expects",
            sentences=(text, promise) if promise else (text,),
            body=Forest(rows=(*members, here)),
        ),
        Section(
            title="Recipes that were tried on these scans",
            sentences=("Predicted change of Dice, and its lower bound.",),
            body=Table(columns=("recipe", "predicted", "lower bound"), figures=2, rows=rows),
        ),
    )


def _cost(found: Any) -> tuple[Section, ...]:
    """Seconds of the worker by stage."""
    if not isinstance(found, Mapping) or not all(number(value) is not None for value in found.values()):
        return ()
    rows = tuple(Row(name=str(name), cells=(figure(value / 1000),)) for name, value in found.items())
    table = Table(columns=("stage", "seconds"), figures=1, rows=rows)
    return (Section(title="What it cost", sentences=("Seconds of the worker.",), body=table),)


def _routing(result: Mapping[str, Any], epochs: Sequence[Mapping[str, Any]]) -> tuple[Section, ...]:
    latest = (data["coefficients"] for data in reversed(epochs) if data.get("coefficients"))
    found = _coefficients(result.get("coefficients") or next(latest, None))
    if found is None:
        return ()
    text = _TEXT.format(f"{100 / len(found.rows):.0f}")
    return (Section(title="Share of each model per layer", sentences=(text,), body=found),)


def _coefficients(found: Any) -> HeatMap | None:
    """None unless it is a table of numbers, as wide as there are models and as long as there are layers."""
    try:
        layers, models = tuple(map(str, found["layers"])), tuple(map(str, found["models"]))
        values = tuple(tuple(float(value) for value in layer) for layer in found["values"])
    except (KeyError, TypeError, ValueError):
        return None
    whole = len(values) == len(layers) and {len(layer) for layer in values} == {len(models)}
    finite = all(math.isfinite(value) and value >= 0 for layer in values for value in layer)
    return heat_map(layers, models, values, "all layers") if whole and finite and layers and models else None


def _gains(manifest: RoutingSpaceManifest) -> dict[str, float]:
    """By member, of those that were compared with the global model."""
    metrics = manifest.metrics
    return {
        site: metrics[f"{site}.val_dice"] - metrics[f"{site}.val_dice_global"]
        for site in manifest.inside
        if {f"{site}.val_dice", f"{site}.val_dice_global"} <= metrics.keys()
    }


SCAN = ScanAdaptation[RoutingSpaceManifest](
    network=lambda artefact: artefact.manifest.global_model,
    run="service.worker.routing_scan:run_routing_scan",
    graphs={AUTO: SHIFT_GRAPH, SCAN_FALLBACK: SCAN_GRAPH},
)
ADAPTATION = HospitalAdaptation[RoutingSpaceManifest](
    source="a global model with those of the federation's sites, as `python -m training.federate "
    "--method iop-fl` publishes it with consent",
    options=RoutingOptions,
    presets=FOR_COHORTS,
    work="service.worker.routing_space:RoutingWork",
    fallback_reason="no epoch was better than step 0 by the loss; the candidate is step 0",
    sections=sections,
    scan=SCAN,
    words=Words(
        truth="no score on it was taken against a ground truth: this hospital sent none.",
        gate="No check has seen a drawn mask: look at the pictures too.",
        epochs="No labels are involved. Epoch 0 is step 0, before anything was learned: all models in "
        "equal parts, or the global model alone, by the preset. “ladder” learns nothing.",
        before="The global model it came from first",
        parts={
            "consistency": "Mean squared difference between the answers to an image and to the image "
            "with noise.",
            "entropy": "How undecided the answers are. A low value is not a good mask.",
            "shape": "How far the answers are from compact shapes.",
        },
    ),
)
KIND = ArtefactKind(
    manifest=RoutingSpaceManifest,
    noun="a routing-space",
    description="a global one with one per site",
    summary="adapts to a hospital without masks, or with a few",
    parts=lambda artefact: Parts(
        artefact.manifest.global_model, artefact.manifest.inside, gains=_gains(artefact.manifest)
    ),
    masks=BY_MASKS,
    adaptation=ADAPTATION,
)
