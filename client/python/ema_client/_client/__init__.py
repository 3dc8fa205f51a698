# SPDX-License-Identifier: Apache-2.0
"""What talks to a server, for anything that has named arrays: `Client`, `Run`, `pull`."""
