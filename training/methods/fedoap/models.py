"""FedOAP's models: from the parts that a run keeps to networks."""

from __future__ import annotations

from collections.abc import Collection, Mapping

import torch

from model_store.manifest import NetworkSpec
from model_store.task import Task
from personalization.fedoap.parts import bank_state, identity, split, start_personal
from personalization.networks import FedOapUNet
from personalization.networks.fedoap import LEAST_SIDE
from personalization.state import StreamingMean
from training.algorithm import State
from training.errors import ConfigurationError, PublishError
from training.local.networks import network_of
from training.methods.fedoap.config import FedOapConfig
from training.state_tree import part


def check_task(task: Task, method: str = "fedoap") -> None:
    """Raise ConfigurationError for a task that is not one tumour against the background."""
    problems = []
    if len(task.classes) != 2:
        labels = ", ".join(task.labels)
        problems.append(
            f"labels: expected one foreground class, found {len(task.classes) - 1} ({labels}); the method is "
            "binary: keep one label, or give the values of all of them to one"
        )
    if task.ignore:
        problems.append("ignore: its losses need a truth at every pixel; remove the value, or such cases")
    if min(task.size) < LEAST_SIDE:
        problems.append(f"size: expected sides of at least {LEAST_SIDE}, found {list(task.size)}")
    if problems:
        raise ConfigurationError(f"method {method} does not fit the task '{task.name}'", problems)


def by_site(bank: State) -> dict[str, State]:
    """{"CS/key": ..., "CS/value": ...} as {"CS": {"key": ..., "value": ...}}, sorted."""
    return {site: part(bank, site) for site in sorted({name.rpartition("/")[0] for name in bank})}


def with_bank(
    spec: NetworkSpec, model: State, bank: Mapping[str, State], absent: Collection[str] = ()
) -> tuple[NetworkSpec, State]:
    """A model and a bank as one network: its arguments and its whole state."""
    if not spec.arguments["attention"]:
        return spec, dict(model)
    width = spec.arguments["width"]
    assert isinstance(width, int)
    state = bank_state(bank, 16 * width, absent)
    sites, tokens, _ = state["bank_key"].shape
    return spec.model_copy(update={"arguments": {**spec.arguments, "sites": sites, "tokens": tokens}}), {
        **model,
        **state,
    }


def on_device(spec: NetworkSpec, model: State, bank: Mapping[str, State], device: torch.device) -> FedOapUNet:
    """A network with copies of these weights and entries."""
    network = network_of(*with_bank(spec, model, bank), device)
    assert isinstance(network, FedOapUNet)
    return network


def zero_shot(
    config: FedOapConfig, gamma: State, drawn: State, exported: Mapping[str, State]
) -> tuple[State, str]:
    """gamma with a personal part for a hospital that has none, and what its query stage was made of.

    Keys that are personal have no shared counterpart: there it is the mean, or nothing. An untrained stage
    would send random features through the residual into a trained decoder. Raises PublishError when there is
    nothing trained that it could be made of.
    """
    own_keys = config.own_keys
    if own_keys and not exported:
        raise PublishError(
            "kv: own keeps query stages, keys and values at the sites, and no site exported its model: a "
            "global model would answer with untrained ones. Add --resume and --consent all, or --consent "
            "SITE,SITE (on a network hospitals set `consents: true` in their policies): nothing is trained "
            "again. With kv: averaged the shared ones can stand in"
        )
    if exported and (own_keys or config.zero_shot == "mean"):
        mean = StreamingMean()
        for site, model in exported.items():
            mean.add(split(model, own_keys=own_keys)[1], 1.0, f"site {site}")
        return {**gamma, **identity(mean.result())}, "mean"
    return {**gamma, **start_personal(gamma, drawn)}, "shared"
