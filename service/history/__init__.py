"""What was answered and decided, read from what is recorded: for an auditor, and for a report of a period.

answers(session, store, "north", Sought(series="1.2.3"))     which version answered, by which decision, why
report(session, store, "north", begin, end)                  a period of a hospital, as one object
version_card(session, store, version, "north")               what is recorded of a version
"""

from service.history.answers import AnswerAccount, Sought, answers
from service.history.period import PeriodReport, report
from service.history.version_card import VersionCard, version_card

__all__ = ["AnswerAccount", "PeriodReport", "Sought", "VersionCard", "answers", "report", "version_card"]
