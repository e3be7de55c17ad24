"""Read a bundle's configuration without its expressions: plain values, and references among them.

MONAI's `ConfigParser` imports modules by name and evaluates strings that begin with `$`. Here a component
stays what is written: the name of a class in `_target_`, and its arguments. References, `@a::b` or `@a#b`,
are followed. Expressions (`$`) and macros that read files (`%`) are refused where a value is needed. All
others are not looked at.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

import yaml

from training.errors import ImportRefused

MOST_BYTES: Final = 1 << 20
# Of references that lead to references, and of lists and mappings in each other.
MOST_STEPS: Final = 8
MOST_LEVELS: Final = 16
_MOST_VALUES: Final = 20_000
_MOST_COMPONENTS: Final = 64
_MOST_PARTS: Final = 32
_SEPARATOR = re.compile(r"::|#")
# `$@a::b` alone is what `@a::b` is.
_REFERENCE = re.compile(r"@|\$@[A-Za-z0-9_:#]+\Z")
# Keys of components: `_disabled_` is read, the others do not change what a component is.
_KEYS_ALLOWED = frozenset({"_target_", "_desc_", "_disabled_"})

Plain = str | int | float | bool | None | list[Any] | dict[str, Any]


class Config:
    """A configuration file.

    Args:
        content: what the file has.
        where: the file, for errors.
        declared: values that the user gives for places of the file, in place of what is written there.
    """

    def __init__(
        self, content: Mapping[str, Any], where: str, declared: Mapping[str, Plain] | None = None
    ) -> None:
        self._content, self.where, self._declared = content, where, dict(declared or {})

    @classmethod
    def parse(cls, name: str, data: bytes, declared: Mapping[str, Plain] | None = None) -> Config:
        """Read JSON or YAML (safe_load), by the name's suffix. Raises ImportRefused."""
        try:
            text = data.decode()
            content = json.loads(text) if name.endswith(".json") else yaml.safe_load(text)
        except (ValueError, yaml.YAMLError, RecursionError) as error:
            raise ImportRefused(f"{name}: cannot be read: {str(error)[:200]}") from error
        if not isinstance(content, dict):
            raise ImportRefused(f"{name}: expected a mapping, found {type(content).__name__}")
        return cls(content, name, declared)

    def has(self, place: str) -> bool:
        """Whether something is written or declared at a place. Raises ImportRefused for a circle."""
        return self._locate(place)[1] is not _NOTHING

    def value(self, place: str) -> Plain:
        """The plain value of a place, with every reference in it followed.

        Raises ImportRefused for an expression, a macro, a component in place of a value, a reference that
        leads nowhere or in a circle, and for too many values.
        """
        return self._plain(place, place, 0, [_MOST_VALUES])

    def written(self, place: str) -> object:
        """What is written at a place, an expression too, as it stands. Raises ImportRefused for a circle."""
        return self._locate(place)[1]

    def component(self, place: str) -> Component:
        """The component that is written at a place. Raises ImportRefused where there is none."""
        asked, (place, found) = place, self._found(place)
        if not isinstance(found, dict) or not isinstance(found.get("_target_"), str):
            raise ImportRefused(
                f"{self.where}: {asked}: expected a component with `_target_`, found {_shown(found)}"
            )
        target = found["_target_"]
        if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_.]{0,127}", target):
            raise ImportRefused(
                f"{self.where}: {place}: expected the name of a class, found {_shown(target)}"
            )
        strange = sorted(str(key) for key in found if str(key).startswith("_") and key not in _KEYS_ALLOWED)
        if strange:
            raise ImportRefused(
                f"{self.where}: {place}: `{strange[0][:64]}` is not read, since it can run code: remove it "
                "from the file"
            )
        start = f"{place}::"
        declared = [key.removeprefix(start) for key in self._declared if key.startswith(start)]
        names = [str(key) for key in found if key not in _KEYS_ALLOWED]
        names += [name for name in declared if "::" not in name and name not in (*names, *_KEYS_ALLOWED)]
        return Component(self, place, target, tuple(names))

    def components(self, place: str) -> list[Component]:
        """The components of a list, or of a `Compose` at a place, in their order, without disabled ones."""
        asked, (place, found) = place, self._found(place)
        if isinstance(found, dict) and "_target_" in found:
            outer = self.component(place)
            if outer.name != "Compose":
                return [outer]
            place, found = self._found(f"{place}::transforms")
        if not isinstance(found, list) or len(found) > _MOST_COMPONENTS:
            raise ImportRefused(
                f"{self.where}: {asked}: expected a list of at most {_MOST_COMPONENTS}, found {_shown(found)}"
            )
        each = [self.component(f"{place}::{index}") for index in range(len(found))]
        return [one for one in each if not one.disabled]

    def _locate(self, asked: str) -> tuple[str, Any]:
        """Go to a place. A reference, there or on the way, is replaced by where it leads.

        Returns the place without references and what is written there: `_NOTHING` where it does not exist.
        """
        parts, steps = _SEPARATOR.split(asked), 0
        while True:
            found: Any = self._content
            for index, part in enumerate(parts):
                found = self._declared.get("::".join(parts[: index + 1]), _enter(found, part))
                if isinstance(found, str) and _REFERENCE.match(found):
                    break
            else:
                return "::".join(parts), found
            parts, steps = [*_SEPARATOR.split(found.lstrip("$")[1:]), *parts[index + 1 :]], steps + 1
            if steps > MOST_STEPS or len(parts) > _MOST_PARTS:
                raise ImportRefused(
                    f"{self.where}: {asked}: expected at most {MOST_STEPS} references in a row, found "
                    "more, or a "
                    f"circle: declare the value with --set {asked}=VALUE"
                )

    def _found(self, asked: str) -> tuple[str, Any]:
        """As `_locate`. Raises ImportRefused where nothing is written, and for expressions and macros."""
        place, found = self._locate(asked)
        if found is _NOTHING:
            led = "" if place == asked else f" (where {asked} leads)"
            raise ImportRefused(
                f"{self.where}: expected a value at {place}{led}, found none; declare it with --set "
                f"{place}=VALUE"
            )
        if isinstance(found, str) and found[:1] in ("$", "%"):
            what = (
                "is an expression in Python, and none is evaluated"
                if found[0] == "$"
                else "reads another file"
            )
            raise ImportRefused(
                f"{self.where}: {place}: {_shown(found)} {what}: declare its value with --set "
                f"{place}=VALUE, or "
                "write it into the file"
            )
        return place, found

    def _plain(self, asked: str, place: str, level: int, budget: list[int]) -> Plain:
        budget[0] -= 1
        if budget[0] < 0 or level > MOST_LEVELS:
            raise ImportRefused(
                f"{self.where}: {asked}: expected at most {_MOST_VALUES} values, {MOST_LEVELS} levels "
                "deep, found more"
            )
        place, found = self._found(place)
        if isinstance(found, dict) and not any(str(key).startswith("_") for key in found):
            return {str(key): self._plain(asked, f"{place}::{key}", level + 1, budget) for key in found}
        if isinstance(found, list):
            return [self._plain(asked, f"{place}::{i}", level + 1, budget) for i in range(len(found))]
        if found is None or isinstance(found, str | int | float | bool):
            return found
        raise ImportRefused(
            f"{self.where}: {place}: expected a plain value, found {_shown(found)}: declare it with --set "
            f"{place}=VALUE"
        )


