"""A hospital and the operator in one process: the hospital's requests are calls of the operator."""

from __future__ import annotations

import json
import re
import shutil
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict

import pytest
import torch

from model_store.store import Store
from model_store.task import Task
from personalization.networks import build
from tests.helpers.training.classified_sites import write_volumes
from training.config import RunConfig
from training.data.cases import Federation, digest_of_sites
from training.data.federation import load_federation
from training.engine.client import RunEnvironment
from training.engine.tensorfile import read_tensors, write_tensors
from training.engine.worker import Task as Part
from training.errors import ConfigurationError, EgressRefused, PublishError, RoundFailed, TrainingError
from training.methods.registry import method as find_method
from training.network.cell import Rejected, Unreachable
from training.network.hospital import Hospital, Sent
from training.network.joining import Screen as Terminal
from training.network.kits import Kit, provision
from training.network.messages import PROTOCOL, Asking, Invitation, Next, Session, pack, unpack
from training.network.operator import Listener, Operator
from training.network.rounds import RoundLimits
from training.network.runs import NetworkRun
from training.phantom import write_federation
from training.privacy import epsilon_of
from training.run import Run, execute
from training.state_tree import part

SITES = ("aster", "birch")
GOES_ON = RoundLimits(quorum=1)
OVER = Next(over="over")
ASKING = pack(Asking(protocol=PROTOCOL))
POLICY = "allows: [weights, statistics, features]\nconsents: true\n"
# Methods without and with a memory and a model of the site's own; the last sends features.
CONFIGS = {
    "fedavg": {"width": 2, "rounds": 2, "batch_size": 8, "least_steps": 1},
    "plan": {},
    "fedrep": {"width": 2, "rounds": 2, "batch_size": 8, "least_steps": 1},
    "fedoap": {
        "width": 2,
        "heads": 4,
        "groups": 4,
        "rounds": 1,
        "local_steps": 1,
        "batch_size": 4,
        "bank_minimum": 1,
        "fine_tune_rounds": 0,
    },
}


@pytest.fixture(autouse=True)
def impatient(monkeypatch):
    """Ask for a task often: without a network, the operator cannot wake a hospital."""
    monkeypatch.setattr("training.network.link._IDLE_S", 0.01)
    for module in ("hospital", "link"):
        monkeypatch.setattr(f"training.network.{module}.RETRY_S", 0.01)


class Line:
    """In the place of a cell: the operator is called directly. `change` may replace or lose a reply."""

    def __init__(self, operator, name):
        self.operator, self.name = operator, name
        self.change = lambda topic, reply: reply
        self.asked: list[str] = []

    def start(self):
        pass

    def stop(self):
        pass

    def request(self, topic, payload, timeout, target="server"):
        self.asked.append(topic)
        return self.change(topic, self.operator.handle(self.name, topic, payload))


class Screen:
    """What a person at the hospital sees."""

    def __init__(self):
        self.lines: list[str] = []

    def waiting(self, reason):
        self.lines.append(f"waiting {reason}")

    def warning(self, message):
        self.lines.append(f"warning {message}")

    def joined(self, invitation, plan, spec, patients):
        self.lines.append(f"joined {spec.name}: {patients}")

    def started(self, phase, round):
        self.lines.append(f"started {phase.name}")

    def sent(self, sent):
        self.lines.append(f"sent {sent.phase} {sorted(sent.groups)} {sent.total}")

    def refused(self, phase, round, reason):
        self.lines.append(f"refused {phase.name}: {reason}")

    def dropped(self, reason):
        self.lines.append(f"dropped: {reason}")


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return write_federation(tmp_path_factory.mktemp("phantom"), SITES, patients_per_site=3, size=16)


@pytest.fixture(scope="module")
def kits(tmp_path_factory):
    root = tmp_path_factory.mktemp("kits")
    provision(root, "hearts", "localhost:8002", SITES)
    return root


