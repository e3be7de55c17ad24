"""Write docs/results/systems.md: each system of the four papers' tables, how it is run, tested and measured.

A system is a line of a paper's table: an arm for which the paper prints a figure. Its command follows from
what the arm runs, its cells from the recorded rows, and its test is named here.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

from benchmarks.accuracy.papers import fedbicross, fedins, fedoap, iop_fl
from benchmarks.accuracy.papers.report import PaperTables
from benchmarks.accuracy.summary.settings import recorded
from benchmarks.harness.cells import in_order
from benchmarks.harness.experiment import RESULTS
from benchmarks.harness.tables import table, write_text
from benchmarks.registry import find

PATH = RESULTS / "systems.md"
PAPERS = ("paper-iop-fl", "paper-fedins", "paper-fedoap", "paper-fedbicross")
_METHODS, _TIME = "tests/unit/training/methods", "tests/unit/personalization/test_time"
_FEDINS = "tests/unit/personalization/fedins"
_IOP_FL = "tests/integration/benchmarks/accuracy/test_paper_iop_fl.py"
_CODE = f"{_METHODS}/test_against_public_code.py"
# What runs -> the test that compares it with something independent: a plain loop, or the public code's rule.
TESTS: Mapping[str, str] = {
    "local-only": f"{_METHODS}/test_reference_arms.py::test_local_only_is_a_plain_loop_at_every_site",
    "fedavg": f"{_METHODS}/test_fedavg.py::test_one_round_equals_the_naive_computation",
    "fedprox": f"{_METHODS}/test_fedprox.py::test_a_round_is_that_of_a_plain_loop",
    "fedbn": f"{_METHODS}/test_personal_parts.py::test_only_what_is_shared_travels_and_only_the_rest_stays",
    "fedper": f"{_METHODS}/test_personal_parts.py::"
    "test_a_site_goes_on_with_its_own_part_and_the_others_average",
    "fedrep": f"{_METHODS}/test_personal_parts.py::test_fedrep_trains_the_head_alone_and_then_the_body_alone",
    "pfedme": f"{_METHODS}/test_full_personal_models.py::test_pfedme_is_a_plain_loop",
    "scaffold": f"{_METHODS}/test_scaffold.py::test_rounds_are_those_of_a_plain_loop",
    "moon": f"{_CODE}::test_moon",
    "feddc": f"{_CODE}::test_feddc_reading_code",
    "feddg": f"{_METHODS}/test_feddg.py::test_an_episode_s_gradient_is_that_of_the_update_rule",
    "fedavgm": f"{_CODE}::test_fedavgm",
    "fedadagrad": f"{_CODE}::test_adaptive_servers",
    "feddp": f"{_METHODS}/test_feddp.py::test_calibration_is_that_of_the_authors_code",
    "iop-fl": f"{_METHODS}/test_iop_fl.py::test_the_personal_model_is_the_moving_average_of_the_local_ones",
    "fedins": f"{_FEDINS}/test_pool.py::test_fedins_loss_matches_hand_computed_values",
    "prompt": f"{_FEDINS}/test_prompts.py::test_prompts_are_those_of_a_vit_written_out_for_each_image",
    "fedoap": f"{_METHODS}/test_fedoap.py::test_a_round_is_a_plain_loop_that_attends_to_the_others_tokens",
    "fedavg-1": "tests/integration/benchmarks/accuracy/test_papers_of_classification.py::"
    "test_fedavg_in_one_round_weighs_clients_by_their_images",
    "dafl": f"{_CODE}::test_dafl_generator",
    "dense": f"{_CODE}::test_dense_distillation",
    "fedisca": f"{_CODE}::test_fedisca_distillation",
    "co-boosting": f"{_CODE}::test_co_boosting",
    "fedbicross": f"{_METHODS}/test_fedbicross.py::test_stage_3_is_the_plain_loop",
    # Outside: presets, and what is computed from the members' models.
    "tent": f"{_TIME}/test_tent.py::test_it_is_entropy_minimisation_of_the_global_models_batch_norm",
    "ttt": f"{_TIME}/test_ttt.py::test_steps_are_those_of_the_authors_loop_over_images",
    "paper": f"{_TIME}/test_losses.py::test_consistency_by_hand_with_a_gradient_through_both_views",
    "one per model": f"{_IOP_FL}::test_one_coefficient_per_model_is_one_parameter_of_all_layers",
    "members": f"{_IOP_FL}::test_average_and_ensemble_are_those_of_a_loop_over_members",
    "by label": f"{_TIME}/test_official.py::test_the_official_preset_is_the_reference_loop_step_by_step",
}


@dataclass(frozen=True)
class System:
    """A line of a paper's table. `runs` is its entry in `TESTS`; `command` is how it is run."""

    paper: str
    part: str
    arm: str
    runs: str
    command: str


