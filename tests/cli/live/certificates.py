"""Certificates for tests: one authority, and certificates that it signs."""

from __future__ import annotations

import datetime
import ipaddress
from dataclasses import dataclass
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID


@dataclass(frozen=True)
class Signed:
    certificate: str
    key: str


class Signer:
    """Signs certificates of servers and clients on 127.0.0.1."""

    def __init__(self, directory: Path, name: str) -> None:
        self._directory = directory
        self._name = _named(name)
        self._key = ec.generate_private_key(ec.SECP256R1())
        built = self._built(self._name, self._key.public_key()).add_extension(
            x509.BasicConstraints(ca=True, path_length=None), critical=True
        )
        self.ca = str(directory / f"{name}.pem")
        Path(self.ca).write_bytes(_pem(built.sign(self._key, hashes.SHA256())))

    def sign(self, name: str) -> Signed:
        key = ec.generate_private_key(ec.SECP256R1())
        usages = [ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH]
        host = x509.IPAddress(ipaddress.ip_address("127.0.0.1"))
        built = (
            self._built(_named(name), key.public_key())
            .add_extension(x509.SubjectAlternativeName([host]), critical=False)
            .add_extension(x509.ExtendedKeyUsage(usages), critical=False)
        )
        paths = Signed(str(self._directory / f"{name}.pem"), str(self._directory / f"{name}.key"))
        Path(paths.certificate).write_bytes(_pem(built.sign(self._key, hashes.SHA256())))
        Path(paths.key).write_bytes(
            key.private_bytes(
                serialization.Encoding.PEM,
                serialization.PrivateFormat.PKCS8,
                serialization.NoEncryption(),
            )
        )
        return paths

    def _built(self, subject: x509.Name, key: ec.EllipticCurvePublicKey) -> x509.CertificateBuilder:
        now = datetime.datetime.now(datetime.timezone.utc)
        day = datetime.timedelta(days=1)
        return x509.CertificateBuilder(
            issuer_name=self._name,
            subject_name=subject,
            public_key=key,
            serial_number=x509.random_serial_number(),
            not_valid_before=now - day,
            not_valid_after=now + day,
        )


def _named(name: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])


def _pem(certificate: x509.Certificate) -> bytes:
    return certificate.public_bytes(serialization.Encoding.PEM)
