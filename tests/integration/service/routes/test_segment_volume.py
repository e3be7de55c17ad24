"""`POST /segment` with a network that sees volumes: every form of the answer, several channels, refusals."""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import highdicom as hd
import httpx
import nibabel as nib
import numpy as np
import pytest
from numpy.typing import NDArray
from PIL import Image
from pydicom import dcmread
from scipy import ndimage

from model_store.artefact import Artefact
from model_store.manifest import GRAPH, WEIGHTS, Lineage, ModelManifest, NetworkSpec
from model_store.scan import decode, decode_mask
from model_store.scans.channels import packed
from model_store.store import Store
from model_store.task import Task
from service.errors import JobCancelled
from service.inference.sessions import GraphSession
from service.jobs import records
from service.jobs.files import JobFolder
from service.worker.attempt import Attempt
from service.worker.runner import run_job
from tests.helpers.model_store.dicom_files import series, zipped
from tests.helpers.service.api import sent
from tests.helpers.service.coded import CODES
from tests.helpers.waiting import wait_for

PATCH = (16, 16, 8)
AFFINE = np.diag([-1.5, 1.5, 2.0, 1.0])


def graph(channels: int, at: float) -> bytes:
    """Certain of foreground where the sum of the channels is above `at`."""
    import onnx
    from onnx import TensorProto, helper

    values = [0.0] * channels + [1.0] * channels
    nodes = [
        helper.make_node("Conv", ["image", "w", "b"], ["logits"], kernel_shape=[1, 1, 1]),
        helper.make_node("Softmax", ["logits"], ["probabilities"], axis=1),
    ]
    made = helper.make_graph(
        nodes,
        "threshold",
        [helper.make_tensor_value_info("image", TensorProto.FLOAT, ["B", channels, *PATCH])],
        [helper.make_tensor_value_info("probabilities", TensorProto.FLOAT, ["B", 2, *PATCH])],
        [
            helper.make_tensor("w", TensorProto.FLOAT, [2, channels, 1, 1, 1], values),
            helper.make_tensor("b", TensorProto.FLOAT, [2], [0.0, -at]),
        ],
    )
    model = helper.make_model(made, opset_imports=[helper.make_opsetid("", 18)], ir_version=10)
    onnx.checker.check_model(model)
    content: bytes = model.SerializeToString()
    return content


def publish(root: Path, name: str, channels: tuple[str, ...] = (), **fields: Any) -> Artefact:
    none = {"scope": "volume", "method": "none"}
    content = {
        "name": name,
        "labels": {"bright": [1]},
        "codes": {"bright": CODES},
        "geometry": {"spacing": None, "patch": PATCH},
        **({"channels": [{"name": each, "normalisation": none} for each in channels]} if channels else {}),
        **({} if channels else {"normalisation": none}),
        **fields,
    }
    count = max(1, len(channels))
    manifest = ModelManifest(
        name=name,
        task=Task.model_validate(content),
        network=NetworkSpec(name="threshold", arguments={}),
        lineage=Lineage(method="by-hand", run="test", sites=(), rounds=0, seed=0),
    )
    return Store(root).publish(manifest, {WEIGHTS: b"none", GRAPH: graph(count, 100 * count)})


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("store")
    publish(root, "volume")
    publish(root, "two", ("T1", "FLAIR"))
    publish(root, "stacked", ("T1", "FLAIR"), stacked=True)
    publish(root, "largest", keep_largest=["bright"])
    return root


@pytest.fixture(scope="module")
def api(start: Callable[..., Any], store: Path) -> Any:
    return start(store)


def voxels(seed: int = 5) -> NDArray[np.int16]:
    drawn = np.random.default_rng(seed).integers(0, 200, (32, 27, 21))
    return np.where(abs(drawn - 100) < 5, 0, drawn).astype(np.int16)


def nifti(values: NDArray[np.generic]) -> bytes:
    image = nib.Nifti1Image(values, AFFINE)
    image.header.set_xyzt_units("mm")
    return bytes(image.to_bytes())


def mask_of(response: Any) -> Any:
    assert response.status_code == 200, response.text
    return nib.Nifti1Image.from_bytes(gzip.decompress(response.content))


