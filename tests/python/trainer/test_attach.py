# SPDX-License-Identifier: Apache-2.0
"""attach(): what a training loop gets from its one line."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
import time

import ema_client
import numpy as np
import pytest
import torch
from server_process import ServerProcess
from testing import SUPPORT, assert_same_bits, exit_codes, replay, started, step_until, wait_for


class Trainer:
    """A small model and its optimizer."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.module = torch.nn.Sequential(
            torch.nn.Linear(6, 11), torch.nn.BatchNorm1d(11), torch.nn.Linear(11, 2)
        )
        self.optimizer = torch.optim.Adam(self.module.parameters(), lr=0.05)

    def step(self) -> None:
        self.optimizer.zero_grad()
        self.module(torch.randn(8, 6)).square().mean().backward()
        self.optimizer.step()

    def weights(self) -> dict[str, torch.Tensor]:
        return {name: tensor.detach().clone() for name, tensor in self.module.state_dict().items()}


@pytest.fixture
def trainer() -> Trainer:
    return Trainer()


def train(trainer, steps):
    """Trains, and returns the weights after each step."""
    logged = {}
    for step in range(1, steps + 1):
        trainer.step()
        logged[step] = trainer.weights()
    return logged


def await_pushes(ema, count):
    """Until so many have ended, well or not."""
    wait_for(lambda: ema.stats.pushes + ema.stats.skipped >= count, f"{count} pushes", 30)


def pushes_of(client, model, logged):
    return [(entry.version, logged[entry.version.step]) for entry in client.versions(model)]


def test_pushes_when_an_update_is_due(server, client, model, trainer):
    ema = ema_client.attach(
        trainer.module, trainer.optimizer, server.url(model), half_life="4ba", update_interval="5ba"
    )
    logged = train(trainer, 23)
    ema.close()
    pushes = pushes_of(client, model, logged)
    assert [version.step for version, _ in pushes] == [1, 5, 10, 15, 20]
    assert [version.tracks["ema"].elapsed for version, _ in pushes] == [0, 4, 5, 5, 5]
    assert_same_bits(replay(pushes, "ema"), client.pull(model, track="ema"))
    assert (ema.stats.pushes, ema.stats.skipped) == (5, 0)
    assert ema.version == pushes[-1][0]
    assert ema.step == 23
    size = sum(t.numel() * t.element_size() for t in logged[1].values())
    assert ema.stats.sent_bytes == 5 * size


def test_close_gives_the_optimizer_back(server, client, model, trainer):
    with ema_client.attach(
        trainer.module, trainer.optimizer, server.url(model), half_life="4ba"
    ) as ema:
        train(trainer, 2)
    train(trainer, 3)
    ema.close()
    assert client.model(model).latest.step == 2
    assert ema.step == 2


def test_a_new_trainer_goes_on_after_the_newest_version(server, client, model, trainer):
    for _ in range(2):
        with ema_client.attach(
            trainer.module,
            trainer.optimizer,
            server.url(model),
            half_life="4ba",
            existing="continue",
        ):
            train(trainer, 3)
    steps = [entry.version.step for entry in client.versions(model)]
    assert steps == [1, 2, 3, 4, 5, 6]


def test_half_precision_and_frozen_and_foreign_parameters(server, client, model):
    module = torch.nn.ModuleList([torch.nn.Linear(3, 3), torch.nn.Linear(3, 3)]).to(torch.bfloat16)
    module[1].bias.requires_grad_(False)
    optimizer = torch.optim.SGD(module[0].parameters(), lr=0.1)
    with ema_client.attach(module, optimizer, server.url(model), tracks={"raw": "copy"}):
        for parameter in module[0].parameters():
            parameter.grad = torch.ones_like(parameter)
        optimizer.step()
        pushed = {name: t.clone() for name, t in module.state_dict().items()}
        # Not in the optimizer, so it may change at any time.
        with torch.no_grad():
            module[1].weight.zero_()
    raw = client.pull(model, track="raw")
    assert raw["0.weight"].dtype == torch.bfloat16
    assert all(torch.equal(raw[name], tensor) for name, tensor in pushed.items())


