"""The engine with real worker processes, on a method computed by hand."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import partial

import pytest
import torch

from tests.helpers.training.toy_federation import Toy, ToyData, load, site
from training.config import Defence
from training.engine.client import RunEnvironment
from training.engine.engine import FederationEngine
from training.engine.folder import RunFolder, SiteFolder
from training.engine.history import RoundEntry, Silent, defended
from training.engine.pool import Inline
from training.errors import (
    AlgorithmError,
    ConfigurationError,
    EgressRefused,
    FederationError,
    RoundFailed,
)
from training.privacy import Noising, PrivacyDemand


def run(root, sites, algorithm=None, *, workers=0, seed=0, folder=None, **options):
    folder = folder or RunFolder(root)
    engine = FederationEngine(
        algorithm or Toy(), sites, RunEnvironment(seed), folder, workers=workers, **options
    )
    return engine.run()


def three_sites(**faults):
    return [
        site(name, *values, faults=faults.get(name))
        for name, values in (("A", (1.0, 3.0)), ("B", (5.0,)), ("C", (0.0, 0.0, 9.0)))
    ]


def test_run_equals_the_hand_computed_result(tmp_path):
    outcome = run(tmp_path, three_sites())
    assert not any(entry.dropped for entry in outcome.history)
    # Per round: sample-weighted mean of the sites' mean values (2, 5, 3) with weights 2, 1, 3.
    gain = (2 * 2.0 + 1 * 5.0 + 3 * 3.0) / 6
    expected = 3 * gain * 2 * 2  # three rounds, then doubled twice by the server stage
    assert outcome.server.tensors["w"].tolist() == pytest.approx([expected, expected])
    assert outcome.server.tensors["count"].item() == 2  # integers are the first site's
    first = outcome.server.facts["log"][0]
    assert first == {
        "sites": ["A", "B", "C"],
        "total": 6.0,
        "tokens": [1.0, 3.0, 5.0, 0.0, 0.0, 9.0],
        "notes": {"A": 1.0, "B": 5.0, "C": 0.0},
    }


def test_sites_keep_memory_between_rounds_and_bytes_are_counted(tmp_path):
    outcome = run(tmp_path, three_sites())
    train = [entry for entry in outcome.history if entry.phase == "train"]
    assert [entry.sites["B"].metrics for entry in train] == [{"seen": 1}, {"seen": 2}, {"seen": 3}]
    # w: 2 float32, count: 1 int64; total: 1 float64; tokens: 3 float32; notes: 1 float32; one metric.
    assert train[0].sites["C"].sent == {
        "weights": 2 * 4 + 8,
        "total": 8,
        "tokens": 3 * 4,
        "notes": 4,
        "metrics": 8,
    }
    assert train[0].sites["C"].received == {"weights": 2 * 4 + 8}


class Told(Silent):
    def __init__(self):
        self.warnings = []

    def warning(self, message):
        self.warnings.append(message)


@pytest.mark.parametrize(("data", "rounds"), [({"images": 1}, (0, 1)), ({}, (1,))])
def test_a_weight_beyond_what_a_site_announced_counts_as_what_it_announced(tmp_path, data, rounds):
    """As its training images before the first round, or where these are unknown, in the first round."""
    told = Told()
    sites = three_sites(B=dict.fromkeys(rounds, "heavy"))
    sites[1] = replace(sites[1], load=partial(load, ToyData((5.0,), dict.fromkeys(rounds, "heavy"), **data)))
    outcome = run(tmp_path, sites, observer=told)
    honest = run(tmp_path / "honest", three_sites())
    assert torch.equal(outcome.server.tensors["w"], honest.server.tensors["w"])
    for entry in outcome.history[:3]:
        claimed = 1e15 if entry.round in rounds else None
        assert (entry.sites["B"].weight, entry.sites["B"].claimed) == (1, claimed)
        assert RoundEntry.from_json(json.loads(json.dumps(entry.to_json()))) == entry
    words = "site B claimed a weight of 1e+15; 1 counts, which it announced"
    assert sum(words in warning for warning in told.warnings) == len(rounds)
    (line,) = defended(outcome.history)
    assert line == f"phase 'train': {words} in {'one round' if len(rounds) == 1 else '2 rounds'}"


def test_a_site_with_more_than_half_of_the_weight_is_reported(tmp_path):
    told = Told()
    sites = [site("A", *[1.0] * 7), site("B", 5.0, 1.0), site("C", 0.0, 0.0, 9.0)]
    outcome = run(tmp_path, sites, observer=told)
    assert [entry.sites["A"].share for entry in outcome.history[:3]] == [pytest.approx(7 / 12)] * 3
    (warning,) = told.warnings[:1]
    assert "phase 'train', round 1: site A has 58.3% of all weight" in warning
    assert sum("of all weight" in warning for warning in told.warnings) == 1
    (line,) = defended(outcome.history)
    assert line.endswith("in 3 rounds")
    assert defended(run(tmp_path / "capped", sites, defence=Defence(most_share=0.5)).history) == []
    assert defended(run(tmp_path / "even", three_sites()).history) == []
    assert defended(run(tmp_path / "one", sites[:1]).history) == []


def test_by_default_an_update_far_larger_than_the_others_is_bounded_and_reported(tmp_path):
    told = Told()
    sites = [site("A", 1.0, 3.0), site("B", 5.0), site("C", 3e4), site("D", 3.0, 3.0)]
    outcome = run(tmp_path, sites, observer=told)
    scaled = [entry.sites["C"].scaled for entry in outcome.history[:3]]
    # The median of 2, 5 and 3, five times.
    assert scaled == [pytest.approx(15 / 3e4)] * 3
    assert outcome.server.tensors["w"].tolist() == pytest.approx([3 * 4 * (4 + 5 + 15 + 6) / 6] * 2)
    assert "site C had its update scaled by 0.0005" in told.warnings[0]
    assert "in 3 rounds" in defended(outcome.history)[0]


def test_noise_that_a_site_adds_by_its_own_policy_is_not_bounded(tmp_path):
    """Its update is a thousand times as large as the others', by what it demands."""
    demand = PrivacyDemand(kinds={"weights": Noising(clip=1.0, noise=2000.0)})
    sites = [site("A", 1.0), site("B", 1.0), replace(site("C", 1.0), demand=demand)]
    outcome = run(tmp_path, sites, folder=RunFolder(tmp_path))
    assert all(entry.sites["C"].scaled is None for entry in outcome.history[:3])
    assert abs(outcome.server.tensors["w"]).max() > 100


