"""What `make demo` shows: each step of the phantom federation, its service and the hospital from outside."""

from __future__ import annotations

import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import typer
from rich.console import Console
from rich.table import Table

from locum import Client
from locum.demo.phantom_scans import NEW_PATIENT, PhantomScan, cohort_of
from locum.demo.service_process import check_port, end_by_signals, running_service
from locum.demo.visit import ANY_ORGAN, MODEL, Visit, answered_by
from training.phantom import TASK

# Its scanner is brighter and noisier than the members', which batch norm's statistics can undo.
OUTSIDE = "heath"
# The phantom's fourth folder has other contrasts between tissues, which they cannot. It takes no part.
LEFT_OUT = "dune"
MEMBERS = ("aster", "birch", "cedar")
# A bad cohort shows in few scans; with fewer, the gate compares no halves.
BAD_SCANS = 4
# Patients with masks: enough to train on most of them and validate on the others.
MASKED_SCANS = 6
# Patients that every model is measured on: one alone says little.
NEW_PATIENTS = 6
# Patients with masks of an acceptance: below ten there is no bound.
ACCEPTED_SCANS = 12
ASKED = {"least_dice": 0.6, "most_missed": 0.3}
# FedOAP learns the phantom in fewer rounds than IOP-FL, and a hospital joins it in few epochs.
ANY_ORGAN_ROUNDS = 4
JOINING_EPOCHS = 10

# Mean Dice of the new patients, by the model that segmented them.
Scores = dict[str, float]

console = Console()


def federate(store: Path, method: str, name: str, rounds: int | None, *options: str) -> list[str]:
    """Return the command that trains the members on this machine, as a person would type it."""
    return [
        *(sys.executable, "-m", "training.federate"),
        *("--method", method, "--name", name, "--out", str(store), "--leave-out", LEFT_OUT),
        *("--consent", "all", "--resume", *options),
        *(["--rounds", str(rounds)] if rounds else []),
    ]


def train(folder: Path, rounds: int | None) -> Path:
    """Train both federations with `training.federate`; return the store."""
    store = folder / "store"
    any_organ_rounds = min(rounds or ANY_ORGAN_ROUNDS, ANY_ORGAN_ROUNDS)
    for command in (
        federate(store, "iop-fl", MODEL, rounds, "--playbook"),
        federate(store, "fedoap", ANY_ORGAN, any_organ_rounds),
    ):
        if subprocess.run(command, check=False).returncode:
            raise typer.Exit(1)
    return store


def segment_new_patients(client: Client, folder: Path) -> None:
    """Segment a new patient of a member, by its own model, and one from outside, by the global model."""
    for hospital in (MEMBERS[0], OUTSIDE):
        scan = PhantomScan.at(hospital)
        answer = client.segment(scan.volume, hospital=hospital, model=MODEL)
        overlay = client.render(scan.volume, "overlay", hospital=hospital, model=MODEL)
        files = {
            "scan": (folder / f"{hospital}-scan.nii.gz", scan.image),
            "mask": (folder / f"{hospital}-mask.nii.gz", answer.content),
            "overlay": (folder / f"{hospital}-overlay.png", overlay.content),
        }
        where = "in" if hospital in MEMBERS else "outside"
        served, score = answered_by(answer.receipt), scan.dice_of(answer.content)
        console.print(f"{hospital}, {where} the federation, is served [bold]{served}[/]: Dice {score:.3f}")
        for what, (path, content) in files.items():
            path.write_bytes(content)
            console.print(f"  {what:<8} {path}", soft_wrap=True, highlight=False)


def join(visit: Visit) -> Scores:
    """Join with masks: the gate measures the candidate against them, and it is assigned."""
    scans = cohort_of(OUTSIDE, MASKED_SCANS, first=100)
    candidate = visit.fit("joined", scans, JOINING_EPOCHS, model=ANY_ORGAN, with_masks=True)
    before, after = visit.compare("joined", candidate, ANY_ORGAN)
    visit.assign(candidate, "its gate passed, and the pictures look right", ANY_ORGAN)
    visit.measure(f"{OUTSIDE} is served", model=ANY_ORGAN)
    return {
        f"{ANY_ORGAN}, zero-shot": before,
        f"{ANY_ORGAN}, joined with {MASKED_SCANS} masks": after,
    }


def adapt(visit: Visit, scans: int) -> Scores:
    """Adapt without masks, the more the farther the scans are; the gate passes the candidate."""
    candidate = visit.fit("adapted", cohort_of(OUTSIDE, scans))
    before, after = visit.compare("adapted", candidate)
    visit.assign(candidate, "the members gained by it in practice, and the pictures look right")
    visit.measure(f"{OUTSIDE} is now served", model=MODEL)
    return {
        f"{MODEL}, the global model": before,
        f"{MODEL}, adapted to {scans} scans without masks": after,
    }


