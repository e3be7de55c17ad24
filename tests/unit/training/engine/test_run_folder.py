from __future__ import annotations

import json
import os

import pytest
import torch

from training.algorithm import Memory
from training.engine.folder import MEMORIES, MOST_KEPT, RunCheckpoint, RunFolder, SiteFolder, free_slot
from training.errors import RunMismatch, TrainingError


def memory(value):
    return Memory({"w": torch.tensor([value])}, {"round": value})


@pytest.mark.parametrize("kept", [1, 3, MOST_KEPT])
def test_slot_of_the_next_memory_is_one_that_no_round_in_the_checkpoint_needs(tmp_path, kept):
    folder = committed(tmp_path, kept, 2 * kept + 3)
    found = folder.checkpoint()
    needed = [each.server_slot for each in (found, *found.before)]
    assert len(set(needed)) == kept + 1
    assert free_slot(found) not in needed
    assert free_slot(found, "A") not in needed
    assert free_slot(found, "new") == free_slot(None) == "a"
    assert len(list(tmp_path.glob("server-*"))) == kept + 2


def test_commit_interrupted_by_a_kill_leaves_the_previous_checkpoint(tmp_path):
    folder = RunFolder(tmp_path)
    assert folder.checkpoint() is None
    first = folder.commit(RunCheckpoint(0, 1, "a", {"A": "b"}), memory(1.0), {"round": 0})
    # State after a kill during the next commit: the other slot and an unfinished line of history.
    folder._server_file("b").write_bytes(b"half")
    with (tmp_path / "history.jsonl").open("ab") as file:
        file.write(b'{"rou')
    found = RunFolder(tmp_path).checkpoint()
    assert found == first
    assert folder.history(found) == [{"round": 0}]
    assert folder.server(found.server_slot).facts == {"round": 1.0}
    second = folder.commit(RunCheckpoint(1, 0, "b", {}, found.history_bytes), memory(2.0), {"round": 1})
    assert folder.history(second) == [{"round": 0}, {"round": 1}]
    assert folder.server("b").tensors["w"].tolist() == [2.0]


def committed(root, kept, rounds):
    """A folder after so many rounds of `train`, each with its number for the server's memory."""
    folder, checkpoint = RunFolder(root, kept), None
    for number in range(rounds):
        slot = free_slot(checkpoint)
        bytes_ = checkpoint.history_bytes if checkpoint else 0
        new = RunCheckpoint(0, number + 1, slot, {"A": slot}, bytes_)
        note = {"phase": "train", "round": number}
        checkpoint = folder.commit(new, memory(float(number)), note, checkpoint)
    return folder


@pytest.mark.parametrize("kept", [1, 3])
def test_a_round_can_be_taken_back_as_long_as_its_memory_is_kept(tmp_path, kept):
    folder = committed(tmp_path, kept, 6)
    folder.take_back_to("train", 7 - kept)
    found = folder.checkpoint()
    assert found.round == 6 - kept
    assert folder.server(found.server_slot).facts == {"round": 5.0 - kept}
    assert [note["round"] for note in folder.history(found)] == list(range(6 - kept))
    assert found.before == ()
    assert found.site_slots == {"A": found.server_slot}
    with pytest.raises(TrainingError, match=r"train:1 cannot be taken back; these can: none"):
        folder.take_back_to("train", 1)


def test_delete_unused_keeps_the_memories_that_rounds_can_be_taken_back_to(tmp_path):
    folder = committed(tmp_path, 2, 6)
    folder.delete_unused(folder.checkpoint())
    assert len(list(tmp_path.glob("server-*"))) == 3
    folder.take_back_to("train", 5)
    assert folder.server(folder.checkpoint().server_slot).facts == {"round": 3.0}
    folder.delete_unused(folder.checkpoint())
    assert len(list(tmp_path.glob("server-*"))) == 1


def test_a_round_that_cannot_be_taken_back_is_refused_with_those_that_can(tmp_path):
    folder = committed(tmp_path, 2, 5)
    for phase, round_ in (("train", 3), ("train", 6), ("export", 5)):
        with pytest.raises(TrainingError, match="cannot be taken back; these can: train:4, train:5"):
            folder.take_back_to(phase, round_)
    with pytest.raises(TrainingError, match="these can: none"):
        RunFolder(tmp_path / "new").take_back_to("train", 1)


def test_commit_flushes_the_folder_for_new_names_and_every_checkpoint(tmp_path, monkeypatch):
    root, flushed, fsync = tmp_path / "run", [], os.fsync

    def watched(descriptor):
        flushed.append(os.fstat(descriptor).st_ino)
        fsync(descriptor)

    def in_root(work):
        flushed.clear()
        work()
        return flushed.count(root.stat().st_ino)

    monkeypatch.setattr(os, "fsync", watched)
    folder, site = RunFolder(root), SiteFolder(root, "A")
    # The server's slot and history.jsonl when they are new, and checkpoint.json always.
    found = [
        in_root(lambda slot=slot: folder.commit(RunCheckpoint(0, 1, slot), memory(1.0), {})) for slot in "aba"
    ]
    assert found == [3, 2, 1]
    in_root(lambda: site.save("a", memory(1.0)))
    assert {(root / "sites").stat().st_ino, (root / "sites" / "A").stat().st_ino} <= set(flushed)


def test_site_folder_without_memory_loads_an_empty_one(tmp_path):
    place = SiteFolder(tmp_path, "St. Mary's")
    assert place.load(None) == Memory()
    place.save("a", memory(3.0))
    assert SiteFolder(tmp_path, "St. Mary's").load("a").tensors["w"].tolist() == [3.0]


def test_run_folder_held_by_another_process_is_rejected(tmp_path):
    first, second = RunFolder(tmp_path), RunFolder(tmp_path)
    with first.held(), pytest.raises(TrainingError, match="in use by another process"), second.held():
        pass
    with RunFolder(tmp_path).held():
        pass


def test_claim_rejects_another_run_and_an_unresumed_one(tmp_path):
    identity = {"method": "fedavg", "config": {"rounds": 3, "sites": ("A", "B")}}
    folder = RunFolder(tmp_path)
    folder.claim(identity, resume=False)
    # Still allowed: no round is committed yet, and another run takes the folder.
    folder.claim({**identity, "data": "corrected"}, resume=True)
    folder.claim(identity, resume=False)
    folder.commit(RunCheckpoint(0, 1, "a"), memory(1.0), {})
    folder.claim(identity, resume=True)
    with pytest.raises(RunMismatch, match="holds this run already"):
        folder.claim(identity, resume=False)
    with pytest.raises(RunMismatch) as refused:
        folder.claim({**identity, "config": {"rounds": 4, "sites": ("A", "B")}}, resume=True)
    assert refused.value.problems == ("config.rounds: this run 4, the folder's 3",)


def test_a_run_with_memories_of_another_layout_is_refused_in_words(tmp_path):
    folder = committed(tmp_path, 1, 1)
    content = json.loads((tmp_path / "checkpoint.json").read_text())
    assert content.pop("memories") == MEMORIES
    # Those of before layouts had a number.
    (tmp_path / "checkpoint.json").write_text(json.dumps(content))
    with pytest.raises(
        RunMismatch, match=f"expected layout {MEMORIES}, found 1; resume the run with the version"
    ):
        folder.checkpoint()