@pytest.mark.parametrize(
    ("figure", "words"),
    [
        ({"metrics": {"val_dice": 1e308}}, "val_dice: expected a magnitude of at most 1e+15, found 1e+308"),
        ({"metrics": {"loss": -1.7e308}}, "loss: expected"),
        ({"metrics": {"loss": float("inf")}}, "loss: expected"),
        ({"weight": 1e308}, "weight: expected"),
        ({"seconds": 1e308}, "seconds: expected"),
    ],
)
def test_a_figure_beyond_the_bound_drops_its_site(tmp_path, figure, words):
    class Absurd(Inline):
        def run(self, tasks):
            for answer in super().run(tasks):
                yield replace(answer, **figure) if answer.site == "B" and answer.files else answer

    sites = three_sites()
    outcome = run(tmp_path, sites, pool=Absurd(Toy(), sites, RunEnvironment(0), tmp_path, quorum=2))
    assert f"site B: {words}" in outcome.history[0].dropped["B"]
    assert set(outcome.history[0].sites) == {"A", "C"}
    assert all(tensor.isfinite().all() for tensor in outcome.server.tensors.values())


def test_metrics_that_a_phase_does_not_take_drop_their_site(tmp_path):
    class Checked(Toy):
        def plan(self):
            return tuple(
                replace(step, check=few) if step.name == "train" else step for step in super().plan()
            )

    def few(metrics, size):
        if metrics["seen"] > 1 and size.cases == 7:
            raise ValueError(f"seen: expected 1, found {metrics['seen']}")

    sites = three_sites()
    sites[1] = replace(sites[1], cases=7)
    outcome = run(tmp_path, sites, Checked(), quorum=2)
    first, second, _ = (entry for entry in outcome.history if entry.phase == "train")
    assert set(first.sites) == {"A", "B", "C"}
    assert set(second.sites) == {"A", "C"}
    assert second.dropped["B"] == "site B: seen: expected 1, found 2"


