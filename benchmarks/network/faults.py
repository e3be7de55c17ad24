"""What is left of a federation over a network when its members are killed, stopped and cut off?

An operator and three hospitals, each a process of its own, train over NVFLARE's connections. A seeded draw
decides what goes wrong next. Dead processes are started again, as a process manager would. The federation has
recovered from a fault once a round that began after it is committed. In the end all invariants must hold.
"""

from __future__ import annotations

import json
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.harness.campaign import HEADER, Campaign, NeverHappened, batches, recovery, violated
from benchmarks.harness.cells import Cell, Row
from benchmarks.harness.experiment import Experiment, Table
from benchmarks.harness.tables import table
from benchmarks.network.consortium import Consortium, Member
from benchmarks.network.proxy import Proxy
from model_store.store import Store
from training.choices.fedavg import FedAvgConfig
from training.config import RunConfig
from training.data.federation import load_federation
from training.phantom import write_federation
from training.run import Run, execute

SITES = ("aster", "birch", "cedar")
_NEVER_S = 120.0
_DEADLINE_S = 20


@dataclass(frozen=True)
class Profile:
    """Faults, faults per row, the seed of the draws, and rounds of a run, which must last for a row."""

    faults: int = 60
    batch: int = 12
    seed: int = 0
    rounds: int = 150


PROFILES = {"smoke": Profile(3, 3, 1, 60), "cpu": Profile()}


class NetworkFaults(Experiment[Profile]):
    """Random faults against a federation over the network engine."""

    name = "network_faults"
    title = "Faults on a network"
    question = "What is left of a federation between hospitals when its members are killed and cut off?"
    profiles = PROFILES
    tables = (Table("network_faults"),)

    def cells(self) -> list[Cell]:
        """Batches of faults; in the last, a deadline drops late hospitals."""
        settings = self.profile
        cells = batches(settings.faults, settings.batch, settings.seed)
        last = len(cells) - 1
        return [
            {
                **cell,
                "rounds": settings.rounds,
                "ends": "by deadline" if cell["batch"] == last > 0 else "with every hospital",
            }
            for cell in cells
        ]

    def compute(self, cell: Cell, work: Path) -> dict[str, Any]:
        """One batch of faults."""
        campaign = NetworkCampaign(cell, work)
        campaign.run()
        return {"faults": [asdict(strike) for strike in campaign.strikes], "violations": campaign.broken}

    def sections(self, rows: Sequence[Row]) -> list[str]:
        """Violated invariants, and recovery by kind of fault."""
        faults = [fault for row in rows for fault in row["result"]["faults"]]
        return [
            f"{len(faults)} faults in {len(rows)} runs of FedAvg on the phantom, each with an operator and "
            "three hospitals as processes of their own, over NVFLARE's connections with mutual TLS.",
            *violated(rows),
            "Checked after each run: the operator and every hospital ended with exit code 0; every round of "
            "the plan is in the history once, in order; a round without a deadline has every hospital; a "
            "round with one has the quorum, and the last round has every hospital; every hospital's own log "
            "has the bytes that the operator counted; no upload is left at the operator, and no "
            "hospital's memory is there; without a deadline, the published digests are those of the "
            "in-process engine, which nothing disturbed.",
            "## Recovery",
            "Seconds from the fault until a round that began after it is committed. A stop, a cut and a slow "
            "connection last up to 6 s; a process that is killed starts again at once and imports torch.",
            table(["fault", *HEADER], recovery(rows, KINDS)),
        ]


@dataclass(frozen=True)
class Strike:
    """A fault, and the seconds until the federation had recovered."""

    kind: str
    recovered_s: float | None


