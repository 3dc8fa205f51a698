# SPDX-License-Identifier: Apache-2.0
"""attach() and averaged() where no rank has the whole model."""

from __future__ import annotations

import concurrent.futures
import dataclasses
import importlib
import pathlib
import pickle
import sys
import threading
from collections.abc import Iterator

import ema_client
import numpy as np
import pytest
import torch
from ema_client._model.ranks import Ranks
from ema_client._model.torch_model import shard_again
from ema_client._trainer.rank_layout import HeldBox, TensorProperties, Layout
from server_process import ServerProcess
from testing import SUPPORT, Weights, assert_same_bits, exit_codes, replay, started

STEPS = 26
# Of each of several runs.
RESUMED_STEPS = 8
# At the first step, and when an update is due.
DUE = [1, *range(3, STEPS + 1, 3)]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """One that waits for ranks as long as it does by default: four of them share two processors."""
    folder = tmp_path_factory.mktemp("server")
    with ServerProcess(folder, data_dir=folder / "data") as process:
        yield process
        assert process.stop() == 0, process.log()


def run_ranks(
    folder: pathlib.Path, kind: str, world_size: int, url: str, steps: int = STEPS
) -> list[dict[str, np.ndarray]]:
    (folder / "init").unlink(missing_ok=True)
    program = [sys.executable, SUPPORT / "sharded_rank.py", kind]
    commands = [[*program, rank, world_size, folder, url, steps] for rank in range(world_size)]
    with started(*commands) as ranks:
        assert exit_codes(ranks) == [0] * world_size
    return [dict(np.load(folder / f"{rank}.npz")) for rank in range(world_size)]


def whole_model(logs: list[dict[str, np.ndarray]], prefix: str) -> Weights:
    """Of what several ranks have, the first one's."""
    return {
        name.removeprefix(f"{prefix}/"): value
        for log in reversed(logs)
        for name, value in log.items()
        if name.startswith(f"{prefix}/")
    }


def test_the_class_of_fully_shard_where_pytorch_2_5_has_it(server, client, model, monkeypatch):
    composable = importlib.import_module("torch.distributed._composable.fsdp")
    monkeypatch.delattr(torch.distributed.fsdp, "FSDPModule", raising=False)
    net = torch.nn.Sequential(torch.nn.Linear(3, 2))
    net[0].__class__ = type("FSDPLinear", (composable.FSDPModule, torch.nn.Linear), {})
    sharded_again = []
    net[0].register_state_dict_pre_hook(lambda *_: sharded_again.append(1))
    shard_again(net)
    assert sharded_again
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    with ema_client.attach(net, optimizer, server.url(model), half_life="4ba"):
        net(torch.ones(1, 3)).sum().backward()
        optimizer.step()
    with ema_client.averaged(net, server.url(model)):
        assert_same_bits(client.pull(model, track="ema"), net.state_dict())


