# SPDX-License-Identifier: Apache-2.0
"""How a track averages, and the presets that say it in other libraries' words."""
