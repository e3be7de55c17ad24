"""A hospital's certificate that has ended, signed by the authority of its consortium."""

from __future__ import annotations

import json
from datetime import UTC, datetime, timedelta
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization


def end(root: Path, site: str) -> datetime:
    """Replace the certificate in the kit of `site` by one that ended yesterday; returns when."""
    (state,) = (root / ".authority").glob("*/state/cert.json")
    signing = json.loads(state.read_text())["root_pri_key"].encode()
    path = root / site / "client.crt"
    before = x509.load_pem_x509_certificate(path.read_bytes())
    ended = datetime.now(UTC) - timedelta(days=1)
    made = (
        x509.CertificateBuilder(before.issuer, before.subject, before.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(ended - timedelta(days=360))
        .not_valid_after(ended)
    )
    for extension in before.extensions:
        made = made.add_extension(extension.value, extension.critical)
    signed = made.sign(serialization.load_pem_private_key(signing, None), hashes.SHA256())
    path.write_bytes(signed.public_bytes(serialization.Encoding.PEM))
    return ended