def correct(visit: Visit) -> None:
    """A person corrects answers; a version that answered them unseen meanwhile is compared with both."""
    visit.shadow(f"{MODEL}@1", "is the adapted version worth keeping?")
    for change in visit.correct(MODEL):
        console.print(f"  {change}", highlight=False)
    visit.show_shadow(MODEL)


def accept(visit: Visit) -> None:
    """Score what serves on patients outside every training set, by thresholds that were written before."""
    asked = f"Dice of at least {ASKED['least_dice']}, at most {ASKED['most_missed']:.0%} without any hit"
    console.print(f"{ACCEPTED_SCANS} patients with true masks; asked before: {asked}", soft_wrap=True)
    scans = cohort_of(OUTSIDE, ACCEPTED_SCANS, first=NEW_PATIENT + NEW_PATIENTS)
    visit.accept(scans, {"labels": {next(iter(TASK.labels)): ASKED}})


def adapt_to_negatives(visit: Visit) -> Scores:
    """Adapt to scans that an export turned into negatives; the new patients' scans are not, and stay."""
    console.print(f"An export swapped black and white in {BAD_SCANS} scans, but not in the new patients'.")
    candidate = visit.fit("inverted", cohort_of(OUTSIDE, BAD_SCANS, how="negative"))
    inverted = replace(
        visit, patients=[PhantomScan.at(OUTSIDE, NEW_PATIENT + n, "negative") for n in range(NEW_PATIENTS)]
    )
    before = inverted.measure("new patients, inverted too:", model=MODEL, personalization="global")
    after = inverted.measure("through the lens:", model=candidate)
    visit.measure("new patients as they are:", model=candidate)
    return {
        f"{MODEL}, the global model, of inverted scans": before,
        f"{MODEL}, adapted to {BAD_SCANS} inverted scans, of inverted scans": after,
    }


def adapt_to_nothing(visit: Visit) -> Scores:
    """Adapt to scans of nothing, as a scanner gives that is tested; the gate rejects the candidate."""
    console.print(f"A technician sent {BAD_SCANS} test scans of an empty table.")
    candidate = visit.fit("refused", cohort_of(OUTSIDE, BAD_SCANS, how="noise"))
    visit.assign(candidate, "it is the newest")
    visit.measure(f"{OUTSIDE} is still served", model=MODEL)
    return {}


def adapt_to_one_scan(visit: Visit) -> Scores:
    """Adapt to each new patient's scan alone, for that one answer."""
    score = visit.measure("for this answer only:", model=MODEL, personalization="scan")
    return {f"{MODEL}, adapted to this one scan": score}


def show_scores(scores: Scores) -> None:
    """Show the new patients' Dice by every model."""
    table = Table(f"{NEW_PATIENTS} new patients, segmented by", "Dice", box=None, header_style="dim")
    for name, score in scores.items():
        table.add_row(name, f"{score:.3f}")
    console.print(table)


def run(folder: Path, port: int, rounds: int | None, scans: int, *, once: bool) -> None:
    """Train the phantom federation, serve it, and fit it to a hospital from outside."""
    end_by_signals()
    check_port(port)  # before training, which takes minutes
    folder.mkdir(parents=True, exist_ok=True)
    console.rule("1  three phantom hospitals train together")
    store = train(folder, rounds)
    with running_service(store, folder / "state", port) as http, Client(str(http.base_url)) as client:
        console.rule("2  the service segments new patients")
        for hospital in (*MEMBERS, OUTSIDE):
            client.register(hospital, hospital.capitalize(), hospital if hospital in MEMBERS else None)
        segment_new_patients(client, folder)
        patients = [PhantomScan.at(OUTSIDE, NEW_PATIENT + number) for number in range(NEW_PATIENTS)]
        visit = Visit(console, client, folder, patients)
        # Before all others: Adapt proposes a cohort that came after the last adaptation.
        page = visit.page_of_new_patients(MODEL)
        console.rule(f"3  {OUTSIDE}, from outside, joins with a few masks, and the gate passes it")
        scores = join(visit)
        console.rule(f"4  {OUTSIDE} adapts without masks, by how far its scans are from the members'")
        scores |= adapt(visit, scans)
        console.rule("5  a person corrects masks, while the federation's version answers unseen")
        correct(visit)
        console.rule("6  one person measures what serves by thresholds, and another decides")
        accept(visit)
        console.rule(f"7  {OUTSIDE} sends inverted scans, and a lens puts them right")
        scores |= adapt_to_negatives(visit)
        console.rule(f"8  {OUTSIDE} sends scans of nothing, and the gate rejects the candidate")
        scores |= adapt_to_nothing(visit)
        console.rule("9  one scan alone, and nothing is kept")
        scores |= adapt_to_one_scan(visit)
        console.rule("results")
        show_scores(scores)
        console.print(
            f"\nThe page shows a new patient of {OUTSIDE} with its true mask; press Segment there:\n"
            f"[bold]{page}[/]",
            soft_wrap=True,
        )
        if once:
            return
        console.print("The service's API is described at /docs. Ctrl-C stops it.")
        try:
            signal.pause()
        except KeyboardInterrupt:
            console.print("stopped")
