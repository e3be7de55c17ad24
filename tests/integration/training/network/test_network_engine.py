"""Federate three hospitals that are processes of their own, over NVFLARE's connections with mutual TLS."""

from __future__ import annotations

import json
import re
import shutil
import signal
from datetime import date
from pathlib import Path

import pytest

from benchmarks.harness.forked import Forked
from benchmarks.network.consortium import Consortium, Member, until
from model_store.store import Store
from tests.helpers.training.backbones import publish, unet
from tests.helpers.training.certificates import end
from training.choices.fedavg import FedAvgConfig
from training.config import RunConfig
from training.data.federation import load_federation
from training.methods.iop_fl import IopFlConfig
from training.network import calendar
from training.network.kits import Kit, provision, renew, revoke
from training.network.roster import rows
from training.phantom import write_federation
from training.run import Run, execute

SITES = ("aster", "birch", "cedar")
CONFIG = "method: {width: 2, rounds: 2, batch_size: 8}\nrun: {seed: 4}\n"


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_federation(tmp_path_factory.mktemp("phantom"), SITES, patients_per_site=3, size=16)


@pytest.fixture
def consortium(data, tmp_path):
    (tmp_path / "config.yaml").write_text(CONFIG)
    with Consortium(tmp_path, data, SITES, begin=Forked) as made:
        yield made


def digests(root: Path) -> dict[str, str]:
    store = Store(root)
    return {name: store.open(name).digest for name in store.versions.names()}


@pytest.fixture(scope="module")
def expected(data, tmp_path_factory) -> dict[str, str]:
    """Digests of the artefacts of the same run in one process."""
    root = tmp_path_factory.mktemp("reference")
    config = IopFlConfig(width=2, rounds=2, batch_size=8)
    run = Run(load_federation(data), "iop-fl", config, RunConfig(seed=4, consent="all"))
    execute(run, root / "run", workers=0, store=Store(root / "store"))
    return digests(root / "store")


def started(consortium: Consortium, *command: object) -> Member:
    """Start the operator, and wait until hospitals connect at their first try."""
    operator = consortium.start_operator(*command)
    operator.wait_for("listening on")
    return operator


def options(consortium: Consortium, *more: object) -> tuple[object, ...]:
    return ("--method", "iop-fl", "--config", consortium.root / "config.yaml", *more)


def test_digests_are_those_of_the_in_process_engine_whatever_was_killed(consortium, expected):
    operator = started(consortium, *options(consortium))
    sites = {site: consortium.start_site(site) for site in SITES}
    sites["birch"].wait_for("train 1/2: computing")
    sites["birch"].kill()
    sites["birch"] = consortium.start_site("birch")
    sites["cedar"].wait_for("train 2/2: computing")
    operator.kill()

    operator = consortium.start_operator(*options(consortium, "--resume"))
    assert operator.end() == 0, operator.text()
    assert [site.end() for site in sites.values()] == [0, 0, 0]

    assert digests(consortium.root / "store") == expected
    # What stays at a hospital is not in the operator's folder.
    assert not (consortium.root / "run" / "sites").exists()
    record = json.loads((consortium.root / "run" / "record.json").read_text())
    assert all(set(entry["sites"]) == set(SITES) for entry in record["rounds"])
    # A hospital's own log has at least what the operator counted: a repeated step sends again.
    for site in SITES:
        (log,) = (consortium.root / "state" / site).glob("*/sent.jsonl")
        logged = [json.loads(line) for line in log.read_text().splitlines()]
        sent = {(line["phase"], line["round"]): line["sent"] for line in logged}
        for entry in record["rounds"]:
            counted = dict(entry["sites"][site]["sent"])
            counted.pop("metrics", None)
            assert sent[entry["phase"], entry["round"] + 1] == counted