@pytest.mark.parametrize("workers", [0, 2])
def test_the_share_of_a_site_that_claims_too_much_at_once_is_capped(tmp_path, workers):
    sites = three_sites(B={0: "heavy", 1: "heavy", 2: "heavy"})
    outcome = run(tmp_path, sites, workers=workers, defence=Defence(most_share=0.5))
    # B has half of the weight, as much as A and C: (2 * 2 + 3 * 3 + 5 * 5) / 10 per round.
    assert outcome.server.tensors["w"].tolist() == pytest.approx([3 * 3.8 * 4] * 2)


def test_an_upload_of_another_shape_drops_its_own_site_though_it_is_the_first(tmp_path):
    outcome = run(tmp_path, three_sites(A={0: "shape"}), quorum=2)
    assert "group 'weights': tensor 'w': expected [2]" in outcome.history[0].dropped["A"]
    assert set(outcome.history[0].sites) == {"B", "C"}


def test_an_upload_that_cannot_be_read_drops_its_site(tmp_path):
    class Damaged(Inline):
        def run(self, tasks):
            for answer in super().run(tasks):
                if answer.site == "B" and answer.files:
                    answer.files["weights"].write_bytes(b"torn")
                yield answer

    sites = three_sites()
    outcome = run(tmp_path, sites, pool=Damaged(Toy(), sites, RunEnvironment(0), tmp_path, quorum=2))
    assert "site B: its upload cannot be read (TrainingError)" in outcome.history[0].dropped["B"]
    assert set(outcome.history[0].sites) == {"A", "C"}


@pytest.mark.parametrize("workers", [0, 2])
def test_a_robust_reduction_does_not_depend_on_the_number_of_workers(tmp_path, workers):
    defence = Defence(reduction="median", most_norm=1.5, beyond="drop")
    outcome = run(tmp_path, three_sites(), workers=workers, defence=defence, quorum=2)
    # Means of 2, 5 and 3: 5 is more than 1.5 times the median of 2 and 3, so it is dropped; the median of
    # the others is 2.5.
    assert [set(entry.dropped) for entry in outcome.history[:3]] == [{"B"}] * 3
    first = outcome.history[0]
    assert first.refused["B"].sent["weights"] == first.sites["C"].sent["weights"]
    assert outcome.server.tensors["w"].tolist() == pytest.approx([3 * 2.5 * 4] * 2)


def test_a_round_fails_where_the_defence_leaves_fewer_sites_than_the_quorum(tmp_path):
    sites, defence = three_sites(), Defence(most_norm=1.5, beyond="drop")
    pool = Inline(Toy(), sites, RunEnvironment(0), tmp_path)
    with pytest.raises(RoundFailed, match=r"2 of 3 sites delivered, the quorum is 3 \(B: its update of"):
        run(tmp_path, sites, pool=pool, defence=defence)
    assert RunFolder(tmp_path).checkpoint() is None
    pool.quorum = 2
    assert set(run(tmp_path, sites, pool=pool, defence=defence).history[0].dropped) == {"B"}


@pytest.mark.parametrize(
    ("defence", "needs"),
    [
        (Defence(reduction="trimmed-mean"), "trimmed-mean needs 3 sites in a round of 'train', found 2"),
        (Defence(reduction="krum"), "krum needs 4 sites in a round of 'train', found 2"),
    ],
)
def test_robust_reduction_of_too_few_sites_is_refused_before_training(tmp_path, defence, needs):
    with pytest.raises(ConfigurationError, match=needs):
        run(tmp_path, three_sites()[:2], defence=defence)
    with pytest.raises(ConfigurationError, match=needs):
        run(tmp_path, three_sites(), defence=defence, participation=0.7)
    assert RunFolder(tmp_path).checkpoint() is None