@pytest.mark.parametrize("has_frozen", [False, True], ids=["trained", "frozen"])
def test_nobody_writes_into_weights_that_are_being_read(server, client, model, has_frozen):
    """A server that takes nothing for a while: the next step waits; with frozen weights, this one."""
    module = torch.nn.ParameterDict({"trained": torch.nn.Parameter(torch.ones(24 << 20))})
    if has_frozen:
        module["frozen"] = torch.nn.Parameter(torch.ones(24 << 20), requires_grad=False)
    optimizer = torch.optim.SGD([module["trained"]], lr=1.0)
    module["trained"].grad = torch.ones_like(module["trained"])
    is_waiting, has_stepped = threading.Event(), threading.Event()
    has_waited = []

    def go_on():
        assert is_waiting.wait(60)
        has_waited.append(not has_stepped.wait(1))
        server.send_signal(signal.SIGCONT)

    helper = threading.Thread(target=go_on)
    with ema_client.attach(
        module, optimizer, server.url(model), tracks={"raw": "copy"}, update_interval="10ba"
    ) as ema:
        helper.start()
        server.send_signal(signal.SIGSTOP)
        try:
            if not has_frozen:
                optimizer.step()
            is_waiting.set()
            optimizer.step()
            if has_frozen:
                with torch.no_grad():
                    module["frozen"].zero_()
        finally:
            is_waiting.set()
            has_stepped.set()
            helper.join()
    assert has_waited == [True]
    assert ema.stats.pushes == 1
    raw = client.pull(model, track="raw")
    assert raw.version.step == 1
    assert torch.equal(raw["trained"], torch.zeros(24 << 20))
    if has_frozen:
        assert torch.equal(raw["frozen"], torch.ones(24 << 20))
    assert module["trained"][0] == (0 if has_frozen else -1)


def test_two_ranks_each_send_half(server, client, model, tmp_path):
    steps = 30
    commands = [
        [
            *[sys.executable, SUPPORT / "training_rank.py", rank, 2],
            *[tmp_path / "init", server.url(model), tmp_path / f"{rank}.npz", steps],
        ]
        for rank in (0, 1)
    ]
    with started(*commands) as ranks:
        assert exit_codes(ranks) == [0, 0]
    logs = [dict(np.load(tmp_path / f"{rank}.npz")) for rank in (0, 1)]

    # The same parameters on both, other statistics: rank 0's are the ones that count.
    assert_same_bits(
        {"w": logs[0][f"{steps}/first.weight"]}, {"w": logs[1][f"{steps}/first.weight"]}
    )
    assert not np.array_equal(
        logs[0][f"{steps}/norm.running_mean"], logs[1][f"{steps}/norm.running_mean"]
    )
    names = [spec.name for spec in client.model(model).tensors]
    assert "third.weight" not in names, "tied to first.weight"
    assert "scratch" not in names, "not persistent"
    assert "frozen" in names and "norm.num_batches_tracked" in names
    pushes = [
        (entry.version, {name: logs[0][f"{entry.version.step}/{name}"] for name in names})
        for entry in client.versions(model)
    ]
    assert [version.step for version, _ in pushes] == [1, *range(3, steps + 1, 3)]
    pulled = {track: client.pull(model, track=track) for track in ("fast", "slow", "raw")}
    for weights in pulled.values():
        assert weights.pop("third.weight") is weights["first.weight"]
    for track in ("fast", "slow"):
        assert_same_bits(replay(pushes, track), pulled[track])
    assert_same_bits(pushes[-1][1], pulled["raw"])

    sent = [int(log["sent_bytes"]) for log in logs]
    sizes = {name: np.asarray(logs[0][f"1/{name}"]).nbytes for name in names}
    # The frozen one once: then all tracks have it.
    count = len(pushes)
    assert sum(sent) == count * sum(sizes.values()) - (count - 1) * sizes["frozen"]
    assert abs(sent[0] - sent[1]) <= count * 8
    for log in logs:
        assert (int(log["pushes"]), int(log["skipped"]), int(log["version"])) == (count, 0, count)


