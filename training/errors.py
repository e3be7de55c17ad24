"""The errors of the package `training`.

    TrainingError
    ├── ProblemsFound
    │   ├── FederationError
    │   ├── ConfigurationError
    │   └── RunMismatch
    ├── AlgorithmError
    ├── EgressRefused
    ├── SiteFailed
    ├── RoundFailed
    ├── PublishError
    └── ImportRefused

A message names the thing (file, site, round, tensor), what was expected, what was found and what to do.
"""

from __future__ import annotations

import re
import traceback
from collections.abc import Sequence

_MOST_ALIKE = 20
# Quoted names, paths, file names and numbers.
_VARIABLE = re.compile(r"'[^']*'|\S*[/\\]\S*|\S+\.\w{1,4}\b|\d+")


class TrainingError(Exception):
    """Base of all errors that this package raises on purpose."""


class ProblemsFound(TrainingError):
    """Several problems, reported together so that they can be fixed together.

    `problems` has all of them. The message has at most twenty that differ in names and numbers alone, and
    says how many more there are.
    """

    def __init__(self, heading: str, problems: Sequence[str]) -> None:
        self.heading = heading
        self.problems = tuple(problems)
        super().__init__("\n".join((heading, *(f"  - {line}" for line in _summarised(self.problems)))))

    def __reduce__(self) -> tuple[type[ProblemsFound], tuple[str, tuple[str, ...]]]:
        """Pickle both arguments; by default only the message would be passed to the constructor."""
        return type(self), (self.heading, self.problems)


def _summarised(problems: Sequence[str]) -> list[str]:
    """Return the lines of a message: of more than twenty like problems, twenty and a count."""
    kinds: dict[str, list[str]] = {}
    for problem in problems:
        kinds.setdefault(_kind(problem), []).append(problem)
    lines = []
    for alike in kinds.values():
        lines += alike[:_MOST_ALIKE]
        if rest := len(alike) - _MOST_ALIKE:
            lines += [f"and {rest} more like the last {_MOST_ALIKE}"] if rest > 0 else []
    return lines


def _kind(problem: str) -> str:
    """Return what a problem says, without the file that it names first, quoted names, paths and numbers."""
    return _VARIABLE.sub("*", problem.partition(": ")[2] or problem)


class FederationError(ProblemsFound):
    """The hospitals' folders or files are invalid: pairs, masks, channels, empty sites."""


class ConfigurationError(ProblemsFound):
    """A configuration file or an option is not accepted."""


class RunMismatch(ProblemsFound):
    """A run folder holds another run; the problems name the fields that differ."""


class AlgorithmError(TrainingError):
    """A method violated its own declaration of groups, shapes or keys."""


class EgressRefused(TrainingError):
    """A site's egress policy refuses an upload that is essential to the method."""


class SiteFailed(TrainingError):
    """One site's step failed; the round continues without the site."""


class RoundFailed(TrainingError):
    """Every site of a round failed, or too few delivered."""


class PublishError(TrainingError):
    """The trained models could not be published."""


class ImportRefused(TrainingError):
    """A model that was made elsewhere cannot be imported, or a version cannot be exported."""


def in_words(error: Exception) -> str:
    """The sentence of an error; of one of the system, as a full disk, the path and what is wrong with it.

    A semaphore or a process that the system refuses has no path: then the file of Python that asked for it.
    """
    if not isinstance(error, OSError) or not error.strerror:
        return str(error)
    if error.filename is not None:
        return f"{error.filename}: {error.strerror}"
    asked = traceback.extract_tb(error.__traceback__)
    return f"{error.strerror} (asked for in {asked[-1].filename})" if asked else error.strerror


def no_network_engine(error: ImportError) -> ConfigurationError:
    """The error of a command that needs the extra `network`, and what to do; `error` says what is missing."""
    return ConfigurationError(
        "the network engine is not installed",
        [f"{error}; in Locum's checkout: pip install -c constraints.txt '.[network]'"],
    )
