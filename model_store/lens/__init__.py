"""The lens: a hospital's scans are moved towards those that a network was trained on, before the network.

Fingerprint   what a federation's scans look like, and how far its members are apart (`fingerprint.json`)
seen_of       what a member, or a hospital, sees of its own scans
fit           a cohort and a fingerprint -> a lens, as far as the cohort is further away than is natural
Lens          four steps on a network's input (`lens.json`)
lens_of       the lens of a version; `seen_through` applies it to a scan that was prepared
"""

from model_store.lens.features import Kind
from model_store.lens.fingerprint import FILE as FINGERPRINT
from model_store.lens.fingerprint import KINDS, Fingerprint, Seen, check_seen, seen_of
from model_store.lens.fit import STEPS, Fitted, Polarity, Step, fit
from model_store.lens.lens import FILE as LENS
from model_store.lens.lens import Lens
from model_store.lens.published import lens_of, seen_through

__all__ = [
    "FINGERPRINT",
    "KINDS",
    "LENS",
    "STEPS",
    "Fingerprint",
    "Fitted",
    "Kind",
    "Lens",
    "Polarity",
    "Seen",
    "Step",
    "check_seen",
    "fit",
    "lens_of",
    "seen_of",
    "seen_through",
]