@pytest.mark.parametrize(
    ("kind", "world_size"),
    [
        ("fsdp", 2),
        ("pipeline", 2),
        ("fsdp1", 2),
        pytest.param("fsdp", 3, marks=pytest.mark.slow),
        pytest.param("hsdp", 4, marks=pytest.mark.slow),
        pytest.param("tensor_parallel", 2, marks=pytest.mark.slow),
        pytest.param("fsdp_tensor_parallel", 4, marks=pytest.mark.slow),
        pytest.param("experts", 3, marks=pytest.mark.slow),
        pytest.param("fsdp1_wrapped", 3, marks=pytest.mark.slow),
        pytest.param("fsdp1_flat", 2, marks=pytest.mark.slow),
        pytest.param("fsdp1_mixed", 2, marks=pytest.mark.slow),
        pytest.param("fsdp1_replicas", 4, marks=pytest.mark.slow),
        pytest.param("fsdp1_whole", 2, marks=pytest.mark.slow),
        pytest.param("fsdp1_offloaded", 2, marks=pytest.mark.slow),
    ],
)
def test_each_rank_pushes_what_it_has(server, client, model, tmp_path, kind, world_size):
    logs = run_ranks(tmp_path, kind, world_size, server.url(model))
    pushes = [
        (entry.version, whole_model(logs, str(entry.version.step)))
        for entry in client.versions(model)
    ]
    assert [version.step for version, _ in pushes] == DUE
    specs = {spec.name: spec.shape for spec in client.model(model).tensors}
    assert specs == {name: value.shape for name, value in pushes[0][1].items()}
    for track in ("fast", "slow"):
        assert_same_bits(replay(pushes, track), client.pull(model, track=track))
    assert_same_bits(pushes[-1][1], client.pull(model, track="raw"))

    assert [int(log["pushes"]) for log in logs] == [len(DUE)] * world_size
    # Nothing is sent twice: frozen tensors once, all else in each push.
    sizes = {name: value.nbytes for name, value in pushes[0][1].items()}
    frozen = sum(
        size for name, size in sizes.items() if name.endswith("frozen") or name.startswith("0.")
    )
    sent_bytes = len(DUE) * sum(sizes.values()) - (len(DUE) - 1) * frozen
    assert sum(int(log["sent_bytes"]) for log in logs) == sent_bytes

    fast = client.pull(model, track="fast")
    if kind == "fsdp1_mixed":
        # The model's own statistics have this dtype.
        statistics = {n: t.bfloat16().float() for n, t in fast.items() if ".running_" in n}
        assert len(statistics) == 2
        fast.update(statistics)
    for log in logs:
        assert int(log["averaged_step"]) == DUE[-1]
        averaged = whole_model([log], "averaged")
        # Of a stage, and with experts, what this rank has.
        assert (averaged.keys() < fast.keys()) == (kind in ("pipeline", "experts"))
        assert_same_bits({name: fast[name] for name in averaged}, averaged)
        if loaded := whole_model([log], "loaded"):
            assert_same_bits(fast, loaded)


@pytest.mark.slow
@pytest.mark.timeout(450)  # Four times what run_ranks() gives one training.
def test_trained_on_two_ranks_resumed_on_four_evaluated_on_one_and_three(tmp_path, model):
    folder = tmp_path / "ranks"
    folder.mkdir()
    with ServerProcess(tmp_path, data_dir=tmp_path / "data") as server:
        with ema_client.Client(server.address) as client:
            first = run_ranks(folder, "fsdp", 2, server.url(model))
            second = run_ranks(folder, "fsdp", 4, server.url(model))
            logs = [{**log, **other} for log, other in zip(first, second)]
            pushes = [
                (entry.version, whole_model(logs, str(entry.version.step)))
                for entry in client.versions(model)
            ]
            assert [version.step for version, _ in pushes] == [1, *range(3, 2 * STEPS + 1, 3)]
            fast = client.pull(model, track="fast")
            assert_same_bits(replay(pushes, "fast"), fast)
            for world_size in (1, 3):
                for log in run_ranks(folder, "fsdp", world_size, server.url(model), steps=0):
                    assert_same_bits(fast, whole_model([log], "averaged"))


@pytest.mark.slow
@pytest.mark.timeout(450)  # Four times what run_ranks() gives one training.
def test_a_run_of_fsdp1_continues_on_other_ranks_with_fsdp2_and_alone(tmp_path, model):
    folder = tmp_path / "ranks"
    folder.mkdir()
    runs = [("fsdp1", 2), ("fsdp1_flat", 3), ("fsdp", 2), ("plain", 1), ("fsdp1", 2)]
    last = len(runs) * RESUMED_STEPS
    with ServerProcess(tmp_path, data_dir=tmp_path / "data") as server:
        with ema_client.Client(server.address) as client:
            weights: Weights = {}
            for kind, world_size in runs:
                logs = run_ranks(folder, kind, world_size, server.url(model), RESUMED_STEPS)
                weights |= {key: value for log in reversed(logs) for key, value in log.items()}
            pushes = [
                (entry.version, whole_model([weights], str(entry.version.step)))
                for entry in client.versions(model)
            ]
            assert [version.step for version, _ in pushes] == [1, *range(3, last + 1, 3)]
            fast = client.pull(model, track="fast")
            assert_same_bits(replay(pushes, "fast"), fast)
            for log in run_ranks(folder, "fsdp1_wrapped", 3, server.url(model), steps=0):
                assert_same_bits(fast, whole_model([log], "averaged"))