def test_training_goes_on_without_the_server(model, trainer, tmp_path, caplog):
    with ServerProcess(tmp_path) as server:
        ema = ema_client.attach(
            trainer.module, trainer.optimizer, server.url(model), half_life="4ba", max_wait_s=300
        )
        train(trainer, 3)
        server.kill()
        train(trainer, 50)
        start = time.monotonic()
        ema.close(timeout_s=300)
    assert time.monotonic() - start < 20
    assert ema.stats.wait_seconds < 20
    assert ema.stats.skipped >= 45
    assert ema.step == 53
    assert any("skipped" in record.message for record in caplog.records)


def test_pushes_start_again_when_the_server_is_back(model, trainer, tmp_path):
    with ServerProcess(tmp_path, data_dir=tmp_path / "data") as server:
        with ema_client.attach(
            trainer.module, trainer.optimizer, server.url(model), half_life="4ba"
        ) as ema:
            train(trainer, 3)
            with ema_client.Client(server.address) as client:
                saved = client.create_checkpoint(model).version
            server.kill()
            train(trainer, 2)
            assert ema.stats.skipped >= 1
            server.start(port=server.port)
            step_until(
                lambda: ema.version.incarnation != saved.incarnation, trainer.step, timeout_s=30
            )
        assert ema.version.incarnation > saved.incarnation
        assert ema.version.number > saved.number
        # The half-life is right in spite of the steps that were skipped.
        assert ema.version.tracks["ema"].update_count == ema.version.number


def test_a_server_that_has_forgotten_the_model_gets_it_again(model, trainer, tmp_path):
    with ServerProcess(tmp_path) as server:
        with ema_client.attach(
            trainer.module, trainer.optimizer, server.url(model), half_life="4ba"
        ) as ema:
            train(trainer, 3)
            server.kill()
            server.start(port=server.port)
            pushes = ema.stats.pushes
            step_until(lambda: ema.stats.pushes >= pushes + 2, trainer.step)
        with ema_client.Client(server.address) as client:
            assert client.model(model).latest == ema.version


@pytest.mark.slow
def test_two_ranks_go_on_when_the_server_is_back(model, tmp_path):
    stop_file = tmp_path / "stop"
    with ServerProcess(tmp_path) as server:
        commands = [
            [
                *[sys.executable, SUPPORT / "training_rank.py", rank, 2],
                *[tmp_path / "init", server.url(model), tmp_path / f"{rank}.npz", 100_000_000],
                stop_file,
            ]
            for rank in (0, 1)
        ]
        with started(*commands, stdout=subprocess.PIPE, text=True) as ranks:
            versions = ranks[0].stdout
            for _ in range(3):
                assert versions.readline()
            for _ in range(2):
                server.kill()
                server.start(port=server.port)
                with ema_client.Client(server.address) as client:
                    # Some that the last server made may still come.
                    for _ in versions:
                        try:
                            latest = client.model(model).latest
                        except ema_client.NotFoundError:
                            continue
                        if latest is not None and latest.number >= 5:
                            break
            stop_file.touch()
            for rank in ranks:
                rank.communicate(timeout=60)
            assert [rank.returncode for rank in ranks] == [0, 0]
    logs = [dict(np.load(tmp_path / f"{rank}.npz")) for rank in (0, 1)]
    for log in logs:
        assert int(log["skipped"]) >= 2
        # The hooks may wait for max_wait_s = 300.
        assert float(log["slowest_s"]) < 20


RANK = """
import sys
import ema_client, torch
import torch.distributed as dist

rank, init_file, url, how = int(sys.argv[1]), *sys.argv[2:]
dist.init_process_group("gloo", init_method=f"file://{init_file}", rank=rank, world_size=2)
torch.manual_seed(0)
module = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Linear(4, 2))
if rank == 1 and how == "value":
    with torch.no_grad():
        module[1].weight[1, 3] += 1e-6
if rank == 1 and how == "shape":
    module[1] = torch.nn.Linear(4, 3)
if rank == 1 and how == "exception":
    class Refusal(Exception):
        def __init__(self, a, b):
            super().__init__(f"{a} {b}")
    def time(step):
        raise Refusal("not", "picklable")
else:
    time = None
optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
try:
    ema_client.attach(module, optimizer, url, half_life="4ba", time=time)
except Exception as error:
    print(type(error).__name__, error)
"""