class Together:
    """An operator and its hospitals."""

    def __init__(self, root, data, kits, method="fedavg", **settings):
        self.root, self.data, self.kits, self.method = root, data, kits, method
        self.task = load_federation(data).task
        self.config = find_method(method).config(**CONFIGS[method])
        self.settings = RunConfig(seed=3, **settings)
        self.operator = self.opened()
        self.lines: dict[str, Line] = {}
        self.state = root / "state"
        self.screens = {site: Screen() for site in SITES}
        self.policies = {site: root / f"{site}.yaml" for site in SITES}
        for path in self.policies.values():
            path.write_text(POLICY)

    def opened(self, limits=GOES_ON):
        """An operator of the run."""
        listener = Listener(Kit.open(self.kits / "server", server=True))
        run = NetworkRun(SITES, self.method, self.config, self.settings, self.task)
        return Operator(listener, self.root / "run", run, limits)

    def hospital(self, site):
        kit = Kit.open(self.kits / site, server=False)
        state = self.state / site
        made = Hospital(kit, self.data / site, self.policies[site], state, self.screens[site])
        made._link.cell = self.lines[site] = Line(self.operator, site)
        return made

    def run(self, store=None, resume=False):
        """Run the federation to its end; returns the digests of what is published, and the result."""
        hospitals = [self.hospital(site) for site in SITES]
        with ThreadPoolExecutor(len(SITES)) as threads:
            ends = [threads.submit(hospital.run) for hospital in hospitals]
            try:
                joined = self.operator.gather(lambda _: None, resume=resume)
                federation = Federation(
                    self.root, self.task, joined, False, digest_of_sites(self.task, joined)
                )
                run = Run(federation, self.method, self.config, self.operator.policies(self.settings))
                result = execute(run, self.root / "run", store=store, pool=self.operator, resume=resume)
            finally:
                self.operator._sessions.end(OVER)
            assert [end.result(30) for end in ends] == ["over"] * len(SITES)
        return {str(a): a.digest for a in result.artefacts}, result


@pytest.mark.parametrize("method", ["fedavg", "fedrep"])
def test_every_kind_of_method_gives_the_digests_of_one_process(method, tmp_path, data, kits):
    digests, _ = Together(tmp_path, data, kits, method).run(Store(tmp_path / "store"))
    config = find_method(method).config(**CONFIGS[method])
    settings = RunConfig(
        seed=3,
        consent="all",
        egress=dict.fromkeys(SITES, ("features", "statistics", "weights")),
    )
    run = Run(load_federation(data), method, config, settings)
    local = execute(run, tmp_path / "local", workers=0, store=Store(tmp_path / "local-store"))
    assert digests == {str(a): a.digest for a in local.artefacts}
    # What stays at a hospital is on its own disk, and not in the operator's folder. FedAvg keeps no network,
    # and the scores of the test patients.
    kept = (tmp_path / "state" / "birch").glob("*/sites/birch/memory-*.safetensors")
    tensors, facts = read_tensors(max(kept, key=lambda path: path.stat().st_mtime_ns))
    assert bool(tensors) == (method == "fedrep")
    assert "tested" in facts
    assert not (tmp_path / "run" / "sites").exists()


def test_volumes_of_a_classification_are_scored_by_slice_and_no_hospital_is_dropped(tmp_path, kits):
    together = Together(tmp_path, write_volumes(tmp_path / "data", SITES), kits)
    _, result = together.run()
    assert not any(entry.dropped for entry in result.history)
    assert {said.scored for said in together.operator.announced.values()} == {9}  # one volume


def test_consent_given_after_the_run_counts_once_the_hospital_joins_the_resumed_one(tmp_path, data, kits):
    together = Together(tmp_path, data, kits, "fedrep")
    for path in together.policies.values():
        path.write_text(POLICY.replace("true", "false"))
    with pytest.raises(PublishError):  # FedRep has no global model
        together.run(Store(tmp_path / "store"))
    together.policies["birch"].write_text(POLICY)
    again = Together(tmp_path, data, kits, "fedrep")
    again.policies["aster"].write_text(POLICY.replace("true", "false"))
    _, result = again.run(Store(tmp_path / "store"), resume=True)
    assert set(result.history[-1].sites) == {"birch"}
    assert [line for line in again.screens["birch"].lines if line.startswith("started")] == ["started export"]


@pytest.mark.parametrize("resume", [False, True])
def test_widened_policy_lets_a_run_begin_that_ended_before_its_first_round(tmp_path, data, kits, resume):
    together = Together(tmp_path, data, kits)
    together.policies["birch"].write_text("allows: [statistics]\nconsents: true\n")
    with pytest.raises(EgressRefused, match="Widen the policy"):
        together.run()
    _, result = Together(tmp_path, data, kits).run(resume=resume)  # with the wider policy
    assert set(result.history[-1].sites) == set(SITES)


def test_process_that_joins_again_announces_and_shows_its_present_policy(tmp_path, data, kits):
    together = Together(tmp_path, data, kits)
    hospital = together.hospital("birch")
    hospital._join()
    hospital._join()
    together.policies["birch"].write_text("allows: [weights]\nconsents: false\n")
    hospital._join()
    assert together.operator.announced["birch"].allows == ("weights",)
    joined = "joined birch: 3 patients (named in cases.csv)"
    few = "warning site 'birch' validates on 1 patient: its validation scores say little of other patients"
    assert together.screens["birch"].lines == [joined, few] * 2