def test_round_with_too_few_sites_for_a_robust_reduction_ends_the_run_and_can_be_resumed(tmp_path):
    defence = Defence(reduction="trimmed-mean")
    with pytest.raises(RoundFailed, match=r"defence\.trim: expected to leave a site of 2"):
        run(tmp_path, three_sites(B={1: "raise"}), defence=defence)
    outcome = run(tmp_path, three_sites(), defence=defence)
    # Only 3 is left of the means 2, 5 and 3.
    assert outcome.server.tensors["w"].tolist() == pytest.approx([3 * 3 * 4] * 2)


def test_a_bounded_update_is_reported(tmp_path):
    outcome = run(tmp_path, three_sites(), defence=Defence(most_norm=1.5))
    assert outcome.history[0].sites["B"].scaled == pytest.approx(1.5 * 2.5 / 5)
    assert outcome.history[0].sites["A"].scaled is None


def test_result_does_not_depend_on_the_number_of_workers(tmp_path):
    sites = three_sites()
    none, one, two = (
        run(tmp_path / str(workers), sites, Toy(noise=True), workers=workers, participation=0.7)
        for workers in (0, 1, 2)
    )
    for other in (one, two):
        assert torch.equal(none.server.tensors["w"], other.server.tensors["w"])
        assert none.server.facts == other.server.facts


@pytest.mark.parametrize("workers", [0, 2])
def test_a_run_that_takes_rounds_back_ends_with_the_same_bits(tmp_path, workers):
    """Sites' memories go back, too: their trails are as long as without it."""
    sites = [replace(each, consents=True) for each in three_sites()]
    plain = run(tmp_path / "plain", sites, Toy(rounds=4, noise=True))
    root = tmp_path / "back"
    whole = run(root, sites, Toy(rounds=4, noise=True), workers=workers, folder=RunFolder(root, 6))
    RunFolder(root, 6).take_back_to("train", 3)
    left = RunFolder(root, 6)
    assert left.checkpoint().round == 2
    again = run(root, sites, Toy(rounds=4, noise=True), workers=workers, folder=left)
    for other in (whole, again):
        assert torch.equal(plain.server.tensors["w"], other.server.tensors["w"])
        assert plain.server.facts == other.server.facts
    assert {len(trail) for trail in again.server.facts["trails"].values()} == {4}


@pytest.mark.parametrize(("kept", "later"), [(1, 1), (3, 1), (2, 4)])
def test_a_run_stopped_in_a_round_goes_back_with_the_memories_of_the_rounds_it_keeps(tmp_path, kept, later):
    """Also where the round under way keeps fewer rounds, or more, than those before."""

    class Stop(Silent):
        def site_finished(self, phase, round, site, entry):
            if (round, site) == (4, "B"):
                raise KeyboardInterrupt

    sites = [replace(each, consents=True) for each in three_sites()]
    plain = run(tmp_path / "plain", sites, Toy(rounds=6))
    root = tmp_path / "stopped"
    with pytest.raises(RoundFailed):
        run(
            root,
            three_sites(A={4: "raise"}, B={4: "raise"}, C={4: "raise"}),
            Toy(rounds=6),
            folder=RunFolder(root, kept),
        )
    with pytest.raises(KeyboardInterrupt):
        run(root, sites, Toy(rounds=6), folder=RunFolder(root, later), observer=Stop())
    RunFolder(root).take_back_to("train", 5 - kept)
    again = run(root, sites, Toy(rounds=6))
    assert again.server.facts == plain.server.facts