@pytest.mark.parametrize(
    "how, error, message",
    [
        ("value", "InvalidArgumentError", '"1.weight" (float32[2, 4]): rank 1 has other values'),
        ("shape", "InvalidArgumentError", '"1.weight": float32[3, 4] on rank 1, float32[2, 4]'),
        ("exception", "", "not picklable"),
    ],
)
def test_what_is_wrong_on_one_rank_raises_on_all(server, model, tmp_path, how, error, message):
    commands = [
        [sys.executable, "-c", RANK, rank, tmp_path / "init", server.url(model), how]
        for rank in (0, 1)
    ]
    with started(*commands, stdout=subprocess.PIPE, text=True) as ranks:
        outputs = [rank.communicate(timeout=60)[0] for rank in ranks]
    for output in outputs:
        assert output.startswith(error)
        assert message in output


def test_an_attachment_is_shown_in_one_line(server, model, trainer):
    with ema_client.attach(trainer.module, trainer.optimizer, server.url(model)) as ema:
        trainer.step()
        ema.wait_pushed()
        shown = "step=1, version=1, pushes=1, skipped=0)"
        assert repr(ema) == f"Attachment(model '{model}', open, {shown}"
    assert repr(ema) == f"Attachment(model '{model}', closed, {shown}"


def test_a_fenced_trainer_stays_fenced(server, client, model, trainer, caplog):
    with ema_client.attach(
        trainer.module, trainer.optimizer, server.url(model), half_life="4ba"
    ) as ema:
        train(trainer, 2)
        newer = client.open_run(model)
        train(trainer, 10)
    assert ema.stats.skipped >= 2
    assert newer.run_epoch == client.model(model).run_epoch
    told = [record for record in caplog.records if record.levelname == "WARNING"]
    assert [record.getMessage() for record in told] == [
        f'Another trainer of model "{model}" has taken over; this one no longer pushes.'
    ]


def test_nothing_waits_for_a_server_that_hangs(model, trainer, tmp_path):
    with ServerProcess(tmp_path) as server:
        ema = ema_client.attach(
            trainer.module, trainer.optimizer, server.url(model), half_life="4ba", max_wait_s=0.5
        )
        train(trainer, 3)
        server.send_signal(signal.SIGSTOP)
        try:
            train(trainer, 20)
            assert ema.stats.wait_seconds < 8
        finally:
            server.send_signal(signal.SIGCONT)
        ema.close(timeout_s=5)
    assert ema.stats.skipped > 0


def test_set_up_without_a_server_raises(trainer):
    start = time.monotonic()
    with pytest.raises((ema_client.UnavailableError, ema_client.DeadlineExceededError)):
        ema_client.attach(
            trainer.module, trainer.optimizer, "ema://127.0.0.1:1/m", half_life="4ba", timeout_s=1
        )
    assert time.monotonic() - start < 10


@pytest.mark.parametrize(
    "options, reason",
    [
        ({"half_life": "1000"}, "BAD_SCHEDULE"),
        ({"half_life": "10ba", "update_interval": "0ba"}, "BAD_SCHEDULE"),
        ({"half_life": "10ba", "tracks": {"ema": "20ba"}}, "BAD_SCHEDULE"),
        ({"half_life": "2ep"}, "BAD_TIME"),
    ],
    ids=["no unit", "interval", "twice", "unit not counted"],
)
def test_wrong_configuration_raises(server, model, trainer, options, reason):
    with pytest.raises(ema_client.InvalidArgumentError) as error:
        ema_client.attach(trainer.module, trainer.optimizer, server.url(model), **options)
    assert error.value.reason == reason


