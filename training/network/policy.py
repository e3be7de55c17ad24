"""A hospital's policy: what may leave it, which methods may run, and whether it takes part now.

    allows: [weights, statistics]     kinds of groups that may leave (weights, features, statistics, images)
    consents: true                    whether phases that need consent may run: the export of its own model
    bounds: {minimum_patients: 10}    bounds on features, see training.bounds
    patient: '^(?P<patient>P[0-9]+)_' finds the patient in a file's name, where cases.csv does not name it
    privacy:                          kinds that leave with noise or not at all, see training.privacy
      kinds: {weights: {clip: 1.0, noise: 5.0}}
      epsilon: 8                      of all runs of a state folder; then nothing more leaves with noise
      delta: 0.00001
    methods: [plan, fedavg]           methods that may run, plan among them; without the line, all
    megabytes_per_round: 200          most that may leave in one round
    megabytes_received: 2048          largest download of a round
    most_parameters: 500000000        of a network that is built here
    most_minutes_per_round: 720       that a step computes here; then it is ended
    most_rounds: 5000                 of a run, repeated ones counted
    takes_part: true                  set to false to pause; the next round is refused
    reports: true                     whether the operator's roster may have device, disk, check and counts

The file is read again before every step, so a stricter policy is obeyed from the next round on. The operator
learns the policy when the hospital joins, and cannot change it.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import Any

import yaml
from pydantic import Field

from model_store.patient_pattern import PatientPattern
from personalization.networks.registry import at_most
from training.algorithm import GroupKind
from training.bounds import NO_BOUNDS, FeatureBounds
from training.config import SecureAggregation, StrictConfig, parse
from training.engine.egress import SiteSpec
from training.errors import ConfigurationError, in_words
from training.privacy import PrivacyDemand

# In minutes: a clock's limits are far beyond it.
_YEAR = 525_600


class Policy(StrictConfig):
    """The content of policy.yaml."""

    allows: tuple[GroupKind, ...]
    consents: bool
    bounds: FeatureBounds = NO_BOUNDS
    patient: PatientPattern | None = None
    privacy: PrivacyDemand | None = None
    secure_aggregation: SecureAggregation = False
    methods: tuple[str, ...] | None = None
    megabytes_per_round: float = Field(1024, gt=0)
    megabytes_received: float = Field(2048, gt=0)
    most_parameters: int = Field(500_000_000, ge=1)
    most_minutes_per_round: float = Field(720, gt=0, le=_YEAR)
    most_rounds: int = Field(5000, ge=1)
    takes_part: bool = True
    reports: bool = True

    @classmethod
    def read(cls, path: Path) -> Policy:
        """Read the file. Raises ConfigurationError."""
        try:
            content = yaml.safe_load(path.read_text())
        except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
            raise ConfigurationError(f"{path} cannot be read", [in_words(error)]) from error
        if not isinstance(content, dict):
            raise ConfigurationError(
                f"{path} is not a policy", ["expected fields such as allows and consents"]
            )
        return parse(cls, content, str(path))

    def bounding_networks(self) -> AbstractContextManager[None]:
        """Build no larger network than the policy allows; the operator chooses it."""
        return at_most(self.most_parameters, "`most_parameters` of the hospital's policy")

    def applied(self, spec: SiteSpec) -> SiteSpec:
        """The site as this policy has it."""
        return replace(
            spec,
            allows=frozenset(self.allows),
            consents=self.consents,
            bounds=self.bounds,
            demand=self.privacy,
        )

    def announced(self) -> dict[str, Any]:
        """What the operator receives of it: fields of an `Announcement`."""
        return {
            "allows": tuple(sorted(self.allows)),
            "consents": self.consents,
            "bounds": self.bounds,
            "privacy": self.privacy,
        }
