"""What the operator answers to a hospital's requests, right and wrong ones. No connection is made."""

from __future__ import annotations

import json
import shutil
import threading
import time
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import replace

import pytest
import torch

from model_store.task import Task as ModelTask
from training.algorithm import Memory
from training.bounds import FeatureBounds
from training.choices.fedavg import FedAvgConfig
from training.config import RunConfig
from training.engine.folder import RunCheckpoint, RunFolder
from training.engine.tensorfile import check_tensors, write_tensors
from training.engine.worker import Delivery, Failure, Task
from training.errors import ConfigurationError
from training.network.cell import CHUNK, Rejected
from training.network.kits import Kit, provision, revoke
from training.network.messages import (
    PROTOCOL,
    Alive,
    Announcement,
    Asking,
    Invitation,
    Leave,
    Next,
    Report,
    Session,
    Slice,
    Welcome,
    Written,
    pack,
    unpack,
    versions,
)
from training.network.operator import Listener, Operator
from training.network.rounds import NO_DEADLINE, Part, RoundLimits
from training.network.runs import NetworkRun, run_to_resume
from training.phantom.federation import TASK

SITES = ("birch", "cedar")
ASKING = pack(Asking(protocol=PROTOCOL))
TRAIN = 1  # the step of FedAvg's plan that uploads weights and scores


@pytest.fixture(scope="module")
def provisioned(tmp_path_factory):
    """Kits, made once: each costs a private key."""
    root = tmp_path_factory.mktemp("kits")
    provision(root, "hearts", "localhost:8002", SITES)
    return root


@pytest.fixture
def kits(provisioned, tmp_path):
    return shutil.copytree(provisioned, tmp_path / "kits")


def opened(kits, limits=NO_DEADLINE, task=TASK):
    listener = Listener(Kit.open(kits / "server", server=True))
    run = NetworkRun(SITES, "fedavg", FedAvgConfig(width=2, rounds=2), RunConfig(), task)
    return Operator(listener, kits.parent / "run", run, limits)


@pytest.fixture
def operator(kits):
    return opened(kits)


class HospitalSide:
    """Speaks the protocol of a hospital, with the kit of `kit`."""

    def __init__(self, operator: Operator, kits, name: str, kit: str | None = None) -> None:
        self.operator, self.name = operator, name
        self.kit = Kit.open(kits / (kit or name), server=False)
        self.session = ""

    def ask(self, topic, message, body=b""):
        return self.operator.handle(self.name, topic, pack(message, body))

    def announcement(self, **changes) -> Announcement:
        from nvflare.lighter.utils import load_private_key_file, sign_content

        invitation, _ = unpack(Invitation, self.operator.handle(self.name, "invite", ASKING))
        said = Announcement(
            protocol=invitation.protocol,
            software=invitation.software,
            plan_digest=invitation.plan_digest,
            configuration_digest=invitation.configuration_digest,
            allows=("weights", "statistics"),
            consents=True,
            bounds={},
            privacy=None,
            digest="0" * 64,
            splits_digest="1" * 64,
            files={"train": 3, "val": 1, "test": 1},
            patients={"train": 3, "val": 1, "test": 1},
            images=6,
            certificate=self.kit.certificate.read_text(),
            nonce=invitation.nonce,
            signature=sign_content(invitation.nonce, load_private_key_file(str(self.kit.key))),
        )
        return said.model_copy(update=changes)

    def join(self, **changes) -> HospitalSide:
        self.session = unpack(Welcome, self.ask("join", self.announcement(**changes)))[0].session
        return self

    def task(self):
        return unpack(Next, self.ask("next", Session(session=self.session)))[0].task

    def upload(self, task, group, content, total=None):
        part = Slice(session=self.session, task=task, group=group, offset=0, total=total or len(content))
        return unpack(Written, self.ask("write", part, content))[0].at

    def alive(self, task, done):
        return self.ask("alive", Alive(session=self.session, task=task, done=done, planned=9))

    def report(self, task, **changes):
        fields = {"groups": ("weights", "scores"), "weight": 3.0, "slot": None} | changes
        return self.ask("done", Report(session=self.session, task=task, **fields))


