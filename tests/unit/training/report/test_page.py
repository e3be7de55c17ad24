from __future__ import annotations

import base64
import io
import re
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from model_store.store import Store
from model_store.task import Task
from tests.helpers.training.run_records import TASK, make_record
from tests.helpers.training.sites import per_scan
from tests.helpers.training.tested import round_of, sent
from training.algorithm import Phase, Publication
from training.config import RunConfig
from training.data.federation import load_federation
from training.engine.history import RoundEntry, SiteEntry
from training.errors import TrainingError
from training.local.slices import Slices
from training.methods.iop_fl import IopFlConfig
from training.methods.registry import method, methods
from training.privacy import Spent
from training.record import RunRecord
from training.report import write_overlays, write_report, write_site_pages
from training.report.charts import Change, Line, forest_chart, line_chart
from training.report.overlays import PREDICTED, TRUTH
from training.report.page import GROUPS
from training.run import Result, Run, execute


class _Reader(HTMLParser):
    """Collects the text and every address that the page refers to."""

    def __init__(self) -> None:
        super().__init__()
        self.texts: list[str] = []
        self.addresses: list[str] = []
        self.tags: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.addresses += [
            value for name, value in attrs if name in ("src", "href", "xlink:href") and value is not None
        ]

    def handle_data(self, data: str) -> None:
        if data.strip():
            self.texts.append(data.strip())


def read(path: Path) -> _Reader:
    reader = _Reader()
    reader.feed(path.read_text(encoding="utf-8"))
    return reader


class TestRecord:
    """The record of a run as JSON."""

    def test_record_round_trips_through_json(self, tmp_path: Path) -> None:
        record = make_record()
        assert RunRecord.read(record.write(tmp_path / "record.json")) == record

    def test_record_sums_traffic_by_group_and_seconds(self) -> None:
        record = make_record()
        assert record.traffic() == {"sent": {"weights": 6000, "metrics": 96}, "received": {"weights": 3000}}
        assert record.seconds == 6.5

    @pytest.mark.parametrize("content", [b"", b"{}", b'{"run": 1}'])
    def test_read_of_an_invalid_record_names_the_file(self, tmp_path: Path, content: bytes) -> None:
        (tmp_path / "record.json").write_bytes(content)
        with pytest.raises(TrainingError, match=r"record\.json is not the record of a run"):
            RunRecord.read(tmp_path / "record.json")


