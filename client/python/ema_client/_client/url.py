# SPDX-License-Identifier: Apache-2.0
"""`ema://host:port/model`, `emas://` over TLS, `ema+unix:///path/of/socket/model`."""

from __future__ import annotations

import re

from ema_client._errors import InvalidArgumentError

_MODEL = re.compile(r"[A-Za-z0-9._-]+")


def split_url(url: str) -> tuple[str, str]:
    """Splits `ema://host:port/model` into the address of a `Client` and the model.

    In `ema+unix:///run/ema.sock/model`, for a unix socket, the last part is the model.
    `ema://host:port,host:port/model` lists servers of one group; the address is the whole list.
    """
    problem = ""
    if isinstance(url, str):
        scheme, separator, rest = url.partition("://")
        is_unix = scheme == "ema+unix"
        host, _, model = rest.rpartition("/") if is_unix else rest.partition("/")
        if not url:
            problem = "is empty; "
        elif not separator or scheme not in ("ema", "emas", "ema+unix"):
            problem = (
                f'begins with "{scheme}{separator}", expected ema://, emas:// or ema+unix://; '
            )
        elif is_unix and not host.startswith("/"):
            problem = f'the path of the socket is "{host}", expected one that begins with "/"; '
        elif not host or re.search(r"\s", host):
            problem = f'the host is "{host}", expected one such as "host:50051"; '
        elif not _MODEL.fullmatch(model):
            problem = f'the model is "{model}", expected letters, digits, ".", "_" and "-"; '
        else:
            return f"unix:{host}" if is_unix else f"{scheme}://{host}", model
    raise InvalidArgumentError(
        f'url "{url}": {problem}must be like ema://host:50051/model, emas://host:50051/model or '
        "ema+unix:///run/ema.sock/model"
    )


def check_is_no_url(address: str) -> None:
    """InvalidArgumentError: the address of a `Client` is the URL of a model."""
    try:
        server, model = split_url(address)
    except InvalidArgumentError:
        return
    raise InvalidArgumentError(
        f'address "{address}": is the URL of model "{model}"; Client() takes the address of the '
        f'server alone, "{server}", and its calls take the name of the model'
    )
