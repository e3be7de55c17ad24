"""Manifests of artefacts, one class per kind: the data needed for serving, and the lineage.

A manifest has no time and no version number, so the same training gives the same bytes and the same digest.
The store keeps the version number and the time.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Final, Literal, get_args

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    FiniteFloat,
    JsonValue,
    TypeAdapter,
    ValidationError,
    model_validator,
)

from model_store.digest import Digest
from model_store.errors import PublishRefused, UnknownKind
from model_store.guard import ReferenceStatistics
from model_store.task import Task

SCHEMA_VERSION: Final = 1

# The method of a version that was made elsewhere.
IMPORTED: Final = "imported"

WEIGHTS = "weights.safetensors"
GRAPH = "graph.onnx"
# Graphs of a routing space: each takes all slices of one scan, and adapts to it as it runs. By the dose that
# the scan's shift asks for, or, where the members' spread is not known, by preset `intent`.
SHIFT_GRAPH = "shift.onnx"
SCAN_GRAPH = "scan.onnx"

# The arithmetic of a graph. Weights are in float32; graphs in the others are made from them.
Precision = Literal["float32", "float16", "int8"]
Reduced = Literal["float16", "int8"]

# A dot joins a composite's name and its part's (`brain.global`). No leading dot, no path separator, no `@`.
Name = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]{0,127}$")]


class _Frozen(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class FileEntry(_Frozen):
    """Size in bytes and sha256 of one file of the artefact."""

    size: int = Field(ge=0)
    sha256: Digest


class NetworkLayers(_Frozen):
    """What presets can move in a network of another package (`personalization.options.movable`)."""

    norm: str
    batch: bool
    tracked: bool
    turns: bool


class NetworkSpec(_Frozen):
    """The name of a registered network and its keyword arguments.

    `origin` has class, package and version of one that an installed package brings, and `layers` what its
    publisher found in it. The package has to be installed wherever the weights are used; a graph is served
    without.
    """

    name: str
    arguments: dict[str, JsonValue]
    origin: dict[str, str] | None = Field(None, exclude_if=lambda origin: origin is None)
    layers: NetworkLayers | None = Field(None, exclude_if=lambda layers: layers is None)


class ImportedWeights(_Frozen):
    """Weights that were trained elsewhere: the file's name and digest, and where they come from.

    `origin` and `licence` are None where the file does not say.
    """

    file: str = Field(min_length=1, max_length=500)
    sha256: Digest
    origin: str | None = Field(None, max_length=500)
    licence: str | None = Field(None, max_length=200)

    def __str__(self) -> str:
        """One line for reports and model cards."""
        origin = self.origin or f"{self.file}, of an origin that is not stated"
        return f"{origin}; licence {self.licence or 'not stated'}; {self.sha256}"


class Lineage(_Frozen):
    """Origin of an artefact.

    `parents` are digests of artefacts, `details` is the run's configuration, `weights` what the training
    started from, or adapted, where that was trained elsewhere.
    """

    method: str
    run: str
    sites: tuple[str, ...]
    rounds: int = Field(ge=0)
    seed: int
    parents: tuple[Digest, ...] = ()
    weights: ImportedWeights | None = None
    details: dict[str, JsonValue] = {}


class BaseManifest(_Frozen):
    """Fields of every kind. `part_of` names the composite that it is a part of; a part is not offered."""

    schema_version: Literal[1] = SCHEMA_VERSION
    name: Name
    part_of: Name | None = None
    task: Task
    lineage: Lineage
    metrics: dict[str, FiniteFloat] = {}
    software: dict[str, str] = {}
    files: dict[Name, FileEntry] = {}

    @property
    def required_files(self) -> tuple[str, ...]:
        """The files that an artefact of this kind must have to be published."""
        return ()

    def references(self) -> dict[str, str]:
        """Map the role of each part to its digest."""
        return {}

    def check_parts(self, parts: Mapping[str, ModelManifest]) -> None:
        """Check that the parts, by role as in `references`, fit this artefact and each other.

        Raises:
            PublishRefused: the parts differ in architecture, or one of them has another task.
        """
        for role, part in parts.items():
            reference = next(iter(parts.values()))
            if part.network != reference.network or part.task != self.task:
                raise PublishRefused(
                    f"{self.name}: its part '{role}' has another architecture or task "
                    f"({part.network.name} {part.network.arguments}, task {part.task.name}) than "
                    f"{reference.network.name} {reference.network.arguments}, task {self.task.name}"
                )

    @property
    def adapted_to(self) -> str | None:
        """The hospital that the artefact was adapted to; None for an artefact of the federation."""
        return None

    def to_bytes(self) -> bytes:
        """Serialise to canonical bytes, over which the digest is computed."""
        content = self.model_dump(mode="json", exclude_none=True)
        return (json.dumps(content, indent=1, sort_keys=True, ensure_ascii=False) + "\n").encode()


class ModelManifest(BaseManifest):
    """One network: its weights and the graph that is served.

    The graph maps `image` float32 [B, C, H, W] (B free) to `probabilities` float32 [B, classes, H, W], for
    classification [B, classes].
    `site` names the member hospital that an inside-personalized model belongs to. `hospital`, with the role
    `hospital`, names the hospital that a model was adapted for; only that hospital may be served the model.
    `statistics` describes the training scans for the guard. With `sources`, the graph has a second output
    `attention` float32 [B, sources]: the share of the attention on each source, in this order; `own` is the
    image itself.

    With `precision`, the artefact is another graph of its parent's weights, which its lineage names: it has
    no weights of its own, and is served where a hospital's assignment says so. See `service.quantisation`.
    """

    kind: Literal["model"] = "model"
    role: str = "global"
    site: str | None = None
    hospital: str | None = None
    network: NetworkSpec
    statistics: ReferenceStatistics | None = None
    sources: tuple[str, ...] | None = None
    precision: Reduced | None = None

    @property
    def required_files(self) -> tuple[str, ...]:
        """The graph; and the weights, unless they are the parent's."""
        return (WEIGHTS, GRAPH) if self.precision is None else (GRAPH,)

    @model_validator(mode="after")
    def _graph_of_one(self) -> ModelManifest:
        if self.precision is not None and (self.part_of is None or len(self.lineage.parents) != 1):
            raise ValueError(
                f"a graph in {self.precision} is a part of the network that it was made of, its one parent: "
                f"found part_of {self.part_of!r} and {len(self.lineage.parents)} parents"
            )
        return self

    @model_validator(mode="after")
    def _one_owner(self) -> ModelManifest:
        if (self.hospital is not None) != (self.role == "hospital"):
            raise ValueError(
                f"role and hospital go together: found role '{self.role}' and hospital {self.hospital!r}"
            )
        return self

    @model_validator(mode="after")
    def _unique_sources(self) -> ModelManifest:
        if self.sources is not None and len({*self.sources}) < len(self.sources):
            raise ValueError(f"sources: expected unique names, found {', '.join(self.sources)}")
        return self

    @property
    def adapted_to(self) -> str | None:
        """The hospital that the artefact was adapted to; None for an artefact of the federation."""
        return self.hospital