class TestReport:
    """The page about a run."""

    def test_report_refers_to_no_other_file(self, tmp_path: Path) -> None:
        reader = read(write_report(make_record(), tmp_path / "report.html"))
        assert all(address.startswith("#") for address in reader.addresses)
        assert not {"script", "link", "img", "iframe"} & set(reader.tags)
        assert "@import" not in (tmp_path / "report.html").read_text()
        assert reader.tags.count("svg") == 4

    def test_report_shows_epsilon_and_what_left_without_noise(self, tmp_path: Path) -> None:
        record = make_record()
        cost = Spent(clip=1.5, noise=10.0, releases=25, epsilon=4.3874, delta=1e-5)
        first = record.rounds[0]
        north = replace(first.sites["north"], privacy={"weights": cost})
        rounds = (replace(first, sites={**first.sites, "north": north}), *record.rounds[1:])
        record = make_record(rounds=rounds)
        assert RunRecord.read(record.write(tmp_path / "record.json")) == record
        text = " | ".join(read(write_report(record, tmp_path / "report.html")).texts)
        assert "north | weights | 1.5 | 10 | 25 | 4.39 | 1e-05" in text
        assert "Left without noise: metrics" in text

    def test_bytes_and_epsilon_of_a_delivery_that_did_not_count_are_reported(self, tmp_path: Path) -> None:
        record = make_record()
        cost = Spent(clip=1.5, noise=10.0, releases=2, epsilon=1.25, delta=1e-5)
        second = record.rounds[1]
        south = replace(record.rounds[0].sites["south"], weight=0.0, privacy={"weights": cost})
        before = record.traffic()
        dropped = replace(second, refused={"south": south})
        record = make_record(rounds=(record.rounds[0], dropped, *record.rounds[2:]))
        assert RunRecord.read(record.write(tmp_path / "record.json")) == record
        assert record.traffic()["sent"]["weights"] == before["sent"]["weights"] + 1000
        assert record.traffic()["received"]["weights"] == before["received"]["weights"] + 500
        text = " | ".join(read(write_report(record, tmp_path / "report.html")).texts)
        assert "south | weights | 1.5 | 10 | 2 | 1.25 | 1e-05" in text

    def test_report_shows_sites_dropouts_warnings_and_published_models(self, tmp_path: Path) -> None:
        text = " | ".join(read(write_report(make_record(), tmp_path / "report.html")).texts)
        for fragment in (
            "iop-fl on nodules",
            "left out: west",
            "the task was inferred <look at it>",
            "train, round 2: south dropped out: its <worker> died",
            "export: south absent in one round: no consent to 'export'",
            "train: north withheld 'scores' in one round",
            "nodules.north@2",
            "sha256:ababababababababab",
            "learning_rate | 0.001",
            "For research use only",
            # Of round 3; round 2 has a better score, but of north alone.
            "0.562 | best validation Dice of a round, mean; 2 of 2 sites on fewer than 10 patients",
            "0.750 | of 2 patients",
            "9.1 kB | exchanged",
        ):
            assert fragment in text, fragment

    def test_scores_of_the_end_are_by_model_and_label_with_n(self, tmp_path: Path) -> None:
        def scored(**metrics: float) -> SiteEntry:
            named = {name.replace("_of_", "/"): value for name, value in metrics.items()}
            return SiteEntry(1.0, named, {}, {}, (), 0.1)

        north = scored(test_dice=0.5, test_n=4.0, personal_test_dice=0.75, personal_test_n=2.0)
        south = scored(
            test_dice=0.8, test_n=2.0, personal_val_dice_of_nodule=0.25, personal_val_n_of_nodule=3.0
        )
        rounds = (RoundEntry("test", 0, 1, 1.0, {"north": north, "south": south}),)
        record = make_record(rounds=rounds)
        (published,) = record.published
        metrics = {"val_dice": 0.75, "val_n": 5.0, "test_dice": 0.625, "test_n": 2.0}
        published = published.model_copy(update={"metrics": metrics})
        record = record.model_copy(update={"published": (published,)})
        text = " | ".join(read(write_report(record, tmp_path / "report.html")).texts)
        for fragment in (
            "all sites | nodule | shared by all sites | 0.600 | 6 | few | – | –",
            "north | nodule | shared by all sites | 0.500 | 4 | few | – | –",
            "– | nodule | the site's own | 0.750 | 2 | few | – | –",
            "south | nodule | shared by all sites | 0.800 | 2 | few | – | –",
            "nodule | the site's own | – | – | 0.250 | 3 | few",
            "a site's own model | north | 0.750 | 5 | few | 0.625 | 2 | few",
        ):
            assert fragment in text, fragment

    def test_verdict_stands_at_the_top_with_paired_figures(self, tmp_path: Path) -> None:
        shared = {"A": [0.92, 0.93] * 5, "B": [0.93, 0.94] * 3, "C": [0.9, 0.92] * 4}
        own = {"A": [0.93, 0.93] * 5, "B": [0.94, 0.94] * 3, "C": None}
        record = make_record(rounds=(round_of({s: sent({"": (shared[s], own[s])}) for s in shared}),))
        reader = read(write_report(record, tmp_path / "report.html"))
        text = " | ".join(reader.texts)
        assert text.index(record.verdict[0]) < text.index("exchanged")
        together = record.paired[0].together
        assert together is not None
        assert together.count == 16
        assert (
            f"all sites | nodule | 16 | {together.before:.3f} | {together.after:.3f} | "
            f"{together.change:+.3f} | {together.low:+.3f} to {together.high:+.3f} | better" in text
        )
        # The mean of own models, of 16, stands nowhere beside that of the shared one, of 24.
        assert "the site's own | 0.935 | 16" not in text
        assert "locum serve --store STORE" in reader.texts

    def test_figures_of_few_cases_are_marked_and_last_and_not_bold(self, tmp_path: Path) -> None:
        scores = {"A": [0.9] * 12, "B": [0.8] * 10, "C": [0.1] * 9}
        page = write_report(
            make_record(rounds=(round_of({s: sent({"": (scores[s], None)}) for s in scores}),)),
            tmp_path / "report.html",
        )
        text = " | ".join(read(page).texts)
        assert re.findall(r"(\w+) \| nodule \| shared by all sites", text) == [
            "sites",
            "B",
            "A",
            "C",
        ]
        assert "C | nodule | shared by all sites | 0.100 | 9 | few" in text
        content = page.read_text()
        assert "<b>0.800</b>" in content
        assert "<b>0.100</b>" not in content
        few = write_report(
            make_record(rounds=(round_of({"C": sent({"": (scores["C"], None)})}),)), tmp_path / "few.html"
        )
        assert "<b>0.100</b>" not in few.read_text()
        # A tile with the best score of four patients.
        assert (
            '<div class="tile few"><b>0.562</b>'
            in write_report(make_record(), tmp_path / "tiles.html").read_text()
        )

    def test_surfaces_and_missed_patients_are_by_site(self, tmp_path: Path) -> None:
        def metrics(hd95: float, missed: float) -> dict[str, float]:
            surfaces = {"hd95": hd95, "assd": 1.0, "nsd": 0.5, "surfaces": 10.0}
            return sent(
                {"": ([hd95 / 10] * 12, None)},
                **{f"test_{name}__nodule": value for name, value in surfaces.items()},
                test_missed__nodule=missed,
                test_missed_n__nodule=12.0,
                test_dice__nodule=hd95 / 10,
                test_n__nodule=12.0,
            )

        record = make_record(rounds=(round_of({"A": metrics(6.0, 0.25), "B": metrics(4.0, 0.5)}),))
        text = " | ".join(read(write_report(record, tmp_path / "report.html")).texts)
        assert "all sites | nodule | shared by all sites | 0.500 | 24 | 9 of 24" in text
        assert "B | nodule | shared by all sites | 0.400 | 12 | 6 of 12" in text
        assert "all sites | nodule | shared by all sites | 5.00 | 1.00 | mm | 0.500 | 20 | 4 | B" in text
        assert "A | nodule | shared by all sites | 6.00 | 1.00 | mm | 0.500 | 10 | 2" in text

    def test_recall_and_precision_are_by_site_and_class(self, tmp_path: Path) -> None:
        task = Task(name="x", kind="classification", class_names=("normal", "ill"), size=(8, 8))
        recall = {"test_recall__ill": 0.75, "test_recall_n__ill": 8.0, "test_precision__ill": 0.5}
        metrics = sent({"": ([1.0] * 12, None)}, "accuracy", **recall, test_precision_n__ill=12.0)
        record = make_record(task=task, rounds=(round_of({"A": metrics, "B": metrics}),))
        text = " | ".join(read(write_report(record, tmp_path / "report.html")).texts)
        assert "all sites | ill | shared by all sites | 0.750 | 16 | 0.500 | 24" in text
        assert "A | ill | shared by all sites | 0.750 | 8 | few | 0.500 | 12" in text

    def test_what_travelled_is_in_words(self, tmp_path: Path) -> None:
        for name in methods():
            chosen = method(name)
            if name == "fedins":
                continue  # is built on a backbone; so it has no plan without one
            task = Task(name="t", labels={"t": (1,)}, size=(32, 32))
            if "segmentation" not in chosen.kinds:
                task = Task(name="t", kind="classification", class_names=("a", "b"), size=(32, 32))
            for step in chosen.build(chosen.config(), task).plan():
                for group in (*step.uploads, *step.downloads) if isinstance(step, Phase) else ():
                    assert group.name in GROUPS, (name, group.name)
        text = " | ".join(read(write_report(make_record(), tmp_path / "report.html")).texts)
        assert "weights | the network's weights | 6.0 kB" in text

    def test_best_own_score_averages_the_best_round_of_each_site(self, tmp_path: Path) -> None:
        def own(dice: float) -> SiteEntry:
            return SiteEntry(1.0, {"personal_val_dice": dice}, {}, {}, (), 0.1)

        rounds = tuple(
            RoundEntry("train", round_, 2, 0.1, {"north": own(north), "south": own(south)})
            for round_, (north, south) in enumerate([(0.75, 0.25), (0.5, 0.625)])
        )
        text = " | ".join(read(write_report(make_record(rounds=rounds), tmp_path / "report.html")).texts)
        assert "0.688 | best validation own Dice of a round, mean" in text

    @pytest.mark.parametrize("metric", ["val_dice", "joined_val_dice", "val_accuracy"])
    def test_best_score_ignores_a_site_that_has_no_score(self, tmp_path: Path, metric: str) -> None:
        """The patients of south are healthy: they have a Dice, of 0, only where something is predicted."""

        def site(score: float | None) -> SiteEntry:
            return SiteEntry(1.0, {} if score is None else {metric: score}, {}, {}, (), 0.1)

        told = [(0.3, 0.0), (0.85, None), (0.9, None)]
        rounds = tuple(
            RoundEntry("train", round_, 3, 0.1, {"north": site(north), "south": site(south)})
            for round_, (north, south) in enumerate(told)
        )
        # A round without south covers other patients.
        rounds += (RoundEntry("train", 3, 4, 0.1, {"north": site(1.0)}),)
        text = " | ".join(read(write_report(make_record(rounds=rounds), tmp_path / "report.html")).texts)
        assert "0.900 | best" in text

    def test_report_of_the_same_record_has_the_same_bytes(self, tmp_path: Path) -> None:
        first = write_report(make_record(), tmp_path / "a.html").read_bytes()
        assert write_report(make_record(), tmp_path / "b.html").read_bytes() == first

    def test_report_without_metrics_and_models_omits_their_sections(self, tmp_path: Path) -> None:
        bare = SiteEntry(1.0, {}, {}, {}, (), 0.1)
        rounds = (RoundEntry("sum", 0, 1, 0.1, {"north": bare}), RoundEntry("cluster", 0, 1, 0.2))
        record = make_record(rounds=rounds, published=(), warnings=(), left_out=())
        text = " | ".join(read(write_report(record, tmp_path / "report.html")).texts)
        assert "Published" not in text
        assert "Warnings" not in text
        assert "Sites" in text


