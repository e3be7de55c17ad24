"""The three distributions, built and installed without the repository."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import site
import subprocess
import sys
import tomllib
import venv
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import nibabel as nib
import numpy as np
import psutil
import pytest
from PIL import Image

from locum.demo.body import SHAPE
from locum.demo.service_process import free_port
from model_store.scan import decode
from tests.helpers.training.nnunet_folders import make_nnunet_folder
from tests.helpers.waiting import wait_for
from training.phantom.federation import write_federation

ROOT = Path(__file__).parents[3]
WHOLE = tomllib.loads((ROOT / "pyproject.toml").read_text())
CLIENT = tomllib.loads((ROOT / "locum/pyproject.toml").read_text())
SERVICE = tomllib.loads((ROOT / "service/pyproject.toml").read_text())
ROOMS = ("model_store", "personalization", "training", "service", "locum")
# The distributions, by the folder that has each `pyproject.toml`.
FOLDERS = (".", "service", "locum")
# What locum-serve does not need.
TRAINS = ("torch", "monai", "safetensors", "scikit-learn", "matplotlib")
# What packages have beside modules, and need.
DATA = (
    ".html",
    ".css",
    ".yaml",
    ".mako",
    ".typed",
    ".js",
    ".json",
    ".wasm",
    ".svg",
    ".png",
    ".woff2",
    ".map",
    ".safetensors",
    ".onnx",
    ".sig",
    ".pem",
)


_BUILD = "import sys; from setuptools import build_meta; build_meta.build_wheel(sys.argv[1])"


def wheel_of(source: Path, out: Path) -> Path:
    """Build as pip does, with the date of a commit, as `tools/build-wheels` does."""
    subprocess.run(
        [sys.executable, "-P", "-c", _BUILD, str(out)],
        cwd=source,
        env={**os.environ, "SOURCE_DATE_EPOCH": "1780000000"},
        check=True,
        capture_output=True,
        text=True,
    )
    (made,) = out.glob("*.whl")
    return made


def copied(to: Path) -> Path:
    """Write the rooms with what builds read, with the time of now. Returns `to`."""
    for name in ROOMS:
        ignored = shutil.ignore_patterns("__pycache__", "*.pyc", "build", "*.egg-info")
        shutil.copytree(ROOT / name, to / name, ignore=ignored, copy_function=shutil.copyfile)
    for name in ("pyproject.toml", "README.md"):
        shutil.copyfile(ROOT / name, to / name)
    return to


@pytest.fixture(scope="module")
def wheels(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The wheel of each distribution, by its folder in the repository."""
    folder = tmp_path_factory.mktemp("wheels")
    source = copied(folder / "source")
    return {each: wheel_of(source / each, folder / f"wheel-{number}") for number, each in enumerate(FOLDERS)}


@pytest.fixture(scope="module")
def whole(wheels: dict[str, Path]) -> Path:
    return wheels["."]


def names_in(wheel: Path) -> set[str]:
    with zipfile.ZipFile(wheel) as archive:
        return {name for name in archive.namelist() if ".dist-info/" not in name}


def test_builds_in_another_folder_at_another_time_have_the_same_bytes(
    wheels: dict[str, Path], tmp_path: Path
) -> None:
    source = copied(tmp_path / "elsewhere")
    for path in source.rglob("*.py"):
        os.utime(path, (1.6e9, 1.6e9))
    # The order is another, and each leaves its folder `build` to the next.
    for number, each in enumerate(reversed(FOLDERS)):
        again = wheel_of(source / each, tmp_path / str(number))
        assert names_in(again) == names_in(wheels[each])
        assert again.read_bytes() == wheels[each].read_bytes(), again.name


def test_wheel_has_every_file_of_every_room(whole: Path) -> None:
    found = names_in(whole)
    there = {
        path.relative_to(ROOT).as_posix()
        for room in ROOMS
        for path in (ROOT / room).rglob("*")
        if path.is_file() and not {"__pycache__", "build"} & {*path.parts} and path.suffix in (".py", *DATA)
    }
    assert there - found == set()
    assert {"locum/demo/__main__.py", "service/static/index.html", "service/worker/__main__.py"} <= found
    assert {name.partition("/")[0] for name in found} == set(ROOMS)