class RoutingSpaceManifest(BaseManifest):
    """IOP-FL: a global model and the federation's inside-personalized models, by digest."""

    kind: Literal["routing-space"] = "routing-space"
    global_model: Digest
    inside: dict[str, Digest]

    @model_validator(mode="after")
    def _only_parts(self) -> RoutingSpaceManifest:
        if self.part_of is not None:
            raise ValueError("a routing space is a composite and cannot be a part of another")
        return self

    def references(self) -> dict[str, str]:
        """Map `global` and each site to a digest."""
        return {"global": self.global_model, **self.inside}


class ClustersManifest(BaseManifest):
    """FedBiCross: a model per cluster of hospitals, and the personal models of hospitals that agreed.

    `clusters` has the models by the cluster's name ("1", "2", …), `assignment` each hospital's cluster,
    `personal` the exported models by hospital. `mixing` is w: for each cluster's model, the weights of all
    clusters in its distillation. `silhouettes` has the mean silhouette for every number of clusters that was
    tried.
    """

    kind: Literal["clusters"] = "clusters"
    clusters: dict[str, Digest] = Field(min_length=1)
    assignment: dict[str, str]
    personal: dict[str, Digest] = {}
    mixing: dict[str, dict[str, FiniteFloat]]
    silhouettes: dict[str, FiniteFloat] = {}

    @model_validator(mode="after")
    def _consistent(self) -> ClustersManifest:
        if self.part_of is not None:
            raise ValueError("clusters are a composite and cannot be a part of another")
        named = [set(self.mixing), *(set(row) for row in self.mixing.values())]
        if set(self.assignment.values()) - set(self.clusters) or any(n != set(self.clusters) for n in named):
            raise ValueError(
                f"assignment and mixing must name the clusters {sorted(self.clusters)}, found the assignment "
                f"{self.assignment} and the mixing {self.mixing}"
            )
        strangers = sorted(set(self.personal) - set(self.assignment))
        if strangers:
            raise ValueError(f"personal models of hospitals without a cluster: {strangers}")
        return self

    def references(self) -> dict[str, str]:
        """Map `cluster NAME` and each site to a digest. Names of sites have no spaces."""
        return {f"cluster {name}": digest for name, digest in self.clusters.items()} | self.personal


class CrossAttentionManifest(BaseManifest):
    """FedOAP: the shared model with the whole token bank, and the members' exported models, by digest.

    The global model holds the shared part, every site's tokens and an initial personal part. It is served to
    hospitals without a personal part, and a hospital that joins starts from it.
    """

    kind: Literal["cross-attention"] = "cross-attention"
    global_model: Digest
    inside: dict[str, Digest]

    @model_validator(mode="after")
    def _only_parts(self) -> CrossAttentionManifest:
        if self.part_of is not None:
            raise ValueError("a cross-attention artefact is a composite and cannot be a part of another")
        return self

    def references(self) -> dict[str, str]:
        """Map `global` and each site to a digest."""
        return {"global": self.global_model, **self.inside}


