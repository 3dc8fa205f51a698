# SPDX-License-Identifier: Apache-2.0
"""Calls that all ranks make together: what fails on one fails on all, and no rank waits for ever."""

from __future__ import annotations

import subprocess
import sys

import ema_client
import pytest
import torch
from ema_client._model.ranks import Ranks
from server_process import ServerProcess
from testing import started

HEAD = """
import sys
import ema_client, torch
import torch.distributed as dist
from ema_client._model.ranks import Ranks

rank, world_size, init_file, url = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], sys.argv[4]
dist.init_process_group("gloo", init_method=f"file://{init_file}", rank=rank, world_size=world_size)
torch.manual_seed(0)
"""

# Rank 1 has a parameter of another shape at the step at which all write the average back. What failed
# behind a step is raised before the next one.
SWITCH = """
net = torch.nn.ParameterDict({"w": torch.nn.Parameter(torch.ones(4))})
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
preset = {
    "preset": "ema_pytorch",
    "update_every": 1,
    "update_after_step": 0,
    "update_model_with_ema_every": 3,
}
ema = ema_client.attach(net, optimizer, url, preset=preset, on_error="raise", max_wait_s=30)
for step in range(1, 6):
    net["w"].grad = torch.ones_like(net["w"])
    if step == 4 and rank == 1:
        net["w"] = torch.nn.Parameter(torch.ones(5))
    try:
        optimizer.step()
    except ema_client.EmaError as error:
        print(step, type(error).__name__)
ema.close(timeout_s=1)
"""

# Commits overtake every pull, and then rank 0 cannot ask for the newest version.
OVERTAKEN = """
from ema_client._client.pieces import pieces_of
from ema_client._evaluator.reading import pull_pieces

class Overtaken:
    def pull(self, *_, **__):
        raise ema_client.OutOfRangeError("gone")
    def model(self, name):
        if rank == 0:
            raise ema_client.UnavailableError("away")
        return info

class info:
    name, latest, tracks = "m", 1, {"ema": None}

class asked:
    client, ranks, info = Overtaken(), Ranks.current(), info
    track, version, step = "ema", 0, None

try:
    pull_pieces(asked, pieces_of({"w": torch.ones(3)}))
except ema_client.EmaError as error:
    print(type(error).__name__)
"""

# The model is of ranks 1 and 2; rank 0 does something else.
PROCESS_GROUP = """
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard, distribute_tensor

group = dist.new_group([1, 2])
mesh = DeviceMesh("cpu", [1, 2])
if rank == 0:
    try:
        ema_client.attach(torch.nn.Linear(3, 5), None, url, half_life="4ba", process_group=group)
    except ema_client.InvalidArgumentError as error:
        print(error)
else:
    weight = distribute_tensor(torch.arange(15.0).view(5, 3), mesh, [Shard(0)])
    net = torch.nn.Module()
    net.weight = torch.nn.Parameter(weight)
    rename = lambda name: "layer." + name
    with ema_client.attach(
        net, None, url, half_life="4ba", process_group=group, rename=rename
    ) as ema:
        ema.after_step()
        version = ema.wait_pushed()
    with torch.no_grad():
        net.weight.zero_()
    for number in (0, version):
        with ema_client.averaged(
            net, url, version=number, process_group=group, rename=rename
        ) as got:
            assert got == version
            assert torch.equal(net.weight.full_tensor(), torch.arange(15.0).view(5, 3))
        assert not net.weight.full_tensor().any()
    print("done")
dist.barrier()
"""

# Rank 1 has nothing of a tensor that is shorter than the ranks are many.
EMPTY = """
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, zeros

out = {"short": zeros(1, 3, device_mesh=init_device_mesh("cpu", (2,)), placements=[Shard(0)])}
pulled = ema_client.pull(url, track="raw", out=out)
print(sorted(pulled), pulled.version.step)
assert torch.equal(out["short"].full_tensor(), torch.ones(1, 3))
"""

