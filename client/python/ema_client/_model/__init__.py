# SPDX-License-Identifier: Apache-2.0
"""What a torch.nn.Module and its optimizers are: names, tensors, ranks."""
