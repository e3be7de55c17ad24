"""A bundle's configuration is data: references are followed, and nothing in it is imported or evaluated."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from monai.bundle import ConfigParser

from training.errors import ImportRefused
from training.exchange.config import MOST_STEPS, Config, read_declared

_EVENTS = ("exec", "compile", "import", "os.system", "subprocess.Popen", "open", "pickle.find_class")
_watching: list[str] | None = None


def _hook(event: str, _: tuple[Any, ...]) -> None:
    if _watching is not None and event in _EVENTS:
        _watching.append(event)


sys.addaudithook(_hook)


@contextmanager
def _events() -> Iterator[list[str]]:
    """What Python itself reports to be imported, compiled, run or opened."""
    global _watching
    seen: list[str] = []
    _watching = seen
    try:
        yield seen
    finally:
        _watching = None


def _config(text: str, **declared: Any) -> Config:
    places = {name.replace("__", "::"): value for name, value in declared.items()}
    return Config.parse("inference.yaml", text.encode(), places)


def test_references_are_followed_at_their_end_and_on_the_way() -> None:
    config = _config("a: {b: [1, '@c', {d: '@e::f'}]}\nc: 5\ne: '@g'\ng: {f: [7, 8]}\n")

    assert config.value("a") == {"b": [1, 5, {"d": [7, 8]}]}
    assert config.value("a#b#1") == 5
    assert config.value("e::f::1") == 8
    assert _config("a: '$@b'\nb: [1]").value("a") == [1]


@pytest.mark.parametrize(
    ("text", "place", "said"),
    [
        ("a: '$import os'", "a", "expression in Python"),
        ("a: {b: ['$1 + 1']}", "a", r"a::b::0: .* --set a::b::0=VALUE"),
        ("a: '%other.json::x'", "a", "reads another file"),
        ("a: '@b'\nb: '@a'", "a", "circle"),
        ("a: '@b'", "a", "expected a value at b"),
        ("a: {_target_: os.system, command: x}", "a", "expected a plain value, found a mapping"),
    ],
)
def test_what_is_no_value_is_refused_with_its_place(text: str, place: str, said: str) -> None:
    with pytest.raises(ImportRefused, match=said):
        _config(text).value(place)


def test_as_many_references_as_allowed_and_one_more() -> None:
    rows = [f"r{i}: '@r{i + 1}'" for i in range(MOST_STEPS + 1)]
    config = _config("\n".join([*rows, f"r{MOST_STEPS + 1}: 3"]))

    assert config.value("r1") == 3
    with pytest.raises(ImportRefused, match="references in a row"):
        config.value("r0")


def test_a_declared_value_takes_the_place_of_an_expression_and_of_nothing() -> None:
    config = _config("n: {_target_: UNet, out_channels: '$len(@x)'}", n__out_channels=3, n__norm="batch")
    component = config.component("n")

    assert component.arguments == ("out_channels", "norm")
    assert component.value("out_channels") == 3
    assert component.value("norm") == "batch"


@pytest.mark.parametrize("key", ["_requires_", "_mode_", "_anything_"])
def test_keys_that_can_run_code_are_refused(key: str) -> None:
    with pytest.raises(ImportRefused, match=f"`{key}` is not read"):
        _config(f"n: {{_target_: UNet, {key}: x}}").component("n")


def test_components_come_in_order_without_disabled_ones() -> None:
    config = _config(
        "pre: {_target_: Compose, transforms: [{_target_: A}, {_target_: B, _disabled_: true}, '@c']}\n"
        "c: {_target_: C, keys: '@k'}\nk: image\n"
    )

    assert [each.name for each in config.components("pre")] == ["A", "C"]
    assert config.components("pre")[1].value("keys") == "image"


def test_references_that_multiply_are_refused() -> None:
    tree: dict[str, Any] = {f"l{level}": [f"@l{level + 1}"] * 9 for level in range(7)}

    with pytest.raises(ImportRefused, match="expected at most"):
        Config({**tree, "l7": 1}, "x").value("l0")


def test_aliases_of_yaml_that_multiply_are_refused() -> None:
    rows = ["l0: &l0 [1, 1, 1, 1, 1, 1, 1, 1, 1]"]
    rows += [f"l{i}: &l{i} [{', '.join([f'*l{i - 1}'] * 9)}]" for i in range(1, 12)]

    with pytest.raises(ImportRefused, match="expected at most"):
        _config("\n".join(rows)).value("l11")


def test_tags_of_yaml_and_deep_nests_are_refused() -> None:
    for text in ("a: !!python/object/apply:os.system ['true']", "[" * 5000, "a: " + "[" * 5000):
        with _events() as seen, pytest.raises(ImportRefused, match="cannot be read"):
            _config(text)
        assert not seen
    with pytest.raises(ImportRefused, match="cannot be read"):
        Config.parse("inference.json", b"[" * 200_000)


def test_declared_values_are_read_from_the_command_line() -> None:
    assert read_declared(["a#b=[1, 2]", "c::d=true"]) == {"a::b": [1, 2], "c::d": True}
    with pytest.raises(ImportRefused, match="expected PLACE=VALUE"):
        read_declared(["nothing"])


_names = st.sampled_from(["a", "b", "c", "0", "1", "_target_", "_disabled_", "_requires_", "transforms"])
_nasty = [
    "$import os",
    "$__import__('os').system('true')",
    "%x.json::a",
    "@a",
    "@b::c",
    "@a#0",
    "$@a",
    "$@a::b",
]
_nasty += [
    "os.system",
    "builtins.exec",
    "monai.transforms.Compose",
    "Compose",
    "@",
    "@@a",
    "@$a",
    "@a::b::c::0",
]
_texts = st.one_of(st.sampled_from(_nasty), st.text(max_size=8))
_nodes = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(-9, 9), st.floats(allow_nan=False), _texts),
    lambda inner: st.one_of(st.lists(inner, max_size=4), st.dictionaries(_names, inner, max_size=4)),
    max_leaves=24,
)
_trees = st.dictionaries(_names, _nodes, min_size=1, max_size=5)


@settings(max_examples=400, deadline=None)
@given(tree=_trees, parts=st.lists(_names, min_size=1, max_size=4))
def test_no_configuration_is_ever_imported_evaluated_or_run(tree: dict[str, Any], parts: list[str]) -> None:
    config, place = Config(tree, "inference.json"), "::".join(parts)
    found: list[Any] = []
    refused: list[str] = []
    with _events() as seen:
        for ask in (config.value, config.component, config.components, config.has):
            try:
                found.append(ask(place))
            except ImportRefused as error:
                refused.append(str(error))
    assert seen == []
    assert len(found) + len(refused) == 4
    assert all(sentence.startswith("inference.json: ") for sentence in refused)
    if found and not isinstance(found[0], bool | list):
        assert not [text for text in _strings(found[0]) if text[:1] in ("$", "%")]


def _strings(found: Any) -> Iterator[str]:
    if isinstance(found, str):
        yield found
    elif isinstance(found, list | dict):
        for each in found.values() if isinstance(found, dict) else found:
            yield from _strings(each)


_plain = st.recursive(
    st.one_of(st.booleans(), st.integers(-9, 9), st.sampled_from(["text", "@k0", "@k1", "@k2::0", "@k1::x"])),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3), st.dictionaries(st.sampled_from(["x", "y"]), inner, max_size=2)
    ),
    max_leaves=8,
)


@settings(max_examples=150, deadline=None)
@given(values=st.tuples(_plain, _plain, _plain))
def test_plain_values_and_references_are_read_as_monai_reads_them(values: tuple[Any, Any, Any]) -> None:
    tree = {f"k{index}": value for index, value in enumerate(values)}
    try:
        own = Config(yaml.safe_load(yaml.safe_dump(tree)), "x").value("k0")
    except ImportRefused:
        return
    assert own == ConfigParser(tree).get_parsed_content("k0")
