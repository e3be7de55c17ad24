"""A campaign of faults, one after the other at randomly drawn instants, and the time of each recovery."""

from __future__ import annotations

import time
from dataclasses import dataclass, field, replace
from pathlib import Path

from benchmarks.faults.kinds import INSTANTS, KINDS, STAGED, STAGES, VISIBLE, Scene, lives
from benchmarks.faults.service import Held, Service
from benchmarks.harness.campaign import Campaign
from benchmarks.harness.cells import Cell
from service.database.job_states import TERMINAL

EPOCHS = 2
# Upper limit of a recovery: a lease, a restart, and a message that is sent again.
RECOVERY_S = 120.0
# How long to wait for a job in the drawn stage.
_AIM_S = 30.0


@dataclass
class Strike:
    """A fault that was injected, and the jobs that ran at that instant."""

    kind: str
    stage: str
    at: float
    held: list[Held]
    killed: list[int] = field(default_factory=list)
    recovered_s: float | None = None


class ServiceCampaign(Campaign[Strike]):
    """Faults against one running service with `jobs` jobs at once."""

    def __init__(self, cell: Cell, service: Service) -> None:
        super().__init__(cell)
        self.service = service
        self.jobs = int(cell["jobs"])
        self.stages: list[str] = []

    def strike(self) -> Strike:
        """Inject one fault; its kind and instant are drawn."""
        kind = self.draw.choices(list(KINDS), [weight for _, weight in KINDS.values()])[0]
        if not self.stages:
            self.stages = self.draw.sample(INSTANTS, len(INSTANTS))
        stage = self.stages.pop()
        self._wait(self.draw.uniform(0, 2))
        self._top_up()
        held = self._aim(stage)
        if stage in STAGES:
            self._wait(self.draw.uniform(0, 0.3))
        strike = Strike(kind, held.stage if held else "none", time.monotonic(), self.service.held())
        strike.killed = KINDS[kind][0](Scene(self.service, held, self.draw))
        return strike

    def finish(self) -> None:
        """Wait for recovery from every fault and the end of all jobs; then run one undisturbed job."""
        service = self.service
        service.until(self._recovered, patience_s=RECOVERY_S)
        service.until(service.over, patience_s=2 * RECOVERY_S)
        service.submit(epochs=EPOCHS)
        service.until(service.over, patience_s=RECOVERY_S)

    def _top_up(self) -> None:
        while sum(not self.service.over(job) for job in self.service.accepted) < self.jobs:
            self.service.submit(epochs=EPOCHS)

    def _aim(self, stage: str) -> Held | None:
        """The first job found in this stage; any running job if none reaches it in time."""
        # In a bucket nothing is staged: a version is written under its digest, and appears by one request.
        store = self.service.settings.store
        staging = store / ".staging" if isinstance(store, Path) else None
        end, before = time.monotonic() + _AIM_S, len(self.service.published())
        while time.monotonic() < end:
            found = self.service.held("publishing" if stage in (STAGED, VISIBLE) else stage)
            if stage == STAGED and staging is not None:
                found = found if any(staging.iterdir()) else []
            elif stage == VISIBLE:
                published = self.service.published()
                found = [one for one in found if one.job in published[before:]]
            if found:
                return replace(found[0], stage=stage)
            if not self.service.held("publishing"):
                # These states change within milliseconds, so while a job publishes nothing else is checked.
                self._look()
                time.sleep(0.01)
        running = self.service.held()
        return running[0] if running else None

    def _wait(self, seconds: float) -> None:
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            self._look()
            time.sleep(0.02)

    def _open(self) -> list[Strike]:
        return [strike for strike in self.strikes if strike.recovered_s is None]

    def _recovered(self) -> bool:
        self._look()
        return not self._open()

    def _look(self) -> None:
        """Restart dead processes, and note the faults that the service has recovered from."""
        self.service.tick()
        waiting = self._open()
        if waiting and self.service.whole():
            here = {worker.pid for worker in self.service.workers} | {self.service.redis_pid()}
            for strike in waiting:
                if not here & {*strike.killed} and all(self._goes_on(held, strike) for held in strike.held):
                    strike.recovered_s = time.monotonic() - strike.at

    def _goes_on(self, held: Held, strike: Strike) -> bool:
        job = self.service.job(held.job)
        if job.state in TERMINAL:
            return True
        pid = None if job.owner is None else int(job.owner.rsplit(":", 1)[1])
        return pid is not None and pid not in strike.killed and lives(pid)
