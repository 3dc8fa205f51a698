#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# Installs what is missing and builds one preset of CMakePresets.json in build/PRESET. The release
# preset also installs the Python client in build/venv.
#
# Usage: deploy/build.sh [PRESET [CMAKE OPTION...]]; the default preset is release.
set -euo pipefail
source "$(dirname "$0")/common.sh"

preset=${1:-release}
shift || true
deploy/setup.sh
[[ $preset != clang ]] || command -v clang++ >/dev/null ||
  fail "there is no clang++: deploy/setup.sh --all installs it (Debian package clang)"
lock build
log=build/$preset.log
: >"$log"
# So that another checkout of the same sources finds what this one has compiled.
export CCACHE_BASEDIR=${CCACHE_BASEDIR-$root} CCACHE_NOHASHDIR=${CCACHE_NOHASHDIR-true}

# A compilation may take 1.5 GB: fewer at a time where there is less.
memory_gb=$(awk '/^MemAvailable/ { print int($2 / 1e6) }' /proc/meminfo)
jobs=$((memory_gb * 2 / 3))
((jobs <= $(nproc))) || jobs=$(nproc)
export CMAKE_BUILD_PARALLEL_LEVEL=${CMAKE_BUILD_PARALLEL_LEVEL:-$((jobs > 1 ? jobs : 1))}
step "configure $preset" "$log" cmake --preset "$preset" "$@"
step "build $preset (minutes, the first time)" "$log" cmake --build --preset "$preset"

if [[ $preset == release ]]; then
  # pip takes seconds even when there is nothing to do.
  inputs=(CMakeLists.txt deploy/cmake deploy/requirements.txt proto include
    server/CMakeLists.txt server/base server/device client/CMakeLists.txt client/cpp client/python)
  hash=$(find "${inputs[@]}" -type f -not -path '*/__pycache__/*' -print0 | sort -z |
    xargs -0 sha256sum | sha256sum)
  stamp=build/venv/.ema_client
  if [[ "$(cat "$stamp" 2>/dev/null)" != "$hash" ]]; then
    # In a folder that stays, so that the next build compiles only what has changed.
    step "install the Python client" "$log" build/venv/bin/python -m pip --no-input \
      --disable-pip-version-check install --no-deps --no-build-isolation --force-reinstall \
      --config-settings=build-dir="$root/build/python" ./client/python
    echo "$hash" >"$stamp"
  fi
fi
