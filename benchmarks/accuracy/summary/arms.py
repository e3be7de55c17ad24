"""The arms by a common name, and what leaves a hospital with each."""

from __future__ import annotations

from collections.abc import Mapping

from benchmarks.accuracy.papers import fedbicross, fedins, fedoap, iop_fl

# A table's own name -> the name on the page, where tables call one thing differently.
ALIASES: Mapping[str, str] = {
    "Single-site": "local-only",
    "SOLO": "local-only",
    "Local-only": "local-only",
    "Average": "single models, mean (running)",
    "Ensemble": "ensemble (running)",
    "Tent": "`tent`",
    "TTT": "`ttt`",
    "statistics": "`statistics`",
    "ladder": "`ladder`",
    "Locum's loss, a coefficient per layer": "`paper`",
    "IOP-FL as published, epoch by loss": "`as-published`",
    "IOP-FL as published, epoch by label": "`as-published`, epoch by label",
    "Locum's loss, a coefficient per model": "`paper`, one coefficient per model",
    "SSF pool": "FedIns",
    "Output ensemble": "output ensemble",
    "attention, adapter and perturbed loss": "FedOAP",
}

_WEIGHTS = "weights, every round"
_PERSONAL = "weights, every round; the personal model by consent"
_RECEIVED = "nothing; it receives the global model"
_ALL_MODELS = "nothing; it receives members' personal models, which say more of them"
_POOL = "the pool, every round"
_ONCE = "weights, once"
_FEDOAP = "weights but the personal part, and tokens of images, every round"
ARMS: Mapping[str, str] = {
    # Members
    "local-only": "nothing",
    "Most frequent class": "nothing",
    "Centralised": "the training images",
    **dict.fromkeys(("FedAvg", "FedProx", "MOON", "FedAvgM", "FedAdagrad", "FedAvg + fine-tuning"), _WEIGHTS),
    "FedAvg, twice the rounds": _WEIGHTS,
    **dict.fromkeys(("IOP-FL", "IOP-FL, Locum's recipe", "pFedMe", "Ditto", "FedSoup"), _PERSONAL),
    **dict.fromkeys(
        (
            *("pFedMe, as many steps", "Ditto, as many steps", "IOP-FL, Locum's recipe, as many steps"),
            *(arm.name for arms in iop_fl.STUDIES_INSIDE.values() for arm in arms),
        ),
        _PERSONAL,
    ),
    "SCAFFOLD": "weights and control variates, every round",
    "FedDC": "weights and drifts, every round",
    "FedBN": "weights but the norms', every round; the personal model by consent",
    **dict.fromkeys(
        ("FedPer", "FedRep", "FedRep, as many steps"),
        "weights of the shared part, every round; the personal model by consent",
    ),
    # From outside, without labels
    **dict.fromkeys(("`tent`", "`statistics`", "`ladder`", "`ttt`"), _RECEIVED),
    "FedDG": f"{_RECEIVED}; its members showed each other amplitudes of their images",
    **dict.fromkeys(
        (
            *("single models, mean (running)", "ensemble (running)"),
            *("`paper`", "`as-published`", "`paper`, one coefficient per model"),
        ),
        _ALL_MODELS,
    ),
    "`as-published`, epoch by label": f"{_ALL_MODELS}; labels choose its epoch, for comparison only",
    # Studies of an adaptation: the loss weighs members' models.
    **{
        name: _RECEIVED if studied.loss is None else _ALL_MODELS
        for arms in iop_fl.STUDIES_OUTSIDE.values()
        for name, studied in arms.items()
        if name != "FedAvg"
    },
    # Organs
    **{
        f"{name}, {after}": f"nothing; it receives the global model{what}"
        for after in (fedoap.ZERO_SHOT, fedoap.TWO_EPOCHS)
        for name, what in (
            *(("FedAvg on FedOAP's network", ""), ("FedDP", ""), ("FedDP, FedOAP's loss", "")),
            ("FedOAP", " and the members' tokens"),
        )
    },
    **dict.fromkeys(
        (
            *("FedOAP", "FedOAP, twice the rounds"),
            *("attention", "attention and adapter, plain second stage"),
        ),
        _FEDOAP,
    ),
    **dict.fromkeys(
        ("FedDP", "FedDP, FedOAP's loss"),
        "weights but the queries, every round; these by consent, to the members that consent",
    ),
    "averaged keys and values, no bank": "weights but the personal part, every round",
    "none: FedAvg on its network": _WEIGHTS,
    # Pools
    **dict.fromkeys(
        ("FedIns", "Prompt pool", *(arm.name for arm in fedins.ARMS["ablation"] if "pool" in arm.name)), _POOL
    ),
    **dict.fromkeys(("SSF", "Prompt"), "one entry of a pool, every round"),
    # One exchange
    **dict.fromkeys(
        (
            *("FedAvg-1", "FedAvg-1 + fine-tuning", "output ensemble"),
            *("DAFL", "DENSE", "FedISCA", "Co-Boosting"),
            *("FedBiCross", "FedBiCross, K = 2", "FedBiCross, K = 3", "FedBiCross, K = 4"),
            *("FedBiCross, read literally",),
            *("Intra-cluster", "Uniform cross", "Sim-weighted", "w/o PKD", "w/o Clus"),
            *(arm.name for arm in fedbicross.ARMS["samples"]),
        ),
        _ONCE,
    ),
}


def leaves(arm: str, outside: bool) -> str:
    """What leaves a member with this arm, or a hospital from outside."""
    return _RECEIVED if outside and arm == "FedAvg" else ARMS[arm]
