# SPDX-License-Identifier: Apache-2.0
"""`ema://host:port/model`, `emas://` over TLS, `ema+unix:///path/of/socket/model`."""

from __future__ import annotations

import re

from ema_client._errors import InvalidArgumentError

DEFAULT_PORT = 50051


def split_url(url: str) -> tuple[str, str]:
    """Splits `ema://host:port/model` into address and model; the port may be left out (50051).

    `emas://` means TLS.

    Of a unix socket's, `ema+unix:///run/ema.sock/model`, the last part is the model.
    """
    text = url if isinstance(url, str) else ""
    if match := re.fullmatch(r"ema\+unix://(/\S+)/([^/\s]+)", text):
        return f"unix:{match[1]}", match[2]
    match = re.fullmatch(r"(emas?://[^/\s]+)/([^/\s]+)", text)
    if match is None:
        raise InvalidArgumentError(
            f'url "{url}": must be like ema://host:50051/model, emas://host:50051/model or '
            "ema+unix:///run/ema.sock/model"
        )
    return with_port(match[1]), match[2]


def with_port(address: str) -> str:
    """Turns `emas://` into `tls:`, removes `ema://`, adds the default port."""
    if not isinstance(address, str) or not address:
        raise InvalidArgumentError(
            f'address {address!r}: must be "host:port", "emas://host:port" or "unix:/path"'
        )
    if address.startswith("unix:"):
        return address
    for scheme in ("emas://", "tls:"):
        if address.startswith(scheme):
            return f"tls:{with_port(address.removeprefix(scheme))}"
    address = address.removeprefix("ema://").rstrip("/")
    # Of an IPv6 address the colons are inside brackets.
    if re.search(r":\d+$", address) and not address.endswith("]"):
        return address
    if ":" in address and not address.endswith("]"):
        return address
    return f"{address}:{DEFAULT_PORT}"
