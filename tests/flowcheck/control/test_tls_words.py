"""Why there is no TLS, in words."""

from __future__ import annotations

import ssl
from typing import Any

import pytest

from flowcheck.control.protocol import tls_reason


def ssl_error(kind: type[ssl.SSLError] = ssl.SSLError, **fields: Any) -> ssl.SSLError:
    error = kind(1, "[SSL] words of a library (_ssl.c:1000)")
    for name, value in fields.items():
        setattr(error, name, value)
    return error


@pytest.mark.parametrize(("error", "why"), [
    (ssl_error(reason="TLSV1_ALERT_UNKNOWN_CA"), "tlsv1 alert unknown ca"), (ssl_error(reason=None), "closed"),
    (ssl_error(reason="WRONG_VERSION_NUMBER"), "the other side speaks without"),
    (ssl_error(ssl.SSLCertVerificationError, reason="CERTIFICATE_VERIFY_FAILED", verify_message="it has expired"),
     "the node's certificate is not trusted: it has expired"),
    (OSError(32, "Broken pipe"), "Broken pipe"), (OSError("something else"), "something else"),
], ids=lambda value: value if isinstance(value, str) else "")
def test_why_there_is_no_tls(error: OSError, why: str) -> None:
    assert tls_reason(error) == why
