"""A rehearsal: one round of the real sizes with few steps at each hospital, and what the run will take.

It proves that every hospital registers, computes, receives and sends, in minutes. Two such rounds that differ
in their steps tell the seconds of a step from those of everything else.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from training.algorithm import Phase, Plan
from training.config import MethodConfig
from training.data.cases import Federation
from training.engine.history import RoundEntry
from training.local.schedule import planned_batches
from training.network.operator import Listener, Operator
from training.network.rounds import RoundLimits
from training.network.runs import NetworkRun
from training.progress.format import duration, size
from training.run import Run, execute

FEW, MORE = 1, 5


def rehearse(
    listener: Listener,
    run: NetworkRun,
    folders: Path,
    limits: RoundLimits,
    gather: Callable[[Operator], Federation[Any]],
) -> list[str]:
    """Rehearse a run, in folders that go again; say what was proved, and what the run will take.

    The hospitals wait for the run then. `gather` waits until they joined. Raises TrainingError.
    """
    histories: list[tuple[RoundEntry, ...]] = []
    images: dict[str, int] = {}
    for steps in (FEW, MORE):
        short = replace(run, config=shortened(run.config, steps))
        place = folders / f"rehearsal-{short.id}"
        shutil.rmtree(place, ignore_errors=True)
        try:
            with Operator(listener, place, short, limits, follows=True) as operator:
                federation = gather(operator)
                images = operator.images()
                settings = operator.policies(run.settings.model_copy(update={"leave_out": ()}))
                made = execute(Run(federation, run.method, short.config, settings), place, pool=operator)
                histories.append(made.history)
        finally:
            shutil.rmtree(place, ignore_errors=True)
    few, more = histories
    return sentences(run.algorithm().plan(), run.config, few, more, images)


def shortened(config: MethodConfig, steps: int) -> MethodConfig:
    """One round of so many steps; of a method that counts no steps, one round as it is."""
    fields = {"rounds": 1, "local_steps": steps, "least_steps": 0}
    return config.model_copy(
        update={name: value for name, value in fields.items() if name in type(config).model_fields}
    )


@dataclass(frozen=True)
class Expected:
    """What a round takes at a hospital: seconds in all, batches (None: not known), and seconds of a batch."""

    site: str
    seconds: float
    batches: int | None = None
    of_batch: float = 0.0

    @property
    def words(self) -> str:
        """Such as 14:50 (400 batches of 2.1 s)."""
        # Two roundings may leave nothing of a quick step.
        each = max(self.of_batch, 0.001)
        steps = "" if self.batches is None else f" ({self.batches} batches of {each:.2g} s)"
        return f"{duration(self.seconds)}{steps}"


def sentences(
    plan: Plan,
    config: MethodConfig,
    few: Sequence[RoundEntry],
    more: Sequence[RoundEntry],
    images: Mapping[str, int],
) -> list[str]:
    """Say what was proved, and what the run of this plan will take. `images` train at each hospital.

    `few` and `more` are the histories of the rehearsals with `FEW` and `MORE` steps.
    """
    phases = {phase.name: phase.rounds for phase in plan if isinstance(phase, Phase)}
    main = max(phases, key=lambda name: phases[name])
    one, other = (next(entry for entry in each if entry.phase == main) for each in (few, more))
    expected = sorted(
        (_expected(site, config, one, other, images) for site in other.sites),
        key=lambda each: -each.seconds,
    )
    slowest = expected[0]
    rest = sum(
        entry.seconds * phases.get(entry.phase, entry.rounds) / entry.rounds
        for entry in more
        if entry.phase != main
    )
    in_all = phases[main] * slowest.seconds + rest
    sent = max(sum(part.sent.values()) for part in other.sites.values())
    received = max(sum(part.received.values()) for part in other.sites.values())
    others = (
        f" Then {', '.join(f'{each.site} {each.words}' for each in expected[1:])}." if expected[1:] else ""
    )
    return [
        f"Rehearsed: {len(other.sites)} hospitals registered, computed and delivered; a round sends at most "
        f"{size(sent)} from a hospital and {size(received)} to it.",
        f"{phases[main]} rounds: about {duration(in_all)}, and {slowest.site} decides: a round takes "
        f"{slowest.words} there.{others}",
    ]


def _expected(
    site: str, config: MethodConfig, one: RoundEntry, other: RoundEntry, images: Mapping[str, int]
) -> Expected:
    # What the slowest of the round did not compute, it waited and sent.
    sending = max(0.0, other.seconds - max(part.seconds for part in other.sites.values()))
    seconds, batches = other.sites[site].seconds, _batches(config, images.get(site, 0))
    if batches is None or site not in one.sites:
        return Expected(site, seconds + sending)
    of_batch = max(0.0, seconds - one.sites[site].seconds) / (MORE - FEW)
    fixed = max(0.0, seconds - MORE * of_batch)
    return Expected(site, fixed + batches * of_batch + sending, batches, of_batch)


def _batches(config: MethodConfig, images: int) -> int | None:
    """A round's batches at a hospital; None of a method that counts no steps."""
    fields = ("local_epochs", "batch_size", "local_steps", "least_steps")
    if not {*fields} <= type(config).model_fields.keys():
        return None
    return planned_batches(images, *(getattr(config, name) for name in fields))