def test_line_chart_draws_points_in_order_and_scale() -> None:
    svg = line_chart({"north": Line([(1, 0.0), (2, 1.0), (3, 0.5)], "#123456")}, share=True)
    path = next(d for d in re.findall(r'd="([^"]+)"[^>]*?#123456', svg))
    points = [tuple(map(float, p.split())) for p in re.findall(r"[ML] ([\d.]+ [\d.]+)", path)]
    assert len(points) == 3
    x, y = zip(*points, strict=True)
    assert x[1] - x[0] == pytest.approx(x[2] - x[1])
    # SVG counts downwards: 0.5 is halfway between 0 and 1.
    assert y[1] < y[2] < y[0]
    assert y[2] == pytest.approx((y[0] + y[1]) / 2, abs=0.01)


class TestOverlays:
    """The page of one site."""

    @staticmethod
    def slices() -> Slices:
        """Two patients of three slices; the second slice shows the most foreground."""
        rng = np.random.default_rng(0)
        targets = np.zeros((6, 16, 16), np.uint8)
        for patient in range(2):
            targets[3 * patient + 1, 4:12, 4:12] = 1
            targets[3 * patient + 2, 4:6, 4:6] = 1
        patients = tuple(f"p{i // 3}" for i in range(6))
        images = rng.normal(0, 0.1, (6, 3, 16, 16)).astype(np.float32)
        return Slices(images, targets, patients, patients, (0, 1, 2) * 2)

    @staticmethod
    def pictures(path: Path) -> list[np.ndarray]:
        sources = [a for a in read(path).addresses if a.startswith("data:image/png;base64,")]
        return [np.asarray(Image.open(io.BytesIO(base64.b64decode(s.split(",")[1])))) for s in sources]

    def test_overlay_outlines_are_drawn_at_the_mask_borders(self, tmp_path: Path) -> None:
        slices = self.slices()
        predicted = np.zeros_like(slices.targets)
        predicted[:, 2:8, 2:8] = 1
        task = TASK.model_copy(update={"neighbours": 1})
        path = write_overlays(
            tmp_path / "sites" / "s", "s", task, slices, {"global": per_scan(slices, predicted)}
        )
        first, second = self.pictures(path)
        assert first.shape == second.shape == (288, 288, 3)
        orange = (first == PREDICTED).all(axis=-1)
        turquoise = (first == TRUTH).all(axis=-1)
        rows, columns = np.nonzero(orange)
        assert (rows.min(), rows.max() + 1, columns.min(), columns.max() + 1) == (36, 144, 36, 144)
        rows, columns = np.nonzero(turquoise)
        assert (rows.max() + 1, columns.max() + 1) == (216, 216)
        assert not orange[60:120, 60:120].any()

    def test_overlay_dice_covers_all_slices_of_the_patient(self, tmp_path: Path) -> None:
        slices = self.slices()
        predicted = slices.targets.copy()
        predicted[2] = 0  # misses 4 of the first patient's 68 pixels
        answers = {"global": per_scan(slices, predicted), "own": per_scan(slices, slices.targets)}
        path = write_overlays(tmp_path, "s", TASK, slices, answers)
        text = " | ".join(read(path).texts)
        assert "p0 | slice 2 | global: 0.970 | own: 1.000" in text
        assert "p1 | slice 2 | global: 1.000 | own: 1.000" in text
        assert "must not leave it" in text

    def test_overlay_without_foreground_shows_no_dice(self, tmp_path: Path) -> None:
        slices = self.slices()
        empty = Slices(
            slices.images, np.zeros_like(slices.targets), slices.patients, slices.cases, slices.positions
        )
        path = write_overlays(tmp_path, "s", TASK, empty, {"global": per_scan(empty, empty.targets)})
        assert "global: –" in read(path).texts
        assert "tokens" not in " ".join(read(path).texts)

    def test_overlay_attention_bars_are_proportional(self, tmp_path: Path) -> None:
        slices = self.slices()
        shares = {"own": {"own": 0.75, "aster": 0.25, "s": 0.0}}
        answers = {"own": per_scan(slices, slices.targets)}
        path = write_overlays(tmp_path, "s", TASK, slices, answers, shares)
        assert "own | 75.0 % | aster | 25.0 % | s | 0.0 %" in " | ".join(read(path).texts)
        assert re.findall(r'class="bar" style="width:([0-9.]+)%"', path.read_text()) == [
            "75.0",
            "25.0",
            "0.0",
        ]


