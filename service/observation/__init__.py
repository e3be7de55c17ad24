"""Every answer leaves an observation: a row of numbers, with no pixel and no name.

observed = Observed(...)                           what a predictor knows of its answer
append(session, [Answer(observed, ...)])           in the transaction of the answer's audit row
page(session, "north", "organ", limit=100)         the newest first
    reviews.of("north", digest, confidences)           the rank of an answer among the hospital's own
"""

from service.observation.observed import (
    Observed,
    SeenLabel,
    acquisition_of,
    seen_labels,
    spacing_of,
)
from service.observation.review import Reviews
from service.observation.rows import Answer, Stored, Way, append, delete_before, delete_of, page

__all__ = [
    "Answer",
    "Observed",
    "Reviews",
    "SeenLabel",
    "Stored",
    "Way",
    "acquisition_of",
    "append",
    "delete_before",
    "delete_of",
    "page",
    "seen_labels",
    "spacing_of",
]
