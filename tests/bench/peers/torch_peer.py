# SPDX-License-Identifier: Apache-2.0
"""torch's own average of a model's weights, inside the trainer."""

from __future__ import annotations

import os

import peer_loop
import torch
from torch.optim import swa_utils


def main() -> None:
    tensors, elements = peer_loop.shape(peer_loop.parser(__doc__).parse_args())
    model = torch.nn.ParameterList([torch.full((elements,), float(i)) for i in range(tensors)])
    average = swa_utils.AveragedModel(model, multi_avg_fn=swa_utils.get_ema_multi_avg_fn(0.75))
    peer_loop.serve(lambda: average.update_parameters(model), os.getpid(), 0)


if __name__ == "__main__":
    main()