# Rank 1 cannot reach the server when all evaluate the average: by what callbacks of frameworks do.
EVALUATION = """
from ema_client._callbacks import CallbackAverage

def average_of(url, attachment, **options):
    average = CallbackAverage(url, options, track=None)
    average.attachment = attachment
    return average

net = torch.nn.Linear(3, 2)
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
ema = ema_client.attach(net, optimizer, url, half_life="4ba")
for _ in range(2):
    net(torch.ones(3)).sum().backward()
    optimizer.step()
own = net.weight.detach().clone()
for attachment in (ema, None):
    for is_disconnected in (False, True):
        of_rank = "ema://127.0.0.1:1/away" if is_disconnected and rank == 1 else url
        for on_error in ("skip", "raise"):
            average = average_of(of_rank, attachment, on_error=on_error, timeout_s=2)
            try:
                with average.averaged_or_own(net) as version:
                    is_own = torch.equal(own, net.weight)
                    print("own" if is_own else "average", version and version.step)
            except ema_client.UnavailableError:
                print("raises")
            assert torch.equal(own, net.weight)
average_of(of_rank, ema, timeout_s=2).copy_or_own(net)
assert torch.equal(own, net.weight)
average_of(url, ema).copy_or_own(net)
assert not torch.equal(own, net.weight)
ema.close()
"""
# Layouts that no trainer had, on a mesh of two dimensions, with shards that are not even.
OTHER_MESH = """
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor, zeros

mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
layouts = {
    "rows.and.columns": (mesh, [Shard(0), Shard(1)]),
    "columns": (mesh, [Replicate(), Shard(1)]),
    "rows.twice": (mesh, [Shard(0), Shard(0)]),
    "of.a.part": (mesh["b"], [Shard(1)]),
    "whole": (mesh, [Replicate(), Replicate()]),
}
address, _, model = url.removeprefix("ema://").partition("/")
out = {
    name: zeros(7, 9, device_mesh=on, placements=placements)
    for name, (on, placements) in layouts.items()
}
received = []
with ema_client.Client(address) as client:
    version = client.model(model).latest
    client.pull(model, track="ema", version=version, out=out, on_progress=received.append)
    expected = client.pull(model, track="ema", version=version)
for name, (on, placements) in layouts.items():
    # Every rank has the same, so distributing it moves nothing.
    mine = distribute_tensor(expected[name], on, placements)
    assert torch.equal(out[name].to_local(), mine.to_local()), name
    assert torch.equal(out[name].full_tensor(), expected[name]), name
print(received[-1] == sum(4 * tensor.to_local().numel() for tensor in out.values()))
"""
# Rank 1 fails before it could ask the server: by its arguments, or for want of memory.
ONE_FAILS = """
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from ema_client._callbacks import CallbackAverage
from ema_client._evaluator import averaged
from ema_client._trainer.same_version import pull_on_all_ranks

def parts(placements):
    net = torch.nn.Module()
    weight = distribute_tensor(torch.arange(6.0).view(3, 2), mesh, placements)
    net.weight = torch.nn.Parameter(weight)
    return net

def no_memory(*_, **__):
    raise MemoryError("rank 1")

def on_rank_1(holder, name, value):
    if rank == 1:
        setattr(holder, name, value)

def said(call):
    try:
        call()
        print("nothing")
    except Exception as error:
        print(type(error).__name__)

def enter(at):
    with ema_client.averaged(net, at):
        pass

def twice(name):
    if rank == 1:
        raise KeyError(name)
    return name

mesh = init_device_mesh("cpu", (2,))
net = parts([Shard(0)])
with ema_client.attach(net, None, url, half_life="4ba") as ema:
    ema.after_step()
    bad = "http://nowhere" if rank == 1 else url
    said(lambda: enter(bad))
    said(lambda: ema_client.load_into(net, bad))
    said(lambda: ema_client.load_into(net, url, rename=twice))
    said(lambda: ema_client.load_into(net, url))
    version = ema.wait_pushed()
    group = Ranks.current()
    own = net.weight.to_local().clone()
    wait_pushed, pull, targets = ema.wait_pushed, ema._client.pull, averaged._targets

    on_rank_1(ema, "wait_pushed", no_memory)
    said(lambda: pull_on_all_ranks(ema, group, track="ema"))
    on_rank_1(ema, "wait_pushed", wait_pushed)
    on_rank_1(ema._client, "pull", no_memory)
    said(lambda: pull_on_all_ranks(ema, group, track="ema"))
    on_rank_1(ema._client, "pull", pull)

    average = CallbackAverage(url, {}, track=None)
    average.attachment = ema

    def evaluate():
        with average.averaged_or_own(net) as got:
            print("own" if got is None else "average")

    on_rank_1(averaged, "_targets", no_memory)
    said(evaluate)
    said(lambda: enter(url))
    on_rank_1(averaged, "_targets", targets)
    if rank == 0:
        ema.wait_pushed = no_memory
    said(evaluate)
    ema.wait_pushed = wait_pushed
    said(evaluate)
    assert torch.equal(own, net.weight.to_local())
"""
# One rank's own state_dict() was None: it had found the server away.
OTHER_STATES = """
net = torch.nn.Linear(3, 2)
with ema_client.attach(net, None, url, half_life="4ba") as ema:
    ema.after_step()
    state = ema.state_dict()
with ema_client.attach(net, None, url, half_life="4ba") as ema:
    for without in (0, 1):
        try:
            ema.load_state_dict(None if rank == without else state)
        except ema_client.InvalidArgumentError as error:
            print("resume from different states" in str(error), f"rank {without} from None" in str(error))
    ema.load_state_dict(None)
    ema.load_state_dict(state)
    ema.after_step()
    print(ema.wait_pushed().step)
"""
# In attach(), only rank 0 learns that the server has no data directory.
NO_STATES = """
labels = ema_client.Client.labels

def fails(*_, **__):
    raise ema_client.UnavailableError("away")

net = torch.nn.Linear(3, 2)
ema_client.Client.labels = fails if rank == 1 else labels
with ema_client.attach(net, None, url, half_life="4ba") as ema:
    ema_client.Client.labels = labels
    ema.after_step()
    print(ema.state_dict())
"""
# Each rank's optimizer steps its share of the parameters, and then gets the others.
SHARED_STEPS = """
from torch.distributed.optim import ZeroRedundancyOptimizer

net = torch.nn.Sequential(torch.nn.Linear(3, 5), torch.nn.Linear(5, 4))
net = torch.nn.parallel.DistributedDataParallel(net)
outer = ZeroRedundancyOptimizer(net.parameters(), torch.optim.SGD, lr=0.1)
inner = outer.optim
_, _, name = url.rpartition("/")
for given, of in ((outer, "outer"), (inner, "inner")):
    with ema_client.attach(net, given, f"{url}-{of}", tracks={"raw": "copy"}) as ema:
        for step in range(1, 4):
            net(torch.ones(2, 3)).square().sum().backward()
            outer.step()
            assert ema.wait_pushed().step == ema.step == step
            raw = ema_client.pull(f"{url}-{of}", track="raw")
            print(of, all(torch.equal(raw[key], value) for key, value in net.module.state_dict().items()))
            dist.barrier()
"""
# Some ranks call attach() or averaged() alone, before all call attach() together.
ABSENT = """
import time

net = torch.nn.Linear(3, 2)
pair = dist.new_group([1, 2])

def said(call):
    start = time.monotonic()
    try:
        call()
    except ema_client.EmaError as error:
        print(type(error).__name__, error)
    assert time.monotonic() - start < 10

def attached(**options):
    ema_client.attach(net, None, url, half_life="4ba", **options).close()

if rank == 0:
    said(lambda: attached(timeout_s=2))
elif rank == 1:
    said(lambda: attached(timeout_s=2, process_group=pair))
dist.barrier()
if rank != 0:
    said(lambda: attached(timeout_s=2))
dist.barrier()
if rank == 0:
    said(lambda: Ranks.current(call="averaged()").barrier(3))
else:
    said(lambda: attached(timeout_s=2))
dist.barrier()
attached()
if rank != 0:
    attached(process_group=pair)
print("attached")
"""
# A clock that all ranks have from rank 0, which waits for them.
CLOCK = """
net = torch.nn.Linear(3, 2)
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)

def clock(step):
    now = [float(step)]
    dist.broadcast_object_list(now)
    return {"sec": now[0]}

for given in ([], optimizer):
    try:
        ema = ema_client.attach(
            net, given if rank == 1 else optimizer, url, half_life="10sec", time=clock
        )
        print("attached")
        ema.close()
    except ema_client.InvalidArgumentError as error:
        print(error)
"""
# Not the interpreter's end, at which gloo aborts now and then: see example_rank.py.
TAIL = """
import os
sys.stdout.flush()
os._exit(0)
"""


