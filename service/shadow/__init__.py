"""A second version answers unseen: begin and end a shadow, take its scans, and say how both compare.

begin(session, "north", "organ", artefact, every=5, ...)     from now on, one scan in five
shadows.taken("north", "organ", request)                     whether an answer is one of these scans
keep(context's parts, ...)                                   after the answer was sent: a job for the worker
note(session, ...)                                           what both found, in the worker
report(session, shadow)                                      agreement, sizes, confidence, corrections of both
"""

from service.shadow.report import ShadowReport, look, report
from service.shadow.rows import (
    Both,
    Rule,
    accepted,
    active,
    begin,
    corrected,
    delete_before,
    end,
    listed,
    note,
    of_request,
)
from service.shadow.taking import ShadowOptions, Shadows, keep

__all__ = [
    "Both",
    "Rule",
    "ShadowOptions",
    "ShadowReport",
    "Shadows",
    "accepted",
    "active",
    "begin",
    "corrected",
    "delete_before",
    "end",
    "keep",
    "listed",
    "look",
    "note",
    "of_request",
    "report",
]
