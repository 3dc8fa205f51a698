#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# The main job on real data: two ranks train, the server averages, an evaluator measures.
# Usage: deploy/demo.sh [--short]
#   --short  fewer steps, for the tests; writes build/demo-short/, not build/demo/
set -euo pipefail
source "$(dirname "$0")/common.sh"

build_for_demo --demo
lock demo
exec build/venv/bin/python deploy/demo/run_demo.py "$@"
