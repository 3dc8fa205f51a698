# SPDX-License-Identifier: Apache-2.0
"""Calls that daemon threads are in when Python ends."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest

# Each waits, with the lock let go, until the interpreter has ended.
CALLS = {
    "watch": "for _ in client.watch(name): pass",
    "watch of nobody": "for _ in ema_client.Client('127.0.0.1:1').watch(name): pass",
    "wait_for": "client.wait_for(name, step=100)",
    "pull": "while True: client.pull(name, track='raw', on_progress=lambda received: None)",
    "run": "while True:\n        with client.open_run(name) as run: run.wait_ready()",
    "fold": """
    import numpy as np
    ema, weights = np.zeros(1 << 20, np.float32), np.ones(1 << 20, np.float32)
    while True: ema_client._ema.fold_many([ema], [weights], 0.5)
""",
}
PROGRAM = """
import ctypes, sys, threading
import ema_client

# As a library that takes its time to end, after Python.
libc = ctypes.CDLL(None)
libc.__cxa_atexit(libc.usleep, ctypes.c_void_p(200_000), None)
address, name, wait_s = sys.argv[1:]
client = ema_client.Client(address)
started = threading.Event()

def call():
    started.set()
    {call}

threading.Thread(target=call, daemon=True).start()
started.wait()
threading.Event().wait(float(wait_s))
print("trained", flush=True)
"""


@pytest.mark.parametrize("call", CALLS)
def test_do_not_change_how_the_program_ends(server, client, model, call):
    weights = {"a": np.zeros(1 << 16, np.float32)}
    client.create_model(model, weights, tracks={"raw": "copy"})
    with client.open_run(model) as run:
        run.push(step=1, weights=weights)
    program = PROGRAM.format(call=CALLS[call])
    # Waits look for Ctrl-C every 50 ms: before the interpreter has ended, or first after it.
    for wait_s in (0.3, 0.316, 0.332):
        ended = subprocess.run(
            [sys.executable, "-c", program, server.address, model, str(wait_s)],
            capture_output=True,
            text=True,
            timeout=60,
        )
        assert (ended.stdout, ended.stderr, ended.returncode) == ("trained\n", "", 0)


LOGGING = """
import logging, threading, time
import ema_client

class Slow(logging.Handler):
    def emit(self, record):
        writing.set()
        time.sleep(0.5)  # Lets Python's lock go, and takes it after the interpreter's end.

writing = threading.Event()
logging.getLogger("ema_client").addHandler(Slow())
logging.getLogger("ema_client").setLevel(logging.INFO)
threading.Thread(target=lambda: ema_client.Client("127.0.0.1:1").models(), daemon=True).start()
assert writing.wait(60)
import ctypes
libc = ctypes.CDLL(None)
libc.__cxa_atexit(libc.usleep, ctypes.c_void_p(1_000_000), None)
print("trained", flush=True)
"""


def test_a_call_that_is_telling_of_its_wait_does_not_either():
    ended = subprocess.run(
        [sys.executable, "-c", LOGGING], capture_output=True, text=True, timeout=120
    )
    assert (ended.stdout, ended.stderr, ended.returncode) == ("trained\n", "", 0)
