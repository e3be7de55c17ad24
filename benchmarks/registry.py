"""The experiments by name: a new one is a module with an `Experiment`, and a line here."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from typing import Any

from benchmarks.harness.experiment import Experiment, OptionError, unknown

# name -> module:class. Imported when needed: most import torch and half of Locum.
EXPERIMENTS: Mapping[str, str] = {
    "dose": "benchmarks.accuracy.dose.experiment:Dose",
    "lens": "benchmarks.accuracy.lens.experiment:LensExperiment",
    "field_of_view": "benchmarks.accuracy.field_of_view.experiment:FieldOfView",
    "review": "benchmarks.accuracy.review.experiment:Review",
    "volumes": "benchmarks.accuracy.volumes.experiment:Volumes",
    "picking": "benchmarks.accuracy.picking.experiment:Picking",
    "paper-iop-fl": "benchmarks.accuracy.papers.iop_fl:PaperIopFl",
    "paper-fedoap": "benchmarks.accuracy.papers.fedoap:PaperFedOap",
    "paper-fedbicross": "benchmarks.accuracy.papers.fedbicross:PaperFedBiCross",
    "paper-fedins": "benchmarks.accuracy.papers.fedins:PaperFedIns",
    "device_calls": "benchmarks.cost.device_calls:DeviceCalls",
    "round_cost": "benchmarks.cost.round:RoundCost",
    "method_cost": "benchmarks.cost.methods.experiment:MethodCost",
    "serving_cost": "benchmarks.cost.serving:ServingCost",
    "throughput": "benchmarks.cost.throughput:Throughput",
    "page_cost": "benchmarks.cost.page:PageCost",
    "quantised": "benchmarks.cost.quantised:Quantised",
    "dicom_cost": "benchmarks.cost.dicom:DicomCost",
    "scale": "benchmarks.cost.scale:Scale",
    "security_cost": "benchmarks.cost.security:SecurityCost",
    "observation_cost": "benchmarks.cost.observation:ObservationCost",
    "shadow_cost": "benchmarks.cost.shadow:ShadowCost",
    "health_under_load": "benchmarks.cost.health:HealthUnderLoad",
    "faults": "benchmarks.faults.experiment:Faults",
    "watch": "benchmarks.watch.experiment:Watch",
    "acceptance": "benchmarks.acceptance.experiment:Acceptance",
    "attacks": "benchmarks.faults.attacks:Attacks",
    "network_cost": "benchmarks.network.cost:NetworkCost",
    "network_faults": "benchmarks.network.faults:NetworkFaults",
}


def find(name: str) -> type[Experiment[Any]]:
    """The experiment of this name. Raises OptionError, with the nearest name, when there is none."""
    if name not in EXPERIMENTS:
        raise OptionError(unknown("experiment", name, EXPERIMENTS))
    module, _, attribute = EXPERIMENTS[name].partition(":")
    found: type[Experiment[Any]] = getattr(import_module(module), attribute)
    return found
