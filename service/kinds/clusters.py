"""Clusters (FedBiCross): a hospital from outside is given the model of the cluster that its scans pick."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from model_store.artefact import Artefact
from model_store.manifest import ClustersManifest
from personalization.options.picking import PickingOptions
from service.jobs.sections import Row, Section, Table, figure, number
from service.kinds.kind import ArtefactKind, HospitalAdaptation, Parts, Words

_TEXT = (
    "What each cluster's model costs on these scans, by every criterion: the least is best. The pick is by "
    "{}; the others are shown for information."
)


def _parts(artefact: Artefact[ClustersManifest]) -> Parts:
    """The model of an only cluster has learned from all hospitals: it is a global one. None of several
    clusters is; the hospital's scans say which one is right for it.
    """
    manifest = artefact.manifest
    only = next(iter(manifest.clusters.values())) if len(manifest.clusters) == 1 else None
    return Parts(only, manifest.personal, manifest.clusters, manifest.assignment)


def sections(result: Mapping[str, Any], _: Sequence[Mapping[str, Any]]) -> tuple[Section, ...]:
    """The cost of every cluster by every criterion; nothing where the result has no pick."""
    try:
        picked, criterion = str(result["cluster"]), str(result["options"]["criterion"])
        sites = {str(name): tuple(map(str, found)) for name, found in result["sites"].items()}
        costs = {
            str(by): [number(found.get(name)) for name in sites] for by, found in result["costs"].items()
        }
    except (AttributeError, KeyError, TypeError):
        return ()
    rows = tuple(
        Row(
            name=name,
            cells=(", ".join(hospitals), *map(figure, numbers)),
            mark="picked" if name == picked else "",
        )
        for (name, hospitals), *numbers in zip(sites.items(), *costs.values(), strict=True)
    )
    table = Table(columns=("cluster", "its hospitals", *costs), figures=len(costs), rows=rows)
    return (Section(title="Which cluster was picked", sentences=(_TEXT.format(criterion),), body=table),)


KIND = ArtefactKind(
    manifest=ClustersManifest,
    noun="clusters",
    description="one per cluster of sites",
    summary="a model for each cluster of hospitals",
    parts=_parts,
    adaptation=HospitalAdaptation(
        source="a model per cluster of the federation's hospitals, as `python -m training.federate --method "
        "fedbicross` publishes it",
        options=PickingOptions,
        work="service.worker.clusters:PickingWork",
        sections=sections,
        words=Words(
            truth="no score on it was taken against a ground truth: this hospital sent none.",
            gate="No check has seen a drawn mask or a true class: look at the answers too.",
            epochs="",
            before="The mean answer of all clusters' models first",
            parts={},
        ),
    ),
)