@pytest.fixture
def birch(operator, kits):
    return HospitalSide(operator, kits, "birch").join()


@pytest.fixture
def round_(operator, tmp_path):
    """A round of training for both hospitals; a thread collects the results."""
    tasks = [Task(site, TRAIN, 0, {}, None, upload=tmp_path / "up" / f"up-{site}") for site in SITES]
    with ThreadPoolExecutor(1) as pool:
        future = pool.submit(lambda: list(operator.run(tasks)))
        while set(operator._rounds._parts) != set(SITES):
            threading.Event().wait(0.01)
        yield future
        for site in SITES:  # lets the thread end
            operator._rounds.fail(site, "end of the test")


def tensor_file(tmp_path, **tensors):
    path = tmp_path / "tensors"
    write_tensors(path, tensors or {"w": torch.ones(3)})
    return path.read_bytes()


def deliver(side, tmp_path):
    task = side.task()
    for group in ("weights", "scores"):
        side.upload(task.id, group, tensor_file(tmp_path))
    side.report(task.id)
    return task


def rejected(code, action):
    with pytest.raises(Rejected) as caught:
        action()
    assert caught.value.code == code, caught.value
    return str(caught.value)


class TestJoin:
    def test_member_with_its_own_certificate_joins(self, birch, operator):
        assert len(birch.session) == 64
        assert set(operator.announced) == {"birch"}

    def test_name_outside_the_run_is_rejected(self, operator):
        rejected("stranger", lambda: operator.handle("elm", "invite", ASKING))

    def test_another_members_certificate_is_rejected(self, operator, kits):
        rejected("revoked", HospitalSide(operator, kits, "birch", kit="cedar").join)

    def test_certificate_without_its_key_is_rejected(self, operator, kits):
        side = HospitalSide(operator, kits, "birch", kit="cedar")
        certificate = (kits / "birch" / "client.crt").read_text()
        rejected("revoked", lambda: side.join(certificate=certificate))

    def test_nonce_counts_once_and_another_ones_signature_is_rejected(self, operator, kits):
        side = HospitalSide(operator, kits, "birch")
        first, second = side.announcement(), side.announcement()
        side.ask("join", first)
        rejected("session", lambda: side.ask("join", first))
        copied = second.model_copy(update={"signature": first.signature})
        rejected("revoked", lambda: side.ask("join", copied))

    def test_certificate_of_another_authority_is_rejected(self, operator, kits, tmp_path):
        provision(tmp_path / "foreign", "hearts", "localhost:8002", ["birch"])
        rejected("revoked", HospitalSide(operator, tmp_path / "foreign", "birch").join)

    def test_revoked_certificate_is_rejected_when_it_joins_and_in_its_session(self, birch, operator, kits):
        kit = birch.kit
        revoke(kits, "birch")
        rejected("revoked", birch.task)
        birch.kit = Kit(next(kits.glob("birch-revoked-*")), kit.content)
        rejected("revoked", birch.join)

    @pytest.mark.parametrize(
        ("change", "words"),
        [
            ({"plan_digest": "2" * 64}, "plan_digest"),
            ({"configuration_digest": "2" * 64}, "configuration_digest"),
            (
                {"protocol": 5},
                "birch speaks version 5 of the wire, the operator 4: upgrade Locum at the oper",
            ),
            ({"files": {"train": 0}}, "no case to train on"),
            ({"images": None}, "images: expected 1 to 49152 training images of 3 files, found None"),
            ({"images": 10**15}, "images: expected 1 to 49152 training images of 3 files"),
        ],
    )
    def test_difference_to_the_operators_run_is_named(self, operator, kits, change, words):
        side = HospitalSide(operator, kits, "birch")
        assert words in rejected("mismatch", lambda: side.join(**change))

    def test_other_versions_join_and_it_is_said_what_they_mean(self, operator, kits):
        ours = versions()
        HospitalSide(operator, kits, "cedar").join(software={**ours, "locum": "0.3.0"})
        HospitalSide(operator, kits, "birch").join(software={**ours, "torch": "2.12.0"})
        assert operator.differences == [
            f"torch is 2.12.0 at birch and {ours['torch']} here: results agree to rounding, and the digests "
            "of this run will not be reproduced",
            f"locum is 0.3.0 at cedar and {ours['locum']} here: the same steps run, since plan and "
            "configuration are equal",
        ]

    def test_fields_and_topics_of_a_later_version_do_no_harm(self, birch, operator):
        later = json.dumps({"session": birch.session, "mood": "good"}).encode()
        message = len(later).to_bytes(4, "big") + later
        assert unpack(Next, operator.handle("birch", "next", message))[0].task is None
        with pytest.raises(Rejected, match="unknown request") as error:
            operator.handle("birch", "sing", message)
        assert error.value.code == "rejected"

    def test_changed_data_is_rejected_once_the_run_began_also_after_a_restart_of_the_operator(
        self, birch, operator, kits
    ):
        HospitalSide(operator, kits, "cedar").join()
        operator.gather(pytest.fail)
        assert "data changed" in rejected("mismatch", lambda: birch.join(digest="3" * 64))
        RunFolder(kits.parent / "run").commit(RunCheckpoint(0, 1, "a"), Memory({"w": torch.ones(1)}), {})
        again = HospitalSide(opened(kits), kits, "birch")
        assert "data changed" in rejected("mismatch", lambda: again.join(digest="3" * 64))
        assert again.join(allows=("weights",)).session
        assert again.operator.announced["birch"].allows == ("weights", "statistics")

    @pytest.mark.parametrize("restarted", [False, True])
    def test_join_before_the_first_committed_round_replaces_what_was_announced(self, birch, kits, restarted):
        side = HospitalSide(opened(kits), kits, "birch") if restarted else birch
        side.join(digest="3" * 64, allows=("weights",), bounds=FeatureBounds(minimum_patients=3))
        HospitalSide(side.operator, kits, "cedar").join()
        (found, _) = side.operator.gather(pytest.fail)
        assert found.digest == "3" * 64
        policy = side.operator.policies(RunConfig())
        assert set(policy.egress["birch"]) == {"weights"}
        assert policy.feature_bounds["birch"].minimum_patients == 3

    def test_run_that_did_not_begin_waits_for_hospitals_that_left_or_joined_another_process(
        self, birch, operator, kits
    ):
        HospitalSide(operator, kits, "cedar").join()
        birch.ask("leave", Leave(session=birch.session, reason="corrects its folder"))
        waited = []

        def waiting(missing):
            waited.append(missing)
            birch.join()

        operator.gather(waiting)
        again = opened(kits)
        sides = {site: HospitalSide(again, kits, site) for site in SITES}
        again.gather(lambda missing: waited.append(missing) or sides[missing[0]].join())
        assert waited == [("birch",), SITES, ("cedar",)]

    def test_second_process_of_a_hospital_replaces_the_first(self, birch, operator, kits):
        old = birch.session
        birch.join()
        rejected("replaced", lambda: birch.ask("next", Session(session=old)))

    def test_session_of_before_a_restart_must_join_again(self, birch, kits):
        birch.operator = opened(kits)
        rejected("session", birch.task)


