"""Whether a version does at a hospital what its thresholds ask: figures by label, from scans with masks.

measure(found, drawn, ...)      an answer beside its mask, label by label
figures_of(measures, ...)       the figures of a label over patients, with bounds
lower_bound(values)             of a mean over few patients; how it was chosen is said there
powered(dice, ranks, others)    the same with scans without masks (PPI++)
"""

from personalization.acceptance.bounds import FEWEST, lower_bound, share_bound
from personalization.acceptance.figures import Figures, figures_of
from personalization.acceptance.measures import Measure, measure, merged
from personalization.acceptance.ppi import Powered, powered

__all__ = [
    "FEWEST",
    "Figures",
    "Measure",
    "Powered",
    "figures_of",
    "lower_bound",
    "measure",
    "merged",
    "powered",
    "share_bound",
]
