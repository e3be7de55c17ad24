"""The presets of test-time adaptation: what each starts from and what it learns.

The loss and the step of a preset are in `personalization.test_time.presets`, in a module of its name (with _
for -).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

Learned = Literal["routing", "bn", "weights"]
Router = Literal["direct", "pooled"]


@dataclass(frozen=True)
class Preset:
    """One preset.

    Attributes:
        name: as a client gives it, and of the module with its loss.
        description: for the API, after the name.
        models: what is adapted: a mixture of `all` models of the routing space, or its `global` model alone.
        learns: the parameters that change: coefficients of the models (`routing`), scale and shift of batch
            norm (`bn`), all of the network (`weights`). Without any, only batch norm's statistics are
            measured.
        draws: whether the result depends on the seed.
        unit: what it adapts to: a hospital's `cohort` of scans, one `scan`, or either.
        router: where its coefficients come from, where it has no choice; None: either.
        batch_size: slices per step where the client gives none; None: the default of all presets.
        norm: what it moves, so that it refuses a network without: `batch` norm, or `instance` norm that
            tracks; None: it needs none.
        epochs: passes over the images where the client gives none; None: the default of all presets.
    """

    name: str
    description: str
    models: Literal["all", "global"] = "all"
    learns: frozenset[Learned] = frozenset({"routing", "bn"})
    draws: bool = True
    unit: Literal["cohort", "scan", "either"] = "either"
    router: Router | None = None
    batch_size: int | None = None
    norm: Literal["batch", "instance"] | None = None
    epochs: int | None = None

    @property
    def defaults(self) -> Mapping[str, Any]:
        """Options of an adaptation that take other defaults with this preset."""
        own = {"router": self.router, "batch_size": self.batch_size, "epochs": self.epochs}
        return {name: value for name, value in own.items() if value is not None}


PRESETS: Mapping[str, Preset] = MappingProxyType(
    {
        preset.name: preset
        for preset in (
            Preset(
                "ladder",
                "learns nothing: the global model, with batch norm's statistics part of the way from the "
                "federation's to these scans'",
                models="global",
                learns=frozenset(),
                draws=False,
                norm="batch",
            ),
            Preset(
                "intent",
                "learns nothing: the mean of six such answers, weighted by how sure each is",
                models="global",
                learns=frozenset(),
                draws=False,
                unit="scan",
                norm="batch",
            ),
            Preset("paper", "consistency + 0.01 (shape + entropy), noise only"),
            Preset("official", "the loss of IOP-FL's published code alone, with the router of the request"),
            Preset(
                "as-published",
                "IOP-FL as its authors run it: that loss; pooled routers with a random start and dropout, "
                "those of the bottleneck not learned; batches of 5 neighbouring slices",
                router="pooled",
                batch_size=5,
            ),
            Preset(
                "statistics",
                "learns nothing: the global model alone, with batch norm's statistics of these scans",
                models="global",
                learns=frozenset(),
                draws=False,
                norm="batch",
            ),
            Preset(
                "tent",
                "entropy, minimised over batch norm's scale and shift: the global model alone",
                models="global",
                learns=frozenset({"bn"}),
                draws=False,
                norm="batch",
            ),
            Preset(
                "blend",
                "learns nothing: the global model, with instance norm's statistics part of the way from each "
                "image's own to the federation's, by `doses`",
                models="global",
                learns=frozenset(),
                draws=False,
                norm="instance",
            ),
            Preset(
                "ttt",
                "the encoder of the global model, by a step per slice of predicting its quarter turns; "
                "of a federation that trained the head for it (`rotation_head`)",
                models="global",
                learns=frozenset({"weights"}),
                batch_size=32,
                epochs=1,
            ),
        )
    }
)

# The presets for a hospital's cohort, and for one scan.
FOR_COHORTS = tuple(name for name, preset in PRESETS.items() if preset.unit != "scan")
FOR_SCANS = tuple(name for name, preset in PRESETS.items() if preset.unit != "cohort")
# Those of them that need one model alone.
OF_ONE_MODEL = tuple(name for name in FOR_COHORTS if PRESETS[name].models == "global")
OF_ONE_MODEL_FOR_SCANS = tuple(name for name in FOR_SCANS if PRESETS[name].models == "global")
AUTO = "auto"
# The file of an artefact that says how far its members are apart (`personalization.iop_fl.spread`).
SPREAD = "spread.json"
# What the members practised.
PLAYBOOK = "playbook.json"
# What `auto` does with one scan where it is not known how far the members are apart: no gradient, and the
# least spread of those that were compared.
SCAN_FALLBACK = "intent"

if TYPE_CHECKING:
    PresetName: TypeAlias = str
    CohortPreset: TypeAlias = str
    ModelPreset: TypeAlias = str
    ScanPreset: TypeAlias = str
else:
    PresetName = Literal[tuple(PRESETS)]
    CohortPreset = Literal[AUTO, *FOR_COHORTS]
    ModelPreset = Literal[AUTO, *OF_ONE_MODEL]
    ScanPreset = Literal[AUTO, *FOR_SCANS]


def describe(names: Iterable[str]) -> str:
    """`name` and description of some presets, for the API."""
    return "; ".join(f"`{name}` {PRESETS[name].description}" for name in names)