def test_the_mask_is_on_the_files_own_grid_with_a_receipt(api: Any, store: Path) -> None:
    scan = nifti(voxels())
    mask = mask_of(api.segment(scan, model="volume"))
    np.testing.assert_array_equal(mask.get_fdata(), voxels() > 100)
    np.testing.assert_allclose(mask.affine, AFFINE)
    report = api.segment(scan, model="volume", output="json").json()
    assert report["labels"]["bright"]["voxels"] == (voxels() > 100).sum()
    assert report["labels"]["bright"]["volume_ml"] == pytest.approx((voxels() > 100).sum() * 4.5 / 1000)
    assert 0 < report["labels"]["bright"]["confidence"] < 1
    receipt, manifest = report["receipt"], Store(store).open("volume").manifest
    assert receipt["input_sha256"] == f"sha256:{hashlib.sha256(scan).hexdigest()}"
    assert receipt["graph"] == manifest.files[GRAPH].sha256
    # The same scan, the same bytes.
    assert api.segment(scan, model="volume").content == api.segment(scan, model="volume").content


def test_islands_are_taken_off_where_the_task_says_so_and_the_report_counts_them(api: Any) -> None:
    smooth = ndimage.gaussian_filter(np.random.default_rng(8).normal(size=(32, 27, 21)), 1.5)
    scan = nifti(np.where(smooth > np.quantile(smooth, 0.85), 200, 0).astype(np.int16))
    whole = mask_of(api.segment(scan, model="volume")).get_fdata() > 0
    labelled, count = ndimage.label(whole, np.ones((3, 3, 3)))
    assert count > 3
    expected = labelled == 1 + np.bincount(labelled.ravel())[1:].argmax()
    found = mask_of(api.segment(scan, model="largest")).get_fdata()
    np.testing.assert_array_equal(found > 0, expected)
    report = api.segment(scan, model="largest", output="json").json()
    assert report["labels"]["bright"]["voxels"] == expected.sum()
    assert report["removed"] == {"bright": whole.sum() - expected.sum()}
    assert report["receipt"]["keep_largest"] == ["bright"]
    without = api.segment(scan, model="volume", output="json").json()
    assert (without["removed"], without["receipt"]["keep_largest"]) == ({}, [])


def test_uncertainty_and_overlay_are_of_the_volume(api: Any) -> None:
    scan = nifti(voxels())
    percent = mask_of(api.segment(scan, model="volume", voxels="uncertainty")).get_fdata()
    p = 1 / (1 + np.exp(-(voxels().astype(float) - 100)))
    entropy = -(p * np.log(p.clip(1e-7)) + (1 - p) * np.log((1 - p).clip(1e-7))) / np.log(2)
    assert np.abs(percent - 100 * entropy).max() <= 0.51
    picture = api.segment(scan, model="volume", output="overlay")
    assert picture.status_code == 200, picture.text
    assert len(np.unique(np.asarray(Image.open(io.BytesIO(picture.content))))) > 20


def test_a_dicom_series_gets_a_seg(api: Any) -> None:
    cube = voxels().transpose(2, 1, 0)
    response = api.segment(zipped(series(cube)), model="volume", output="dicom-seg")
    assert response.status_code == 200, response.text
    seg = hd.seg.segread(io.BytesIO(response.content))
    found = np.asarray(seg.pixel_array).sum()
    assert found == (cube > 100).sum()