def test_a_model_that_differs_raises(server, model, trainer):
    ema_client.attach(trainer.module, trainer.optimizer, server.url(model), half_life="4ba").close()
    other = torch.nn.Sequential(torch.nn.Linear(6, 10), *(torch.nn.Linear(2, 2) for _ in range(7)))
    optimizer = torch.optim.SGD(other.parameters(), lr=0.1)
    with pytest.raises(ema_client.AlreadyExistsError) as raised:
        ema_client.attach(other, optimizer, server.url(model), half_life="4ba", existing="continue")
    problem = str(raised.value)
    assert 'here, not there: "3.weight", "3.bias", "4.weight", ' in problem
    assert 'there, not here: "1.running_mean", "1.running_var", "1.num_batches_tracked"' in problem
    assert '"0.weight" float32[10, 6] here, float32[11, 6] there' in problem


def test_on_error_raise(server, client, model, trainer):
    ema = ema_client.attach(
        trainer.module, trainer.optimizer, server.url(model), half_life="4ba", on_error="raise"
    )
    train(trainer, 1)
    await_pushes(ema, 1)
    client.open_run(model).close()
    trainer.step()
    await_pushes(ema, 2)
    # Asking raises nothing; the next step does, once.
    assert ema.version.step == 1
    assert (ema.stats.pushes, ema.stats.skipped) == (1, 1)
    with pytest.raises(ema_client.AbortedError) as error:
        trainer.step()
    assert error.value.reason == "FENCED"
    trainer.step()
    ema.close()


def test_time_in_other_units(server, client, model, trainer):
    with ema_client.attach(
        trainer.module,
        trainer.optimizer,
        server.url(model),
        half_life="100sp",
        update_interval="40sp",
        time=lambda step: {"batch": step, "sample": 8 * step},
    ):
        train(trainer, 12)
    steps = [entry.version.step for entry in client.versions(model)]
    assert steps == [1, 5, 10]


@pytest.mark.one_server("the program stops the process of the server")
@pytest.mark.parametrize("how", ["push runs", "server hangs"])
def test_a_program_that_forgets_to_close_ends(server, model, how):
    program = f"""
import ema_client, os, signal, torch
module = torch.nn.Linear(2000, 2000)
optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
ema = ema_client.attach(module, optimizer, {server.url(model)!r}, half_life="4ba")
module(torch.ones(1, 2000)).sum().backward()
if {how!r} == "server hangs":
    os.kill({server.pid}, signal.SIGSTOP)
optimizer.step()
"""
    start = time.monotonic()
    try:
        result = subprocess.run([sys.executable, "-c", program], timeout=60)
    finally:
        server.send_signal(signal.SIGCONT)
    assert result.returncode == 0
    assert time.monotonic() - start < 40


def test_ctrl_c_ends_a_wait(server, client, model, tmp_path):
    """A push that waits for a rank that never comes."""
    client.create_model(model, {"w": np.zeros(8, np.float32)}, tracks={"raw": "copy"})
    # A job in the background of a shell starts with Ctrl-C ignored.
    program = f"""
import signal
signal.signal(signal.SIGINT, signal.default_int_handler)
import ema_client, numpy as np
client = ema_client.Client({server.address!r})
runs = [client.open_run({model!r}, launch_id="x", rank=r, world_size=2) for r in (0, 1)]
push = runs[0].start_push(step=1, weights={{"w": np.zeros(8, np.float32)}}, timeout_s=60)
try:
    print("waiting", flush=True)
    push.wait()
except KeyboardInterrupt:
    push.abandon()
    print("interrupted", flush=True)
"""
    command = [sys.executable, "-c", program]
    with started(command, stdout=subprocess.PIPE, text=True) as [process]:
        assert process.stdout is not None
        assert process.stdout.readline() == "waiting\n"
        start = time.monotonic()
        process.send_signal(signal.SIGINT)
        assert process.stdout.readline() == "interrupted\n"
        assert time.monotonic() - start < 20
        assert process.wait(30) == 0
