"""From a finished run to artefacts in a store.

Parts are published before the composite that refers to them, so a composite is never seen without its models.
Publishing the same run again publishes nothing new: equal content is one version.
"""

from __future__ import annotations

import platform
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.metadata import version
from types import MappingProxyType
from typing import Any

from model_store.artefact import Artefact
from model_store.errors import LocumStoreError
from model_store.manifest import (
    GRAPH,
    SCAN_GRAPH,
    SHIFT_GRAPH,
    WEIGHTS,
    ClustersManifest,
    CrossAttentionManifest,
    Lineage,
    ModelManifest,
    PersonalModelsManifest,
    RoutingSpaceManifest,
    SsfPoolManifest,
)
from model_store.reference import NAME
from model_store.store import Store
from model_store.task import Task
from personalization.errors import PersonalizationError
from personalization.export import to_onnx
from personalization.fedins import InstanceAdaptive
from personalization.iop_fl.spread import FILE, Spread
from personalization.networks import build, build_backbone
from personalization.networks.capabilities import moving_norms
from personalization.state import from_safetensors, to_safetensors
from personalization.test_time.presets.intent import scan_graph
from personalization.test_time.presets.ladder import shift_graph
from training.algorithm import Algorithm, ModelDraft, Phase, Publication
from training.engine.egress import SiteSpec
from training.errors import ConfigurationError, PublishError

_SOFTWARE = ("locum", "torch", "onnx", "numpy")


@dataclass(frozen=True)
class Origin:
    """What all artefacts of a run share."""

    name: str
    task: Task
    lineage: Lineage


def software() -> dict[str, str]:
    """The versions that an artefact's bytes may depend on."""
    return {"python": platform.python_version(), **{name: version(name) for name in _SOFTWARE}}


def check_names(name: str, parts: Sequence[str] = ()) -> None:
    """Know before the training what the store would refuse after it: `name`, and NAME.PART of each part.

    Raises ConfigurationError.
    """
    names = (name, *(f"{name}.{part}" for part in parts)) if NAME.fullmatch(name) else (name,)
    problems = [
        f"'{found}', of {len(found)} characters: expected at most 128 letters, digits, '.', '_' and '-', "
        "beginning with a letter or digit; take another --name"
        for found in names
        if not NAME.fullmatch(found)
    ]
    if problems:
        raise ConfigurationError("what is trained cannot be published under this name", problems)


def parts_of(algorithm: Algorithm, sites: Sequence[SiteSpec]) -> tuple[str, ...]:
    """Names of parts that a run may publish: of the sites that consent, and the longest other one. A method
    without an export publishes one model, which has no parts.
    """
    if not any(isinstance(step, Phase) and step.consent for step in algorithm.plan()):
        return ()
    return (*(site.name for site in sites if site.consents), algorithm.longest_part(len(sites)))


def publish(store: Store, origin: Origin, publication: Publication) -> tuple[Artefact, ...]:
    """Publish a run's models; the artefact that a person asks for by name comes last.

    Raises PublishError, naming the artefact, when a model cannot be exported or the store refuses it.
    """
    if publication.kind not in _KINDS:
        raise PublishError(
            f"'{origin.name}': kind '{publication.kind}' cannot be published; known: {', '.join(_KINDS)}"
        )
    details = {**origin.lineage.details, **publication.details}
    origin = replace(origin, lineage=origin.lineage.model_copy(update={"details": details}))
    try:
        return _KINDS[publication.kind](store, origin, publication)
    except (LocumStoreError, PersonalizationError) as error:
        raise PublishError(
            f"'{origin.name}' was not published to {store.root}: {error}. "
            "The run is kept: mend the cause and resume"
        ) from error


def _publish_model(store: Store, origin: Origin, publication: Publication) -> tuple[Artefact, ...]:
    (draft,) = publication.models
    return (
        _model(store, origin, draft, publication, name=origin.name, part_of=None, files=publication.files),
    )