def test_resumed_run_waits_for_hospitals_that_may_consent_until_the_deadline(tmp_path, data, kits):
    together = Together(tmp_path, data, kits)
    together.run()
    # FedAvg's last phase needs no consent.
    assert len(Together(tmp_path, data, kits).operator.gather(pytest.fail, resume=True)) == 2
    asking = Together(tmp_path / "asking", data, kits, "fedrep")
    for path in asking.policies.values():
        path.write_text(POLICY.replace("true", "false"))
    with pytest.raises(PublishError):
        asking.run(Store(tmp_path / "store"))
    asking.operator = asking.opened(RoundLimits(deadline=0.1, quorum=1))
    missing = []
    asking.operator.gather(missing.append, resume=True)
    assert missing == [SITES]


def test_what_left_is_shown_and_logged_before_it_counts(tmp_path, data, kits):
    together = Together(tmp_path, data, kits)
    _, result = together.run()
    lines = [line for line in together.screens["birch"].lines if line.startswith("sent train")]
    assert lines[0].startswith("sent train ['scores', 'weights'] ")
    (log,) = (tmp_path / "state" / "birch").glob("*/sent.jsonl")
    sent = [json.loads(line) for line in log.read_text().splitlines()]
    total = sum(sum(line["sent"].values()) for line in sent)
    assert together.screens["birch"].lines[-1].endswith(f" {total}")
    counted = sum(
        size
        for entry in result.history
        for group, size in entry.sites["birch"].sent.items()
        if group != "metrics"
    )
    assert total == counted


def test_log_has_what_left_before_its_round_ended_and_survives_a_kill_in_its_line(tmp_path, data, kits):
    together = Together(tmp_path, data, kits)
    hospital = together.hospital("birch")
    session = hospital._join()
    start_round(together, 1)
    task = unpack(Next, hospital._link.ask("next", pack_session(session)))[0].task

    def end(topic, reply):
        if topic == "write":  # the first chunk is there, and the deadline passes
            together.operator._rounds._parts = {}
        return reply

    hospital._link.cell.change = end
    with pytest.raises(Rejected, match=r"it is late|is over|another task"):
        hospital._step(session, hospital._prepared, task)
    (log,) = (tmp_path / "state" / "birch").glob("*/sent.jsonl")
    (line,) = map(json.loads, log.read_text().splitlines())
    assert set(line["sent"]) == {"weights", "scores"}

    with log.open("a") as file:
        file.write('{"time": "2026')
    again = together.hospital("birch")
    session = again._join()
    start_round(together, 1)
    task = unpack(Next, again._link.ask("next", pack_session(session)))[0].task
    again._step(session, again._prepared, task)
    first, second = map(json.loads, log.read_text().splitlines())
    assert first == line
    total = 2 * sum(second["sent"].values())
    assert together.screens["birch"].lines[-1] == f"sent train ['scores', 'weights'] {total}"


def computed_and_logged(together, site):
    """The steps that a hospital computed, and those in its log, by phase."""
    computed = [line.split()[1] for line in together.screens[site].lines if line.startswith("started")]
    (log,) = (together.state / site).glob("*/sent.jsonl")
    return computed, [json.loads(line)["phase"] for line in log.read_text().splitlines()]


def test_lost_replies_cost_neither_a_computed_step_nor_the_chunks_before(tmp_path, data, kits, monkeypatch):
    monkeypatch.setattr("training.network.link.CHUNK", 4000)
    together = Together(tmp_path, data, kits)
    lost = Counter({"invite": 1, "join": 1, "next": 2, "read": 2, "write": 3, "done": 1})
    passed = Counter()

    def lose(topic, reply):
        passed[topic] += 1
        # In the middle of a file, after the operator has written the chunk.
        if lost[topic] and (topic != "write" or passed[topic] > 3):
            lost[topic] -= 1
            raise Unreachable("the reply is lost")
        return reply

    made = together.hospital

    def hospital(site):
        found = made(site)
        if site == "birch":
            found._link.cell.change = lose
        return found

    together.hospital = hospital
    _, result = together.run()
    assert not lost.total()
    assert not any(entry.dropped for entry in result.history)
    # Only what failed twice in a row is said.
    assert [line for line in together.screens["birch"].lines if line.startswith("waiting")] == [
        "waiting the reply is lost"
    ] * 4
    computed, logged = computed_and_logged(together, "birch")
    assert computed == logged == [entry.phase for entry in result.history]
    writes = [together.lines[site].asked.count("write") for site in SITES]
    assert writes[1] - writes[0] == 3 < writes[0] / 2


