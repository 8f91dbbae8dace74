"""Certificates for tests, made by openssl."""

from __future__ import annotations

import subprocess
from pathlib import Path


def make_certificate(
    directory: Path,
    name: str,
    *,
    issuer: tuple[Path, Path] | None = None,
    hosts: str = "IP:127.0.0.1,DNS:localhost",
) -> tuple[Path, Path]:
    """A certificate for these hosts and its key; self-signed unless there is an issuer."""
    cert, key, request = (directory / f"{name}.{kind}" for kind in ("crt", "key", "csr"))
    extensions = directory / f"{name}.ext"
    extensions.write_text(f"subjectAltName={hosts}\n")
    run = ["openssl", "req", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]
    run += ["-subj", f"/CN={name}", "-keyout", str(key)]
    if issuer is None:
        run += ["-x509", "-days", "2", "-addext", extensions.read_text().strip(), "-out", str(cert)]
        subprocess.run(run, check=True, capture_output=True)
        return cert, key
    subprocess.run([*run, "-out", str(request)], check=True, capture_output=True)
    sign = ["openssl", "x509", "-req", "-in", str(request), "-days", "2", "-CAcreateserial"]
    sign += ["-CA", str(issuer[0]), "-CAkey", str(issuer[1]), "-extfile", str(extensions), "-out", str(cert)]
    subprocess.run(sign, check=True, capture_output=True)
    return cert, key
