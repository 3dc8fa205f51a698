# SPDX-License-Identifier: Apache-2.0
"""The tensors of a torch.nn.Module, its optimizers, and the ranks of its training."""