def test_line_on_which_a_chunk_takes_longer_than_the_first_timeout_delivers(
    tmp_path, data, kits, monkeypatch
):
    together = Together(tmp_path, data, kits)
    hospital = together.hospital("birch")
    now, waited = 0.0, []
    monkeypatch.setattr("training.network.link.time.monotonic", lambda: now)
    request = hospital._link.cell.request

    def slow(topic, payload, timeout, target="server"):
        """A chunk takes 100 s."""
        nonlocal now
        if topic == "write":
            waited.append(timeout)
            assert len(waited) < 9
            now += min(timeout, 100)
            if timeout < 100:
                raise Unreachable("the line is slow")
        return request(topic, payload, timeout)

    hospital._link.cell.request = slow
    session = hospital._join()
    start_round(together, 1)
    task = unpack(Next, hospital._link.ask("next", pack_session(session)))[0].task
    hospital._step(session, hospital._prepared, task)
    assert set(together.operator._rounds._parts["birch"].answer.files) == {"weights", "scores"}
    assert waited == [60, 120, 200]


def test_hospital_with_too_large_an_upload_says_so_and_does_not_compute_it_again(tmp_path, data, kits):
    together = Together(tmp_path, data, kits)
    together.operator = together.opened(RoundLimits(quorum=1, upload_bytes=5000))
    with pytest.raises(RoundFailed, match="more than the 5000 bytes that a round allows"):
        together.run()
    lines = together.screens["birch"].lines
    assert lines.count("started train") == 1
    assert lines[-1] == "dropped: its upload has more than the 5000 bytes that a round allows"


def test_round_with_fewer_accepted_uploads_than_the_quorum_fails(tmp_path, data, kits, monkeypatch):
    def tampered(hospital, answer):
        if hospital._kit.name == "birch" and "weights" in answer.files:
            write_tensors(answer.files["weights"], {"w": torch.ones(3)})

    monkeypatch.setattr(Hospital, "_check_size", tampered)
    together = Together(tmp_path, data, kits)
    together.operator = together.opened(RoundLimits())
    with pytest.raises(
        RoundFailed, match=r"'train', round 1: 1 of 2 sites delivered, the quorum is 2 \(birch: "
    ):
        together.run()


def test_hospital_says_how_far_its_step_is_while_it_computes(tmp_path, data, kits, monkeypatch):
    monkeypatch.setattr("training.network.link._BEAT_S", 0.001)
    together = Together(tmp_path, data, kits)
    heard = []
    together.operator.tell(lambda _: None, lambda *said: heard.append(said))
    together.run()
    steps = {planned for _, _, planned in heard}
    assert {site for site, _, _ in heard} == set(SITES)
    assert max(steps) > 0
    assert all(done <= planned for _, done, planned in heard)


def test_hospital_of_which_the_device_was_lost_ends_and_repeats_its_step_once_it_is_back(
    tmp_path, data, kits, monkeypatch
):
    together = Together(tmp_path, data, kits)
    hospital = together.hospital("birch")
    session = hospital._join()
    start_round(together, 1)
    task = unpack(Next, hospital._link.ask("next", pack_session(session)))[0].task
    with monkeypatch.context() as lost:
        lost.setattr("training.network.hospital.fault_of", lambda device: f"{device} does not compute")
        with pytest.raises(TrainingError, match=r"cpu does not compute; it did when .* Start this process"):
            hospital._step(session, hospital._prepared, task)
    again = together.hospital("birch")
    session = again._join()
    same = unpack(Next, again._link.ask("next", pack_session(session)))[0].task
    assert same == task
    again._step(session, again._prepared, same)
    assert together.screens["birch"].lines[-1].startswith("sent train")