def test_a_start_is_sent_by_the_operator_and_judged_at_the_hospitals(consortium, data, tmp_path):
    federation = load_federation(data)
    for root in (consortium.root / "store", tmp_path / "reference/store"):
        publish(root, federation.task, unet(federation.task), "base")
    store = Store(tmp_path / "reference/store")
    config = FedAvgConfig(width=2, rounds=2, batch_size=8, start="base@1")
    config = config.prepared(store, federation.task, federation.task.name)
    run = Run(federation, "fedavg", config, RunConfig(seed=4, consent="all"))
    execute(run, tmp_path / "reference/run", workers=0, store=store)

    # No hospital has the version, nor a store.
    command = ("--method", "fedavg", "--config", consortium.root / "config.yaml", "--from", "base@1")
    operator = started(consortium, *command)
    sites = [consortium.start_site(site) for site in SITES]
    assert operator.end() == 0, operator.text()
    assert [site.end() for site in sites] == [0, 0, 0]
    assert digests(consortium.root / "store") == digests(store.root)
    record = json.loads((consortium.root / "run" / "record.json").read_text())
    assert record["details"]["judged"]["sites"].keys() == set(SITES)


def test_deadline_drops_a_stopped_hospital_and_it_is_back_in_the_next_round(consortium):
    (consortium.root / "config.yaml").write_text(CONFIG.replace("rounds: 2", "rounds: 4"))
    command = ("--method", "fedavg", "--config", consortium.root / "config.yaml")
    operator = started(consortium, *command, "--deadline", 3, "--quorum", 2)
    sites = {site: consortium.start_site(site) for site in SITES}
    at = sites["aster"].wait_for("train 1/4: computing")
    sites["aster"].process.send_signal(signal.SIGSTOP)
    operator.wait_for("site aster dropped")
    sites["aster"].process.send_signal(signal.SIGCONT)
    until(lambda: "left" in sites["aster"].text()[at:])
    assert operator.end() == 0, operator.text()

    record = json.loads((consortium.root / "run" / "record.json").read_text())
    dropped = [entry for entry in record["rounds"] if "aster" in entry["dropped"]]
    assert dropped
    assert "did not deliver within 3 s" in dropped[0]["dropped"]["aster"]
    lacks = Store(consortium.root / "store").open("phantom").manifest.lineage.details["missing"]
    assert lacks.keys() == {"aster"}
    assert re.fullmatch(r"train [0-9, -]+ of 4: did not deliver within 3 s", lacks["aster"])
    assert "aster" in record["rounds"][-1]["sites"]


def listening(consortium: Consortium) -> Member:
    """Start what hears the hospitals between runs."""
    kits = consortium.root / "kits"
    listener = consortium.start("listen.log", "training.network", "listen", "--kits", kits)
    listener.wait_for("listening on")
    return listener


def state_of(consortium: Consortium, site: str) -> str:
    own = Kit.open(consortium.root / "kits/server", server=True)
    return next(row.state for row in rows(own, {}) if row.site == site)


def test_hospital_that_stays_is_in_the_roster_between_runs_and_takes_part_in_both(consortium, monkeypatch):
    monkeypatch.setattr("training.network.hospital._IDLE_S", 0.2)
    own = Kit.open(consortium.root / "kits/server", server=True)
    planned = calendar.add(own, "hearts, two rounds", date(2100, 12, 5), ())
    listener = listening(consortium)
    sites = {site: consortium.start_site(site, more=("--stay",)) for site in SITES}
    for site in SITES:
        sites[site].wait_for(f"locum site agree {planned.id}")
        sites[site].wait_for("no run has begun yet")
        assert state_of(consortium, site) == "ready"
    waiting = "planned: waits for the agreement of aster, birch, cedar"
    assert calendar.standing(planned, rows(own, {})).state == waiting
    for site in SITES:
        calendar.agree(consortium.root / "state" / site, planned.id, f"Dr {site}")
    until(lambda: calendar.standing(planned, rows(own, {})).state == "ready")
    listener.kill()
    for number, seed in enumerate((4, 5), 1):
        (consortium.root / "config.yaml").write_text(CONFIG.replace("seed: 4", f"seed: {seed}"))
        folder = ("--method", "fedavg", "--config", consortium.root / "config.yaml")
        more = ("--planned", planned.id) if seed == 4 else ()
        operator = consortium.start_operator(*folder, "--run", consortium.root / f"run-{seed}", *more)
        assert operator.end() == 0, operator.text()
        for site in SITES:
            sites[site].wait_for("waiting for the next run", after=0)
            assert sites[site].text().count("joined run") == number
    (entry,) = calendar.read(own)
    assert entry.began < entry.ended
    for site in SITES:
        sites[site].process.send_signal(signal.SIGINT)
        assert sites[site].end() == 130


