# SPDX-License-Identifier: Apache-2.0
"""What a program or library is linked to, and what it may be."""

from __future__ import annotations

import pathlib
import re
import subprocess

SYSTEM = {"ld-linux-x86-64", "libc", "libgcc_s", "libm", "libstdc++"}
# Checksums, and kernels for the processor at hand.
OURS = {"libhwy", "libisal"}
# Of the Python extension: Debian's gRPC, and RE2 and OpenSSL, which gRPC needs, too. No LibTorch, and no Python: the interpreter brings its own.
EXTENSION = {"libabsl", "libcrypto", "libgpr", "libgrpc", "libgrpc++", "libprotobuf", "libre2"}


def linked(path: pathlib.Path) -> set[str]:
    """The shared libraries that a file names itself, without versions; Abseil's many are one."""
    done = subprocess.run(["readelf", "-d", path], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    # In the client's wheel a hash follows the name.
    names = re.findall(r"\(NEEDED\).*\[([^]]+?)(?:-[0-9a-f]{8})?\.so[^]]*\]", done.stdout)
    return {"libabsl" if name.startswith("libabsl_") else name for name in names}


def assert_linked(path: pathlib.Path, allowed: set[str]) -> None:
    """Fails if it needs anything besides `allowed` and what all of ours may."""
    libraries = linked(path)
    assert libraries - SYSTEM - OURS <= allowed
    assert OURS <= libraries