class TestSeveralChannels:
    def expected(self) -> NDArray[np.bool_]:
        return voxels(1).astype(int) + voxels(2) > 200

    def fields(self) -> dict[str, tuple[str, bytes]]:
        return {"scan.FLAIR": ("b.nii", nifti(voxels(2))), "scan.T1": ("a.nii", nifti(voxels(1)))}

    def test_a_field_for_each_a_zip_and_a_4d_file_are_one_scan(self, api: Any) -> None:
        by_field = mask_of(api.client.post("/segment", files=self.fields(), data={"model": "two"}))
        by_zip = mask_of(
            api.segment(packed({"T1": [nifti(voxels(1))], "FLAIR": [nifti(voxels(2))]}), model="two")
        )
        both = np.stack([voxels(1), voxels(2)], axis=-1)
        by_4d = mask_of(api.segment(nifti(both), model="stacked"))
        for mask in (by_field, by_zip, by_4d):
            agree = mask.get_fdata() == self.expected()
            assert agree[voxels(1).astype(int) + voxels(2) != 200].all()
            np.testing.assert_allclose(mask.affine, AFFINE)

    def series_of(self, **of_flair: Any) -> list[tuple[str, tuple[str, bytes]]]:
        """Two series on one grid, the slices of FLAIR last to first; `of_flair` are values of its headers."""
        made = {
            "T1": series(voxels(1).transpose(2, 1, 0), SeriesInstanceUID="1.2.3.1"),
            "FLAIR": series(voxels(2).transpose(2, 1, 0), SeriesInstanceUID="1.2.3.2", **of_flair),
        }
        return [
            (f"scan.{name}", (f"{number}.dcm", content))
            for name, files in made.items()
            for number, content in enumerate(reversed([*files.values()]))
        ]

    def test_two_dicom_series_in_fields_of_their_own(self, api: Any) -> None:
        mask = mask_of(api.client.post("/segment", files=self.series_of(), data={"model": "two"}))
        found, expected = int(mask.get_fdata().sum()), int(self.expected().sum())
        assert found == expected

    def test_two_dicom_series_get_a_seg_on_the_first(self, api: Any) -> None:
        data = {"model": "two", "output": "dicom-seg"}
        response = api.client.post("/segment", files=self.series_of(), data=data)
        assert response.status_code == 200, response.text
        seg = hd.seg.segread(io.BytesIO(response.content))
        (source,) = seg.ReferencedSeriesSequence
        assert source.SeriesInstanceUID == "1.2.3.2"
        assert len(source.ReferencedInstanceSequence) == 21
        slices = [dcmread(io.BytesIO(file[1])) for name, file in self.series_of() if name == "scan.FLAIR"]
        uids = [each.SOPInstanceUID for each in reversed(slices)]
        found = seg.get_pixels_by_source_instance(uids)[..., 0]
        np.testing.assert_array_equal(found > 0, self.expected().transpose(2, 1, 0))
        report = api.client.post("/segment", files=self.series_of(), data={**data, "output": "dicom-sr"})
        assert report.status_code == 200, report.text
        again = api.client.post("/segment", files=self.series_of()[::-1], data=data)
        assert again.content == response.content
        contours = api.client.post(
            "/segment", files=self.series_of(), data={**data, "output": "dicom-rtstruct"}
        )
        assert contours.status_code == 200, contours.text
        first = {str(n): file[1] for n, (name, file) in enumerate(self.series_of()) if name == "scan.FLAIR"}
        mask = decode_mask(contours.content, scan=decode(zipped(first))).voxels[..., 0]
        np.testing.assert_array_equal(mask > 0, self.expected())

    @pytest.mark.parametrize(
        ("of_flair", "says"),
        [
            (
                {"FrameOfReferenceUID": "1.2.9"},
                "channels FLAIR and T1: expected series with one frame of",
            ),
            ({"PatientID": "ANOTHER"}, "channels FLAIR and T1: expected series with one patient"),
            ({"PixelSpacing": [1.0, 1.0]}, "channel T1 is not on the grid of channel FLAIR"),
        ],
    )
    def test_series_that_do_not_belong_together_are_refused(
        self, api: Any, of_flair: dict[str, Any], says: str
    ) -> None:
        response = api.client.post("/segment", files=self.series_of(**of_flair), data={"model": "two"})
        assert (response.status_code, response.json()["type"]) == (422, "urn:locum:problem:scan-mismatch")
        assert says in response.json()["detail"]
        assert "ANOTHER" not in response.text

    def test_a_mixture_of_series_and_nifti_has_no_seg(self, api: Any) -> None:
        mask = mask_of(api.client.post("/segment", files=self.series_of(), data={"model": "two"}))
        image = nib.Nifti1Image(np.zeros(mask.shape, np.int16), mask.affine)
        image.header.set_xyzt_units("mm")
        files = [*self.series_of()[:21], ("scan.FLAIR", ("b.nii", image.to_bytes()))]
        response = api.client.post("/segment", files=files, data={"model": "two", "output": "dicom-seg"})
        assert (response.status_code, response.json()["type"]) == (422, "urn:locum:problem:output-mismatch")

    def test_two_series_in_one_field_are_refused_with_what_to_do(self, api: Any) -> None:
        files = [("scan", content) for _, content in self.series_of()]
        response = api.client.post("/segment", files=files, data={"model": "two"})
        assert response.status_code == 415
        assert "each by its channel (scan.CHANNEL)" in response.json()["detail"]

    def test_a_viewer_is_shown_one_channel(self, api: Any) -> None:
        content = packed({"T1": [nifti(voxels(1))], "FLAIR": [nifti(voxels(2))]})
        shown = mask_of(api.client.post("/display", files={"scan": ("x.zip", content)}))
        assert shown.shape == (32, 27, 21)
        np.testing.assert_array_equal(shown.get_fdata(), voxels(2))

    def test_the_receipt_has_the_digest_of_both_in_any_order(self, api: Any) -> None:
        digests = set()
        for fields in (self.fields(), dict(reversed(self.fields().items()))):
            response = api.client.post("/segment", files=fields, data={"model": "two", "output": "json"})
            digests.add(response.json()["receipt"]["input_sha256"])
        assert len(digests) == 1

    @pytest.mark.parametrize(
        ("fields", "says"),
        [
            ({"scan.T1": nifti(voxels(1))}, "channels T1, FLAIR, and FLAIR is missing"),
            (
                {"scan.T1": nifti(voxels(1)), "scan.FLAIR": nifti(voxels(2)[:, :, :20])},
                "channel T1 is not on the grid of channel FLAIR",
            ),
            ({"scan": nifti(voxels(1))}, r"expects 2 channels \(T1, FLAIR\), found one file with 1"),
            ({"scan": nifti(voxels(1)), "scan.T1": nifti(voxels(1))}, "for each channel, found both"),
            ({"scan.T 1": nifti(voxels(1))}, "expected the name of a channel"),
        ],
    )
    def test_what_does_not_fit_is_said(self, api: Any, fields: dict[str, bytes], says: str) -> None:
        import re

        files = {name: ("x.nii", content) for name, content in fields.items()}
        response = api.client.post("/segment", files=files, data={"model": "two"})
        assert response.status_code == 422, response.text
        assert re.search(says, json.loads(response.content)["detail"])