class NetworkCampaign(Campaign[Strike]):
    """One run of a federation with its faults."""

    def __init__(self, cell: Cell, work: Path) -> None:
        super().__init__(cell)
        self._cell = cell
        self._root = work / f"run-{time.time_ns()}"
        self._root.mkdir(parents=True)
        self._data = write_federation(self._root / "data", SITES, patients_per_site=3, size=16)
        config = f"method: {{width: 2, rounds: {cell['rounds']}, batch_size: 8, least_steps: 2}}\n"
        (self._root / "config.yaml").write_text(config)
        self._by_deadline = cell["ends"] == "by deadline"
        self._sites: dict[str, Member] = {}
        self._proxies: dict[str, Proxy] = {}

    def run(self) -> None:
        """Start the federation, strike, and end it."""
        with Consortium(self._root, self._data, SITES) as self._consortium:
            self._operator = self._start_operator()
            for site in SITES:
                self._proxies[site] = Proxy(self._consortium.port)
                self._through_proxy(site)
                self._sites[site] = self._consortium.start_site(site)
            try:
                self._until(lambda: self._committed() > 1)
                super().run()
            finally:
                for proxy in self._proxies.values():
                    proxy.close()

    def _start_operator(self, *more: str) -> Member:
        limits = ("--deadline", str(_DEADLINE_S), "--quorum", "2") if self._by_deadline else ()
        command = ("--method", "fedavg", "--config", self._root / "config.yaml", *limits, *more)
        return self._consortium.start_operator(*command)

    def _through_proxy(self, site: str) -> None:
        path = self._root / "kits" / site / "kit.json"
        content = json.loads(path.read_text()) | {"address": f"localhost:{self._proxies[site].port}"}
        path.write_text(json.dumps(content))

    def strike(self) -> Strike:
        """Inject one fault, and wait until a round that began after it is committed."""
        if self._operator.process.poll() is not None:
            raise NeverHappened(f"the run ended after {len(self.strikes)} faults; give it more rounds")
        kind = self.draw.choice([*KINDS])
        time.sleep(self.draw.uniform(0, 1.5))
        began = time.monotonic()
        KINDS[kind](self, self.draw.choice(SITES))
        after = self._committed()
        try:
            # The next commit may be of a round that began before the fault.
            self._until(lambda: self._committed() > after + 1 or self._operator.process.poll() == 0)
        except NeverHappened as error:
            self.broken.append(f"{kind}: {error}")
            return Strike(kind, None)
        return Strike(kind, round(time.monotonic() - began, 2))

    def kill_hospital(self, site: str) -> None:
        """kill -9 of a hospital's process, which is started again."""
        self._sites[site].kill()
        self._sites[site] = self._consortium.start_site(site)

    def kill_operator(self, _: str) -> None:
        """kill -9 of the operator's process, which is resumed."""
        self._operator.kill()
        self._operator = self._start_operator("--resume")

    def kill_everyone(self, _: str) -> None:
        """A power cut: every process is killed, and started again."""
        self._operator.kill()
        for site in SITES:
            self._sites[site].kill()
        for site in SITES:
            self._sites[site] = self._consortium.start_site(site)
        self._operator = self._start_operator("--resume")

    def stop_hospital(self, site: str) -> None:
        """A hospital's process hangs for a while."""
        self._sites[site].process.send_signal(signal.SIGSTOP)
        time.sleep(self.draw.uniform(1, 6))
        self._sites[site].process.send_signal(signal.SIGCONT)

    def cut_connection(self, site: str) -> None:
        """A hospital's connection is cut for a while."""
        self._proxies[site].cut()
        time.sleep(self.draw.uniform(0, 6))
        self._proxies[site].mend()

    def slow_connection(self, site: str) -> None:
        """A hospital's connection is slow for a while."""
        self._proxies[site].slow(0.2)
        time.sleep(self.draw.uniform(2, 6))
        self._proxies[site].mend()

    def second_process(self, site: str) -> None:
        """A hospital is started on another machine, too: the later process takes the place of the first."""
        state = self._root / "state" / f"{site}.{len(self._consortium.members)}"
        first, self._sites[site] = self._sites[site], self._consortium.start_site(site, state=state)
        try:
            first.end(_NEVER_S)
        except Exception as error:
            self.broken.append(f"second process of {site}: the first did not end: {error}")

    def _committed(self) -> int:
        path = self._root / "run" / "history.jsonl"
        return path.read_bytes().count(b"\n") if path.exists() else 0

    def _until(self, condition: Callable[[], bool]) -> None:
        end = time.monotonic() + _NEVER_S
        while not condition():
            if time.monotonic() > end:
                raise NeverHappened(f"no further round within {_NEVER_S:.0f} s")
            time.sleep(0.05)

    def finish(self) -> None:
        """Wait for the end of the run and check the invariants."""
        broken = self.broken
        for name, member in {"operator": self._operator, **self._sites}.items():
            try:
                if code := member.end(600):
                    broken.append(f"{name} ended with exit code {code}: {member.text()[-300:]}")
            except Exception:
                broken.append(f"{name} did not end: {member.text()[-300:]}")
        if broken:
            return
        record = json.loads((self._root / "run" / "record.json").read_text())
        rounds = record["rounds"]
        train = [entry["round"] for entry in rounds if entry["phase"] == "train"]
        if train != list(range(self._cell["rounds"])):
            broken.append(f"rounds of training: {train}")
        for entry in rounds:
            there = set(entry["sites"])
            if not self._by_deadline and there != set(SITES):
                broken.append(f"{entry['phase']} {entry['round']}: only {sorted(there)}: {entry['dropped']}")
            if len(there) < 2:
                broken.append(f"{entry['phase']} {entry['round']}: below the quorum")
        if set(rounds[-1]["sites"]) != set(SITES):
            broken.append(f"the last round has only {sorted(rounds[-1]['sites'])}")
        broken += self._logs(rounds)
        left = [path.name for path in (self._root / "run" / "exchange").glob("*")]
        if left or (self._root / "run" / "sites").exists():
            broken.append(f"left at the operator: {left}")
        if not self._by_deadline and self._digests(self._root / "store") != self._reference():
            broken.append("the published digests are not those of an undisturbed run")

    def _logs(self, rounds: Sequence[dict[str, Any]]) -> list[str]:
        """Compare what hospitals logged as sent with what the operator counted."""
        broken = []
        for site in SITES:
            logged: dict[tuple[str, int], dict[str, int]] = {}
            for path in (self._root / "state").glob(f"{site}*/*/sent.jsonl"):
                for line in map(json.loads, path.read_text().splitlines()):
                    logged[line["phase"], line["round"] - 1] = line["sent"]
            for entry in rounds:
                counted = {
                    k: v for k, v in entry["sites"].get(site, {}).get("sent", {}).items() if k != "metrics"
                }
                if counted and logged.get((entry["phase"], entry["round"])) != counted:
                    broken.append(f"{site}, {entry['phase']} {entry['round']}: not in the hospital's log")
        return broken

    def _reference(self) -> dict[str, str]:
        config = FedAvgConfig(width=2, rounds=self._cell["rounds"], batch_size=8, least_steps=2)
        run = Run(load_federation(self._data), "fedavg", config, RunConfig(consent="all"))
        execute(run, self._root / "reference", workers=0, store=Store(self._root / "reference-store"))
        return self._digests(self._root / "reference-store")

    def _digests(self, root: Path) -> dict[str, str]:
        store = Store(root)
        return {name: store.open(name).digest for name in store.versions.names()}


KINDS: dict[str, Callable[[NetworkCampaign, str], None]] = {
    "hospital killed": NetworkCampaign.kill_hospital,
    "operator killed": NetworkCampaign.kill_operator,
    "everyone killed": NetworkCampaign.kill_everyone,
    "hospital stopped": NetworkCampaign.stop_hospital,
    "connection cut": NetworkCampaign.cut_connection,
    "connection slow": NetworkCampaign.slow_connection,
    "second process": NetworkCampaign.second_process,
}
