"""The configuration of a run: settings of the method, settings of the run, and reading both from a file.

A file has two sections, both optional, with the fields of the method's configuration and of `RunConfig`:

    method: {rounds: 100, width: 32}
    run: {participation: 0.5, egress: {CS: [weights]}}
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, Self, TypeVar

import yaml
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError, model_validator

from model_store.manifest import ImportedWeights
from model_store.misfits import misfits
from model_store.store import Store
from model_store.task import Task
from training.algorithm import GroupKind
from training.bounds import FeatureBounds
from training.errors import ConfigurationError
from training.privacy import PrivacyDemand, RunPrivacy

Config = TypeVar("Config", bound="StrictConfig")


class StrictConfig(BaseModel):
    """Base of configurations: immutable, and rejects unknown fields."""

    model_config = ConfigDict(frozen=True, extra="forbid")


def _not_there(value: bool) -> bool:
    if value:
        raise ValueError(
            "secure aggregation is not available: the server checks and bounds every hospital's update by "
            "itself, and the operator makes the hospitals' keys. Use privacy, which needs no trust in the "
            "operator (docs/explanation/network.md)"
        )
    return value


SecureAggregation = Annotated[bool, AfterValidator(_not_there)]


@dataclass(frozen=True)
class Descent:
    """What a run's versions are made of: digests of versions, and weights that were trained elsewhere."""

    parents: tuple[str, ...] = ()
    weights: ImportedWeights | None = None


class MethodConfig(StrictConfig):
    """Configuration that every method has: the number of rounds."""

    rounds: int = Field(25, ge=1, description="rounds of local training")

    # What `recipe: paper` takes where nothing is given, of a method that has this field.
    PAPER: ClassVar[Mapping[str, Any]] = {}
    # Fields that runs once did not have, with the values that have their results: these are left out of the
    # identity, so that ids of such runs stay the same.
    EARLIER: ClassVar[Mapping[str, Any]] = {}

    def identity(self) -> dict[str, Any]:
        """What the configuration decides of a run, as JSON; `EARLIER` values are left out."""
        content = self.model_dump(mode="json")
        return {name: v for name, v in content.items() if name not in self.EARLIER or v != self.EARLIER[name]}

    @model_validator(mode="before")
    @classmethod
    def _of_the_paper(cls, content: Any) -> Any:
        chosen = isinstance(content, dict) and content.get("recipe") == "paper"
        return {**cls.PAPER, **content} if chosen else content

    def prepared(self, store: Store, task: Task, name: str) -> Self:  # noqa: ARG002
        """Return this configuration, ready for a run that publishes to `store` as `name`.

        A method that needs an artefact of the store, such as a backbone, resolves it to a digest here. Raises
        ConfigurationError if the artefact is missing or cannot be published.
        """
        return self

    def at_hospital(self, store: Path | None) -> Self:  # noqa: ARG002
        """Return this configuration for a hospital on a network, with its own `store` if it gave one.

        Raises ConfigurationError if the method needs one.
        """
        return self

    def descent(self) -> Descent:
        """Say what the prepared run's versions are made of, for their lineage."""
        return Descent()


class Defence(StrictConfig):
    """What the server believes of the sites (`training.engine.defence`).

    By default an update far larger than the others' is bounded.
    """

    reduction: Literal["mean", "median", "trimmed-mean", "krum"] = Field(
        "mean", description="of groups that are averaged; all but `mean` count every site alike"
    )
    trim: float = Field(
        0.2, ge=0, lt=0.5, description="trimmed-mean: share of sites cut at either end, one at least"
    )
    liars: int = Field(1, ge=0, description="krum: sites that may lie")
    most_norm: float | None = Field(
        5.0,
        gt=0,
        description="size of an update, in medians of the others'; more is scaled or dropped; null: no bound",
    )
    beyond: Literal["scale", "drop"] = Field("scale", description="what happens to an update beyond it")
    most_share: float = Field(1.0, gt=0, le=1, description="share of a mean that one site has at most")

    @property
    def needs_all(self) -> bool:
        """Whether a round's uploads must be there together before they are reduced."""
        return self.reduction != "mean" or self.most_norm is not None or self.most_share < 1


NO_DEFENCE = Defence(most_norm=None)


DEVICE = r"^(cpu|cuda(:[0-9]{1,2})?)$"
"""Names of devices."""


class RunConfig(StrictConfig):
    """Settings that, with the method, determine the result of a run: a different value is a different run.

    The number of worker processes is not one of them, because the result does not depend on it.
    """

    seed: int = Field(0, ge=0)
    leave_out: tuple[str, ...] = Field((), description="sites that take no part")
    participation: float = Field(1.0, gt=0, le=1, description="share of sites drawn for each round")
    test: float = Field(0.2, ge=0, lt=1, description="share of a site's patients kept for testing")
    val: float = Field(0.2, ge=0, lt=1, description="share of the remaining patients kept for validation")
    keep_empty: bool = Field(True, description="train on slices without foreground too")
    device: str = Field("cpu", pattern=DEVICE, description="cpu, cuda or cuda:N; a hospital may take its own")
    threads: int = Field(1, ge=1, description="threads of one site's step; the result may depend on it")
    consent: tuple[str, ...] | Literal["all"] = Field((), description="sites that agree to the export phase")
    egress: dict[str, tuple[GroupKind, ...]] = Field(
        {},
        description="site -> kinds that may leave it (weights, features, statistics, images); others: all",
    )
    feature_bounds: dict[str, FeatureBounds] = Field(
        {}, description="site -> its own bounds on features; the stricter of these and the method's apply"
    )
    defence: Defence = Field(Defence(), description="against sites that send what they should not")
    privacy: RunPrivacy | None = Field(
        None, description="groups of which every site clips and noises its updates, and delta"
    )
    privacy_demands: dict[str, PrivacyDemand] = Field(
        {}, description="site -> its own conditions; the stricter of these and `privacy` apply"
    )
    secure_aggregation: SecureAggregation = Field(False, description="not available; true is an error")


def parse(config: type[Config], content: Mapping[str, Any], where: str) -> Config:
    """Make a configuration from plain values; `where` names their source. Raises ConfigurationError."""
    try:
        return config.model_validate(dict(content))
    except ValidationError as error:
        known = ", ".join(config.model_fields)
        problems = misfits(config, error, values=True)
        raise ConfigurationError(f"{where} (its fields: {known})", problems) from error


def read_sections(path: Path | None) -> tuple[dict[str, Any], dict[str, Any]]:
    """Read the sections `method` and `run` of a YAML file. Raises ConfigurationError."""
    if path is None:
        return {}, {}
    try:
        content = yaml.safe_load(path.read_text()) or {}
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ConfigurationError(f"{path} cannot be read", [str(error)]) from error
    sections = content if isinstance(content, dict) else {"": content}
    problems = [
        f"'{name}': expected a section 'method' or 'run' with fields below it"
        for name, section in sections.items()
        if name not in ("method", "run") or not isinstance(section, dict)
    ]
    if problems:
        raise ConfigurationError(f"{path} is not a configuration", problems)
    return dict(sections.get("method", {})), dict(sections.get("run", {}))
