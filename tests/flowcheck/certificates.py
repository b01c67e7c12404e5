"""An authority and a certificate that it signs, made anew for each test: nothing of it is in the repository."""

from __future__ import annotations

import datetime
import ipaddress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

x509 = pytest.importorskip("cryptography.x509", reason="cryptography is not installed: no certificates can be made")

from cryptography.hazmat.primitives import hashes, serialization  # noqa: E402
from cryptography.hazmat.primitives.asymmetric import ec  # noqa: E402

DAY = datetime.timedelta(days=1)


@dataclass(frozen=True)
class Issued:
    ca: Path
    cert: Path
    key: Path


def issue(folder: Path, name: str = "node", hosts: tuple[str, ...] = ("127.0.0.1", "localhost")) -> Issued:
    """Files NAME-ca.pem, NAME.pem and NAME.key. hosts: names and addresses that it is for."""
    now = datetime.datetime.now(datetime.UTC)
    authority, own = (ec.generate_private_key(ec.SECP256R1()) for _ in range(2))
    issuer = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, f"authority of {name}")])

    def signed(subject: Any, public: Any, *extensions: Any) -> Any:
        built = x509.CertificateBuilder().subject_name(subject).issuer_name(issuer).public_key(public)
        built = built.serial_number(x509.random_serial_number()).not_valid_before(now - DAY)
        built = built.not_valid_after(now + DAY)
        for extension in extensions:
            built = built.add_extension(extension, critical=False)
        return built.sign(authority, hashes.SHA256())

    top = signed(issuer, authority.public_key(), x509.BasicConstraints(ca=True, path_length=0))
    names = [x509.IPAddress(ipaddress.ip_address(one)) if one[0].isdigit() else x509.DNSName(one) for one in hosts]
    leaf = signed(x509.Name([]), own.public_key(), x509.SubjectAlternativeName(names))
    found = Issued(folder / f"{name}-ca.pem", folder / f"{name}.pem", folder / f"{name}.key")
    found.ca.write_bytes(top.public_bytes(serialization.Encoding.PEM))
    found.cert.write_bytes(leaf.public_bytes(serialization.Encoding.PEM))
    found.key.write_bytes(own.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    ))
    return found
