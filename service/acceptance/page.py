"""Render the report of an acceptance as one self-contained HTML page, light and dark, without a script."""

from __future__ import annotations

import base64
from collections.abc import Mapping
from typing import Any, Final

import jinja2
from markupsafe import Markup

from model_store.digest import sha256
from service.about import NOTICE
from service.acceptance.report import WORDS, canonical

_TONES: Final = {"met": "good", "not-met": "bad", "too-few": "warn", "no-thresholds": "soft"}


def render(document: Mapping[str, Any], pictures: Mapping[str, Mapping[str, bytes]]) -> str:
    """The page of a report with its digest, signature and decision. The same document gives the same bytes.

    `pictures` are those of the worst answers by their number in the report, `answer` and `drawn`. One that
    is not the picture of the report is left out.
    """
    report = document["report"]
    worst = [
        {**each, "shown": _shown(each["pictures"], pictures.get(str(number), {}))}
        for number, each in enumerate(report["worst"], start=1)
    ]
    return (
        _environment()
        .get_template("acceptance.html")
        .render(
            document=document,
            report=report,
            worst=worst,
            title=WORDS[report["verdict"]],
            tone=_TONES[report["verdict"]],
            notice=NOTICE,
            # In a block that no browser runs: only the end of the element must not be in it.
            embedded=Markup(canonical(report).decode().replace("<", "\\u003c")),
        )
    )


def _shown(expected: Mapping[str, str], there: Mapping[str, bytes]) -> list[tuple[str, str]]:
    return [
        (when, f"data:image/png;base64,{base64.b64encode(there[when]).decode()}")
        for when, digest in expected.items()
        if when in there and sha256(there[when]) == digest
    ]


def _figure(value: float | None, digits: int = 3) -> str:
    return "–" if value is None else f"{value:.{digits}f}"


def _percent(value: float | None) -> str:
    return "–" if value is None else f"{100 * value:.0f} %"


def _environment() -> jinja2.Environment:
    found = jinja2.Environment(
        loader=jinja2.PackageLoader("service.acceptance"),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    found.filters |= {"figure": _figure, "share": _percent}
    return found