def test_every_step_in_this_process_has_the_runs_threads_and_the_deterministic_mode(tmp_path, monkeypatch):
    seen = []

    class Watched(Toy):
        def watch(self):
            cudnn = torch.backends.cudnn
            seen.append((torch.get_num_threads(), cudnn.benchmark, cudnn.deterministic, cudnn.allow_tf32))

        def train(self, *arguments):
            self.watch()
            return super().train(*arguments)

        def average(self, *arguments):
            self.watch()
            return super().average(*arguments)

        def double(self, *arguments):
            self.watch()
            return super().double(*arguments)

    monkeypatch.setattr(torch.backends.cudnn, "benchmark", True)
    monkeypatch.setattr(torch.backends.cudnn, "deterministic", False)
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", True)
    before = torch.get_num_threads()
    folder = RunFolder(tmp_path)
    FederationEngine(Watched(rounds=1), three_sites(), RunEnvironment(0, threads=3), folder, workers=0).run()
    assert seen == [(3, False, True, False)] * (3 + 1 + 2)
    assert torch.get_num_threads() == before
    cudnn = torch.backends.cudnn
    assert (cudnn.benchmark, cudnn.deterministic, cudnn.allow_tf32) == (True, False, True)


def test_result_depends_on_the_seed(tmp_path):
    first = run(tmp_path / "0", three_sites(), Toy(noise=True), seed=0)
    second = run(tmp_path / "1", three_sites(), Toy(noise=True), seed=1)
    assert not torch.equal(first.server.tensors["w"], second.server.tensors["w"])


def test_partial_participation_draws_sites_and_records_absent_ones(tmp_path):
    outcome = run(tmp_path, three_sites(), Toy(rounds=8), participation=0.67)
    train = [entry for entry in outcome.history if entry.phase == "train"]
    assert all(len(entry.sites) == 2 for entry in train)
    assert all(list(entry.absent.values()) == ["not drawn"] for entry in train)
    assert len({tuple(entry.sites) for entry in train}) > 1  # not always the same two


def test_phase_for_everyone_ignores_partial_participation(tmp_path):
    class ForEveryone(Toy):
        def plan(self):
            train, *rest = super().plan()
            return (replace(train, everyone=True), *rest)

    outcome = run(tmp_path, three_sites(), ForEveryone(), participation=0.34)
    train = [entry for entry in outcome.history if entry.phase == "train"]
    assert [list(entry.sites) for entry in train] == [["A", "B", "C"]] * 3


@pytest.mark.parametrize(
    ("fault", "reason"),
    [
        ("raise", "the scanner is on fire"),
        ("bug", "KeyError"),
        ("die", "signal 9"),
        ("nan", "not finite"),
        ("shape", "expected [2]"),
    ],
)
def test_failing_site_is_left_out_of_its_round_only(tmp_path, fault, reason):
    # A step that kills its process needs a worker process.
    outcome = run(tmp_path, three_sites(B={1: fault}), workers=2 if fault == "die" else 0, quorum=2)
    train = [entry for entry in outcome.history if entry.phase == "train"]
    assert [list(entry.sites) for entry in train] == [["A", "B", "C"], ["A", "C"], ["A", "B", "C"]]
    assert reason in train[1].dropped["B"]
    # Weights are renormalised over the sites that remain: A and C with 2 and 3.
    full, without = (2 * 2.0 + 5.0 + 3 * 3.0) / 6, (2 * 2.0 + 3 * 3.0) / 5
    assert outcome.server.tensors["w"][0].item() == pytest.approx((2 * full + without) * 4)
    # The failed step did not change the memory of the site.
    assert train[2].sites["B"].metrics == {"seen": 2}


@pytest.mark.parametrize("workers", [0, 2])
def test_run_stops_without_a_site_of_which_no_one_wrote_that_it_may_be_missing(tmp_path, workers):
    words = (
        r"round 2: 2 of 3 sites delivered, the quorum is 3 \(B: the scanner is on fire\)\. Fix the cause and "
        r"resume, or resume with a smaller --quorum"
    )
    with pytest.raises(RoundFailed, match=words):
        run(tmp_path, three_sites(B={1: "raise"}), workers=workers)
    # It goes on from the round before with the same result as one in which no site failed.
    mended = run(tmp_path, three_sites(), workers=workers)
    whole = run(tmp_path / "whole", three_sites())
    assert torch.equal(mended.server.tensors["w"], whole.server.tensors["w"])