class PersonalModelsManifest(BaseManifest):
    """One model per consenting site, by digest, and the global model if there is one.

    FedBN, FedPer and FedRep have no global model, because their sites share only a part of the network.
    Ditto, pFedMe and FedSoup have one.
    """

    kind: Literal["personal-models"] = "personal-models"
    global_model: Digest | None = None
    inside: dict[str, Digest] = Field(min_length=1)

    @model_validator(mode="after")
    def _only_parts(self) -> PersonalModelsManifest:
        if self.part_of is not None:
            raise ValueError("personal models are a composite and cannot be a part of another")
        return self

    def references(self) -> dict[str, str]:
        """Map `global`, if there is one, and each site to a digest."""
        return ({} if self.global_model is None else {"global": self.global_model}) | self.inside


class SsfPoolManifest(BaseManifest):
    """FedIns: a pool of scales, shifts, keys and heads for one frozen backbone, by digest.

    The weights are those of the pool alone. The graph is complete and includes the backbone. Beside the
    probabilities it has the outputs `entries` int64 [B, top] and `similarities`, the entries that each image
    selected, and `query`, the image's query. `network` is the backbone's. `entries` is the size of the pool,
    `top` the number that a scan selects. `blocks` is how many of its last blocks are adapted, None all.
    `usage` has the number of the federation's training images that selected each entry, if sites allow it.
    """

    # The graph of a pool has no output `attention`, and no other is made from it.
    sources: ClassVar[None] = None
    precision: ClassVar[None] = None

    kind: Literal["ssf-pool"] = "ssf-pool"
    backbone: Digest
    network: NetworkSpec
    entries: int = Field(ge=1)
    top: int = Field(ge=1)
    blocks: int | None = Field(None, ge=1)
    usage: tuple[Annotated[int, Field(ge=0)], ...] | None = None
    statistics: ReferenceStatistics | None = None

    @property
    def required_files(self) -> tuple[str, ...]:
        """Weights and graph."""
        return (WEIGHTS, GRAPH)

    @model_validator(mode="after")
    def _consistent(self) -> SsfPoolManifest:
        if self.part_of is not None:
            raise ValueError("a pool is a composite and cannot be a part of another")
        if self.top > self.entries or (self.usage is not None and len(self.usage) != self.entries):
            raise ValueError(
                f"expected top at most {self.entries} (entries), and a count for each entry, found top "
                f"{self.top} and {'no' if self.usage is None else len(self.usage)} counts"
            )
        return self

    def references(self) -> dict[str, str]:
        """Map `backbone` to its digest."""
        return {"backbone": self.backbone}

    def check_parts(self, parts: Mapping[str, ModelManifest]) -> None:
        """Check that the pool has its backbone's network. Their tasks may differ."""
        backbone = parts["backbone"]
        if backbone.network != self.network:
            raise PublishRefused(
                f"{self.name}: its pool is for {self.network.name} {self.network.arguments}, its backbone is "
                f"{backbone.network.name} {backbone.network.arguments}: a pool fits only the backbone that "
                "it was trained on"
            )


# Kinds with a graph that answers scans.
NetworkManifest = ModelManifest | SsfPoolManifest
# Every kind of artefact; `KINDS`, the parser and the service's table of kinds follow from it.
AnyManifest = (
    ModelManifest
    | RoutingSpaceManifest
    | CrossAttentionManifest
    | ClustersManifest
    | SsfPoolManifest
    | PersonalModelsManifest
)
_ADAPTER: TypeAdapter[AnyManifest] = TypeAdapter(Annotated[AnyManifest, Field(discriminator="kind")])
KINDS: Mapping[str, type[BaseManifest]] = {
    manifest.model_fields["kind"].default: manifest for manifest in get_args(AnyManifest)
}


def parse_manifest(content: bytes, where: str) -> AnyManifest:
    """Read a manifest; `where` names it in the error. Raises UnknownKind."""
    try:
        raw: Any = json.loads(content)
    except ValueError as error:
        raise UnknownKind(
            f"{where}: manifest.json is not JSON ({error}); publish the artefact again"
        ) from error
    found = raw if isinstance(raw, dict) else {}
    version, kind = found.get("schema_version"), found.get("kind")
    if version != SCHEMA_VERSION:
        raise UnknownKind(
            f"{where}: expected schema_version {SCHEMA_VERSION}, found {version!r}; a newer Locum may read it"
        )
    if not isinstance(kind, str) or kind not in KINDS:
        raise UnknownKind(
            f"{where}: expected a kind in {', '.join(KINDS)}, found {kind!r}; a newer Locum may read it"
        )
    try:
        return _ADAPTER.validate_python(raw, strict=False)
    except ValidationError as error:
        problems = "; ".join(f"{'.'.join(map(str, e['loc']))}: {e['msg']}" for e in error.errors())
        raise UnknownKind(f"{where}: not a {kind} manifest: {problems}") from error