def run(program, world_size, url, folder):
    command = [sys.executable, "-c", HEAD + program + TAIL]
    commands = [[*command, rank, world_size, folder / "init", url] for rank in range(world_size)]
    with started(*commands, stdout=subprocess.PIPE, text=True) as ranks:
        outputs = [rank.communicate(timeout=45)[0].split("\n")[:-1] for rank in ranks]
        assert [rank.returncode for rank in ranks] == [0] * world_size
    return outputs


def test_a_rank_that_cannot_push_raises_after_all_have_met(server, model, tmp_path):
    first, second = run(SWITCH, 2, server.url(model), tmp_path)
    assert second == ["5 InvalidArgumentError"]
    assert len(first) == 1 and first[0].startswith("5 ")


@pytest.mark.slow
def test_all_ranks_evaluate_the_average_or_none_does(server, model, tmp_path):
    expected = ["average 2"] * 2 + ["own None", "raises"]
    assert run(EVALUATION, 2, server.url(model), tmp_path) == [expected * 2] * 2


@pytest.mark.slow
def test_a_rank_that_fails_alone_does_not_keep_the_others(server, model, tmp_path):
    expected = ["InvalidArgumentError"] * 2 + ["KeyError", "nothing"]
    expected += ["ResourceExhaustedError"] * 2
    expected += ["own", "nothing", "MemoryError"]
    expected += ["own", "nothing", "average", "nothing"]
    assert run(ONE_FAILS, 2, server.url(model), tmp_path) == [expected] * 2