def _trained(method: str, fields: Mapping[str, Any]) -> str:
    """The command of a method, and the fields that it is given."""
    given = "".join(f", `{name}: {str(value).lower()}`" for name, value in fields.items())
    return f"`training.federate --method {method}`{given}"


def _measured(paper: str, arm: str) -> str:
    """The command of what only the benchmark runs."""
    return f"`benchmarks run {paper} --only {shlex.quote(f'arm={arm}')}`"


def _outside(arm: str) -> tuple[str, str]:
    """What an outside arm of IOP-FL's runs, and its command."""
    preset, _ = iop_fl.OUTSIDE[arm]
    if arm in iop_fl.FEDERATED:
        name, fields = iop_fl.FEDERATED[arm]
        after = f", then preset `{preset}`" if preset else ""
        return preset or name, f"{_trained(name, fields)}{after}"
    if preset is not None:
        return preset, f"`training.federate --method iop-fl`, then preset `{preset}`"
    if arm == "FedAvg":
        return "fedavg", _trained("iop-fl", {}) + ", its global model"
    runs = {iop_fl.LABELLED: "by label", iop_fl.PER_MODEL: "one per model"}.get(arm, "members")
    return runs, _measured("paper-iop-fl", arm)


def _one_shot(arm: str) -> tuple[str, str]:
    """What an arm of FedBiCross's runs, and its command."""
    if arm in fedbicross.ONE_STUDENT:
        name = fedbicross.ONE_STUDENT[arm]
        return name, _trained(name, {})
    if arm == fedbicross.AVERAGE:
        return "fedavg-1", _measured("paper-fedbicross", arm)
    own = next(each for arms in fedbicross.ARMS.values() for each in arms if each.name == arm)
    served = ", its clusters' models" if arm == fedbicross.NO_STAGE_3 else ""
    return "fedbicross", _trained("fedbicross", own.fields) + served


def _of(paper: str, part: str, arm: Any) -> tuple[str, str]:
    if paper == "paper-fedbicross":
        return _one_shot(arm)
    if part == "outside":
        return _outside(arm)
    arms = {"paper-fedins": fedins.ARMS, "paper-fedoap": fedoap.ARMS}.get(paper, {"inside": iop_fl.INSIDE})
    own = next(each for each in arms[part] if each.name == arm)
    if own.fields.get("adapter") == "prompt":
        # A control: `training.federate` refuses to publish it.
        return "prompt", _measured(paper, arm)
    return own.method, _trained(own.method, own.fields)


@cache
def systems() -> Sequence[System]:
    """Every arm that a paper prints a figure for, in the order of the tables."""
    return tuple(
        System(paper, part, arm, *_of(paper, part, arm))
        for paper in PAPERS
        for part, arms in _tables(paper).items()
        for arm, printed in arms.items()
        if printed
    )


def _tables(paper: str) -> Mapping[str, Mapping[str, Mapping[str, float]]]:
    experiment = find(paper)
    assert issubclass(experiment, PaperTables)
    found: Mapping[str, Mapping[str, Mapping[str, float]]] = experiment.published
    return found


def _cells(system: System) -> Iterator[str]:
    """How many of a system's cells have a row, by table."""
    for each in find(system.paper).tables:
        opened = find(system.paper).of_table(each)
        mine = [c for c in opened.cells() if (c["part"], c["arm"]) == (system.part, system.arm)]
        if not mine:
            continue
        found = in_order(recorded(each.name), mine)
        yield f"[{len(found)} of {len(mine)}]({each.name}.md)"


def sections() -> list[str]:
    """The page, from the arms, the tests' names and the recorded rows."""
    found = [
        "# The systems of the four papers",
        "```bash\npython -m benchmarks summary\n```",
        "Every line of the papers' tables, which is an arm for which a paper prints a figure: how it is run "
        "here, the test that compares it with something independent, and how many of its cells are computed, "
        "of all seeds, sets and sites of a profile. `training.federate` is `python -m training.federate "
        "--data DIR --out STORE`, with a method's fields in the section `method` of `--config FILE` "
        "([how](../how-to/train.md)); a preset is an option of an adaptation ([how](../how-to/adapt.md)); "
        "`benchmarks` is `python -m benchmarks`.",
    ]
    for paper in PAPERS:
        body = [
            [
                f"{system.arm}, {system.part}",
                system.command,
                f"`{TESTS[system.runs]}`",
                "; ".join(_cells(system)),
            ]
            for system in systems()
            if system.paper == paper
        ]
        found += [f"## {find(paper).title}", table(["system, table", "run by", "test", "cells"], body)]
    return found


def write() -> None:
    """Write the page."""
    write_text(PATH, "\n\n".join(sections()) + "\n")
