"""Draw a `PeriodReport` or a `VersionCard` as one self-contained HTML page, light and dark, no script."""

from __future__ import annotations

from datetime import UTC, datetime

import jinja2

from service.history.period import PeriodReport
from service.history.version_card import VersionCard


def render(found: PeriodReport) -> str:
    """The page of a period. The same report gives the same bytes."""
    return _environment().get_template("report.html").render(report=found)


def render_card(found: VersionCard) -> str:
    """The page of a version. The same card gives the same bytes."""
    return _environment().get_template("version.html").render(card=found)


def _environment() -> jinja2.Environment:
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("service.history"),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {"instant": _instant, "number": _number, "short": _short}
    return environment


def _instant(value: datetime | None) -> str:
    return "" if value is None else value.astimezone(UTC).strftime("%Y-%m-%d %H:%M")


def _number(value: float | None, digits: int = 2) -> str:
    return "" if value is None else f"{value:.{digits}f}"


def _short(digest: str) -> str:
    return digest.removeprefix("sha256:")[:12]
