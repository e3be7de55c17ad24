"""Draw a `PeriodReport` as one self-contained HTML page, light and dark, without a script."""

from __future__ import annotations

from datetime import UTC, datetime

import jinja2

from service.history.period import PeriodReport


def render(found: PeriodReport) -> str:
    """The page. The same report gives the same bytes."""
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("service.history"),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {"instant": _instant, "number": _number, "short": _short}
    return environment.get_template("report.html").render(report=found)


def _instant(value: datetime | None) -> str:
    return "" if value is None else value.astimezone(UTC).strftime("%Y-%m-%d %H:%M")


def _number(value: float | None, digits: int = 2) -> str:
    return "" if value is None else f"{value:.{digits}f}"


def _short(digest: str) -> str:
    return digest.removeprefix("sha256:")[:12]