class Installed:
    """An environment that has a wheel, and the packages of this environment but for Locum.

    Commands run in `folder`, in which a person has folders with the names of Locum's packages and of modules
    that libraries ask for.
    """

    def __init__(self, wheel: Path, folder: Path, absent: tuple[str, ...] = ()) -> None:
        """Install. Packages of the names `absent` are not found."""
        environment = folder / "environment"
        venv.create(environment, with_pip=False)
        (packages,) = environment.glob("lib/python*/site-packages")
        # The installation of Locum here is found by a .pth file, and these count only in the folder of an
        # environment.
        (packages / "dependencies.pth").write_text("\n".join(site.getsitepackages()))
        # A name that stands for None cannot be imported.
        hidden = f"import sys\nsys.modules.update(dict.fromkeys({absent!r}))\n"
        (packages / "sitecustomize.py").write_text(hidden)
        pip = (sys.executable, "-m", "pip", "--python", str(environment / "bin/python"), "install")
        offline = ("--no-deps", "--no-index", "--no-compile", "--quiet", "--disable-pip-version-check")
        subprocess.run([*pip, *offline, str(wheel)], check=True)
        self.folder = folder / "work"
        self.url = f"http://127.0.0.1:{free_port()}"
        for name in (*ROOMS, "celery", "dl"):
            (self.folder / name).mkdir(parents=True)
            (self.folder / name / "__init__.py").write_text(f"raise SystemExit('{name} of the folder')\n")
        self._variables = {
            **{
                name: value for name, value in os.environ.items() if not name.startswith(("LOCUM_", "PYTHON"))
            },
            "PATH": os.pathsep.join((str(environment / "bin"), os.environ["PATH"])),
            "LOCUM_DEVICE": "cpu",
            "LOCUM_PORT": self.url.rpartition(":")[2],
            "LOCUM_URL": self.url,
        }

    def start(self, command: str) -> subprocess.Popen[str]:
        """Start a command as a shell does."""
        return subprocess.Popen(
            shlex.split(command, comments=True),
            cwd=self.folder,
            env=self._variables,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def run(self, command: str) -> str:
        """Run a command to its end, and return what it printed."""
        with self.start(command) as process:
            said = process.communicate()[0]
        assert process.returncode == 0, f"{command}:\n{said}"
        return said

    @contextmanager
    def running(self, command: str) -> Iterator[None]:
        """Keep a service running."""
        with self.start(command) as process:
            try:
                wait_for(self._ready, psutil.Process(process.pid), patience_s=200)
                yield
            finally:
                process.terminate()

    def _ready(self) -> bool:
        try:
            return httpx.get(f"{self.url}/health/ready").is_success
        except httpx.TransportError:
            return False


@pytest.fixture(scope="module")
def installed(whole: Path, tmp_path_factory: pytest.TempPathFactory) -> Installed:
    return Installed(whole, tmp_path_factory.mktemp("installed"))


@pytest.fixture(scope="module")
def serving(wheels: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Installed:
    """What locum-serve brings, without torch and what else it does not need."""
    absent = (*TRAINS, "sklearn")
    return Installed(wheels["service"], tmp_path_factory.mktemp("serving"), absent)


def ways_in() -> dict[str, list[str]]:
    """The commands of README's three ways in, by the words in bold before them."""
    _, _, section = (ROOT / "README.md").read_text().partition("## Three ways in")
    found = re.split(r"\*\*([^*]+)\*\*", section.partition("\n## ")[0])[1:]
    return {
        name: re.findall(r"^    (locum .+)$", text, re.MULTILINE)
        for name, text in zip(found[::2], found[1::2], strict=True)
    }


def test_readme_has_three_ways_in_of_at_most_three_commands() -> None:
    ways = ways_in()
    assert list(ways) == [
        "Serve the model that you have",
        "See it work",
        "Train on your hospitals' folders",
    ]
    assert all(1 <= len(commands) <= 3 for commands in ways.values())


def test_installed_wheel_serves_the_model_that_one_has(installed: Installed) -> None:
    take_up, serve, segment = ways_in()["Serve the model that you have"]
    (folder,) = (word for word in shlex.split(take_up) if "nnUNet_results" in word)
    (installed.folder / folder).parent.mkdir(parents=True)
    make_nnunet_folder(installed.folder / folder)
    voxels = np.random.default_rng(0).normal(100, 20, (24, 24, 12)).astype(np.float32)
    nib.save(nib.Nifti1Image(voxels, np.diag([1.5, 1.0, 3.0, 1.0])), installed.folder / "scan.nii.gz")

    installed.run(take_up)
    with installed.running(serve):
        installed.run(segment)

    (mask,) = (installed.folder / "masks").glob("*.nii.gz")
    assert nib.load(mask).shape == voxels.shape


def test_wheel_that_serves_shows_a_scan_before_and_after_it_is_fitted(serving: Installed) -> None:
    (demo,) = ways_in()["See it work"]
    port = serving.url.rpartition(":")[2]

    said = serving.run(f"{demo} --once --folder shown --port {port}")

    pattern = r"^(member|before|fitted|undone)\S*.*: Dice liver ([01]\.\d\d), lesion ([01]\.\d\d)$"
    scores = {name: (float(liver), float(lesion)) for name, liver, lesion in re.findall(pattern, said, re.M)}
    assert min(scores["member"]) > 0.8
    far = {name: float(shift) for name, shift in re.findall(r"^(\w+): shift ([\d.]+)", said, re.M)}
    assert far["aster"] < 3 < 10 < far["heath"]
    assert len(re.findall(r"where 1 is usual; it looks inverted$", said, re.M)) == 1
    # The inverted scan is beyond the model; the lens of it brings it back, and is kept nowhere.
    assert scores["before"][0] < 0.5
    assert scores["fitted"][0] > scores["before"][0] + 0.3
    assert scores["undone"] == scores["before"]
    pictures, masks = (
        [serving.folder / name for name in re.findall(rf"^  {what} +(\S+)$", said, re.M)]
        for what in ("picture", "mask")
    )
    assert len(pictures) == len(masks) == 4
    for picture in pictures:
        Image.open(picture).verify()
    before, fitted, undone = (mask.read_bytes() for mask in masks[1:])
    assert before == undone != fitted
    assert decode(fitted).voxels.shape[:3] == SHAPE
    assert re.search(r"http://127\.0\.0\.1:\d+/#/look\?hospital=heath&model=abdomen&\S+scan=heath-1", said)


def test_command_of_image_and_chart_serves_the_carried_store_alone(serving: Installed) -> None:
    with serving.running("locum demo --serve --folder alone"):
        (model,) = httpx.get(f"{serving.url}/models").raise_for_status().json()["models"]

    assert model["name"] == "abdomen"
    # Jobs publish into a copy, of which the carried store knows nothing.
    assert (serving.folder / "alone/store/abdomen/1/manifest.json").exists()


def test_wheel_that_serves_says_what_training_needs(serving: Installed) -> None:
    with serving.start("locum demo --train") as process:
        said = process.communicate()[0]

    assert process.returncode == 1
    assert re.fullmatch(r"--train needs torch, .*`pip install [^`]+`.*\n", said)


def test_installed_wheel_trains_on_folders_of_hospitals(installed: Installed) -> None:
    train, compare = ways_in()["Train on your hospitals' folders"]
    write_federation(installed.folder / "federation", ("aster", "birch"), patients_per_site=3, size=32)

    installed.run(f"{train} --rounds 1")

    assert [*installed.folder.glob("store/*/1/manifest.json")]
    installed.run(f"{compare} --methods fedavg,fedbn --rounds 1 --seeds 1")
    assert [*installed.folder.rglob("compare.html")]


def test_client_alone_has_the_whole_package_and_few_needs(wheels: dict[str, Path]) -> None:
    wheel = wheels["locum"]
    found = names_in(wheel)
    folder = ROOT / "locum"
    modules = (*folder.glob("*.py"), *(folder / "commands").rglob("*.py"), folder / "py.typed")
    assert found == {path.relative_to(ROOT).as_posix() for path in modules}
    mine, all_of_them = CLIENT["project"], WHOLE["project"]
    assert mine["version"] == all_of_them["version"]
    assert mine["scripts"] == all_of_them["scripts"]
    # The same ranges, and nothing that the whole does not need.
    assert set(mine["dependencies"]) <= set(all_of_them["dependencies"])
    names = {re.split(r"\W", each)[0] for each in mine["dependencies"]}
    assert names == {"httpx", "numpy", "nibabel", "typer", "rich"}
    # A name that stands for None cannot be imported: as where it is not installed.
    absent = (
        *(room for room in ROOMS if room != "locum"),
        "torch",
        "monai",
        "onnxruntime",
        "pydantic",
        "scipy",
    )
    program = (
        f"import sys\nsys.path.insert(0, {str(wheel)!r})\nsys.modules.update(dict.fromkeys({absent!r}))\n"
        "import locum\nfor name in locum.__all__: getattr(locum, name)\n"
        "with locum.Client('http://127.0.0.1:1') as client: print(client.connection.url, locum.__file__)"
    )
    run = subprocess.run([sys.executable, "-P", "-c", program], capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    assert run.stdout.split() == ["http://127.0.0.1:1", f"{wheel}/locum/__init__.py"]


def test_service_alone_has_what_serves_and_needs_nothing_that_trains(wheels: dict[str, Path]) -> None:
    found = names_in(wheels["service"])
    rooms = {name.partition("/")[0] for name in found}
    assert rooms == {"model_store", "personalization", "service", "locum"}
    assert {"service/app.py", "service/adaptation/card/templates/card.html", "locum/client.py"} <= found
    assert {"locum/demo/first_mask.py", "locum/demo/store/signed-by.pub.pem"} <= found
    of_science = {name for name in found if name.startswith("personalization/")}
    assert all(name.count("/") == 1 or "/options/" in name for name in of_science)
    assert not [name for name in found if name.startswith("service/worker/")]
    mine, all_of_them = SERVICE["project"], WHOLE["project"]
    assert mine["version"] == all_of_them["version"]
    assert mine["scripts"] == all_of_them["scripts"]
    # The same ranges, but for the one library of which GPUs need another build.
    assert set(mine["dependencies"]) - {"onnxruntime>=1.27"} <= set(all_of_them["dependencies"])
    names = {re.split(r"[^\w-]", each)[0] for each in mine["dependencies"]}
    absent = {re.split(r"[^\w-]", each)[0] for each in all_of_them["dependencies"]} - names
    assert absent == {"onnxruntime-gpu", *TRAINS}
    for extra in ("postgresql", "s3"):
        assert mine["optional-dependencies"][extra] == all_of_them["optional-dependencies"][extra]
