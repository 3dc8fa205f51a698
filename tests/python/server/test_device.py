# SPDX-License-Identifier: Apache-2.0
"""The choice of a device at the server's start."""

from __future__ import annotations

import pytest
from server_process import ServerError, ServerProcess


def test_auto_starts_anywhere_and_says_what_it_has_found(tmp_path):
    with ServerProcess(tmp_path, "--device", "auto") as server:
        pass
    log = server.log()
    if "no GPU can be used: " in log:
        assert 'device=cpu gpus="no GPU can be used: ' in log
        # CUDA says of a driver that is missing that it is too old.
        assert "driver version" not in log
    else:
        assert "device=cuda:0 " in log


def test_a_gpu_that_is_not_there_ends_the_start_with_the_reason(tmp_path):
    with pytest.raises(ServerError, match="ended with 1: ") as error:
        ServerProcess(tmp_path, "--device", "cuda:99").start()
    assert 'cannot start error="FAILED_PRECONDITION: device \\"cuda:99\\": ' in str(error.value)
    assert "there is no GPU of index 99" in str(error.value) or "no GPU can be used: " in str(
        error.value
    )


@pytest.mark.parametrize("name", ["gpu", "cuda", "cuda:x", "cuda:-1"])
def test_another_name_is_refused_with_what_is_expected(tmp_path, name):
    with pytest.raises(ServerError, match="ended with 2: ") as error:
        ServerProcess(tmp_path, f"--device={name}").start()
    assert f'"{name}" is not auto, cpu, or a GPU such as cuda:0' in str(error.value)
