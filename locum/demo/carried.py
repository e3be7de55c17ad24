"""The store that the distribution carries: a model of three phantom hospitals, signed.

`python -m locum.demo.make_store` makes it.
"""

from __future__ import annotations

import shutil
from pathlib import Path

from model_store.signing import TrustedKeys, make_key
from model_store.store import Store

STORE = Path(__file__).with_name("store")
# The public key; the private one was thrown away once it had signed.
KEY = STORE / "signed-by.pub.pem"
MODEL = "abdomen"


def unpack(folder: Path) -> tuple[Path, str, dict[str, str]]:
    """Copy the store to `folder`, and check its files and its signature.

    Versions that jobs made there stay. They are signed with a key of this folder's own, which the service
    trusts beside that of the store.

    Returns the copy, the id of the key that signed it, and the settings (LOCUM_…) that serve it.
    Raises StoreError: a file or the signature is wrong.
    """
    root, private, trusted = folder / "store", folder / "signing.pem", folder / "trusted.pem"
    shutil.copytree(STORE, root, dirs_exist_ok=True, ignore=shutil.ignore_patterns(KEY.name))
    if not private.exists():
        make_key(private)
    trusted.write_bytes(KEY.read_bytes() + private.with_name(f"{private.stem}.pub.pem").read_bytes())
    opened = Store(root, trusted=TrustedKeys.load(KEY))
    signer = opened.signatures.signed_by(opened.open(MODEL))
    assert signer is not None
    return root, signer, {"LOCUM_TRUSTED_KEYS": str(trusted), "LOCUM_SIGNING_KEY": str(private)}
