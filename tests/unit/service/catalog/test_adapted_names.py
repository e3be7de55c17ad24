"""The names of adapted versions."""

from __future__ import annotations

from model_store.reference import NAME
from service.catalog.adapted import adapted_name


def test_adapted_name_joins_model_and_hospital() -> None:
    assert adapted_name("brain", "dune") == "brain.at-dune"


def test_adapted_name_of_long_names_is_cut_and_stays_unique() -> None:
    model, hospital = "m" * 128, "h" * 63
    names = {adapted_name(model, hospital + last) for last in "ab"} | {adapted_name(model[1:], hospital)}
    assert len(names) == 3
    assert all(NAME.fullmatch(name) and len(name) == 128 for name in names)
    longest = adapted_name("m" * 100, "h" * 24)
    assert longest == "m" * 100 + ".at-" + "h" * 24
