"""The change plan of a hospital's model: which changes one person may assign, written before any of them.

set_plan(session, "north", "organ", plan, ...)     an approver writes it; None ends it
plan_of(session, "north", "organ")                 the newest, or None
sign(session, ...)                                 before an assignment: inside, or which signature is missing
"""

from service.change_plan.plan import (
    ChangePlan,
    Signed,
    Written,
    deviations,
    plan_of,
    set_plan,
    sign,
    waiting,
)

__all__ = [
    "ChangePlan",
    "Signed",
    "Written",
    "deviations",
    "plan_of",
    "set_plan",
    "sign",
    "waiting",
]
