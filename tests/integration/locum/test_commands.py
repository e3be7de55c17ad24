"""The `locum` command as its users run it: a process, against a service that `locum serve` runs."""

from __future__ import annotations

import csv
import json
import os
import re
import shutil
import signal
import stat
import subprocess
import sys
import threading
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import nibabel as nib
import numpy as np
import pytest

from locum import Client
from locum.connection import Connection
from service.identity import keys
from service.routes import scan_request
from tests.helpers.model_store.dicom_files import series
from tests.helpers.service.api import Api
from tests.helpers.service.joining_federation import drawn_scans
from tests.helpers.service.routing_federation import outside_scans, volume
from tests.integration.locum.conftest import COMMAND, Served

Run = Callable[..., subprocess.CompletedProcess[str]]


def rows(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def test_serve_works_beside_packages_of_the_same_names(served: Served, command: Run) -> None:
    """Its worker too: the readiness that the fixture waits for needs one."""
    shown = command("status", url=served.url)
    assert shown.returncode == 0, shown.stderr
    assert ": ready; you are anonymous" in shown.stdout
    assert "model organ@1  routing-space, /segment" in shown.stdout
    assert "of the working folder" not in served.log.read_text()


def test_folder_is_segmented_with_a_table_and_left_alone_the_second_time(
    served: Served, command: Run, scans: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "scans"
    shutil.copytree(scans, folder / "monday")
    (folder / "broken.nii.gz").write_bytes(b"no scan")
    (folder / "notes.txt").write_text("left out")
    out = folder / "out"
    first = command("segment", folder, "--model", "organ", "-H", "dune", "-o", out, "-j", 3, url=served.url)
    assert first.returncode == 1, first.stderr
    lines = first.stdout.splitlines()
    assert len([line for line in lines if line.startswith("✓ monday/")]) == 3
    (rejected,) = (line for line in lines if line.startswith("✗"))
    assert rejected.startswith("✗ broken.nii.gz  ")
    assert lines[-1] == f"3 of 4 scans; 1 rejected; table: {out / 'volumes.csv'}"
    table = rows(out / "volumes.csv")
    assert [row["scan"] for row in table if row["error"]] == ["broken.nii.gz"]
    for row in (row for row in table if not row["error"]):
        mask = nib.load(out / row["mask"])
        voxels = np.count_nonzero(np.asarray(mask.dataobj))
        voxel_ml = abs(np.linalg.det(mask.affine[:3, :3])) / 1000
        assert (int(row["voxels"]), float(row["volume_ml"])) == (
            voxels,
            pytest.approx(voxels * voxel_ml, rel=1e-5),
        )
        report = json.loads((out / row["mask"].replace("-mask.nii.gz", "-report.json")).read_text())
        assert report["receipt"]["request"] == row["request"]
        assert report["receipt"]["input_sha256"] == row["input_sha256"]

    (folder / "broken.nii.gz").unlink()
    damaged = out / "monday/patient-501-mask.nii.gz"
    damaged.unlink()
    again = command("segment", folder, "-m", "organ", "-H", "dune", "-o", out, url=served.url)
    assert again.returncode == 0
    assert again.stdout.count("there already") == 2 + 1
    assert "3 of 3 scans; 2 of them there already" in again.stdout
    requests = {row["scan"]: row["request"] for row in table if not row["error"]}
    made = {row["scan"]: row["request"] for row in rows(out / "volumes.csv")}
    assert [name for name in made if made[name] != requests[name]] == ["monday/patient-501.nii.gz"]
    # Other options, other masks
    other = command(
        *("segment", folder, "-m", "organ", "-H", "dune", "-o", out, "--personalization", "global"),
        url=served.url,
    )
    assert "there already" not in other.stdout


def test_series_of_a_study_is_chosen_by_its_number(served: Served, command: Run, tmp_path: Path) -> None:
    bright = volume("dune", 500)[0].voxels[..., 0].transpose(2, 1, 0).astype(np.int16)
    study = tmp_path / "study"
    for number, voxels in ((3, np.flip(bright, 0)), (4, bright)):
        own = {"SeriesNumber": number, "SeriesInstanceUID": f"1.2.{number}"}
        for name, content in series(voxels, spacing=(6.0, 6.0), gap=6.0, **own).items():
            study.mkdir(exist_ok=True)
            (study / f"{number}-{name}").write_bytes(content)
    out = tmp_path / "out"
    arguments = ("segment", study, "-m", "organ", "-o", out)
    refused = command(*arguments, url=served.url)
    assert refused.returncode == 1, refused.stderr
    _, height, width = bright.shape
    listed = f"number 3 (CT, axial, {len(bright)} images of {height} x {width}), number 4 (CT, "
    assert listed in refused.stdout
    assert "choose one by --series, or send" in refused.stdout
    masks = []
    for number in (4, 3):
        made = command(*arguments, "--series", number, url=served.url)
        assert made.returncode == 0, made.stdout
        assert "there already" not in made.stdout
        masks.append(np.asarray(nib.load(out / "study-mask.nii.gz").dataobj))
    assert masks[0].any()
    assert not np.array_equal(*masks)
    again = command(*arguments, "--series", 3, url=served.url)
    assert "there already" in again.stdout
    wrong = command(*arguments, "--series", 5, url=served.url)
    assert (wrong.returncode, "found 0 among 2: number 3" in wrong.stdout) == (1, True)


def test_interrupted_segmentation_goes_on(
    api: Api, command: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The service answers the first scan, and the others once the command was interrupted.
    allowed, answer = threading.Semaphore(1), scan_request.answer_prepared

    def held(*given: Any, **options: Any) -> Any:
        assert allowed.acquire(timeout=60)
        return answer(*given, **options)

    monkeypatch.setattr(scan_request, "answer_prepared", held)
    url = str(api.client.base_url)
    folder, out = tmp_path / "scans", tmp_path / "out"
    folder.mkdir()
    for name, content in outside_scans(12).items():
        (folder / name).write_bytes(content)
    arguments = ["segment", str(folder), "--model", "organ", "-o", str(out), "-j", "1"]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("LOCUM_")}
    process = subprocess.Popen(
        [COMMAND, *arguments], env=environment | {"LOCUM_URL": url}, stdout=subprocess.PIPE, text=True
    )
    try:
        # The line of a scan is printed once its row is noted; its files are there before.
        assert process.stdout is not None
        assert process.stdout.readline().startswith("✓")
        process.send_signal(signal.SIGINT)
    finally:
        allowed.release(24)
    stdout, _ = process.communicate(timeout=60)
    done = len(list(out.glob("*-report.json")))
    assert process.returncode == 130
    assert "stopped; the same command goes on" in stdout
    assert 0 < len(rows(out / "volumes.csv")) <= done < 12
    rest = command(*arguments, url=url)
    assert rest.returncode == 0
    assert f"12 of 12 scans; {done} of them there already" in rest.stdout
    assert not list(out.glob(".*.part"))


def test_hospital_adapts_is_assigned_and_rolled_back(served: Served, command: Run, scans: Path) -> None:
    def locum(*arguments: object) -> subprocess.CompletedProcess[str]:
        return command(*arguments, url=served.url)

    assert "ember: Ember Hospital" in locum("register", "ember", "--name", "Ember Hospital").stdout
    where = ("--hospital", "ember", "--model", "organ")
    followed = locum("adapt", scans, *where, "--option", "epochs=1", "--follow")
    assert followed.returncode == 0, followed.stdout + followed.stderr
    assert "3 scans, 0 masks" in followed.stdout
    # The verdict in words, before the checks and their figures.
    assert re.search(
        r"\n  The new version (passed|did not pass) its checks\.\n.*\n  [✓✗] ", followed.stdout, re.S
    )
    (candidate,) = set(re.findall(r"candidate (\S+)", followed.stdout))
    assert candidate == "organ.at-ember@1"
    job = re.search(r"^job ([0-9a-f]{32})$", followed.stdout, re.MULTILINE)
    assert job
    shown = locum("status", job[1])
    assert f"candidate {candidate} " in shown.stdout

    refused = locum("assign", candidate, "--reason", "test", "--actor", "ada")
    assert refused.returncode == 0 or "say --override: it is recorded" in refused.stderr
    assigned = locum("assign", candidate, "--reason", "test", "--actor", "ada", "--override")
    assert assigned.returncode == 0, assigned.stderr
    assert f"ember is served {candidate}, by ada: test" in assigned.stdout
    with Client(served.url) as client:
        found = client.segment(next(scans.iterdir()), model="organ", hospital="ember")
        assert found.receipt.model.name == candidate
    kept = scans.parent / "kept"
    one = ("segment", next(scans.iterdir()), "-H", "ember", "-m", "organ", "-o", kept)
    assert locum(*one).returncode == 0
    assert "no longer" not in locum(*one).stdout
    back = locum("rollback", *where, "-r", "worse")
    assert back.returncode == 0, back.stderr
    # What the version made that was taken back is named, and not passed for done.
    left = locum(*one)
    assert left.returncode == 1
    assert "there already  by a version that no longer serves" in left.stdout
    said = f"1 of these masks is of {candidate}, which does not serve ember any more: --again sends"
    assert said in left.stdout
    assert locum(*one, "--again").returncode == 0
    assert locum(*one).returncode == 0
    told = locum("history", *where).stdout.splitlines()
    assert [line.split()[3] for line in told[:3]] == ["organ@1", candidate, "organ@1"]
    assert "now: organ@1 (assigned)" in told
    nothing = locum("rollback", "--hospital", "ember", "--model", "tumour", "-r", "x")
    assert (nothing.returncode, nothing.stdout) == (1, "")
    assert nothing.stderr.startswith("locum: ")


def test_hospital_joins_with_masks_beside_its_scans(served: Served, command: Run, tmp_path: Path) -> None:
    for name, (scan, mask) in drawn_scans(3).items():
        (tmp_path / name).write_bytes(scan)
        (tmp_path / name.replace(".nii.gz", "-mask.nii.gz")).write_bytes(mask)
    options = ("--option", "epochs=1", "--option", "batch_size=16")
    joined = command("join", tmp_path, "-H", "dune", "-m", "tumour", *options, "--follow", url=served.url)
    assert joined.returncode == 0, joined.stdout + joined.stderr
    assert "3 scans, 3 masks" in joined.stdout
    assert "candidate tumour.at-dune@1 " in joined.stdout


def test_exit_codes_say_what_went_wrong(
    served: Served, command: Run, api: Api, start: Callable[..., Api], scans: Path
) -> None:
    scan = next(scans.iterdir())
    guarded = start(api.settings.store, auth="keys")
    cases: list[tuple[int, str, tuple[object, ...], str]] = [
        (1, "no-such-model", ("segment", scan, "-m", "no-such-model"), served.url),
        (2, "/nowhere: expected a file", ("segment", "/nowhere"), served.url),
        (2, "expected the service's address", ("status",), "ftp://x"),
        (
            3,
            "http://127.0.0.1:1: expected Locum's service",
            ("history", "-H", "dune", "-m", "organ"),
            "http://127.0.0.1:1",
        ),
        (4, "set LOCUM_KEY, or use `locum login`", ("status", "0" * 32), str(guarded.client.base_url)),
    ]
    for code, words, arguments, url in cases:
        ended = command(*arguments, url=url)
        assert ended.returncode == code, (arguments, ended.stderr)
        assert ended.stderr.startswith("locum: ")
        assert words in ended.stderr
        assert "Traceback" not in ended.stderr
    assert command("segment", "--no-such-option", scan).returncode == 2


def test_login_keeps_a_key_for_its_service_alone(
    command: Run, api: Api, start: Callable[..., Api], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    guarded = start(api.settings.store, auth="keys")
    with guarded.context.database.write() as session:
        _, key = keys.create(session, "test", "operator", None)
    url = str(guarded.client.base_url).rstrip("/")
    home = {"XDG_CONFIG_HOME": str(tmp_path)}
    refused = command("login", url, stdin="locum_wrong\n", **home)
    assert refused.returncode == 4
    file = tmp_path / "locum/credentials.json"
    assert not file.exists()
    kept = command("login", url, stdin=f"{key}\n", **home)
    assert kept.returncode == 0, kept.stderr
    assert key not in kept.stdout + kept.stderr
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    shown = command("status", **home)
    assert f"{url}: " in shown.stdout
    assert "you are key:test" in shown.stdout
    # The other service receives no key of this one: it knows none, and would answer 401.
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    assert Connection.find(url).key == key
    assert Connection.find(str(api.client.base_url)).key is None
    file.chmod(0o644)
    exposed = command("status", **home)
    assert (exposed.returncode, "expected mode 0600, found 0644" in exposed.stderr) == (2, True)
    file.chmod(0o600)
    assert command("login", "--forget", **home).returncode == 0
    assert not file.exists()


def test_help_has_groups_examples_and_exit_codes_and_imports_little(command: Run) -> None:
    shown = command("--help")
    for words in ("On this machine", "Decide what serves a hospital", "locum adapt", "Exit codes"):
        assert words in shown.stdout
    assert command("--version").stdout == f"locum {version('locum')}\n"
    probe = (
        "import sys\nsys.argv = ['locum', '--help']\nfrom locum.commands import main\n"
        "try: main()\nexcept SystemExit: print('MODULES', *sys.modules)"
    )
    listed = subprocess.run([sys.executable, "-c", probe], capture_output=True, text=True, check=True)
    loaded = set(listed.stdout.rpartition("MODULES")[2].split())
    slow: set[Any] = {"httpx", "numpy", "nibabel", "pydantic", "torch", "service", "training", "model_store"}
    assert not slow & loaded
    assert "typer" in loaded


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("serve", "--state-dir"),
        ("train", "--method"),
        ("plan", "--budget"),
        ("compare", "--methods"),
        ("site", "--policy"),
        ("store", "withdraw"),
        ("demo", "--once"),
        ("doctor", "--json"),
        ("site check", "--json"),
        ("federation", "roster"),
        ("store import", "nnunet"),
    ],
)
def test_rooms_have_their_own_help(command: Run, name: str, words: str) -> None:
    shown = command(*name.split(), "--help")
    assert shown.returncode == 0, shown.stderr
    assert f"Usage: locum {name} " in shown.stdout
    assert words in shown.stdout