def test_round_without_any_site_fails_and_can_be_resumed(tmp_path):
    broken = [site("A", 1.0, faults={1: "raise"}), site("B", 2.0, faults={1: "raise"})]
    with pytest.raises(RoundFailed, match=r"round 2: no site delivered \(A: the scanner is on fire; B"):
        run(tmp_path, broken)
    mended = run(tmp_path, [site("A", 1.0), site("B", 2.0)])
    assert [entry.round for entry in mended.history if entry.phase == "train"] == [0, 1, 2]


def test_unreadable_data_fails_before_the_first_round(tmp_path):
    with pytest.raises(FederationError, match="site B: image 3 is torn"):
        run(tmp_path, [site("A", 1.0), site("B", 1.0, faults={-1: "unreadable"})])


def test_undeclared_upload_stops_the_run(tmp_path):
    with pytest.raises(AlgorithmError, match="secret"):
        run(tmp_path, [site("A", 1.0, faults={0: "undeclared"})])


def test_policy_that_withholds_an_essential_group_rejects_the_run(tmp_path):
    sites = [site("A", 1.0), site("B", 1.0, allows=frozenset({"statistics"}))]
    with pytest.raises(EgressRefused, match=r"site B: phase 'train' uploads 'weights'"):
        run(tmp_path, sites)
    assert not (tmp_path / "checkpoint.json").exists()


def test_policy_withholds_optional_groups_and_metrics(tmp_path):
    sites = [site("A", 1.0), site("B", 5.0, allows=frozenset({"weights"}))]
    outcome = run(tmp_path, sites)
    entry = outcome.history[0]
    assert entry.sites["B"].withheld == ("total", "tokens", "notes", "metrics")
    assert entry.sites["B"].sent == {"weights": 16}
    assert entry.sites["B"].metrics == {}
    assert outcome.server.facts["log"][0]["tokens"] == [1.0]
    assert outcome.server.facts["log"][0]["notes"] == {"A": 1.0}
    assert outcome.server.tensors["w"][0].item() == pytest.approx(3 * 3.0 * 4)


class Listener(Silent):
    def __init__(self):
        self.warnings = []

    def warning(self, message):
        self.warnings.append(message)


def test_export_includes_consenting_sites_only(tmp_path):
    sites = [site("A", 1.0, consents=True), site("B", 5.0)]
    outcome = run(tmp_path, sites)
    assert outcome.server.facts["trails"] == {"A": pytest.approx([1.0, 4.0, 7.0])}
    assert outcome.history[-1].absent == {"B": "no consent to 'export'"}
    assert outcome.history[-1].sites["A"].sent == {"trail": 3 * 4}


def test_export_without_consent_is_skipped_with_a_warning(tmp_path):
    listener = Listener()
    outcome = run(tmp_path, [site("A", 1.0)], observer=listener)
    assert "trails" not in outcome.server.facts
    assert listener.warnings == ["phase 'export' skipped: no consent to 'export'"]


def test_later_or_withdrawn_consent_changes_only_the_export(tmp_path):
    def trails(*consenting):
        sites = [site("A", 1.0, consents="A" in consenting), site("B", 5.0, consents="B" in consenting)]
        outcome = run(tmp_path, sites)
        assert [entry.phase for entry in outcome.history] == ["train"] * 3 + ["double"] * 2 + ["export"]
        return outcome.server.facts.get("trails")

    # w_g gains 3 a round; each site's trail is its own mean above it.
    a, b = pytest.approx([1.0, 4.0, 7.0]), pytest.approx([5.0, 8.0, 11.0])
    assert trails() is None
    files = sorted((tmp_path / "sites").rglob("*.safetensors"))
    before = [path.stat().st_mtime_ns for path in files]
    assert trails("A") == {"A": a}
    assert trails("A", "B") == {"A": a, "B": b}
    assert trails("A", "B") == {"A": a, "B": b}
    assert trails("B") == {"B": b}
    assert trails() is None
    assert [path.stat().st_mtime_ns for path in files] == before  # no site trained again


