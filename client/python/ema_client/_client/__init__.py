# SPDX-License-Identifier: Apache-2.0
"""Calls of a server, for anything that has named arrays: `Client`, `Run`, `pull`."""
