# SPDX-License-Identifier: Apache-2.0
"""Runs a script, and leaves before the end of the interpreter.

There gloo aborts now and then: its thread lets go of the last collective's tensors, needs the GIL for that,
and Python ends a thread that asks then (FSDP2 alone, without ema_client: 2 of 11 runs).

It is killed when torchrun is, which the tests do when it takes too long, and which tells its ranks nothing.

Usage: example_rank.py SCRIPT [ARGUMENT...]
"""

import ctypes
import os
import runpy
import signal
import sys

PR_SET_PDEATHSIG = 1  # Of linux/prctl.h.

ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
sys.argv = sys.argv[1:]
sys.path[0] = os.path.dirname(sys.argv[0])
runpy.run_path(sys.argv[0], run_name="__main__")
sys.stdout.flush()
sys.stderr.flush()
os._exit(0)