def test_one_network_of_volumes_weighs_no_models_for_a_scan(api: Any) -> None:
    response = api.segment(nifti(voxels()), model="volume", personalization="scan", preset="official")
    assert response.status_code == 422, response.text
    assert "is one model: leave `preset` out" in response.json()["detail"]


def test_an_image_is_refused(api: Any, make_png: Callable[..., bytes]) -> None:
    response = api.segment(make_png(np.zeros((32, 32), np.uint8)), model="volume")
    assert response.status_code == 422
    assert "segments volumes, and the scan is an image" in response.json()["detail"]


@pytest.fixture(scope="module")
def slow(start: Callable[..., Any], store: Path) -> Any:
    return start(store, volume_seconds=1e-6)


class TestLongVolumes:
    """A volume with windows that take longer than allowed becomes a job."""

    def ask(self, api: Any, prefer: str = "", **fields: str) -> httpx.Response:
        files = {"scan.FLAIR": ("b.nii", nifti(voxels(2))), "scan.T1": ("a.nii", nifti(voxels(1)))}
        headers = {"Prefer": prefer} if prefer else {}
        data = {"model": "two", **fields}
        answer: httpx.Response = api.client.post("/segment", files=files, data=data, headers=headers)
        return answer

    def job(self, api: Any, job_id: str) -> dict[str, Any]:
        found: dict[str, Any] = api.client.get(f"/jobs/{job_id}").json()
        return found

    @pytest.mark.parametrize("output", ["nifti", "json"])
    def test_its_result_is_the_answer_that_a_short_one_gets(self, api: Any, slow: Any, output: str) -> None:
        accepted = self.ask(slow, output=output)
        assert accepted.status_code == 202, accepted.text
        job = accepted.json()
        assert (job["kind"], job["model"], accepted.headers["location"]) == (
            "segment",
            "two",
            f"/jobs/{job['id']}",
        )
        run_job(job["id"], slow.settings)
        folder = JobFolder(slow.settings.open_files(), job["id"])
        assert folder.names == ["result", "result.json"]
        found = slow.client.get(f"/jobs/{job['id']}/result")
        expected = self.ask(api, output=output)
        assert expected.status_code == 200
        timed = {"server-timing", "date", "locum-request", "content-length"}
        for name, value in expected.headers.items():
            assert name in timed or found.headers[name] == value, name
        if output == "nifti":
            assert found.content == expected.content
            return
        answers = [found.json(), expected.json()]
        for answer in answers:
            del answer["timing_ms"], answer["receipt"]["request"]
        assert answers[0] == answers[1]

    def test_a_file_with_all_channels_is_kept_for_its_job(self, api: Any, slow: Any) -> None:
        scan = nifti(np.stack([voxels(1), voxels(2)], axis=-1))
        job = slow.segment(scan, model="stacked").json()["id"]
        run_job(job, slow.settings)
        found = slow.client.get(f"/jobs/{job}/result")
        assert found.content == api.segment(scan, model="stacked").content

    def test_progress_counts_windows(self, slow: Any) -> None:
        job = self.ask(slow).json()["id"]
        run_job(job, slow.settings)
        with slow.context.database.read() as session:
            events = [each.data for each in records.events_of_type(session, job, "progress")]
        noted = [(each["window"], each["windows"]) for each in events if "window" in each]
        # 3 x 3 x 5 windows, each of them noted.
        assert noted == [(done, 45) for done in range(45)]
        assert events[-1]["seconds_left"] >= 0

    def test_cancelling_ends_it_between_two_windows(self, slow: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        job = self.ask(slow).json()["id"]
        runs, run = [], GraphSession.run_alone
        attempts: list[Attempt] = []
        begin = Attempt.__enter__

        def cancelled() -> bool:
            try:
                attempts[0].check_cancelled()
            except JobCancelled:
                return True
            return False

        def counted(self: GraphSession, *given: Any) -> Any:
            runs.append(given)
            if len(runs) == 3:
                assert slow.client.delete(f"/jobs/{job}").status_code == 202
                # As soon as the heartbeat has seen it.
                wait_for(cancelled)
            return run(self, *given)

        monkeypatch.setattr(Attempt, "__enter__", lambda self: attempts.append(self) or begin(self))
        monkeypatch.setattr(GraphSession, "run_alone", counted)
        run_job(job, slow.settings)
        assert (self.job(slow, job)["state"], len(runs)) == ("cancelled", 3)
        assert JobFolder(slow.settings.open_files(), job).names == []

    def test_a_lost_worker_loses_nothing(self, slow: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        class Killed(BaseException): ...

        job = self.ask(slow).json()["id"]
        with monkeypatch.context() as during:
            during.setattr(GraphSession, "run_alone", lambda *_: (_ for _ in ()).throw(Killed))
            with pytest.raises(Killed):
                run_job(job, slow.settings)
        with slow.context.database.write() as session:
            records.get(session, job).lease_until = datetime.now(UTC) - timedelta(hours=1)
        run_job(job, slow.settings)
        assert (self.job(slow, job)["state"], self.job(slow, job)["attempt"]) == ("succeeded", 2)

    def test_a_client_that_waits_gets_the_mask_or_the_job(self, api: Any, slow: Any) -> None:
        early = self.ask(slow, "wait=0")
        assert (early.status_code, early.headers["preference-applied"]) == (202, "wait=0")
        with ThreadPoolExecutor(1) as pool:
            waiting = pool.submit(self.ask, slow, "wait=50")
            (job,) = wait_for(lambda: queued(slow) - {early.json()["id"]})
            run_job(job, slow.settings)
            found = waiting.result(60)
        assert (found.status_code, found.headers["preference-applied"]) == (200, "wait=50")
        assert found.content == self.ask(api).content
        assert JobFolder(slow.settings.open_files(), job).names == []

    def test_respond_async_makes_a_job_of_a_short_one(self, api: Any) -> None:
        accepted = self.ask(api, "respond-async, wait=0")
        assert accepted.status_code == 202
        assert accepted.headers["preference-applied"] == "respond-async, wait=0"
        # What a worker would reject is rejected now.
        refused = self.ask(api, "respond-async", output="png")
        assert refused.status_code == 422

    def test_a_version_that_is_assigned_meanwhile_does_not_answer(
        self, start: Callable[..., Any], tmp_path: Path
    ) -> None:
        publish(tmp_path, "volume")
        api = start(tmp_path, volume_seconds=1e-6)
        job = api.segment(nifti(voxels()), model="volume").json()["id"]
        publish(tmp_path, "volume", labels={"bright": [1], "other": [1]}, codes={})
        run_job(job, api.settings)
        assert api.client.get(f"/jobs/{job}/result").headers["locum-model"] == "volume@1"
        gone = api.segment(nifti(voxels()), model="volume@1").json()["id"]
        api.store.withdraw("volume@1", actor="ada", reason="wrong")
        run_job(gone, api.settings)
        assert "withdrawn" in self.job(api, gone)["reason"]


def queued(api: Any) -> set[str]:
    with api.context.database.read() as session:
        return {job.id for job in records.listed(session, state="queued")}


def test_a_client_that_leaves_ends_the_work_between_patches(
    start: Callable[..., Any], store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs, run, left = [], GraphSession.run_alone, threading.Event()

    def held(self: GraphSession, *given: Any) -> Any:
        runs.append(given)
        assert left.wait(60)
        # The API looks for its client from time to time.
        time.sleep(0.3)
        return run(self, *given)

    monkeypatch.setattr(GraphSession, "run_alone", held)
    api = start(store)
    with sent(api, files={"scan": nifti(voxels())}, data={"model": "volume"}):
        wait_for(lambda: runs)
    left.set()
    wait_for(lambda: not api.context.admission.running)
    # Of 3 x 3 x 5 windows, which all would take thirteen seconds.
    assert 0 < len(runs) < 30
