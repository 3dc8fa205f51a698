# SPDX-License-Identifier: Apache-2.0
"""The health check that probes and load balancers use, asked by another gRPC than ours."""

from __future__ import annotations

import pytest
from server_process import ServerProcess
from testing import SERVING, check_health

grpc = pytest.importorskip("grpc", reason="grpcio is not installed: pip install grpcio")


@pytest.mark.parametrize("service", ["", "ema.v1.EmaService", "checkpoints"])
def test_the_server_and_its_services_are_serving(server, service):
    assert check_health(server.address, service) == SERVING


@pytest.mark.parametrize("service", ["ema.v1.Nothing", "ema.v1", "grpc.health.v1.Health"])
def test_an_unknown_service_is_not_found(server, service):
    with pytest.raises(grpc.RpcError) as error:
        check_health(server.address, service)
    assert error.value.code() == grpc.StatusCode.NOT_FOUND


def test_without_a_data_directory_there_are_no_checkpoints(tmp_path):
    with ServerProcess(tmp_path) as server:
        assert check_health(server.address, "") == SERVING
        with pytest.raises(grpc.RpcError) as error:
            check_health(server.address, "checkpoints")
        assert error.value.code() == grpc.StatusCode.NOT_FOUND