def test_terminal_of_a_hospital_shows_kinds_bytes_and_the_sum(tmp_path, data, kits, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    together = Together(tmp_path, data, kits)
    together.policies["birch"].write_text("allows: [weights]\nconsents: false\n")
    together.screens["birch"] = Terminal()
    together.run()
    said = capsys.readouterr().out
    assert re.search(r"^ *train +2 +weights \(weights\) +scores \(statistics\) *$", said, re.MULTILINE)
    left = r"^train 2: left weights [\d.]+ [KM]iB; withheld scores, metrics; [\d.]+ [KM]iB in sum$"
    assert re.search(left, said, re.MULTILINE), said
    assert "test 1: left no tensors" in said


def test_terminal_of_a_hospital_names_the_first_of_many_metrics_and_small_groups_in_bytes(capsys):
    Terminal().sent(Sent("test", 0, {"tested": 8, "moments": 2048}, tuple("abcdefg"), (), 2**20, 0.1, {}))
    assert capsys.readouterr().out == (
        "test 1: left tested 8 B, moments 2.0 KiB; metrics a, b, c, d and 3 more (sent.jsonl); "
        "1.00 MiB in sum\n"
    )


def test_stricter_policy_holds_from_the_next_round_on(tmp_path, data, kits):
    together = Together(tmp_path, data, kits)
    screen = together.screens["birch"]
    before = screen.started

    def started(phase, round):
        before(phase, round)
        if phase.name == "train" and round == 0:
            together.policies["birch"].write_text("allows: [statistics]\nconsents: false\n")

    screen.started = started
    _, result = together.run()
    # The change is read after the step is announced and before it runs.
    trained = [entry for entry in result.history if entry.phase == "train"]
    assert ["birch" in entry.sites for entry in trained] == [False, False]
    assert "the hospital's policy does not allow phase 'train'" in trained[0].dropped["birch"]


def test_operator_cannot_weaken_the_privacy_that_a_hospital_asks_for(tmp_path, data, kits):
    weak = {"groups": {"weights": {"clip": 3.0, "noise": 0.001}}, "delta": 1e-3}
    together = Together(tmp_path, data, kits, privacy=weak)
    epsilon = epsilon_of([4.0], 1e-5)
    demand = f"{{kinds: {{weights: {{clip: 0.5, noise: 4}}}}, epsilon: {1.01 * epsilon}}}"
    together.policies["birch"].write_text(f"{POLICY}privacy: {demand}\n")
    _, result = together.run()
    first, second = (entry for entry in result.history if entry.phase == "train")
    assert asdict(first.sites["birch"].privacy["weights"]) == pytest.approx(
        {"clip": 0.5, "noise": 4.0, "releases": 1, "epsilon": epsilon, "delta": 1e-5}
    )
    assert first.sites["aster"].privacy["weights"].noise == 0.001
    # Two rounds would cost more than birch allows.
    assert "epsilon of" in second.dropped["birch"]
    assert second.sites["aster"].privacy["weights"].releases == 2
    (log,) = (tmp_path / "state" / "birch").glob("*/sent.jsonl")
    logged = [json.loads(line)["privacy"] for line in log.read_text().splitlines()]
    assert [line["weights"]["releases"] for line in logged if line] == [1]


def test_limit_of_epsilon_holds_over_all_runs_of_a_state_folder(tmp_path, data, kits):
    first, other = (Together(tmp_path / name, data, kits) for name in ("first", "other"))
    other.state = first.state
    once = epsilon_of([4.0], 1e-5)
    demand = f"{{kinds: {{weights: {{clip: 0.5, noise: 4}}}}, epsilon: {1.01 * once}}}"
    for together in (first, other):
        together.policies["birch"].write_text(f"{POLICY}privacy: {demand}\n")
    first.run()
    _, result = other.run()
    trained = [entry for entry in result.history if entry.phase == "train"]
    assert ["birch" in entry.sites for entry in trained] == [False, False]
    spent = f"Spent by its releases.json: {once:.3g} in run {run_id(first)}"
    assert trained[0].dropped["birch"].endswith(spent)
    # The hospital decides to begin a new account.
    (first.state / "birch" / "releases.json").unlink()
    again = Together(tmp_path / "again", data, kits)
    again.state = first.state
    again.policies["birch"].write_text(f"{POLICY}privacy: {demand}\n")
    _, result = again.run()
    trained = [entry.sites["birch"].privacy for entry in result.history if "birch" in entry.sites]
    assert [cost["weights"].epsilon for cost in trained if cost] == [pytest.approx(once)]


def test_process_that_did_not_hear_the_end_of_its_run_does_not_join_another(tmp_path, data, kits):
    first, other = (Together(tmp_path / name, data, kits) for name in ("first", "other"))
    hospital = first.hospital("birch")
    hospital._session = hospital._join()
    hospital._link.cell.operator = other.operator
    ids = [run_id(together) for together in (first, other)]
    with pytest.raises(TrainingError, match=f"run {ids[0]}, .* found run {ids[1]}; start this command again"):
        hospital.run()
    assert not other.operator.announced
    # The command that is started again joins it.
    other.state = first.state
    assert other.hospital("birch")._join()


def test_second_process_with_the_same_state_folder_ends_before_it_asks_the_operator(tmp_path, data, kits):
    together = Together(tmp_path, data, kits)
    first, second = together.hospital("birch"), together.hospital("birch")
    joined = []

    def while_the_first_runs(topic, reply):
        if topic == "join":
            with pytest.raises(TrainingError, match="another process of this hospital runs here"):
                second.run()
            joined.append(second._link.cell.asked)
            together.operator._sessions.end(OVER)
        return reply

    first._link.cell.change = while_the_first_runs
    assert first.run() == "over"
    assert joined == [[]]
    # The lock ends with the first.
    assert second.run() == "over"


def test_operator_cannot_lift_the_bounds_of_a_hospital(tmp_path, kits):
    data = write_federation(tmp_path / "data", SITES, patients_per_site=3, size=32)
    together = Together(tmp_path, data, kits, "fedoap")
    together.policies["birch"].write_text(f"{POLICY}bounds: {{minimum_patients: 50}}\n")
    policies = together.operator.policies
    together.operator.policies = lambda settings: policies(settings).model_copy(update={"feature_bounds": {}})
    _, result = together.run()
    (trained,) = (entry for entry in result.history if entry.phase == "train")
    assert {site: entry.sent["tokens"] > 0 for site, entry in trained.sites.items()} == {
        "aster": True,
        "birch": False,
    }


def unlisted(root):
    """Two files of each of birch's three patients, whom no cases.csv names."""
    data = write_federation(root, SITES, patients_per_site=6, size=16)
    (data / "birch" / "cases.csv").unlink()
    for folder in ("images", "masks"):
        for number, path in enumerate(sorted((data / "birch" / folder).iterdir())):
            path.rename(path.with_name(f"P{number // 2}_s{number}.nii.gz"))
    return data


class TestPatients:
    """The hospital, not the operator's task, decides what a patient is."""

    RULE = "patient: '^(?P<patient>P[0-9]+)_'\n"

    @pytest.fixture
    def together(self, tmp_path, kits):
        together = Together(tmp_path, unlisted(tmp_path / "data"), kits)
        together.task = together.task.model_copy(update={"patient": "^(?P<patient>.+)$"})
        together.operator = together.opened()
        return together

    def test_least_number_that_the_operators_rule_would_count_keeps_the_hospital_out(self, together):
        together.policies["birch"].write_text(f"{POLICY}bounds: {{minimum_patients: 4}}\n")
        hospital = together.hospital("birch")
        with pytest.raises(ConfigurationError, match=r"minimum_patients: the operator's task would decide"):
            hospital.run()
        assert hospital._link.cell.asked == ["hello", "invite"]

    def test_rule_of_the_policy_comes_before_the_operators(self, together):
        together.policies["birch"].write_text(f"{POLICY}{self.RULE}bounds: {{minimum_patients: 4}}\n")
        together.hospital("birch")._join()
        assert sum(together.operator.announced["birch"].patients.values()) == 3
        assert joined(together) == "joined birch: 3 patients (by the policy's '^(?P<patient>P[0-9]+)_')"

    def test_rule_of_the_operator_is_shown_where_there_is_no_other(self, together):
        together.hospital("birch")._join()
        assert joined(together) == "joined birch: 6 patients (by the operator's '^(?P<patient>.+)$')"

    def test_cases_csv_comes_before_both_rules(self, together):
        files = sorted(path.name for path in (together.data / "birch" / "images").iterdir())
        rows = "".join(f"{name},{index // 3}\n" for index, name in enumerate(files))
        (together.data / "birch" / "cases.csv").write_text("file,patient\n" + rows)
        together.policies["birch"].write_text(f"{POLICY}bounds: {{minimum_patients: 2}}\n")
        together.hospital("birch")._join()
        assert joined(together) == "joined birch: 2 patients (named in cases.csv)"

    def test_cases_csv_that_leaves_a_patient_open_names_not_all(self, together):
        files = sorted(path.name for path in (together.data / "birch" / "images").iterdir())
        rows = "".join(f"{name},{index or ''}\n" for index, name in enumerate(files))
        (together.data / "birch" / "cases.csv").write_text("file,patient\n" + rows)
        together.policies["birch"].write_text(f"{POLICY}bounds: {{minimum_patients: 2}}\n")
        with pytest.raises(ConfigurationError, match="minimum_patients"):
            together.hospital("birch").run()

    @pytest.mark.parametrize(
        ("policy", "reason"),
        [("bounds: {minimum_patients: 4}", "bounds.minimum_patients"), (RULE, "the policy's rule changed")],
    )
    def test_policy_that_changes_after_the_folder_was_read_sends_nothing(self, together, policy, reason):
        hospital = together.hospital("birch")
        session = hospital._join()
        together.policies["birch"].write_text(f"{POLICY}{policy}\n")
        start_round(together, 1)
        task = unpack(Next, hospital._link.ask("next", pack_session(session)))[0].task
        hospital._step(session, hospital._prepared, task)
        assert reason in together.operator._rounds._parts["birch"].answer.reason
        assert "write" not in hospital._link.cell.asked


def joined(together):
    """What birch's screen says of its joining, beside warnings of its few validation patients."""
    (line,) = (line for line in together.screens["birch"].lines if not line.startswith("warning "))
    return line


@pytest.mark.parametrize(
    ("policy", "reason"),
    [
        ("takes_part: false", "pauses its part"),
        ("methods: [iop-fl]", "no longer allows this method"),
        ("megabytes_per_round: 0.000001", "the hospital's policy allows 1"),
        (
            "megabytes_received: 0.000001",
            "expected at most 1e-06 MiB (`megabytes_received` of the hospital's policy)",
        ),
        ("nonsense: 1", "cannot be read; nothing leaves"),
        ("secure_aggregation: true", "cannot be read; nothing leaves"),
    ],
)
def test_policy_that_forbids_a_step_sends_only_the_reason(tmp_path, data, kits, policy, reason):
    together = Together(tmp_path, data, kits)
    hospital = together.hospital("birch")
    session = hospital._join()
    prepared = hospital._prepared
    together.policies["birch"].write_text(f"{POLICY}{policy}\n")
    train = next(i for i, step in enumerate(prepared.algorithm.plan()) if step.name == "train")
    start_round(together, train)
    task = unpack(Next, hospital._link.ask("next", pack_session(session)))[0].task
    hospital._step(session, prepared, task)
    assert reason in together.operator._rounds._parts["birch"].answer.reason
    assert "write" not in hospital._link.cell.asked


@pytest.mark.parametrize(
    ("limit", "reason"),
    [
        ("most_minutes_per_round: 0.000001", "longer than 1e-06 minutes (`most_minutes_per_round` of"),
        ("most_rounds: 2", "the run had 2 rounds here (`most_rounds` of"),
        # The words are in the hospital's own log.
        ("most_parameters: 10", "NetworkError at registry.py"),
    ],
)
def test_step_that_takes_more_than_the_policy_allows_is_ended(tmp_path, data, kits, limit, reason):
    together = Together(tmp_path, data, kits)
    hospital = together.hospital("birch")
    session = hospital._join()
    prepared = hospital._prepared
    prepared.log.rounds = 2
    together.policies["birch"].write_text(f"{POLICY}{limit}\n")

    def endless(_):
        """The operator's method."""
        build("unet", in_channels=1, classes=2)
        while True:
            pass

    prepared.worker._do = endless
    start_round(together, 1)
    task = unpack(Next, hospital._link.ask("next", pack_session(session)))[0].task
    hospital._step(session, prepared, task)
    assert reason in together.operator._rounds._parts["birch"].answer.reason


def test_round_that_is_repeated_with_other_weights_is_trained_from_them(tmp_path, data, kits):
    together = Together(tmp_path, data, kits)

    def upload_of(hospital, session, seed):
        start_round(together, 1, seed)
        task = unpack(Next, hospital._link.ask("next", pack_session(session)))[0].task
        hospital._step(session, hospital._prepared, task)
        return (tmp_path / "up" / "up-weights").read_bytes()

    hospital = together.hospital("birch")
    session = hospital._join()
    first, repeated = (upload_of(hospital, session, seed) for seed in (3, 4))
    restarted = together.hospital("birch")
    assert repeated == upload_of(restarted, restarted._join(), 4) != first


def run_id(together):
    """The start of the run's id, as hospitals see it."""
    return unpack(Invitation, together.operator.handle("birch", "invite", ASKING))[0].run[:16]


def pack_session(session):
    return Session(session=session)


def start_round(together, step, seed=3):
    """Give birch its task of a step, with the downloads that the engine would write."""
    algorithm = find_method(together.method).build(together.config, together.task)
    memory = algorithm.initial(RunEnvironment(seed).context("initial", 0, 1))
    down = together.root / "down"
    write_tensors(down, part(memory.tensors, "train/w_g"))
    task = Part("birch", step, 0, {"weights": down}, None, upload=together.root / "up" / "up")
    together.operator._rounds.begin([task])
    return down


def test_plan_of_a_task_without_a_size_is_made_with_hospitals(tmp_path, data, kits):
    together = Together(tmp_path, data, kits, "plan")
    together.task = Task.for_plan({"name": "organ", "labels": dict(together.task.labels)})
    together.operator = together.opened()
    assert not together.task.is_sized
    together.run()
    for screen in together.screens.values():
        assert any(line.startswith("sent fingerprint") for line in screen.lines)


class TestOperatorThatCannotBeBelieved:
    def test_download_that_is_none_of_tensors_is_not_read(self, tmp_path, data, kits):
        together = Together(tmp_path, data, kits)
        hospital = together.hospital("birch")
        session = hospital._join()
        down = start_round(together, 1)
        down.write_bytes(b"\x80\x04" + b"x" * 100)
        task = unpack(Next, hospital._link.ask("next", pack_session(session)))[0].task
        hospital._step(session, hospital._prepared, task)
        assert "not a file of tensors" in together.operator._rounds._parts["birch"].answer.reason

    @pytest.mark.parametrize("change", [{"step": 99}, {"step": 0, "round": 5}])
    def test_step_of_another_plan_ends_the_process(self, tmp_path, data, kits, change):
        together = Together(tmp_path, data, kits)
        hospital = together.hospital("birch")
        session = hospital._join()
        start_round(together, 1)
        task = unpack(Next, hospital._link.ask("next", pack_session(session)))[0].task
        with pytest.raises(TrainingError, match="of another plan"):
            hospital._step(session, hospital._prepared, task.model_copy(update=change))

    @pytest.mark.parametrize(
        ("change", "words"),
        [
            ({"method": "os.system"}, "unknown method"),
            ({"config": {"rounds": 2, "code": "x"}}, "code"),
            ({"settings": {"seed": 3, "device": "cpu", "out": "/etc"}}, "out"),
            ({"task": {"name": "x"}}, "task is not valid"),
            ({"plan_digest": "0" * 64}, "plan_digest"),
            ({"configuration_digest": "0" * 64}, "configuration_digest"),
            (
                {"protocol": 9},
                "this hospital speaks version 4 of the wire, the operator 9: upgrade Locum",
            ),
            (
                {"config": {"rounds": 10**9}},
                "at most 5000 rounds (`most_rounds` of the hospital's policy), found 1000000000",
            ),
            # With those of the other phases.
            ({"config": {"rounds": 5000}}, "of the hospital's policy), found 500"),
            (
                {"config": {"rounds": 2, "width": 10**4}},
                "at most 500000000 parameters (`most_parameters` of the hospital's policy), found ",
            ),
            ({"config": {"rounds": 2, "width": 10**12}}, "network 'unet': it cannot be built"),
            ({"method": "fedrep", "config": {"width": 2**15}}, "`most_parameters` of the hospital's policy"),
        ],
    )
    def test_invitation_to_something_else_is_refused_before_anything_is_sent(
        self, tmp_path, data, kits, change, words
    ):
        together = Together(tmp_path, data, kits)
        hospital = together.hospital("birch")

        def changed(topic, reply):
            said, _ = unpack(Invitation, reply)
            return pack(said.model_copy(update=change))

        hospital._link.cell.change = changed
        with pytest.raises(ConfigurationError) as caught:
            hospital.run()
        assert words in str(caught.value)
        assert hospital._link.cell.asked == ["hello", "invite"]

    def test_method_outside_the_policy_is_refused(self, tmp_path, data, kits):
        together = Together(tmp_path, data, kits)
        together.policies["birch"].write_text(f"{POLICY}methods: [iop-fl]\n")
        with pytest.raises(ConfigurationError, match="the policy allows iop-fl, not fedavg"):
            together.hospital("birch").run()

    def test_policy_without_plan_is_told_what_plan_is_for(self, tmp_path, data, kits):
        together = Together(tmp_path, data, kits)
        together.policies["birch"].write_text(f"{POLICY}methods: [fedavg]\n")
        hospital = together.hospital("birch")

        def changed(topic, reply):
            said, _ = unpack(Invitation, reply)
            return pack(said.model_copy(update={"method": "plan"}))

        hospital._link.cell.change = changed
        with pytest.raises(
            ConfigurationError, match="allows fedavg, not plan: --plan runs it before the train"
        ):
            hospital.run()

    def test_folder_with_a_problem_never_joins(self, tmp_path, data, kits):
        together = Together(tmp_path, data, kits)
        together.data = shutil.copytree(data, tmp_path / "data")
        next((together.data / "birch" / "masks").iterdir()).unlink()
        hospital = together.hospital("birch")
        with pytest.raises(TrainingError, match="no mask"):
            hospital.run()
        assert hospital._link.cell.asked == ["hello", "invite"]
