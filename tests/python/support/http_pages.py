# SPDX-License-Identifier: Apache-2.0
"""What a server's HTTP address shows."""

from __future__ import annotations

import json
import re
import urllib.error
import urllib.request
from collections.abc import Iterator
from typing import Any

import pytest
from server_process import ServerProcess
from testing import wait_for

# Of a metric: its labels, sorted, and what it is.
Series = dict[tuple[tuple[str, str], ...], float]

LISTEN = ("--http-listen", "127.0.0.1:0")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """For a test file to import: a server that shows them, all statistics included."""
    folder = tmp_path_factory.mktemp("server")
    flags = (*LISTEN, "--statistics-every-commits", "1")
    with ServerProcess(folder, *flags, data_dir=folder / "data") as process:
        yield process
        assert process.stop() == 0, process.log()


def find_url(log: str) -> str:
    """The address, from the server's log; empty: it is not there yet."""
    found = re.findall(r"(http://[^\s/]+)/", log)
    return found[-1] if found else ""


def url_of(server: ServerProcess) -> str:
    """The address of a server that has started; its log may come a moment later."""
    return wait_for(lambda: find_url(server.log_path.read_text()), "the log names the address")


def get(url: str, path: str) -> tuple[int, str]:
    """Status code and body."""
    try:
        with urllib.request.urlopen(url + path, timeout=30) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read().decode()


def get_status(url: str) -> dict[str, Any]:
    """What the status page shows."""
    code, text = get(url, "/status.json")
    assert code == 200
    return json.loads(text)


def parse(text: str) -> dict[str, Series]:
    """The series of Prometheus' text format, by name."""
    metrics: dict[str, Series] = {}
    for line in text.splitlines():
        if line.startswith("#"):
            continue
        match = re.fullmatch(r"([a-z_]+)(?:\{(.*)\})? (\S+)", line)
        assert match, line
        labels = tuple(sorted(re.findall(r'(\w+)="([^"]*)"', match[2] or "")))
        assert labels not in metrics.setdefault(match[1], {}), line
        metrics[match[1]][labels] = float(match[3])
    return metrics


def scrape(server: ServerProcess) -> dict[str, Series]:
    code, text = get(url_of(server), "/metrics")
    assert code == 200
    return parse(text)


def value(metrics: dict[str, Series], name: str, **labels: str) -> float:
    return metrics[name][tuple(sorted(labels.items()))]
