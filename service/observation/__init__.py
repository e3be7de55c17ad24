"""Every answer leaves an observation: a row of numbers, with no pixel and no name.

observed = Observed(...)                           what a predictor knows of its answer
append(session, [Answer(observed, ...)])           in the transaction of the answer's audit row
page(session, "north", "organ", limit=100)         the newest first
reviews.of("north", digest, confidences)           the rank of an answer among the hospital's own
most_doubtful(session, "north", "organ", 50)       the masks to look at first
doubts(session, "north", digests)                  the same rank of scans that a cohort has
look_at(session, "north", 17, "key:ada@north")     somebody looked at one
"""

from service.observation.observed import (
    Observed,
    SeenLabel,
    acquisition_of,
    mask_digest,
    seen_labels,
    spacing_of,
)
from service.observation.review import Ranked, Reviews, doubts, most_doubtful
from service.observation.rows import Answer, Stored, Way, append, delete_before, delete_of, look_at, page

__all__ = [
    "Answer",
    "Observed",
    "Ranked",
    "Reviews",
    "SeenLabel",
    "Stored",
    "Way",
    "acquisition_of",
    "append",
    "delete_before",
    "delete_of",
    "doubts",
    "look_at",
    "mask_digest",
    "most_doubtful",
    "page",
    "seen_labels",
    "spacing_of",
]
