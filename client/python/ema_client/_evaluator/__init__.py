# SPDX-License-Identifier: Apache-2.0
"""Puts averages into a torch.nn.Module: `averaged`, `load_into`."""