@pytest.fixture(scope="module")
def result(phantom_federation: Path, tmp_path_factory: pytest.TempPathFactory) -> Result:
    root = tmp_path_factory.mktemp("run")
    run = Run(
        load_federation(phantom_federation),
        "iop-fl",
        IopFlConfig(recipe="paper", rounds=1, width=2, local_steps=1),
        RunConfig(leave_out=("cedar",), consent=("aster",)),
    )
    return execute(run, root / "run", workers=1, store=Store(root / "store"))


class TestOfARun:
    """After a real, small run."""

    def test_record_of_a_run_has_sites_models_and_no_patient_names(self, result: Result) -> None:
        record = RunRecord.of(result, ["look out"])
        assert (record.method, record.left_out, record.warnings[0]) == ("iop-fl", ("cedar",), "look out")
        assert [site.name for site in record.sites] == ["aster", "birch"]
        assert record.sites[0].patients == {"train": 2, "val": 1, "test": 1}
        assert [p.reference for p in record.published][-1] == "phantom@1"
        assert {(p.role, p.site) for p in record.published} == {
            ("global", None),
            ("inside", "aster"),
            ("routing-space", None),
        }
        names = {case.patient for site in result.run.federation.sites for case in site.cases}
        assert not any(name in record.model_dump_json() for name in names)

    def test_site_page_shows_only_its_own_patients_and_models(self, result: Result, tmp_path: Path) -> None:
        pages = write_site_pages(result, tmp_path)
        assert pages == {name: tmp_path / "sites" / name / "overlays.html" for name in ("aster", "birch")}
        for site in result.run.sites():
            text = " | ".join(read(pages[site.name]).texts)
            validated = {case.patient for case in site.of_split("val")}
            everyone = {patient for other in result.run.federation.sites for patient in other.patients}
            assert {patient for patient in everyone if patient in text} == validated != set()
            assert ("own:" in text) == (site.name == "aster")
            assert "global:" in text


