from __future__ import annotations

import os

import pytest
import torch

from training.algorithm import Memory
from training.engine.folder import RunCheckpoint, RunFolder, SiteFolder, other
from training.errors import RunMismatch, TrainingError


def memory(value):
    return Memory({"w": torch.tensor([value])}, {"round": value})


def test_slots_alternate():
    assert [other(None), other("a"), other("b")] == ["a", "b", "a"]


def test_a_commit_is_seen_whole_or_not_at_all(tmp_path):
    folder = RunFolder(tmp_path)
    assert folder.checkpoint() is None
    first = folder.commit(RunCheckpoint(0, 1, "a", {"A": "b"}), memory(1.0), {"round": 0})
    # What a kill in the middle of the next commit leaves: the other slot and a line of history.
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


def test_a_commit_can_be_taken_back(tmp_path):
    folder = RunFolder(tmp_path)
    first = folder.commit(RunCheckpoint(1, 0, "a"), memory(1.0), {"phase": "train"})
    second = folder.commit(
        RunCheckpoint(2, 0, "b", {}, first.history_bytes), memory(2.0), {"phase": "export"}
    )
    assert folder.take_back(second, 1) == first == folder.checkpoint()


def test_a_name_that_is_new_is_flushed_and_so_is_every_checkpoint_s(tmp_path, monkeypatch):
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
    # The server's slot where it is new, history.jsonl where it is new, and checkpoint.json.
    found = [
        in_root(lambda slot=slot: folder.commit(RunCheckpoint(0, 1, slot), memory(1.0), {})) for slot in "aba"
    ]
    assert found == [3, 2, 1]
    in_root(lambda: site.save("a", memory(1.0)))
    assert {(root / "sites").stat().st_ino, (root / "sites" / "A").stat().st_ino} <= set(flushed)


def test_a_site_without_memory_has_an_empty_one(tmp_path):
    place = SiteFolder(tmp_path, "St. Mary's")
    assert place.load(None) == Memory()
    place.save("a", memory(3.0))
    assert SiteFolder(tmp_path, "St. Mary's").load("a").tensors["w"].tolist() == [3.0]


def test_one_process_at_a_time(tmp_path):
    first, second = RunFolder(tmp_path), RunFolder(tmp_path)
    with first.held(), pytest.raises(TrainingError, match="in use by another process"), second.held():
        pass
    with RunFolder(tmp_path).held():
        pass


def test_a_folder_belongs_to_one_run(tmp_path):
    identity = {"method": "fedavg", "config": {"rounds": 3, "sites": ("A", "B")}}
    folder = RunFolder(tmp_path)
    folder.claim(identity, resume=False)
    folder.claim(identity, resume=False)  # nothing was done in it yet
    folder.commit(RunCheckpoint(0, 1, "a"), memory(1.0), {})
    folder.claim(identity, resume=True)
    with pytest.raises(RunMismatch, match="holds this run already"):
        folder.claim(identity, resume=False)
    with pytest.raises(RunMismatch) as refused:
        folder.claim({**identity, "config": {"rounds": 4, "sites": ("A", "B")}}, resume=True)
    assert refused.value.problems == ("config.rounds: this run 4, the folder's 3",)
