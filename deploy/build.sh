#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# Installs what is missing and builds one preset of CMakePresets.json in build/PRESET. The release
# preset also builds and installs the Python client, by deploy/wheel.sh.
#
# Usage: deploy/build.sh [PRESET [-DOPTION=VALUE...]]
#   PRESET            release by default
#   -DOPTION=VALUE    passed on to CMake
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
limit_compilations
step "configure $preset" "$log" cmake --preset "$preset" "$@"
step "build $preset (minutes, the first time)" "$log" cmake --build --preset "$preset"

[[ $preset != release ]] || deploy/wheel.sh
