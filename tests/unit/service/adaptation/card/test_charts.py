"""Curves: where points lie, and what is drawn where there are none."""

from __future__ import annotations

import re
from xml.etree import ElementTree

import pytest

from service.adaptation.card.charts import (
    HEIGHT,
    NAMED_WIDTH,
    WIDTH,
    Mark,
    Scale,
    bars,
    cells,
    curve,
    file_of,
    forest,
    ticks,
)
from service.adaptation.card.charts import lines as lines_of
from service.jobs.sections import Bar, Bars, Forest, Interval, Line, Lines


@pytest.mark.parametrize(
    ("low", "high", "expected"),
    [
        (0.0, 1.0, [0.0, 0.5, 1.0]),
        (0.0, 0.8, [0.0, 0.2, 0.4, 0.6, 0.8]),
        (0.13, 0.29, [0.1, 0.15, 0.2, 0.25, 0.3]),
        (-3.0, 9.0, [-5.0, 0.0, 5.0, 10.0]),
        (0.0001, 0.00039, [0.0001, 0.0002, 0.0003, 0.0004]),
    ],
)
def test_ticks_are_round_and_cover_the_values(low: float, high: float, expected: list[float]) -> None:
    assert ticks(low, high) == pytest.approx(expected)


@pytest.mark.parametrize("value", [0.0, 0.5, -2.0, 1e-9])
def test_ticks_of_a_single_value_surround_it(value: float) -> None:
    found = ticks(value, value)
    assert found[0] < value < found[-1] or value in found
    assert len(found) > 1


def test_scale_is_linear_and_may_be_inverted() -> None:
    scale = Scale(0.0, 10.0, 100.0, 0.0)
    assert [scale(0), scale(5), scale(10)] == [100.0, 50.0, 0.0]


def lines(svg: str) -> list[list[tuple[float, float]]]:
    return [
        [(float(x), float(y)) for x, y in (pair.split(",") for pair in points.split())]
        for points in re.findall(r'<polyline class="curve" points="([^"]*)"', svg)
    ]


def test_curve_of_falling_values_falls_on_the_page() -> None:
    (points,) = lines(curve([(0, 3.0), (1, 2.0), (2, 1.0)]))
    xs, ys = zip(*points, strict=True)
    assert xs == tuple(sorted(xs))
    # Downwards on the page.
    assert ys == tuple(sorted(ys))
    assert xs[1] - xs[0] == pytest.approx(xs[2] - xs[1])
    assert all(0 <= x <= WIDTH and 0 <= y <= HEIGHT for x, y in points)


def test_curve_has_a_gap_at_missing_and_nan_values() -> None:
    found = lines(curve([(0, 3.0), (1, 2.0), (2, None), (3, 1.0), (4, float("nan")), (5, 1.0), (6, 2.0)]))
    assert [len(piece) for piece in found] == [2, 2, 2]
    assert found[1][0] == found[1][1]


def test_curve_without_finite_values_is_empty() -> None:
    assert curve([(0, None), (1, float("inf"))]) == ""
    assert curve([]) == ""


def test_mark_without_a_value_is_not_drawn() -> None:
    svg = curve([(0, 3.0), (1, 2.0), (2, None)], [Mark(1, "chosen"), Mark(2, "unsafe"), Mark(9, "unsafe")])
    found = re.findall(r'<circle class="(\w+)" cx="([\d.]+)" cy="([\d.]+)"', svg)
    assert [(kind, (float(x), float(y))) for kind, x, y in found] == [("chosen", lines(svg)[0][1])]


def test_curve_of_many_epochs_labels_at_most_twelve() -> None:
    svg = curve([(epoch, 1.0 / (epoch + 1)) for epoch in range(200)])
    assert len(re.findall(r'<text class="x"', svg)) <= 12


def test_bars_leave_room_for_names() -> None:
    drawn = str(
        bars(
            Bars(
                rows=(Bar(name="own", share=0.25, own=True), Bar(name="a site with a long name", share=0.75))
            )
        )
    )
    [left] = {float(x) for x in re.findall(r'<rect class="\w+" x="([\d.]+)"', drawn)}
    widths = [float(width) for width in re.findall(r'width="([\d.]+)" height', drawn)]
    assert left >= 150
    assert widths[1] == pytest.approx(3 * widths[0])
    assert left + max(widths) <= NAMED_WIDTH


