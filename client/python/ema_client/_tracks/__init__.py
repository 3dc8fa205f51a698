# SPDX-License-Identifier: Apache-2.0
"""Tracks, their schedules, and presets with the arguments of other libraries."""
