# SPDX-License-Identifier: Apache-2.0
"""Cut connections between the home, another server, etcd and the clients of a group, also in one direction only, and
processes that are stopped for a while.

The group recovers by itself without a loss of memory, and what the clients are told stays right. In a campaign, each
fault lasts 1, 5 and 60 s, otherwise 1 or 5 s.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys

import pytest
from group_network import why_not
from testing import CAMPAIGN_SEED, IS_CAMPAIGN, SUPPORT

pytestmark = [
    pytest.mark.slow,
    pytest.mark.campaign,
    pytest.mark.skipif(not shutil.which("etcd"), reason="etcd is not installed"),
    pytest.mark.skipif(bool(why_not()), reason=why_not()),
]


@pytest.mark.timeout(7200 if IS_CAMPAIGN else 1800)
def test_a_group_recovers_from_cuts_and_stops(tmp_path):
    arguments = ["all", 1, 5, 60] if IS_CAMPAIGN else [CAMPAIGN_SEED, 1, 5]
    command = [sys.executable, SUPPORT / "cut_group.py", tmp_path, *arguments]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    result = subprocess.run(
        [str(word) for word in command],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    print(result.stdout)
    assert result.returncode == 0