@dataclass(frozen=True)
class Component:
    """A component as it is written: `target` names its class, `arguments` are the names of its arguments."""

    config: Config
    place: str
    target: str
    arguments: tuple[str, ...]

    @property
    def name(self) -> str:
        """The name of the class without its module."""
        return self.target.rpartition(".")[2]

    @property
    def disabled(self) -> bool:
        """Whether `_disabled_` is true. Raises ImportRefused where it is an expression."""
        place = f"{self.place}::_disabled_"
        if not self.config.has(place):
            return False
        found = self.config.value(place)
        return found is True or (isinstance(found, str) and found.lower() == "true")

    def value(self, name: str, default: Plain = None) -> Plain:
        """The plain value of an argument, or `default` where it is not written. Raises ImportRefused."""
        return self.config.value(f"{self.place}::{name}") if name in self.arguments else default

    def written(self, name: str) -> str:
        """What is written for an argument, as text that is not interpreted; references are followed."""
        return str(self.config.written(f"{self.place}::{name}"))

    def refuse(self, sentence: str) -> ImportRefused:
        """Make the error that names this component."""
        return ImportRefused(f"{self.config.where}: {self.place}: {self.name}: {sentence}")


def read_declared(texts: list[str]) -> dict[str, Plain]:
    """Read `PLACE=VALUE` of the command line, where VALUE is YAML. Raises ImportRefused."""
    declared: dict[str, Plain] = {}
    for text in texts:
        place, sign, value = text.partition("=")
        try:
            found = yaml.safe_load(value[:MOST_BYTES])
        except (yaml.YAMLError, RecursionError) as error:
            raise ImportRefused(f"--set {text[:64]}: {error}") from error
        if not sign or not place.strip():
            raise ImportRefused(f"--set {text[:64]}: expected PLACE=VALUE, as network_def::out_channels=3")
        declared["::".join(_SEPARATOR.split(place.strip()))] = found
    return declared


class _Nothing: ...


_NOTHING = _Nothing()


def _enter(found: Any, part: str) -> Any:
    if isinstance(found, dict):
        # Keys of YAML may be numbers.
        return next((each for key, each in found.items() if str(key) == part), _NOTHING)
    if (
        isinstance(found, list)
        and part.isascii()
        and part.isdecimal()
        and len(part) < 6
        and int(part) < len(found)
    ):
        return found[int(part)]
    return _NOTHING


def _shown(found: Any) -> str:
    text = (
        repr(found)
        if not isinstance(found, dict | list)
        else f"a {'mapping' if isinstance(found, dict) else 'list'}"
    )
    return text if len(text) <= 80 else f"{text[:77]}…"
