"""`python -m model_store`, run as an operator runs it; `test_exchange` starts it by its command."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from benchmarks.harness import forked
from model_store.manifest import Lineage, ModelManifest, NetworkSpec
from model_store.store import Store
from model_store.task import Task
from tests.helpers.model_store.graphs import endless_graph, graph_of, plant


@pytest.fixture
def root(tmp_path: Path) -> Path:
    store = Store(tmp_path / "store")
    for content in (b"1", b"2"):
        store.publish(
            ModelManifest(
                name="brain",
                task=Task(name="t", labels={"a": (1,)}, size=(32, 32)),
                network=NetworkSpec(name="unet", arguments={}),
                lineage=Lineage(method="fedavg", run="r", sites=("A",), rounds=1, seed=0),
            ),
            {"weights.safetensors": content, "graph.onnx": graph_of(content.decode())},
        )
    return store.root


def run(root: Path, *arguments: str, columns: int = 200) -> tuple[int, str]:
    environment = {**os.environ, "COLUMNS": str(columns)}
    done = forked.run("model_store", *arguments, "--store", root, environment=environment)
    return done.returncode, done.stdout + done.stderr


def test_list_show_withdraw_verify_and_prune_succeed_in_turn(root: Path) -> None:
    code, said = run(root, "list")
    assert code == 0
    assert "brain@1" in said
    assert "brain@2" in said
    code, said = run(root, "show", "brain@2")
    assert '"kind": "model"' in said
    code, said = run(root, "withdraw", "brain@2", "--actor", "ada", "--reason", "bad labels")
    assert (code, "nothing descends" in said) == (0, True)
    assert "withdrawn" in run(root, "list")[1]
    assert run(root, "verify")[0] == 0
    assert "2 deleted" in run(root, "prune")[1]


def test_failing_command_prints_the_reason_and_exits_non_zero(root: Path) -> None:
    code, said = run(root, "show", "heart")
    assert (code, "Traceback" in said) == (2, False)
    assert "'heart' is not in the store; names: brain" in said
    graph = root / "brain" / "1" / "graph.onnx"
    graph.unlink()
    code, said = run(root, "verify")
    assert code == 1
    assert "brain@1: graph.onnx: expected 3 bytes, found no file" in said


def test_list_in_a_narrow_terminal_keeps_whole_references(root: Path) -> None:
    Store(root).withdraw("brain@1", actor="ada", reason="bad labels")
    lines = run(root, "list", columns=20)[1].splitlines()
    digests = [version.artefact.digest[7:19] for version in Store(root).versions.of("brain")]
    assert [line.split()[0] for line in lines[1:]] == ["brain@1", "brain@2"]
    assert [digest in line for digest, line in zip(digests, lines[1:], strict=True)] == [True, True]
    assert lines[1].endswith("withdrawn")


def test_verify_of_an_absent_store_is_rejected(root: Path) -> None:
    code, said = run(root.parent / "stor", "verify")
    assert code == 2
    assert "stor: expected a store's folder, found none" in said
    assert run(root, "verify")[0] == 0


def test_withdraw_by_name_alone_prints_the_withdrawn_version(root: Path) -> None:
    said = run(root, "withdraw", "brain", "--actor", "ada", "--reason", "bad labels")[1]
    assert said.startswith("withdrawn brain@2;")


def test_operator_text_with_brackets_is_not_rendered_as_markup(root: Path) -> None:
    code, said = run(root, "show", "brain[/b]")
    assert (code, "Traceback" in said) == (2, False)
    assert "'brain[/b]': expected name, name@3" in said
    run(root, "withdraw", "brain@1", "--actor", "ada", "--reason", "[red] in [/tmp]")
    assert "[red] in [/tmp]" in run(root, "show", "brain@1")[1]
    assert "[red] in [/tmp]" in run(root, "verify", "brain@1")[1]


def test_verify_names_a_refused_graph_and_takes_further_operators(tmp_path: Path) -> None:
    manifest = ModelManifest(
        name="loop",
        task=Task(name="t", labels={"a": (1,)}, size=(32, 32)),
        network=NetworkSpec(name="unet", arguments={}),
        lineage=Lineage(method="fedavg", run="r", sites=("A",), rounds=1, seed=0),
    )
    plant(tmp_path, manifest, {"weights.safetensors": b"w", "graph.onnx": endless_graph()})
    code, said = run(tmp_path, "verify")
    assert (code, "refused  loop@1: graph.onnx: " in said, "found Loop" in said) == (1, True, True), said
    assert run(tmp_path, "verify", "--graph-operators", "Loop")[0] == 0
    code, said = run(tmp_path, "verify", "--graph-operators", "EPContext")
    assert (code, "cannot be allowed" in said) == (2, True)