def test_a_rank_without_the_state_that_others_load(server, model, tmp_path):
    assert run(OTHER_STATES, 2, server.url(model), tmp_path) == [["True True"] * 2 + ["2"]] * 2


def test_no_rank_has_a_state_of_a_server_without_a_data_directory(model, tmp_path):
    with ServerProcess(tmp_path) as server:
        assert run(NO_STATES, 2, server.url(model), tmp_path) == [["None"]] * 2


def test_a_clock_that_is_broadcast_where_one_rank_has_a_wrong_argument(server, model, tmp_path):
    said = "optimizer: none given [BAD_REQUEST]"
    assert run(CLOCK, 2, server.url(model), tmp_path) == [
        [f"rank 1: {said}", "attached"],
        [said, "attached"],
    ]


def test_a_step_of_a_sharded_optimizer_ends_when_all_shares_are_exchanged(server, model, tmp_path):
    expected = ["outer True"] * 3 + ["inner True"] * 3
    assert run(SHARED_STEPS, 2, server.url(model), tmp_path) == [expected] * 2


@pytest.mark.slow
def test_ranks_that_do_not_call_attach_are_named(server, model, tmp_path):
    def absence(ranks, did="not called it"):
        return (
            f"DeadlineExceededError attach() must be called on every rank; {ranks} {did} within 2 s "
            "(timeout_s)"
        )

    zero, one, two = run(ABSENT, 3, server.url(model), tmp_path)
    assert zero[0] == absence("ranks 1, 2 have")
    assert one[:2] == [absence("rank 2 has"), absence("rank 0 has")]
    assert two[0] == absence("rank 0 has")
    assert one[2] == two[1] == absence("rank 0 has", "called averaged() instead")
    assert zero[1].startswith(
        "DeadlineExceededError averaged() must be called on every rank; ranks 1"
    )
    assert zero[2] == one[3] == two[2] == "attached"