def test_pieces_are_pulled_into_dtensors_of_another_mesh(server, client, model, tmp_path):
    run_ranks(tmp_path, "fsdp", 2, server.url(model))
    torch = pytest.importorskip("torch")
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, zeros

    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/one", rank=0, world_size=1)
    try:
        mesh = init_device_mesh("cpu", (1,))
        out = {"up.weight": zeros(18, 9, device_mesh=mesh, placements=[Shard(1)])}
        pulled = client.pull(model, track="fast", out=out)
        assert pulled["up.weight"] is out["up.weight"]
        expected = client.pull(model, track="fast", tensors=["up.weight"])
        assert torch.equal(out["up.weight"].full_tensor(), expected["up.weight"])
    finally:
        dist.destroy_process_group()


class Together(Ranks):
    """Ranks that are threads; keeps what each sends, pickled."""

    def __init__(self, rank: int, barrier: threading.Barrier, sent: list[list[bytes]]) -> None:
        super().__init__(rank, barrier.parties, None)
        object.__setattr__(self, "share", (barrier, sent))

    def gather(self, value):
        barrier, sent = self.share
        sent[self.rank].append(pickle.dumps(value))
        barrier.wait(30)
        gathered = [pickle.loads(of_rank[-1]) for of_rank in sent]
        barrier.wait(30)  # Before one of them sends more.
        return gathered


def layouts_of(held: list[list[HeldBox]]) -> tuple[list[Layout | Exception], list[list[bytes]]]:
    """Of each rank, and what it has sent."""
    barrier, sent = threading.Barrier(len(held)), [[] for _ in held]

    def exchange(rank: int) -> Layout | Exception:
        try:
            return Layout.exchange(Together(rank, barrier, sent), held[rank])
        except ema_client.InvalidArgumentError as error:
            return error

    with concurrent.futures.ThreadPoolExecutor(len(held)) as pool:
        return list(pool.map(exchange, range(len(held)))), sent


def holding(name: str, offsets, extents, checksum: int = 0, rows: int = 6) -> HeldBox:
    kind = TensorProperties((name, "float32", (rows, 2), False, ()), name.startswith("frozen"))
    return HeldBox(kind, ema_client.Shard(name, offsets, extents), checksum)


def test_ranks_of_two_stages_tell_each_tensor_once_and_keep_their_own_boxes():
    """Two stages, of three ranks each: a tensor in pieces, one that all of them have, one without a piece."""
    held = [
        [
            holding(f"pieces.{stage}", (2 * rank, 0), (2, 2), rank),
            holding(f"frozen.{stage}", (0, 0), (6, 2), -7),
            holding(f"short.{stage}", (rank, 0), (int(rank == 0), 2), rank, rows=1),
        ]
        for stage in "ab"
        for rank in range(3)
    ]
    layouts, sent = layouts_of(held)
    names = [own.name for own in held[0] + held[3]]
    for rank, layout in enumerate(layouts):
        pieces, frozen, short = (own.box for own in held[rank])
        stage = (0, 1, 2) if rank < 3 else (3, 4, 5)
        own = {(rank,): [pieces, short] if rank % 3 == 0 else [pieces]}
        assert layout.groups == {**own, stage: [frozen]}
        assert [spec[0] for spec in layout.specs] == names
        assert layout.frozen == ["frozen.a", "frozen.b"]
        assert [b"pieces" in blob for blob in sent[rank]].count(True) == (rank % 3 == 0)


def test_an_action_that_one_rank_has_by_default_is_that_of_all():
    kind = TensorProperties(("mask", "float32", (2,), True, ()), False)
    box = ema_client.Shard("mask", (0,), (2,))
    held = [
        [HeldBox(kind, box, 0)],
        [HeldBox(dataclasses.replace(kind, default_action="copy"), box, 0)],
    ]
    layouts, _ = layouts_of(held)
    assert [layout.default_actions for layout in layouts] == [{"mask": "copy"}] * 2
    assert [layout.groups for layout in layouts] == [{(0, 1): [box]}] * 2


@pytest.mark.parametrize(
    "other, said",
    [
        (holding("w", (0, 0), (6, 2), 8), "rank 2 has other values than rank 0, and both"),
        (
            holding("w", (0, 0), (7, 2), 7, rows=7),
            "float32[7, 2] on rank 2, float32[6, 2] on rank 0",
        ),
    ],
)
def test_ranks_that_do_not_fit_together_all_say_so(other, said):
    layouts, _ = layouts_of([[holding("w", (0, 0), (6, 2), 7)]] * 2 + [[other]])
    assert len({str(error) for error in layouts}) == 1
    assert said in str(layouts[0]) and layouts[0].reason == "BAD_LAYOUT"