def test_site_that_failed_in_the_export_is_retried_on_resume(tmp_path):
    sites = [site("A", 1.0, faults={-2: "raise"}, consents=True), site("B", 5.0, consents=True)]
    first = run(tmp_path, sites, quorum=1)
    assert first.history[-1].dropped == {"A": "the line is down"}
    assert first.server.facts["trails"].keys() == {"B"}
    a, b = (site("A", 1.0, consents=True), site("B", 5.0, consents=True))
    second = run(tmp_path, [a, b])
    assert second.server.facts["trails"].keys() == {"A", "B"}
    assert [entry.phase for entry in second.history] == ["train"] * 3 + ["double"] * 2 + ["export"]
    assert second.history[:-1] == first.history[:-1]  # no site trained again
    undisturbed = run(tmp_path / "undisturbed", [a, b])
    assert second.server.facts == undisturbed.server.facts
    assert torch.equal(second.server.tensors["w"], undisturbed.server.tensors["w"])


def test_error_details_of_a_site_stay_in_its_own_folder(tmp_path):
    sites = three_sites(B={1: "bug"})
    outcome = run(tmp_path, sites, quorum=2)
    (reason,) = (entry.dropped["B"] for entry in outcome.history if entry.dropped)
    assert reason.startswith("KeyError at toy_federation.py:")
    assert reason.endswith("; see sites/B/failures.log in the run's folder")
    naming = [path for path in tmp_path.rglob("*") if path.is_file() and b"jane-doe" in path.read_bytes()]
    assert naming == [tmp_path / "sites" / "B" / "failures.log"]
    assert naming[0].stat().st_mode & 0o777 == 0o600
    assert naming[0].read_text().startswith("phase 'train', round 2\nTraceback")


def test_site_key_is_created_once_with_owner_only_access(tmp_path):
    folders = [SiteFolder(tmp_path, name) for name in "AB"]
    keys = [folder.key() for folder in folders]
    assert [len(key) for key in keys] == [32, 32]
    assert keys[0] != keys[1]
    assert [SiteFolder(tmp_path, name).key() for name in "AB"] == keys
    assert (tmp_path / "sites" / "A" / "key").stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize("workers", [0, 1])
def test_exchange_folder_is_empty_after_a_run(tmp_path, workers):
    """The folder is empty after a finished run, a failed run and a run that was killed before."""
    folder = RunFolder(tmp_path)
    fine, broken = [site("A", 1.0), site("B", 2.0)], [site(s, 1.0, faults={1: "raise"}) for s in "AB"]
    with pytest.raises(RoundFailed):
        run(tmp_path, broken, workers=workers)
    assert list(folder.exchange.iterdir()) == []
    (folder.exchange / "up-7-weights").write_bytes(b"of a round that was killed")
    run(tmp_path, fine, workers=workers)
    assert list(folder.exchange.iterdir()) == []
    (folder.exchange / "up-7-weights").write_bytes(b"of a kill just after the last commit")
    run(tmp_path, fine, workers=workers)
    assert list(folder.exchange.iterdir()) == []


def test_run_with_one_site_succeeds(tmp_path):
    outcome = run(tmp_path, [site("A", 2.0)], workers=2)
    assert outcome.server.tensors["w"][0].item() == pytest.approx(3 * 2.0 * 4)


def test_exported_group_is_not_exchanged_before_consent(tmp_path, monkeypatch):
    """No file of the exchange folder contains the trail until a site consents to export it."""
    trail = torch.tensor([1234.5, 2469.0, 3703.5])
    crossed, empty = b"", RunFolder.empty_exchange

    def watched(folder):
        nonlocal crossed
        crossed += b"".join(path.read_bytes() for path in folder.exchange.glob("*"))
        empty(folder)

    monkeypatch.setattr(RunFolder, "empty_exchange", watched)
    run(tmp_path, [site("A", 1234.5)])
    assert trail[:1].numpy().tobytes() in crossed  # the last round's w did cross
    assert trail.numpy().tobytes() not in crossed
    kept = b"".join(path.read_bytes() for path in (tmp_path / "sites" / "A").iterdir())
    assert trail.numpy().tobytes() in kept
