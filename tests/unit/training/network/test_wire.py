"""The wire: what a version of it once had stays, so that two minor versions of Locum federate.

`wire-4.json` has the messages of version 4 as they were first released. After a change that a test here
refuses, `PROTOCOL` is another, with a file of its own: `python -m tests.unit.training.network.test_wire`.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from training.network import messages
from training.network.cell import Rejected
from training.network.messages import PROTOCOL, Asking, Message, check_wire, other_wire, pack, unpack

FILE = Path(__file__).with_name(f"wire-{PROTOCOL}.json")


def kinds() -> dict[str, type[Message]]:
    """All messages, by name."""
    found = {name: kind for name, kind in vars(messages).items() if isinstance(kind, type)}
    return {name: kind for name, kind in found.items() if issubclass(kind, Message) and kind is not Message}


def shape(kind: type[Message]) -> dict[str, Any]:
    """The fields of a message and of what is in it: types, bounds, and which must be there."""
    schema = kind.model_json_schema()
    parts = {"": schema, **schema.get("$defs", {})}
    return {name: _without_words(part) for name, part in parts.items()}


def _without_words(schema: dict[str, Any]) -> dict[str, Any]:
    properties = {
        name: {key: value for key, value in field.items() if key not in ("title", "description")}
        for name, field in schema.get("properties", {}).items()
    }
    return {"required": sorted(schema.get("required", [])), "properties": properties}


@pytest.mark.parametrize("name", json.loads(FILE.read_text()) if FILE.exists() else [])
def test_message_has_what_it_first_had_and_what_came_later_may_be_left_out(name: str) -> None:
    before, now = json.loads(FILE.read_text())[name], shape(kinds()[name])
    for part, recorded in before.items():
        found = now[part]
        assert found["required"] == recorded["required"]
        assert {field: found["properties"].get(field) for field in recorded["properties"]} == recorded[
            "properties"
        ]


def test_every_message_is_recorded() -> None:
    # One that is new to the wire is asked for by a topic that an earlier side rejects.
    assert json.loads(FILE.read_text()).keys() == kinds().keys()


def test_fields_of_a_later_version_are_left_out() -> None:
    said = json.dumps({"protocol": PROTOCOL, "later": {"x": 1}}).encode()
    content = len(said).to_bytes(4, "big") + said
    assert unpack(Asking, content)[0] == Asking(protocol=PROTOCOL)


def test_another_wire_is_a_sentence_that_says_where_to_upgrade() -> None:
    check_wire("birch", pack(Asking(protocol=PROTOCOL)))
    # Release 0.2 asks without content, and ends with the words of a mismatch.
    with pytest.raises(Rejected, match="birch speaks version 3 of the wire, the operator 4: upgr") as old:
        check_wire("birch", b"")
    assert old.value.code == "mismatch"
    with pytest.raises(Rejected, match="version 5 of the wire, the operator 4: upgrade Locum at the op"):
        check_wire("birch", pack(Asking(protocol=5)))
    assert other_wire(PROTOCOL, "birch", PROTOCOL, "the operator") is None


if __name__ == "__main__":
    content = {name: shape(kind) for name, kind in kinds().items()}
    FILE.write_text(json.dumps(content, indent=1, sort_keys=True) + "\n")
