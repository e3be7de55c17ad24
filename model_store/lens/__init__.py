"""The lens: a hospital's scans are moved towards those that a network was trained on, before the network.

Fingerprint   what a federation's scans look like, and how far its members are apart (`fingerprint.json`)
seen_of       what a member, or a hospital, sees of its own scans
fit           a cohort and a fingerprint -> a lens, as far as the cohort is further away than is natural
Lens          four steps on a network's input (`lens.json`)
fingerprint_of, lens_of  those of a version; `seen_through` applies it to a scan that was prepared
Distances     how far scans are from the members', one by one and together, and what differs most
LensForScan   a lens that is fitted to one scan as it comes
scale_of      whether a cohort has smaller structures than the members; `enlarged` shows them larger
"""

from model_store.lens.distance import Distance, Distances, Measure
from model_store.lens.features import CELLS, CENTRES, LEVELS, Feature, Kind
from model_store.lens.fingerprint import FILE as FINGERPRINT
from model_store.lens.fingerprint import KINDS, Fingerprint, Seen, check_seen, mean_shift, seen_of
from model_store.lens.fit import STEPS, Fitted, Polarity, Step, fit
from model_store.lens.lens import FILE as LENS
from model_store.lens.lens import Lens
from model_store.lens.published import fingerprint_of, lens_of, seen_through
from model_store.lens.scale import Scale, enlarged, middle, scale_of
from model_store.lens.scan import LensForScan, OfScan

__all__ = [
    "CELLS",
    "CENTRES",
    "FINGERPRINT",
    "KINDS",
    "LENS",
    "LEVELS",
    "STEPS",
    "Distance",
    "Distances",
    "Feature",
    "Fingerprint",
    "Fitted",
    "Kind",
    "Lens",
    "LensForScan",
    "Measure",
    "OfScan",
    "Polarity",
    "Scale",
    "Seen",
    "Step",
    "check_seen",
    "enlarged",
    "fingerprint_of",
    "fit",
    "lens_of",
    "mean_shift",
    "middle",
    "scale_of",
    "seen_of",
    "seen_through",
]
