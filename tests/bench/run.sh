#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# Measures the data plane and the checkpoints beside their peers, in one run, prints a table, and
# writes build/bench/report.json and report.md. Checkpoints go to build/bench/data, and away again. Installs peers that are missing (Redis, Ray).
#
# Usage: tests/bench/run.sh [--quick]
#   --quick  shorter: two minutes instead of fifteen
set -euo pipefail
source "$(dirname "$0")/../../deploy/common.sh"

# How long a row may take to be known to 5 %, and how often the server is left alone for seconds.
effort=(--seconds 30 --idle-commits 200)
case ${1-} in
  "") ;;
  --quick) effort=(--seconds 3 --idle-commits 8) ;;
  *) fail "unknown option $1; see the top of $0" ;;
esac

deploy/setup.sh --bench
deploy/build.sh release -DEMA_BUILD_TESTS=ON -DEMA_BUILD_BENCHMARKS=ON
results=build/bench
mkdir -p "$results"
build/release/tests/bench/data_bench --server build/release/server/ema-server \
  --python build/venv-bench/bin/python "${effort[@]}" >"$results/rows.jsonl"
build/venv/bin/python tests/bench/report.py "$results/rows.jsonl" "$results"