def _publish_global_and_inside(
    store: Store, origin: Origin, publication: Publication
) -> tuple[Artefact, ...]:
    if not publication.models:
        raise PublishError(
            f"'{origin.name}': no site exported its model, and kind '{publication.kind}' has no other. Add "
            "--resume and --consent all, or --consent SITE,SITE: nothing is trained again"
        )
    inside: dict[str, str] = {}
    shared: dict[str, Any] = {}
    parts: list[Artefact] = []
    metrics: dict[str, float] = {}
    for draft in publication.models:
        label = draft.site or "global"
        part = _model(store, origin, draft, publication, name=f"{origin.name}.{label}", part_of=origin.name)
        parts.append(part)
        if draft.site is None:
            shared["global_model"] = part.digest
        else:
            inside[draft.site] = part.digest
        metrics |= {f"{label}.{metric}": value for metric, value in draft.metrics.items()}
    manifest = _GLOBAL_AND_INSIDE[publication.kind](
        name=origin.name,
        task=origin.task,
        lineage=origin.lineage,
        metrics=metrics,
        software=software(),
        inside=inside,
        **shared,
    )
    files = dict(publication.files)
    # The graphs of one scan end in a softmax, which regions have not.
    if publication.kind == "routing-space" and not origin.task.regions:
        draft = next(draft for draft in publication.models if draft.site is None)
        network = build(draft.network.name, **draft.network.arguments)
        network.load_state_dict(draft.weights)
        channels, size = origin.task.in_channels, origin.task.input_shape
        # The recipes of these graphs move batch norm; without, a scan is adapted by a job.
        if FILE in files:
            files[SHIFT_GRAPH] = shift_graph(network, Spread.model_validate_json(files[FILE]), channels, size)
        elif moving_norms(network):
            files[SCAN_GRAPH] = scan_graph(network, channels, size)
    return (*parts, store.publish(manifest, files))


def _publish_clusters(store: Store, origin: Origin, publication: Publication) -> tuple[Artefact, ...]:
    clusters: dict[str, str] = {}
    personal: dict[str, str] = {}
    parts: list[Artefact] = []
    metrics: dict[str, float] = {}
    for draft in publication.models:
        label = f"cluster-{draft.cluster}" if draft.site is None else draft.site
        part = _model(store, origin, draft, publication, name=f"{origin.name}.{label}", part_of=origin.name)
        parts.append(part)
        if draft.site is None:
            clusters[str(draft.cluster)] = part.digest
        else:
            personal[draft.site] = part.digest
        metrics |= {f"{label}.{metric}": value for metric, value in draft.metrics.items()}
    manifest = ClustersManifest(
        name=origin.name,
        task=origin.task,
        lineage=origin.lineage,
        metrics=metrics,
        software=software(),
        clusters=clusters,
        personal=personal,
        **publication.composite,
    )
    return (*parts, store.publish(manifest, {}))


def _publish_ssf_pool(store: Store, origin: Origin, publication: Publication) -> tuple[Artefact, ...]:
    composite = dict(publication.composite)
    routing = composite.pop("routing")
    if routing != "instance":
        raise PublishError(
            f"'{origin.name}': a pool trained with routing '{routing}' is a control and is not published; "
            "no graph would serve it as it was trained"
        )
    (draft,) = publication.models
    network = InstanceAdaptive(
        build_backbone(draft.network.name, **draft.network.arguments),
        len(origin.task.classes),
        composite["entries"],
        composite["top"],
        blocks=composite["blocks"],
    )
    network.backbone.load_state_dict(from_safetensors(store.by_digest(composite["backbone"]).read(WEIGHTS)))
    network.pool.load_state_dict(draft.weights)
    manifest = SsfPoolManifest(
        name=origin.name,
        task=origin.task,
        network=draft.network,
        lineage=origin.lineage,
        metrics=dict(draft.metrics),
        statistics=publication.statistics,
        software=software(),
        **composite,
    )
    files = {
        WEIGHTS: to_safetensors(draft.weights),
        GRAPH: to_onnx(network, origin.task.in_channels, origin.task.input_shape),
    }
    return (store.publish(manifest, files),)


def _model(
    store: Store,
    origin: Origin,
    draft: ModelDraft,
    publication: Publication,
    *,
    name: str,
    part_of: str | None,
    files: Mapping[str, bytes] = MappingProxyType({}),
) -> Artefact:
    network = build(draft.network.name, **draft.network.arguments)
    network.load_state_dict(draft.weights)
    manifest = ModelManifest(
        name=name,
        part_of=part_of,
        role=draft.role,
        site=draft.site,
        task=origin.task,
        network=draft.network,
        lineage=origin.lineage,
        metrics=dict(draft.metrics),
        statistics=publication.statistics,
        sources=draft.sources,
        software=software(),
    )
    task = origin.task
    graph = to_onnx(
        network,
        task.in_channels,
        task.input_shape,
        regions=bool(task.regions),
        logits=task.averages_logits,
    )
    own = {WEIGHTS: to_safetensors(draft.weights), GRAPH: graph}
    return store.publish(manifest, {**files, **own})


_GLOBAL_AND_INSIDE: Mapping[
    str, type[RoutingSpaceManifest] | type[CrossAttentionManifest] | type[PersonalModelsManifest]
] = {
    "routing-space": RoutingSpaceManifest,
    "cross-attention": CrossAttentionManifest,
    "personal-models": PersonalModelsManifest,
}

_KINDS: Mapping[str, Callable[[Store, Origin, Publication], tuple[Artefact, ...]]] = {
    "model": _publish_model,
    **dict.fromkeys(_GLOBAL_AND_INSIDE, _publish_global_and_inside),
    "clusters": _publish_clusters,
    "ssf-pool": _publish_ssf_pool,
}
