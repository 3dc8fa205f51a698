# SPDX-License-Identifier: Apache-2.0
"""The health check that probes and load balancers use, asked by another gRPC than ours."""

from __future__ import annotations

import pytest

grpc = pytest.importorskip("grpc", reason="grpcio is not installed: pip install grpcio")

SERVING = b"\x08\x01"  # HealthCheckResponse{status: SERVING}


@pytest.fixture
def check(server):
    """Calls grpc.health.v1.Health/Check; messages are bytes, as no generated code is there."""
    with grpc.insecure_channel(server.address) as channel:
        call = channel.unary_unary("/grpc.health.v1.Health/Check")

        def check(service: str) -> bytes:
            name = service.encode()
            request = b"\x0a" + bytes([len(name)]) + name  # HealthCheckRequest{service: name}
            return call(request, timeout=30)

        yield check


@pytest.mark.parametrize("service", ["", "ema.v1.EmaService"])
def test_the_server_and_its_service_are_serving(check, service):
    assert check(service) == SERVING


def test_an_empty_request_asks_for_the_server(server):
    with grpc.insecure_channel(server.address) as channel:
        assert channel.unary_unary("/grpc.health.v1.Health/Check")(b"", timeout=30) == SERVING


@pytest.mark.parametrize("service", ["ema.v1.Nothing", "ema.v1", "grpc.health.v1.Health"])
def test_an_unknown_service_is_not_found(check, service):
    with pytest.raises(grpc.RpcError) as error:
        check(service)
    assert error.value.code() == grpc.StatusCode.NOT_FOUND