def test_rehearsal_says_what_the_run_takes_and_the_hospitals_wait_for_it(consortium):
    (consortium.root / "config.yaml").write_text("method: {width: 2, rounds: 20, batch_size: 8}\n")
    folder = ("--method", "fedavg", "--config", consortium.root / "config.yaml")
    operator = started(consortium, *folder, "--rehearse")
    sites = {site: consortium.start_site(site) for site in SITES}
    assert operator.end() == 0, operator.text()
    assert "Rehearsed: 3 hospitals registered, computed and delivered" in operator.text()
    said = re.search(
        r"20 rounds: about ([0-9:]+), and (\w+) decides: a round takes .* batches", operator.text()
    )
    assert said is not None, operator.text()
    assert said[2] in SITES
    assert not [*(consortium.root / "runs").glob("*")]
    operator = consortium.start_operator(*folder, "--rounds", 1)
    assert operator.end() == 0, operator.text()
    assert [site.end() for site in sites.values()] == [0, 0, 0]
    assert all(site.text().count("joined run") == 3 for site in sites.values())


def test_hospitals_that_tls_keeps_out_are_named_on_both_sides_at_once(consortium, tmp_path):
    provision(tmp_path / "older", "loopback", f"localhost:{consortium.port}", SITES)
    kits = consortium.root / "kits"
    for file in ("client.crt", "client.key", "rootCA.pem"):
        shutil.copy(tmp_path / "older/aster" / file, kits / "aster" / file)
    end(kits, "birch")
    listener = listening(consortium)
    aster, birch = consortium.start_site("aster"), consortium.start_site("birch")
    aster.wait_for("is of another authority than this kit: one of the two kits is of an earlier generation")
    assert birch.end() == 2
    assert "is not valid now" in birch.text()
    listener.wait_for("aster cannot connect: its kit, of ")
    listener.wait_for("birch cannot connect: its certificate ended on ")
    for site, command in (("aster", "provision --site aster"), ("birch", "renew --site birch")):
        assert state_of(consortium, site).startswith("mend why it cannot connect: its ")
        assert command in state_of(consortium, site)
    listener.kill()
    # While a run waits for its hospitals, too; and a new kit mends it.
    operator = started(consortium, "--method", "fedavg", "--config", consortium.root / "config.yaml")
    shutil.rmtree(consortium.root / "state/birch", ignore_errors=True)
    consortium.start_site("birch")
    operator.wait_for("waiting for aster, birch, cedar")
    renew(kits, ["birch"])
    consortium.start_site("birch")
    operator.wait_for("waiting for aster, cedar")
    assert state_of(consortium, "birch") == "ready"


def test_hospital_obeys_its_own_policy(consortium):
    consortium.policy("aster", "allows: [weights]\nconsents: false\n")
    operator = started(consortium, *options(consortium, "--quorum", 1))
    sites = {site: consortium.start_site(site) for site in SITES}
    sites["birch"].wait_for("train 1/2: computing")
    consortium.policy("birch", "allows: [weights, statistics]\nconsents: true\ntakes_part: false\n")
    assert operator.end() == 0, operator.text()

    shown = sites["aster"].text()
    assert "nothing: no consent" in shown
    record = json.loads((consortium.root / "run" / "record.json").read_text())
    sent = {group for entry in record["rounds"] for group in entry["sites"].get("aster", {}).get("sent", {})}
    assert sent == {"weights"}
    assert "phantom.aster" not in digests(consortium.root / "store")
    paused = [entry["dropped"].get("birch", "") for entry in record["rounds"]]
    assert "the hospital's policy pauses its part" in paused


