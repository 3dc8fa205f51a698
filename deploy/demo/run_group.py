# SPDX-License-Identifier: Apache-2.0
"""Runs servers that keep models together on this machine, until Ctrl-C.

Usage: run_group.py N [--demo | --port P]. Without --demo, models stay in build/group/ for the next time. With it, a small network
is trained while one server is killed and started again; the logs are in build/group-demo/.
"""

from __future__ import annotations

import argparse
import pathlib
import shutil
import signal
import sys
import time

from server_group import ServerGroup
from server_process import ROOT, ServerError


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("count", type=int, metavar="N", help="number of servers")
    parser.add_argument("--demo", action="store_true", help="train while one server is killed")
    parser.add_argument(
        "--port",
        type=int,
        default=50051,
        metavar="P",
        help="the first server's port, by default 50051; the others have the next ones",
    )
    arguments = parser.parse_args()
    least = 2 if arguments.demo else 1
    if arguments.count < least:
        parser.error(f"N is {arguments.count}, expected at least {least}")
    # `kill` must stop the servers as Ctrl-C does.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        if arguments.demo:
            demo(arguments.count, ROOT / "build/group-demo")
        else:
            serve(arguments.count, ROOT / "build/group", arguments.port)
    except KeyboardInterrupt:
        return 130
    except ServerError as error:
        print(f"group: FAILED: {error}", file=sys.stderr)
        return 1
    print("group: ok")
    return 0


def serve(count: int, folder: pathlib.Path, first_port: int) -> None:
    """Runs the servers until Ctrl-C, which saves all models. Raises ServerError: a server has ended by itself."""
    with ServerGroup(folder, count, first_port=first_port) as group:
        emactl = f"build/release/client/cli/emactl --server ema://{group.address}"
        print(f"group: {count} servers and etcd are running; data and logs are in {folder}")
        print(f"group: trainers and evaluators use {group.url('MODEL')}")
        print(f"group: to list the models: {emactl} list")
        print("group: to save the models and stop: Ctrl-C", flush=True)
        try:
            while group.is_running():
                time.sleep(0.2)
        except KeyboardInterrupt:
            print("\ngroup: stopping")
            return
        raise ServerError(f"a server has ended by itself:\n{group.log()}")


def demo(count: int, folder: pathlib.Path) -> None:
    """Raises ServerError: the training did not continue after the kill."""
    # torch takes seconds to import, and serve() does not need it.
    from group_demo import run_demo

    shutil.rmtree(folder, ignore_errors=True)
    with ServerGroup(folder, count) as group:
        run_demo(group)


if __name__ == "__main__":
    sys.exit(main())
