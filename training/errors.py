"""What can go wrong while a federation trains.

    TrainingError
    ├── ProblemsFound            several problems at once, all listed in `.problems`
    │   ├── FederationError      the hospitals' folders: pairs, masks, channels, empty sites
    │   ├── ConfigurationError   a configuration file or an option
    │   └── RunMismatch          a run folder that belongs to another configuration
    ├── AlgorithmError           a method broke its own declaration (groups, shapes, keys)
    ├── EgressRefused            a site does not let out what the method cannot do without
    ├── SiteFailed               one site's step failed; the engine drops the site for that round
    ├── RoundFailed              no site of a round delivered
    └── PublishError             the trained models could not be published

A message names the thing (file, site, round, tensor), what was expected, what was found and what to do.
"""

from __future__ import annotations

from collections.abc import Sequence


class TrainingError(Exception):
    """Base of everything this package raises on purpose."""


class ProblemsFound(TrainingError):
    """Several problems found in one look, so that a person can mend them in one go."""

    def __init__(self, heading: str, problems: Sequence[str]) -> None:
        self.heading = heading
        self.problems = tuple(problems)
        super().__init__("\n".join((heading, *(f"  - {problem}" for problem in self.problems))))

    def __reduce__(self) -> tuple[type[ProblemsFound], tuple[str, tuple[str, ...]]]:
        """Two arguments, one message: without this the error would not survive a process boundary."""
        return type(self), (self.heading, self.problems)


class FederationError(ProblemsFound):
    """The federation's folders are not what they should be."""


class ConfigurationError(ProblemsFound):
    """A configuration is not what the method or the engine accepts."""


class RunMismatch(ProblemsFound):
    """A run folder holds another run; the problems name the fields that differ."""


class AlgorithmError(TrainingError):
    """A method did something other than what it declared."""


class EgressRefused(TrainingError):
    """A site's egress policy forbids an upload that the method cannot do without."""


class SiteFailed(TrainingError):
    """One site's step did not deliver; the others go on without it."""


class RoundFailed(TrainingError):
    """A round in which no site delivered."""


class PublishError(TrainingError):
    """The trained models could not be published."""