def test_run_of_which_a_hospital_was_revoked_is_resumed_without_it(consortium):
    (consortium.root / "config.yaml").write_text(CONFIG.replace("rounds: 2", "rounds: 4"))
    command = ("--method", "fedavg", "--config", consortium.root / "config.yaml")
    operator = started(consortium, *command)
    sites = {site: consortium.start_site(site) for site in SITES}
    sites["cedar"].wait_for("train 2/4: computing")
    revoke(consortium.root / "kits", "cedar")
    assert sites["cedar"].end() == 2
    operator.kill()

    operator = consortium.start_operator(*command, "--resume")
    assert operator.end() == 0, operator.text()
    assert "without cedar: revoked since the run began" in operator.text()
    record = json.loads((consortium.root / "run" / "record.json").read_text())
    trained = [entry for entry in record["rounds"] if entry["phase"] == "train"]
    assert len(trained) == 4
    assert "cedar" in trained[0]["sites"]
    assert trained[-1]["dropped"] == {"cedar": "its certificate was revoked"}


def test_run_stops_without_a_hospital_of_which_no_one_wrote_that_it_may_be_missing(consortium):
    command = ("--method", "fedavg", "--config", consortium.root / "config.yaml")
    operator = started(consortium, *command)
    sites = {site: consortium.start_site(site) for site in SITES}
    sites["cedar"].wait_for("train 1/2: computing")
    sites["cedar"].process.send_signal(signal.SIGINT)
    assert operator.end() == 2, operator.text()
    assert "2 of 3 sites delivered, the quorum is 3 (cedar: left the run" in operator.text()
    assert not (consortium.root / "store").exists() or not digests(consortium.root / "store")
    # It comes back, and nothing of the run is lost.
    consortium.start_site("cedar")
    operator = consortium.start_operator(*command, "--resume")
    assert operator.end() == 0, operator.text()
    record = json.loads((consortium.root / "run" / "record.json").read_text())
    assert all(set(entry["sites"]) == set(SITES) for entry in record["rounds"])


def test_hospital_stopped_by_ctrl_c_notifies_the_operator_and_the_rounds_go_on(consortium):
    """Without the notice, the operator would wait for it: there is no deadline."""
    command = ("--method", "fedavg", "--config", consortium.root / "config.yaml", "--quorum", 2)
    operator = started(consortium, *command)
    sites = {site: consortium.start_site(site) for site in SITES}
    sites["cedar"].wait_for("train 1/2: computing")
    sites["cedar"].process.send_signal(signal.SIGINT)
    assert sites["cedar"].end() == 130, sites["cedar"].text()
    assert "left the run; the same command joins again" in sites["cedar"].text()
    assert operator.end() == 0, operator.text()
    assert "cedar: left the run: stopped by the hospital" in operator.text()


def test_hospital_is_turned_away_once_its_certificate_is_revoked(consortium):
    command = ("--method", "fedavg", "--config", consortium.root / "config.yaml")
    operator = started(consortium, *command, "--deadline", 3, "--quorum", 2)
    sites = {site: consortium.start_site(site) for site in SITES}
    sites["cedar"].wait_for("train 1/2: computing")
    revoke(consortium.root / "kits", "cedar")
    assert sites["cedar"].end() == 2
    assert "the certificate was revoked; ask the operator for a new kit" in sites["cedar"].text()
    assert operator.end() == 0, operator.text()
    record = json.loads((consortium.root / "run" / "record.json").read_text())
    assert "cedar" not in record["rounds"][-1]["sites"]