def test_what_is_passed_on_says_whose_it_is():
    class Two(Ranks):
        def gather(self, value):
            return [(None, 7), (failure, 7)]

    for failure, said in [
        (ema_client.UnavailableError("away", reason="X"), "rank 1: away [X]"),
        (ValueError("rank 1: away"), "rank 1: away"),
        (MemoryError(), ""),
    ]:
        with pytest.raises(type(failure)) as raised:
            Two(0, 2, None).gather_or_raise(None, 7)
        assert str(raised.value) == said


def test_pulls_that_are_overtaken_on_a_rank_that_has_lost_the_server(tmp_path):
    assert run(OVERTAKEN, 2, "", tmp_path) == [["UnavailableError"]] * 2


def test_a_model_of_some_of_the_ranks(server, model, tmp_path):
    assert run(PROCESS_GROUP, 3, server.url(model), tmp_path) == [
        ["process_group: this rank is not in it [BAD_REQUEST]"],
        ["done"],
        ["done"],
    ]


def test_a_rank_without_any_piece_pulls_nothing(server, client, model, tmp_path):
    weights = {"short": torch.ones(1, 3), "long": torch.ones(1000)}
    client.create_model(model, weights, tracks={"raw": "copy"})
    with client.open_run(model) as run_of_model:
        run_of_model.push(step=7, weights=weights)
    outputs = run(EMPTY, 2, server.url(model), tmp_path)
    assert outputs == [["['short'] 7"], ["[] 7"]]


@pytest.mark.slow
def test_each_rank_receives_its_part_of_another_layout(server, client, model, tmp_path):
    """Bytes are counted: those of the rank's pieces, and no more."""
    names = ["rows.and.columns", "columns", "rows.twice", "of.a.part", "whole"]
    client.create_model(model, {name: torch.ones(7, 9) for name in names}, tracks={"ema": "3ba"})
    torch.manual_seed(8)
    # As two ranks of FSDP push.
    boxes = [((0, 0), (4, 9)), ((4, 0), (3, 9))]
    runs = [
        client.open_run(
            model,
            launch_id="x",
            rank=rank,
            world_size=2,
            shards=[ema_client.Shard(name, *box) for name in names],
        )
        for rank, box in enumerate(boxes)
    ]
    for step in (1, 2):
        weights = {name: torch.randn(7, 9) for name in names}
        parts = [
            {name: value[begin : begin + count] for name, value in weights.items()}
            for (begin, _), (count, _) in boxes
        ]
        pushes = [run.start_push(step=step, weights=part) for run, part in zip(runs, parts)]
        for push in pushes:
            push.wait()
    assert run(OTHER_MESH, 4, server.url(model), tmp_path) == [["True"]] * 4


def test_pieces_of_one_row_or_column_may_have_any_strides(server, client, model):
    """Such tensors are contiguous, whatever the stride of an extent of 1 is."""
    base = torch.arange(20.0).view(4, 5)
    one = torch.arange(10.0)[5::5]
    values = {"one": one, "column": base[:1].T[2:3], "row": base[:, 1:2][:1]}
    net = torch.nn.ParameterDict({name: torch.nn.Parameter(v) for name, v in values.items()})
    for name, value in values.items():
        net[name].data = value
    with ema_client.attach(net, None, server.url(model), tracks={"raw": "copy"}, check=True) as ema:
        ema.after_step()
        ema.wait_pushed()
    raw = client.pull(model, track="raw")
    assert {name: raw[name].tolist() for name in values} == {
        "one": [5.0],
        "column": [[2.0]],
        "row": [[1.0]],
    }
