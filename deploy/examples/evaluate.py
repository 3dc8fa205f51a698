# SPDX-License-Identifier: Apache-2.0
"""An evaluator, in a process of its own: measures the averages while training goes on, and keeps the best.

Usage: evaluate.py ADDRESS MODEL LAST_STEP
such as: evaluate.py localhost:50051 digits 300, before pytorch_train.py begins, or soon after. The server
needs --data-dir: the best version stays on its disk.
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
            f"step {version.step}: {score:.4f}, which counts for nothing: the version has gone while it was "
            "measured. It stays with a larger max_pinned_versions of attach, with pushes that are further "
            "apart, or with set_label before it is measured, which takes a trainer's token"
        )


def main():
    if len(sys.argv) != 4:
        sys.exit(__doc__)
    address, name, last_step = sys.argv[1], sys.argv[2], int(sys.argv[3])
    model = network()
    with ema_client.Client(address) as client:
        for version in client.watch(name, after=0):  # Waits for the next, for ever.
            try:
                model.load_state_dict(client.pull(name, track="ema", version=version))
            except ema_client.OutOfRangeError:
                pass  # Newer ones have come meanwhile, and this one is not kept any more.
            else:
                report(client, name, version, accuracy(model))
            if version.step >= last_step:
                break
        if "best" not in client.labels(name):
            sys.exit(
                f"no version up to step {last_step} is there any more to be measured: start this as soon as "
                "training has begun"
            )
        best = client.pull(name, track="ema", version="best")
    model.load_state_dict(best)
    print(f"best step {best.version.step}: {accuracy(model):.4f}")


if __name__ == "__main__":
    main()
