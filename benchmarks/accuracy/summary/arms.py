"""The arms by a common name, and what leaves a hospital with each."""

from __future__ import annotations

from collections.abc import Mapping

# A table's own name -> the name on the page, where tables call one thing differently.
ALIASES: Mapping[str, str] = {
    "global": "FedAvg",
    "global (running)": "FedAvg",
    "personal": "IOP-FL",
    "fine-tuned": "FedAvg + fine-tuning",
    "Single-site": "local-only",
    "SOLO": "local-only",
    "Local-only": "local-only",
    "Average": "single models, mean (running)",
    "Ensemble": "ensemble (running)",
    "Tent": "`tent`",
    "tent (baked)": "`tent`",
    "statistics": "`statistics`",
    "routing statistics (merged)": "`statistics`",
    "ladder": "`ladder`",
    "Locum's loss, a coefficient per layer": "`paper`",
    "routing paper (merged)": "`paper`",
    "routing official (merged)": "`official`",
    "IOP-FL as published, epoch by loss": "`as-published`",
    "IOP-FL as published, epoch by label": "`as-published`, epoch by label",
    "Locum's loss, a coefficient per model": "`paper`, one coefficient per model",
    "pool, per instance": "FedIns",
    "SSF pool": "FedIns",
    "single SSF": "SSF",
    "Output ensemble": "output ensemble",
    "as printed": "FedBiCross, read literally",
    "as printed, without stage 3": "FedBiCross, read literally, w/o PKD",
    "without clustering": "w/o Clus",
    "without bi-level": "Uniform cross",
    "without stage 3": "w/o PKD",
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
    **dict.fromkeys(("FedAvg", "FedProx", "FedAvgM", "FedAdagrad", "FedAvg + fine-tuning"), _WEIGHTS),
    "FedAvg, twice the rounds": _WEIGHTS,
    **dict.fromkeys(("IOP-FL", "IOP-FL, Locum's recipe", "pFedMe", "Ditto", "FedSoup"), _PERSONAL),
    "SCAFFOLD": "weights and control variates, every round",
    "FedBN": "weights but the norms', every round; the personal model by consent",
    **dict.fromkeys(
        ("FedPer", "FedRep"), "weights of the shared part, every round; the personal model by consent"
    ),
    # From outside, without labels
    **dict.fromkeys(
        (
            *("global (test)", "global (baked)", "tent", "`tent`", "`statistics`", "`ladder`"),
            "routing statistics (dynamic, test)",
        ),
        _RECEIVED,
    ),
    **dict.fromkeys(
        (
            *("single models, mean (running)", "single models, mean (test)"),
            *("average (running)", "average (test)", "average (baked)", "uniform (test)", "uniform (baked)"),
            *("ensemble (running)", "ensemble (test)", "ensemble (baked)"),
            *("`paper`", "`official`", "`as-published`", "`paper`, one coefficient per model"),
            *("routing paper (dynamic, test)", "routing official (dynamic, test)"),
            *("routing paper pooled (dynamic, test)", "routing paper pooled (dynamic, baked)"),
            *("routing paper pooled (mean, test)", "routing paper pooled (merged)"),
        ),
        _ALL_MODELS,
    ),
    "`as-published`, epoch by label": f"{_ALL_MODELS}; labels choose its epoch, for comparison only",
    # Organs
    **dict.fromkeys(
        (
            *(
                "FedOAP",
                "FedOAP, twice the rounds",
                "without bank",
                "without adapter",
                "without PBL",
                "FedOAP, perturbed loss",
            ),
            *("attention", "attention and adapter, plain second stage"),
        ),
        _FEDOAP,
    ),
    "averaged keys and values, no bank": "weights but the personal part, every round",
    "without query stage, attention and bank": "weights but the personal part, every round",
    "none: FedAvg on its network": _WEIGHTS,
    "from scratch": "nothing",
    # Pools
    **dict.fromkeys(
        (
            *("FedIns", "pool, batch mean", "pool, random entries"),
            *("SSF pool of 5", "SSF pool, 1 picked", "SSF pool, 12 picked", "Prompt pool"),
        ),
        _POOL,
    ),
    **dict.fromkeys(("SSF", "Prompt"), "one entry of a pool, every round"),
    "frozen": "nothing, beyond what the frozen network took",
    "fine-tuned head": "the head's weights, every round",
    # One exchange
    **dict.fromkeys(
        (
            *("FedAvg-1", "FedAvg-1 + fine-tuning", "output ensemble", "one global ensemble, distilled"),
            *("DENSE", "FedBiCross", "FedBiCross, K = 2", "FedBiCross, K = 3", "FedBiCross, K = 4"),
            *("FedBiCross, read literally", "FedBiCross, read literally, w/o PKD"),
            *("Intra-cluster", "Uniform cross", "Sim-weighted", "w/o PKD", "w/o Clus"),
        ),
        _ONCE,
    ),
    "local-only, trained on": "nothing",
}
# At a hospital from outside, where a member sends weights.
_FROM_OUTSIDE: Mapping[str, str] = {
    "FedAvg": _RECEIVED,
    **dict.fromkeys(
        ("FedOAP", "FedOAP, perturbed loss"),
        "nothing; it receives the model, with tokens of members' images",
    ),
}


def leaves(arm: str, outside: bool) -> str:
    """What leaves a member with this arm, or a hospital from outside."""
    return _FROM_OUTSIDE.get(arm, ARMS[arm]) if outside else ARMS[arm]
