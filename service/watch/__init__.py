"""Watch the numbers of a hospital's answers for a change, one hospital and one model at a time.

    budget = Budget(months=12, streams=8)
    spacing = budget.spacing(per_day=20)          # answers between false alarms of one stream
    stream = Level()
    alarm = stream.take(value, spacing)           # None, or since when and to which side
    print(budget.price(per_day=20))               # what this setting costs in scans

The statistics know no database and no clock: what is above the line imports nothing below it.

budget.py   the one setting: months between false alarms over all streams together
stream.py   `Level` for a number of each answer, `Share` for a yes or no; their state can be stored
scores.py   normal scores of a value among those before it, whatever their law
cusum.py    cumulative sums that stop at zero
limits.py   the limit of such a sum from the spacing of its false alarms, and the delay of a change
silence.py  nothing arrived on days on which something usually does
-------------------------------------------------------------------
accepted.py the scans by which a hospital accepted a version
series.py   the streams of one scanner's answers
watcher.py  look at what was observed since the last look, in one transaction
messages.py messages on alarms, until the webhooks have received them
sender.py   send them
rules.py    what an approver set: how many false alarms, and what happens at an alarm
views.py    what the watch says
"""

from service.watch.budget import Budget, Price
from service.watch.silence import Arrivals
from service.watch.stream import REFERENCE, Alarm, Level, Share

__all__ = ["REFERENCE", "Alarm", "Arrivals", "Budget", "Level", "Price", "Share"]
