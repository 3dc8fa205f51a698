#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# The main job on real data: two ranks train, the server averages, an evaluator measures.
# Usage: deploy/demo.sh [--short]
#   --short  fewer steps, for the tests; writes build/demo-short/, not build/demo/
set -euo pipefail
source "$(dirname "$0")/common.sh"

# With the tests if they have been built here before, or they would have to be configured again.
options=()
[[ -f build/release/CMakeCache.txt ]] || options=(-DEMA_BUILD_TESTS=OFF)
deploy/setup.sh --server
# Most of what is to be downloaded is not needed before the server has been compiled.
deploy/setup.sh --demo &>build/demo-setup.log &
setup=$!
(
  lock build
  limit_compilations
  step "configure release" build/release.log cmake --preset release "${options[@]}"
  step "build ema-server and emactl (minutes, the first time)" build/release.log \
    cmake --build --preset release --target ema-server emactl
)
wait "$setup" || fail "$(cat build/demo-setup.log)"
deploy/wheel.sh
lock demo
exec build/venv/bin/python deploy/demo/run_demo.py "$@"
