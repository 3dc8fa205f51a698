# SPDX-License-Identifier: Apache-2.0
"""Models, tracks, runs, readers, lanes and broken calls come and go: what the server holds stays the same.

EMA_SOAK_MINUTES: how long; an hour in a campaign.
"""

from __future__ import annotations

import os
import time

import pytest

pytest.importorskip("grpc")
pytest.importorskip("google_crc32c")
pytest.importorskip("grpc_tools")

from churn import Churn, slope_per_hour, take_sample
from http_pages import LISTEN
from server_process import ServerProcess
from testing import CAMPAIGN_SEED, IS_CAMPAIGN, wait_for

MINUTES = float(os.environ.get("EMA_SOAK_MINUTES", 60 if IS_CAMPAIGN else 0.5))
# The first part is not measured: threads start, the heap fills, every path is taken once.
WARM_UP_SHARE = 1 / 3
# How much a slope may add until the end of the measured time.
MAX_GROWTH = {"heap_mib": 4, "resident_mib": 64, "fds": 16, "threads": 8, "disk_mib": 64}

LIMITED = "hostile-51e3a0b2c7d84f60"
OWNER = "owner-0d0f6f0c0b3a4a8c"


@pytest.mark.slow
@pytest.mark.framework
@pytest.mark.campaign
@pytest.mark.timeout(300 + 90 * MINUTES)
def test_what_the_server_holds_stays_the_same(tmp_path):
    print(f"TEST_SEED={CAMPAIGN_SEED}")
    tokens = tmp_path / "tokens"
    tokens.write_text(f"admin {LIMITED} hostile*\nadmin {OWNER}\n")
    data_dir = tmp_path / "data"
    options = (*LISTEN, "--auth-tokens", str(tokens))
    options += ("--memory-bytes", "256M", "--session-timeout", "10s")
    with ServerProcess(tmp_path, *options, data_dir=data_dir) as server:
        before = take_sample(server, data_dir)
        churn = Churn(server, owner_token=OWNER, limited_token=LIMITED, seed=CAMPAIGN_SEED)
        with churn:
            samples = [take_sample(server, data_dir)]
            while samples[-1].seconds < samples[0].seconds + 60 * MINUTES and not churn.faults:
                time.sleep(min(1.0, MINUTES))
                samples.append(take_sample(server, data_dir))
        assert not churn.faults, "\n".join(churn.faults)
        assert all(churn.counts.values()), churn.counts
        print(f"{dict(churn.counts)}")
        measured = samples[int(len(samples) * WARM_UP_SHARE) :]
        hours = (measured[-1].seconds - measured[0].seconds) / 3600
        growths = {what: slope_per_hour(measured, what) * hours for what in MAX_GROWTH}
        for what, growth in growths.items():
            first, last = getattr(measured[0], what), getattr(measured[-1], what)
            print(
                f"{what}: {getattr(before, what):.0f} at the start, {first:.0f} warm,"
                f" {last:.0f} at the end, slope {growth / hours:+.2f} per hour"
            )
        for what, growth in growths.items():
            assert growth <= MAX_GROWTH[what], f"{what} grows by {growth} in {hours:.2f} h"
        wait_for(
            lambda: take_sample(server, data_dir).fds <= before.fds + MAX_GROWTH["fds"],
            "the files of connections are closed",
        )
        assert server.stop() == 0, server.log()