class TestChanges:
    """The section on what models of their own change."""

    def test_the_forest_plots_show_members_inside_and_in_practice(self, tmp_path: Path) -> None:
        personal = {
            "aster": {"share": 0.5, "val_dice": 0.92, "val_dice_global": 0.9},
            "birch": {
                **{"share": 0.0, "val_dice": 0.8, "val_dice_global": 0.8},
                "share_from": "the federation's patients",
            },
        }
        by_shift = {
            **{"episodes": 12, "mean": 0.021, "worst": -0.004, "lost": 0.0, "largest": 9.5},
            "members": {"cedar": [0.02, -0.004, 0.05]},
        }
        practised = {
            "rounds": 48,
            "sent": {"rotations": 2_000_000, "episodes": 9000},
            "by_shift": by_shift,
        }
        details = {"personal": personal, "playbook": practised}
        publication = Publication("routing-space", (), details=details)
        record = make_record().model_copy(update={"method": "iop-fl"})
        text = write_report(record, tmp_path / "report.html", publication).read_text()
        assert "Change of Dice per hospital" in text
        # The invented sites of the record are others.
        assert "aster 0.5 (chosen on 0 validation patients, few)" in text
        assert "birch 0 (chosen on all sites&#39; validation patients together)" in text
        assert "cost 48 rounds" in text
        assert "The further its scans were from the others" in text
        assert "by +2.1 points in the mean and by -0.4 in the worst of 12 episodes" in text
        assert ">cedar<" in text
        without = Publication("routing-space", (), details={"personal": {}})
        text = write_report(record, tmp_path / "none.html", without).read_text()
        assert "Change of Dice per hospital" not in text

    def test_a_forest_plot_has_a_row_per_hospital_and_a_line_at_zero(self) -> None:
        changes = [Change("aster", 0.02, -0.01, 0.05), Change("<b>", -0.01)]
        drawn = forest_chart(changes)
        assert drawn == forest_chart(changes)
        assert drawn.startswith("<svg")
        assert ">aster<" in drawn
        assert "<b>" not in drawn
        assert "&lt;b&gt;" in drawn
        assert ">change of Dice<" in drawn
        assert ">change of accuracy<" in forest_chart(changes, "accuracy")


def test_report_says_what_the_federation_planned(tmp_path: Path) -> None:
    said = "Planned with 24 training cases of A, B, <C>."
    record = make_record()
    planned = record.model_copy(update={"details": {**record.details, "plan": {"sentences": [said]}}})
    assert said in read(write_report(planned, tmp_path / "planned.html")).texts
    assert "Plan" not in read(write_report(record, tmp_path / "plain.html")).texts
