"""Options of an adaptation: fitting a routing space (IOP-FL) to unlabeled scans."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import (
    Field,
    FiniteFloat,
    ValidationInfo,
    field_validator,
    model_validator,
)

from personalization.options.cohort import CohortOptions
from personalization.options.presets import (
    AUTO,
    FOR_COHORTS,
    OF_ONE_MODEL,
    PRESETS,
    CohortPreset,
    ModelPreset,
    Router,
    describe,
)

Dose = Annotated[FiniteFloat, Field(ge=0, le=1)]


class RoutingOptions(CohortOptions):
    """Options of adapting a routing space. The defaults suit most hospitals."""

    preset: CohortPreset = Field(
        AUTO,
        description="What is done with the scans: `auto`, the `ladder` with a dose that grows with the "
        "scans' distance from what is usual between the federation's members (where that is not known, by "
        "`doses`; `blend` of a network with instance norm that tracks); `masks`, with options of its own, "
        "fine-tunes on the cohort's masks, and is what `auto` stands for where they suffice; "
        f"{describe(FOR_COHORTS)}.",
    )
    router: Router = Field(
        "direct",
        description="Where coefficients come from: `direct` one per layer and model, for few scans; `pooled` "
        "a small network on each layer's features. `as-published` has pooled ones only.",
    )
    epochs: int = Field(
        10,
        ge=1,
        le=200,
        description="Passes over the cohort; the best safe epoch is kept. 1 with `ttt` where none is given.",
    )
    batch_size: int = Field(
        16,
        ge=1,
        le=128,
        description="Slices per step; 5 with `as-published` where none is given. With `ttt`, views of a "
        "slice per step; 32 where none is given.",
    )
    routing_rate: FiniteFloat | None = Field(
        None, gt=0, le=10, description="Learning rate of the routing; null: 0.1 for direct, 0.001 for pooled."
    )
    bn_rate: FiniteFloat = Field(
        1e-3, gt=0, le=10, description="Learning rate of batch norm's scale and shift."
    )
    train_bn_affine: bool = Field(True, description="Whether batch norm's scale and shift are learned too.")
    noise: FiniteFloat = Field(
        0.5, ge=0, le=10, description="Noise of the consistency loss, in standard deviations of each slice."
    )
    shape_weight: FiniteFloat | None = Field(
        None,
        ge=0,
        le=10,
        description="Weight of the shape loss, which expects one compact target; null: the preset's.",
    )
    doses: tuple[Dose, Dose, Dose] | None = Field(
        None,
        strict=False,  # JSON has no tuples
        description="With `ladder` and what starts from it: the share of these scans' statistics in batch "
        "norm, in the first, the middle and the last third of its layers; null: the default.",
    )
    seed: int = Field(0, ge=0, le=2**31 - 1, description="The seed of everything random.")

    @model_validator(mode="before")
    @classmethod
    def _with_the_presets_defaults(cls, content: Any) -> Any:
        named = content.get("preset") if isinstance(content, dict) else None
        preset = PRESETS.get(named) if isinstance(named, str) else None
        return content if preset is None else {**preset.defaults, **content}

    @field_validator("router")
    @classmethod
    def _is_the_presets(cls, value: Router, info: ValidationInfo) -> Router:
        preset = PRESETS.get(info.data.get("preset", ""))
        if preset is not None and preset.router not in (None, value):
            raise ValueError(f"expected '{preset.router}': preset '{preset.name}' has no other")
        return value

    @field_validator("train_bn_affine")
    @classmethod
    def _learns_something(cls, value: bool, info: ValidationInfo) -> bool:
        preset = PRESETS.get(info.data.get("preset", ""))
        if not value and preset is not None and preset.learns == {"bn"}:
            raise ValueError(f"expected true: preset '{preset.name}' learns nothing else")
        return value


class ModelOptions(RoutingOptions):
    """Options of adapting one model, which has no others to weigh."""

    preset: ModelPreset = Field(
        AUTO,
        description="What is done with the scans: `auto`, the `ladder` with a dose that grows with the "
        "scans' distance from what is usual between the federation's members (where that is not known, by "
        "`doses`; `blend` of a network with instance norm that tracks); `masks`, with options of its own, "
        f"fine-tunes on the cohort's masks, and is what `auto` stands for where they suffice; "
        f"{describe(OF_ONE_MODEL)}.",
    )