def run_of(*sites, **settings):
    return NetworkRun(sites, "fedavg", FedAvgConfig(width=2), RunConfig(**settings), TASK)


def id_of(sites, **settings):
    return run_of(*sites, **settings).id


class TestResume:
    """A run is found again by what stays: its settings, and its hospitals but for those revoked since."""

    @pytest.fixture
    def find(self, kits, tmp_path):
        def found(*sites, folder=None):
            kit = Kit.open(kits / "server", server=True)
            place, run = run_to_resume(run_of(*sites), kit, tmp_path / "runs", folder)
            assert run == run_of(*run.sites)
            return place, run.sites

        return found

    def begun(self, folder, *sites):
        folder.mkdir(parents=True)
        (folder / "network.json").write_text(json.dumps({"run": "0", "sites": dict.fromkeys(sites)}))
        RunFolder(folder).commit(RunCheckpoint(1, 0, "a"), Memory({}, {}), {})
        return folder

    def test_run_of_a_hospital_that_was_revoked_since_is_found_with_it(self, find, kits, tmp_path):
        run = self.begun(tmp_path / "runs" / id_of(SITES), *SITES)
        self.begun(tmp_path / "runs" / id_of(SITES, seed=1), *SITES)  # other settings
        assert find(*SITES) == (run, SITES)
        revoke(kits, "birch")
        assert find("cedar") == (run, SITES)
        provision(kits, "hearts", "localhost:8002", ["birch"])
        assert find(*SITES) == (run, SITES)

    def test_named_run_of_a_hospital_that_was_revoked_since_keeps_it(self, find, kits, tmp_path):
        run = self.begun(tmp_path / "elsewhere", *SITES)
        revoke(kits, "birch")
        assert find("cedar", folder=run) == (run, SITES)

    def test_folder_does_not_depend_on_the_names_that_are_left_out(self):
        assert id_of(SITES) == id_of(SITES, leave_out=("elm",)) != id_of(SITES[:1])

    @pytest.mark.parametrize("sites", [("birch",), (*SITES, "elm")])
    def test_runs_of_other_hospitals_are_named_instead_of_beginning_anew(self, find, tmp_path, sites):
        run = self.begun(tmp_path / "runs" / id_of(SITES), *SITES)
        for folder in (None, run):
            with pytest.raises(ConfigurationError, match=f"{run}: a run of birch, cedar"):
                find(*sites, folder=folder)

    def test_run_without_a_checkpoint_is_resumed_where_it_began(self, find, kits, tmp_path):
        self.begun(tmp_path / "runs" / id_of(SITES), *SITES)
        own = tmp_path / "runs" / id_of(("cedar",))
        own.mkdir()
        (own / "network.json").write_text('{"run": "1", "sites": {}}')
        assert find("cedar") == (own, ("cedar",))

    def test_without_any_run_a_new_one_begins(self, find, tmp_path):
        assert find(*SITES) == (tmp_path / "runs" / id_of(SITES), SITES)
        assert find(*SITES, folder=tmp_path / "new") == (tmp_path / "new", SITES)

    def test_revoked_hospital_of_a_resumed_run_is_not_waited_for(self, birch, kits, operator, tmp_path):
        HospitalSide(operator, kits, "cedar").join()
        RunFolder(kits.parent / "run").commit(RunCheckpoint(0, 1, "a"), Memory({"w": torch.ones(1)}), {})
        revoke(kits, "birch")
        again = opened(kits)
        assert [site.name for site in again.gather(pytest.fail, resume=True)] == [*SITES]
        tasks = [Task(site, TRAIN, 0, {}, None, upload=tmp_path / site) for site in SITES]
        assert [again._rounds._part(task).answer for task in tasks] == [
            Failure("birch", "its certificate was revoked"),
            None,
        ]


