# SPDX-License-Identifier: Apache-2.0
"""An evaluator, in a process of its own: measures the averages while training goes on, and keeps the best.

Usage: evaluate.py ADDRESS MODEL LAST_STEP
such as: evaluate.py localhost:50051 digits 300. Start it before pytorch_train.py, or soon after. The server
needs --data-dir: it keeps the best version on its disk.
"""

import sys

import ema_client
from pytorch_train import accuracy, network


def report(client, name, version, score):
    try:
        is_best = client.report_metric(name, version, score).moved
        print(f"step {version.step}: {score:.4f}{', the best so far' * is_best}")
    except ema_client.OutOfRangeError:
        print(
            f"step {version.step}: {score:.4f}, which does not count: the server dropped the version while it "
            "was measured. Pass a larger max_pinned_versions to attach, push less often, or call set_label "
            "before you measure (this needs a trainer's token)"
        )


def main():
    if len(sys.argv) != 4:
        sys.exit(__doc__)
    address, name, last_step = sys.argv[1], sys.argv[2], int(sys.argv[3])
    model = network()
    with ema_client.Client(address) as client:
        for version in client.watch(name, after=0):  # Waits for each next version, without a limit.
            try:
                model.load_state_dict(client.pull(name, track="ema", version=version))
            except ema_client.OutOfRangeError:
                pass  # There are newer versions, and the server has dropped this one.
            else:
                report(client, name, version, accuracy(model))
            if version.step >= last_step:
                break
        if "best" not in client.labels(name):
            sys.exit(
                f"no version up to step {last_step} could be measured: the server has dropped them. Start "
                "this script before the training, or soon after its start"
            )
        best = client.pull(name, track="ema", version="best")
    model.load_state_dict(best)
    print(f"best step {best.version.step}: {accuracy(model):.4f}")


if __name__ == "__main__":
    main()
