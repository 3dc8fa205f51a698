# SPDX-License-Identifier: Apache-2.0
"""What gives a torch.nn.Module its averages: `averaged`, `load_into`."""
