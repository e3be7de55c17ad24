"""The names of adapted versions."""

from __future__ import annotations

from model_store.reference import NAME
from service.catalog.adapted import adapted_name


def test_the_name_says_which_model_and_whose() -> None:
    assert adapted_name("brain", "dune") == "brain.at-dune"


def test_too_long_names_are_cut_and_stay_apart() -> None:
    model, hospital = "m" * 128, "h" * 63
    names = {adapted_name(model, hospital + last) for last in "ab"} | {adapted_name(model[1:], hospital)}
    assert len(names) == 3
    assert all(NAME.fullmatch(name) and len(name) == 128 for name in names)
    longest = adapted_name("m" * 100, "h" * 24)
    assert longest == "m" * 100 + ".at-" + "h" * 24
