# SPDX-License-Identifier: Apache-2.0
"""What pushes and saves of a group cost, as the formulas of deploy/docs/group-sizes.md say; and the table there."""

from __future__ import annotations

import base64
import json
import shutil
import urllib.request
from collections.abc import Iterator

import ema_client
import numpy as np
import pytest
from http_pages import LISTEN, scrape
from server_group import ServerGroup
from server_process import ROOT, ServerProcess
from testing import wait_for

NEEDS_ETCD = pytest.mark.skipif(not shutil.which("etcd"), reason="etcd is not installed")

WEIGHTS = {f"t{i}": np.full((64, 100), i, np.float32) for i in range(9)}
SERVERS = 3
PUSHES = 20


def calls(server: ServerProcess, name: str) -> float:
    """How many calls of that name the server has answered, with any result."""
    series = scrape(server).get("ema_rpcs_total", {})
    return sum(count for labels, count in series.items() if ("rpc", name) in labels)


def etcd_writes(group: ServerGroup) -> int:
    """How many writes etcd has had."""
    body = json.dumps({"key": base64.b64encode(b"/").decode()}).encode()
    with urllib.request.urlopen(f"{group.etcd.url}/v3/kv/range", body, timeout=30) as reply:
        return int(json.load(reply)["header"]["revision"])


@pytest.fixture
def group(tmp_path) -> Iterator[ServerGroup]:
    with ServerGroup(tmp_path, SERVERS, *LISTEN, "--keep-last", "1") as running:
        yield running


@NEEDS_ETCD
def test_messages_of_a_push_and_writes_of_a_save(group):
    with ema_client.Client(group.address, timeout_s=60) as client:
        client.create_model("m", WEIGHTS, tracks={"raw": "copy"})
        with client.open_run("m", timeout_s=60) as run:
            run.push(step=1, weights=WEIGHTS)
            before = {
                name: [calls(server, name) for server in group.servers]
                for name in ("Push", "Vote", "PublishState")
            }
            writes = etcd_writes(group)
            for step in range(2, PUSHES + 2):
                run.push(step=step, weights=WEIGHTS)

            def new_calls() -> dict[str, list[float]]:
                return {
                    name: sorted(
                        calls(server, name) - earlier
                        for server, earlier in zip(group.servers, counts, strict=True)
                    )
                    for name, counts in before.items()
                }

            # The home gets a Vote, and answers it, from each of the others. Its reply has the
            # commit.
            expected = {
                "Push": [PUSHES] * SERVERS,
                "Vote": [0, 0, PUSHES * (SERVERS - 1)],
                "PublishState": [0, 0, 0],
            }
            wait_for(lambda: new_calls() == expected, lambda: f"{new_calls()}, not {expected}")
            assert etcd_writes(group) == writes
            client.create_checkpoint("m")
            assert etcd_writes(group) == writes + 1
            run.push(step=PUSHES + 2, weights=WEIGHTS)
            client.create_checkpoint("m")
            # The new one, and the removal of the old one.
            wait_for(lambda: etcd_writes(group) == writes + 3, lambda: f"{etcd_writes(group)}")


# As in tests/group/placement_test.cc.
PARAMETERS = {"Llama 3 70B": 70_553_706_496, "DeepSeek-V3": 671_026_419_200}
UNITS = {"": 1, "MB": 1e6, "GB": 1e9, "TB": 1e12}


def test_the_table_follows_from_the_formulas():
    """The page's first formulas, with bfloat16 pushes, one float32 average and max_pinned_versions=1."""
    text = (ROOT / "deploy/docs/group-sizes.md").read_text()
    rows = [
        [cell.strip() for cell in line.strip("|").split("|")]
        for line in text.splitlines()
        if line.startswith(tuple(f"| {model} |" for model in PARAMETERS)) and " GB |" in line
    ]
    assert {row[0] for row in rows} == PARAMETERS.keys()
    for model, ranks, servers, *cells in rows:
        parameters, r, p = PARAMETERS[model], int(ranks), int(servers)
        expected = [
            2 * parameters / r,
            2 * parameters / (r * p),
            2 * parameters / p,
            r * p,
            r * min(8, p) / p,
            2 * (p - 1),
            p * 0.6,
            4 * 4 * parameters / p,
        ]
        for cell, value in zip(cells, expected, strict=True):
            number, _, unit = cell.partition(" ")
            if unit.isdigit():
                number, unit = number + unit, ""
            assert float(number) * UNITS[unit] == pytest.approx(value, rel=0.06), (model, cell)