class TestRound:
    def test_delivery_reaches_the_engine(self, birch, operator, kits, round_, tmp_path):
        cedar = HospitalSide(operator, kits, "cedar").join()
        deliver(cedar, tmp_path)
        deliver(birch, tmp_path)
        first, second = round_.result(5)
        assert (first.site, second.site) == SITES
        assert first.sent == {"weights": 12, "scores": 12}

    def test_revoked_hospital_delivers_nothing_more_of_its_step_and_the_round_goes_on_without_it(
        self, birch, operator, kits, round_, tmp_path
    ):
        task = birch.task().id
        birch.upload(task, "weights", tensor_file(tmp_path))
        revoke(kits, "birch")
        rejected("revoked", lambda: birch.upload(task, "scores", tensor_file(tmp_path)))
        assert operator._rounds._parts["birch"].answer == Failure("birch", "its certificate was revoked")
        rejected("session", lambda: birch.report(task))

    def test_task_stays_until_it_is_reported(self, birch, round_):
        assert birch.task() == birch.task()
        before = birch.task().id
        assert birch.join().task().id == before

    def test_report_counts_once(self, birch, operator, round_, tmp_path):
        task = deliver(birch, tmp_path)
        assert birch.task() is None
        rejected("stale", lambda: birch.report(task.id, weight=9.0))
        rejected("stale", lambda: birch.upload(task.id, "weights", b"x"))
        assert operator._rounds._parts["birch"].answer.weight == 3.0

    def test_upload_is_not_replaced_while_its_report_is_checked(self, birch, round_, tmp_path, monkeypatch):
        task, good = birch.task().id, tensor_file(tmp_path)
        with ThreadPoolExecutor(1) as pool:
            writes = []

            def check(path):
                if not writes:
                    writes.append(pool.submit(birch.upload, task, "scores", b"x" * len(good)))
                    wait(writes, 0.5)  # it never ends before the report does
                return check_tensors(path)

            monkeypatch.setattr("training.network.rounds.check_tensors", check)
            for group in ("weights", "scores"):
                birch.upload(task, group, good)
            birch.report(task)
            rejected("stale", writes[0].result)
        assert birch.operator._rounds._parts["birch"].answer.sent == {"weights": 12, "scores": 12}
        assert (tmp_path / "up" / "up-birch-scores").read_bytes() == good

    def test_repeated_chunk_is_written_once(self, birch, round_, tmp_path):
        task, content = birch.task(), tensor_file(tmp_path)
        part = Slice(session=birch.session, task=task.id, group="weights", offset=0, total=len(content))
        assert unpack(Written, birch.ask("write", part, content[:10]))[0].at == 10
        later = part.model_copy(update={"offset": 10})
        assert unpack(Written, birch.ask("write", later, content[10:20]))[0].at == 20
        assert unpack(Written, birch.ask("write", later, content[10:20]))[0].at == 20
        assert (tmp_path / "up" / "up-birch-weights").read_bytes() == content[:20]

    @pytest.mark.parametrize("group", ["../../escape", "personal", "weights/../x", "x" * 128])
    def test_group_that_the_phase_does_not_upload_is_rejected(self, birch, round_, group):
        rejected("rejected", lambda: birch.upload(birch.task().id, group, b"x"))
        part = Slice(session=birch.session, task=birch.task().id, group=group, offset=0)
        rejected("rejected", lambda: birch.ask("read", part))

    def test_upload_beyond_the_limit_is_rejected_before_it_is_stored(self, kits, tmp_path):
        operator = opened(kits, RoundLimits(upload_bytes=100))
        side = HospitalSide(operator, kits, "birch").join()
        operator._rounds.begin([Task("birch", TRAIN, 0, {}, None, upload=tmp_path / "up")])
        task = side.task().id
        side.upload(task, "weights", b"x" * 60)
        rejected("rejected", lambda: side.upload(task, "weights", b"x" * 60, total=10))
        assert "100 bytes that a round allows" in rejected(
            "too large", lambda: side.upload(task, "scores", b"x" * 41)
        )
        # The round goes on without the hospital, which would compute the same again.
        assert side.task() is None
        assert isinstance(operator._rounds._parts["birch"].answer, Failure)

    @pytest.mark.parametrize("content", [b"", b"\x80\x04pickle", b"\xff" * 8, b"\x02\0\0\0\0\0\0\0{}tail"])
    def test_file_that_is_none_of_tensors_drops_the_hospital(
        self, birch, operator, round_, tmp_path, content
    ):
        task = birch.task()
        birch.upload(task.id, "scores", tensor_file(tmp_path))
        birch.upload(task.id, "weights", content, total=max(len(content), 1))
        birch.report(task.id)
        assert isinstance(operator._rounds._parts["birch"].answer, Failure)

    @pytest.mark.parametrize(
        "change",
        [
            {"groups": ("scores",)},
            {"groups": ("scores",), "withheld": ("weights",)},
            {"groups": ("weights", "scores", "personal")},
            {"groups": ("weights",)},
        ],
    )
    def test_report_of_other_groups_drops_the_hospital(self, birch, operator, round_, tmp_path, change):
        task = birch.task()
        for group in ("weights", "scores"):
            birch.upload(task.id, group, tensor_file(tmp_path))
        birch.report(task.id, **change)
        assert isinstance(operator._rounds._parts["birch"].answer, Failure)

    def test_scores_of_every_label_are_taken_in_any_script_and_those_of_other_labels_drop_the_hospital(
        self, kits, tmp_path
    ):
        labels = {f"größe {index}/{index}\n": (index,) for index in range(1, 31)}
        task = ModelTask(name="many", labels=labels, size=(32, 32))
        metrics = {
            f"{model}{split}_{what}/{label}": 1.0
            for model in ("", "personal_")
            for split in ("test", "val")
            for what in ("dice", "n")
            for label in labels
        }
        operator = opened(kits, task=task)
        work = Part("id", Task("birch", TRAIN, 0, {}, None), operator._plan[TRAIN])
        report = Report(session="s", task="id", withheld=("weights", "scores"), metrics=metrics)
        sent, _ = unpack(Report, pack(report))
        assert sent.metrics == metrics
        work.phase = replace(work.phase, uploads=())
        said = sent.model_copy(update={"withheld": ()})
        assert isinstance(operator._rounds._checked(work, said), Delivery)
        other = said.model_copy(update={"metrics": {"test_dice/cup\u202e": 1.0}})
        answer = operator._rounds._checked(work, other)
        assert isinstance(answer, Failure)
        assert "expected metrics of the task's labels, found 'cup" in answer.reason
        assert "\u202e" not in answer.reason

    @pytest.mark.parametrize("value", ["NaN", "Infinity", '"x"', "null"])
    def test_report_with_a_weight_that_is_no_number_is_rejected(self, birch, round_, value):
        head = f'{{"session":"{birch.session}","task":"{birch.task().id}","weight":{value}}}'.encode()
        message = len(head).to_bytes(4, "big") + head
        rejected("rejected", lambda: birch.operator.handle("birch", "done", message))

    @pytest.mark.parametrize("message", [b"", b"\0", b"\xff\xff\xff\xff{}", b"\0\0\0\x02[]", b"\0\0\0\x02{}"])
    @pytest.mark.parametrize("topic", ["join", "next", "read", "write", "done", "leave", "other"])
    def test_garbage_is_rejected(self, operator, topic, message):
        rejected("rejected", lambda: operator.handle("birch", topic, message))

    def test_hospital_that_leaves_fails_its_task_and_the_next_until_it_joins_again(
        self, birch, operator, round_, tmp_path
    ):
        birch.ask("leave", Leave(session=birch.session, reason="tea\x1b[2J"))
        answer = operator._rounds._parts["birch"].answer
        assert answer == Failure("birch", "left the run: tea[2J")
        again = operator._rounds._part(Task("birch", TRAIN, 1, {}, None, upload=tmp_path / "up"))
        assert again.answer == answer
        birch.join()
        assert (
            operator._rounds._part(Task("birch", TRAIN, 1, {}, None, upload=tmp_path / "up")).answer is None
        )

    def test_download_is_read_in_chunks(self, birch, operator, tmp_path):
        path = tmp_path / "down"
        path.write_bytes(bytes(range(256)) * (CHUNK // 256) + b"tail")
        task = Task("birch", TRAIN, 0, {"weights": path}, None, upload=tmp_path / "up")
        operator._rounds.begin([task])
        said = birch.task()
        assert said.downloads == {"weights": CHUNK + 4}
        part = Slice(session=birch.session, task=said.id, group="weights", offset=CHUNK)
        assert birch.ask("read", part) == b"tail"


class TestLimits:
    def tasks(self, tmp_path):
        return [Task(site, TRAIN, 0, {}, None, upload=tmp_path / "up" / f"up-{site}") for site in SITES]

    def collected(self, operator, tasks, act):
        with ThreadPoolExecutor(1) as pool:
            future = pool.submit(lambda: list(operator.run(tasks)))
            while set(operator._rounds._parts) != set(SITES):
                threading.Event().wait(0.01)
            act()
            return future.result(20)

    def test_deadline_drops_a_late_hospital(self, kits, tmp_path):
        operator = opened(kits, RoundLimits(deadline=0.2, quorum=1))
        birch = HospitalSide(operator, kits, "birch").join()
        first, second = self.collected(operator, self.tasks(tmp_path), lambda: deliver(birch, tmp_path))
        assert isinstance(first, Delivery)
        assert second == Failure("cedar", "did not deliver within 0.2 s")

    def test_silent_hospital_is_dropped_and_one_that_speaks_is_not(self, kits, tmp_path):
        operator = opened(kits, RoundLimits(silence=0.4))
        birch, cedar = (HospitalSide(operator, kits, site).join() for site in SITES)
        heard = []
        operator.tell(lambda _: None, lambda *said: heard.append(said))

        def act():
            for side in (birch, cedar):
                side.alive(side.task().id, 1)
            for done in range(2, 9):
                threading.Event().wait(0.1)
                birch.alive(birch.task().id, done)
            deliver(birch, tmp_path)

        first, second = self.collected(operator, self.tasks(tmp_path), act)
        assert isinstance(first, Delivery)
        assert isinstance(second, Failure)
        assert second.reason.startswith("was not heard for 0:0")
        assert heard[-1] == ("birch", 8, 9)

    def test_connected_hospital_that_never_speaks_of_its_step_is_waited_for(self, kits, tmp_path):
        operator = opened(kits, RoundLimits(silence=0.1))
        sides = [HospitalSide(operator, kits, site).join() for site in SITES]

        def act():
            threading.Event().wait(0.5)
            for side in sides:
                deliver(side, tmp_path)

        answers = self.collected(operator, self.tasks(tmp_path), act)
        assert all(isinstance(answer, Delivery) for answer in answers)

    def test_late_result_is_said_to_be_late(self, kits, tmp_path):
        operator = opened(kits, RoundLimits(deadline=0.1, quorum=1))
        birch, cedar = (HospitalSide(operator, kits, site).join() for site in SITES)
        late = []

        def act():
            late.append(cedar.task())
            deliver(birch, tmp_path)
            while operator._rounds._parts["cedar"].answer is None:
                threading.Event().wait(0.01)
            with pytest.raises(Rejected, match=r"^train 1 goes on without .* which did not deliver within"):
                cedar.report(late[0].id)

        operator._rounds.begin(self.tasks(tmp_path))
        with ThreadPoolExecutor(1) as pool:
            pool.submit(operator._rounds._await, "cedar", time.monotonic(), lambda _: None)
            act()
        operator._rounds.begin([replace(task, round=1) for task in self.tasks(tmp_path)])
        with pytest.raises(Rejected, match=r"^it is late: train 1 is over; train 2 is in progress$") as error:
            cedar.report(late[0].id)
        assert error.value.code == "stale"
        with pytest.raises(Rejected, match=r"^there is no task '9-x'$"):
            cedar.alive("9-x", 1)

    def test_without_a_quorum_all_that_are_not_revoked_must_deliver(self, kits):
        assert opened(kits).quorum == 2
        assert opened(kits, RoundLimits(quorum=1)).quorum == 1
        revoke(kits, "cedar")
        assert opened(kits).quorum == 1

    def test_round_waits_for_its_quorum_after_the_deadline(self, kits, tmp_path):
        operator = opened(kits, RoundLimits(deadline=0.05, quorum=2))
        sides = [HospitalSide(operator, kits, site).join() for site in SITES]

        def act():
            deliver(sides[0], tmp_path)
            threading.Event().wait(0.3)
            deliver(sides[1], tmp_path)

        answers = self.collected(operator, self.tasks(tmp_path), act)
        assert all(isinstance(answer, Delivery) for answer in answers)

    def test_round_of_fewer_hospitals_than_the_quorum_ends_with_all_of_them(self, kits, tmp_path):
        operator = opened(kits, RoundLimits(quorum=2))
        birch = HospitalSide(operator, kits, "birch").join()
        with ThreadPoolExecutor(1) as pool:
            future = pool.submit(lambda: list(operator.run(self.tasks(tmp_path)[:1])))
            while not operator._rounds._parts:
                threading.Event().wait(0.01)
            deliver(birch, tmp_path)
            assert isinstance(future.result(20)[0], Delivery)
