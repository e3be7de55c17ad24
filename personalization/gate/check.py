"""A gate is a tuple of checks. A check measures one number and compares it with one limit.

    @check("agreement", "at least", 0.85, "Dice with the parent's masks", "Its masks differ too much.")
    def agreement(observed: Observed) -> float:
        \"""Why the limit is 0.85.\"""

    verdict = judge((agreement, ...), observed)

The docstring of a check gives the reason for its limit.
"""

from __future__ import annotations

import inspect
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Generic, Literal, TypeVar

Bound = Literal["at least", "above", "at most"]
T = TypeVar("T")
# A check of less than all that was observed fits every gate.
Seen = TypeVar("Seen", contravariant=True)

_HOLDS: Mapping[Bound, Callable[[float, float], bool]] = {
    "at least": operator.ge,
    "above": operator.gt,
    "at most": operator.le,
}


@dataclass(frozen=True)
class CheckResult:
    """One check of a verdict; the fields are those of its JSON, in this order.

    A `value` of None was not measured and does not count against the candidate. NaN fails; a job's JSON has
    null for both, and `passed` tells them apart. `meaning` says what the value is, `failure` what a
    failed check says of the candidate.
    """

    name: str
    value: float | None
    limit: float
    passed: bool
    meaning: str
    bound: Bound
    failure: str


@dataclass(frozen=True)
class Check(Generic[Seen]):
    """The value that `measure` returns must be at least, above or at most (`bound`) `limit`.

    Attributes:
        name: in JSON.
        bound: how the value is compared with the limit.
        limit: the value that just passes ("above": that just fails).
        sentence: what the value is, for a person.
        failure: what a failed check says of the candidate or the scans, as a sentence for a physician.
        reason: why this limit.
        measure: the value of what was observed; None where it cannot be measured.
    """

    name: str
    bound: Bound
    limit: float
    sentence: str
    failure: str
    reason: str
    measure: Callable[[Seen], float | None]

    def result(self, observed: Seen) -> CheckResult:
        """Measure, and compare with the limit."""
        value = self.measure(observed)
        passed = value is None or _HOLDS[self.bound](value, self.limit)
        return CheckResult(self.name, value, self.limit, passed, self.sentence, self.bound, self.failure)


def check(
    name: str, bound: Bound, limit: float, sentence: str, failure: str
) -> Callable[[Callable[[T], float | None]], Check[T]]:
    """Make a check of a function that measures; its docstring is the reason for the limit."""

    def make(measure: Callable[[T], float | None]) -> Check[T]:
        return Check(name, bound, limit, sentence, failure, inspect.getdoc(measure) or "", measure)

    return make


@dataclass(frozen=True)
class GateVerdict:
    """Whether the candidate may be assigned: it must pass every check."""

    passed: bool
    checks: tuple[CheckResult, ...]

    def to_json(self) -> dict[str, Any]:
        """As JSON has it: {"passed": ..., "checks": [{"name", "value", "limit", "bound", ...}]}.

        NaN is kept.
        """
        return {"passed": self.passed, "checks": [asdict(result) for result in self.checks]}


def judge(gate: Sequence[Check[T]], observed: T) -> GateVerdict:
    """Every check of the gate, in its order."""
    results = tuple(check.result(observed) for check in gate)
    return GateVerdict(all(result.passed for result in results), results)


def limits(gate: Sequence[Check[Any]]) -> dict[str, float]:
    """The limit of every check by name, in the gate's order."""
    return {check.name: check.limit for check in gate}