def test_a_forest_plot_has_a_dot_in_its_range_per_row_and_a_line_at_0() -> None:
    rows = (
        Interval(name="<CS>", value=0.02, low=-0.01, high=0.05),
        Interval(name="here", value=-0.03, low=-0.06, high=-0.03, own=True),
    )
    drawn = str(forest(Forest(rows=rows)))
    assert "<CS>" not in drawn
    assert "&lt;CS&gt;: +0.020 (-0.010 to +0.050)" in drawn
    zero = float(re.search(r'class="zero" x1="([\d.]+)"', drawn)[1])  # type: ignore[index]
    dots = {kind: float(x) for kind, x in re.findall(r'<circle class="(\w+)" cx="([\d.]+)"', drawn)}
    assert dots["chosen"] < zero < dots["dot"]
    ranges = [tuple(map(float, pair)) for pair in re.findall(r'"range" x1="([\d.]+)" x2="([\d.]+)"', drawn)]
    assert ranges[0][0] < zero < dots["dot"] < ranges[0][1]
    assert forest(Forest(rows=())) == ""


def test_lines_lie_in_one_figure_by_their_values_and_their_names_are_escaped() -> None:
    found = Lines(
        across="levels",
        places=(0.0, 0.5, 1.0),
        lines=(
            Line(name="<members>", values=(-2.0, 0.0, 2.0)),
            Line(name="scans", values=(-1.0, 0.0, 1.0)),
        ),
    )
    drawn = lines_of(found)
    members, scans = (
        [[float(value) for value in pair.split(",")] for pair in points.split()]
        for points in re.findall(r'<polyline class="line line-\d" points="([^"]*)"', drawn)
    )
    assert [x for x, _ in members] == [x for x, _ in scans] == sorted(x for x, _ in members)
    # Higher on the page, and twice as far from the middle.
    assert members[2][1] < scans[2][1] < members[1][1] == scans[1][1] < scans[0][1] < members[0][1]
    assert members[1][1] - members[2][1] == pytest.approx(2 * (scans[1][1] - scans[2][1]), abs=0.05)
    assert "&lt;members&gt;" in drawn
    assert "<members>" not in drawn


def test_a_band_is_as_far_above_the_first_line_as_below_and_within_the_figure() -> None:
    found = Lines(across="levels", places=(0.0, 1.0), lines=(Line(name="members", values=(0.0, 1.0)),))
    assert "band" not in lines_of(found)
    drawn = lines_of(found, 1.0)
    [band] = re.findall(r'class="band" points="([^"]*)"', drawn)
    points = [[float(value) for value in pair.split(",")] for pair in band.split()]
    [line] = re.findall(r'<polyline class="line line-0" points="([^"]*)"', drawn)
    first = [float(pair.split(",")[1]) for pair in line.split()]
    (above, below), (again, under) = (points[0], points[3]), (points[1], points[2])
    assert [below[0], under[0]] == [above[0], again[0]]
    assert first[0] - above[1] == pytest.approx(below[1] - first[0], abs=0.05)
    assert min(above[1], again[1]) >= 0


def test_grids_share_one_scale_of_grey() -> None:
    drawn = str(cells((("<a>", ((0.0, 1.0), (2.0, 3.0))), ("b", ((4.0, 4.0), (4.0, 2.0))))))
    assert "&lt;a&gt;" in drawn
    tones = [int(each) for each in re.findall(r"rgb\((\d+),", drawn)]
    assert tones == [0, 64, 128, 191, 255, 255, 255, 128]


def test_a_file_of_figures_is_xml_with_each_below_the_one_before() -> None:
    one = lines_of(Lines(across="levels", places=(0.0, 1.0), lines=(Line(name="a & b", values=(0.0, 1.0)),)))
    root = ElementTree.fromstring(file_of([("Contrast <1>", one), ("", one)]))
    inner = [each for each in root if each.tag.endswith("svg")]
    assert [each.get("y") for each in inner] == ["38", str(38 + int(inner[0].get("height", 0)))]
    assert int(root.get("height", 0)) == sum(int(each.get("height", 0)) for each in inner) + 38
    assert "Contrast <1>" in [each.text for each in root]
