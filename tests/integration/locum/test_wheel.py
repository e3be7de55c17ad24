"""The three distributions, built and installed without the repository."""

from __future__ import annotations

import re
import shutil
import site
import subprocess
import sys
import tomllib
import venv
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
WHOLE = tomllib.loads((ROOT / "pyproject.toml").read_text())
CLIENT = tomllib.loads((ROOT / "locum/pyproject.toml").read_text())
SERVICE = tomllib.loads((ROOT / "service/pyproject.toml").read_text())
ROOMS = ("model_store", "personalization", "training", "service", "locum")
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


def wheel_of(source: Path, out: Path) -> Path:
    subprocess.run(
        [
            *(sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation"),
            *("--no-index", "--disable-pip-version-check", "--wheel-dir", str(out), str(source)),
        ],
        check=True,
        capture_output=True,
        text=True,
    )
    (made,) = out.glob("*.whl")
    return made


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("whole")
    ignored = shutil.ignore_patterns("__pycache__", "*.pyc")
    for name in ROOMS:
        shutil.copytree(ROOT / name, folder / "source" / name, ignore=ignored)
    for name in ("pyproject.toml", "README.md"):
        shutil.copy(ROOT / name, folder / "source" / name)
    return wheel_of(folder / "source", folder / "wheel")


def test_wheel_has_every_file_of_every_room(whole: Path) -> None:
    with zipfile.ZipFile(whole) as archive:
        found = {name for name in archive.namelist() if ".dist-info/" not in name}
    there = {
        path.relative_to(ROOT).as_posix()
        for room in ROOMS
        for path in (ROOT / room).rglob("*")
        if path.is_file() and "__pycache__" not in path.parts and path.suffix in (".py", *DATA)
    }
    assert there - found == set()
    assert {"locum/demo/__main__.py", "service/static/index.html", "service/worker/__main__.py"} <= found


def test_installed_wheel_starts_every_room_without_the_repository(whole: Path, tmp_path: Path) -> None:
    environment = tmp_path / "environment"
    venv.create(environment, with_pip=False)
    (packages,) = environment.glob("lib/python*/site-packages")
    # Its dependencies are those of this environment, without the installation of Locum here: that is found by
    # a .pth file, and these count only in the folder of an environment.
    (packages / "dependencies.pth").write_text("\n".join(site.getsitepackages()))
    with zipfile.ZipFile(whole) as archive:
        archive.extractall(packages)
    python = environment / "bin/python"
    program = "import locum, service; print(locum.__file__); from locum.commands import main; main()"
    for arguments, words in (
        (["--help"], "On this machine"),
        (["demo", "--help"], "--once"),
        (["serve", "--help"], "--state-dir"),
        (["train", "--help"], "--method"),
        (["store", "--help"], "withdraw"),
    ):
        run = subprocess.run(
            [python, "-P", "-c", program, *arguments],
            cwd=tmp_path,
            capture_output=True,
            text=True,
            check=False,
        )
        assert run.returncode == 0, run.stderr
        assert words in run.stdout
        if arguments == ["--help"]:
            assert run.stdout.startswith(str(packages))


def test_client_alone_has_the_whole_package_and_few_needs(tmp_path: Path) -> None:
    source = shutil.copytree(
        ROOT / "locum", tmp_path / "source", ignore=shutil.ignore_patterns("__pycache__")
    )
    wheel = wheel_of(source, tmp_path / "wheel")
    with zipfile.ZipFile(wheel) as archive:
        found = {name for name in archive.namelist() if ".dist-info/" not in name}
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


def test_service_alone_has_what_serves_and_needs_nothing_that_trains(tmp_path: Path) -> None:
    ignored = shutil.ignore_patterns("__pycache__", "*.pyc", "static")
    for name in ROOMS:
        shutil.copytree(ROOT / name, tmp_path / "source" / name, ignore=ignored)
    with zipfile.ZipFile(wheel_of(tmp_path / "source/service", tmp_path / "wheel")) as archive:
        found = {name for name in archive.namelist() if ".dist-info/" not in name}
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
    trains = {"torch", "monai", "safetensors", "scikit-learn", "matplotlib"}
    assert absent == {"onnxruntime-gpu", *trains}
    for extra in ("postgresql", "s3"):
        assert mine["optional-dependencies"][extra] == all_of_them["optional-dependencies"][extra]
