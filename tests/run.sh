#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# Builds the release preset and passes every fast test of it: C++, Python, and the demo in its short
# form. Ends with the line "N passed, N failed, N skipped". Reports and logs: build/tests/.
#
# Usage: tests/run.sh [--all | --campaign [fuzz [MINUTES]]]
#   --all       also the tests labelled slow, framework, container and sanitizer; the Python tests
#               that use a shared server a second time, with a group of three servers; a short run
#               of the benchmarks; the unit and integration tests with AddressSanitizer, and those
#               of threads with ThreadSanitizer; clang's thread-safety analysis and clang-tidy; the
#               checks of shell scripts (shellcheck), format and types
#   --campaign  only the tests labelled campaign, with all of their cases: every system call that
#               fails, ten thousand losses of power, 200 kills. Without it, these tests
#               try a sample; TEST_SEED=N chooses which
#   --campaign fuzz [MINUTES]
#               builds the preset fuzz, and runs each harness of tests/fuzz with clang's libFuzzer
#               for MINUTES (default 2), until one fails; its input is then in build/tests. The next
#               run continues from the inputs that this one has found, in build/fuzz-corpus
set -uo pipefail
source "$(dirname "$0")/../deploy/common.sh"
source tests/tools/checks.sh

all=false campaign=false fuzz=false minutes=${3:-2}
case $* in
  "") ;;
  --all) all=true ;;
  --campaign) campaign=true ;;
  "--campaign fuzz" | "--campaign fuzz $minutes") fuzz=true ;;
  *) fail "unknown options $*; see the top of $0" ;;
esac
[[ $minutes =~ ^[1-9][0-9]*$ ]] || fail "MINUTES is \"$minutes\", expected a whole number"

lock tests
new_results build/tests

# Most C++ tests wait more than they compute, so more of them run than there are processors.
jobs=$((2 * $(nproc)))

# ctest_report NAME PRESET OPTION...: beside the report of ctest those of the suites, in a folder.
ctest_report() {
  local suites=build/$2/tests/reports
  rm -rf "$suites"
  report "$1" ctest --preset "$2" --parallel "$jobs" --timeout 300 \
    --output-junit "$root/$results/$1.xml" "${@:3}"
  [[ ! -d $suites ]] || mv "$suites" "$results/$1"
}

# pytest_report NAME OPTION...
pytest_report() {
  report "$1" build/venv/bin/python -m pytest -c tests/python/pytest.ini tests/python -rs \
    --continue-on-collection-errors --junitxml "$results/$1.xml" "${@:2}"
}
# The tests of one file share a server, so they run in one process.
side_by_side=(--numprocesses "$(nproc)" --dist loadfile)

check_format() {
  git ls-files -z --cached --others --exclude-standard '*.h' '*.cc' '*.cu' |
    xargs -0 clang-format --dry-run --Werror
}

# With what they source. It is what finds a name that nobody assigns in a script that needs a GPU.
check_scripts() {
  git grep -lz --untracked '^#!.*bash' -- '*.sh' .ci/run |
    xargs -0 shellcheck -x -P SCRIPTDIR -S warning
}

# Runs the harnesses one after the other. The table shows two of the numbers that each harness prints.
run_harnesses() {
  local harness name
  for harness in build/fuzz/tests/fuzz/*_fuzz; do
    name=$(basename "$harness" _fuzz)
    mkdir -p "build/fuzz-corpus/$name"
    check "fuzz $name" "$harness" -max_total_time=$((60 * minutes)) -max_len=2048 -timeout=100 \
      -print_final_stats=1 -artifact_prefix="$results/$name-" \
      "build/fuzz-corpus/$name" "tests/fuzz/corpus/$name" || break
  done
  printf '%-12s %12s %10s\n' harness executions "a second"
  for name in "$results"/fuzz-*.log; do
    awk -v name="$(basename "${name#*/fuzz-}" .log)" '
      /^stat::number_of_executed_units:/ { executions = $2 }
      /^stat::average_exec_per_sec:/ { speed = $2 }
      END { printf "%-12s %12d %10d\n", name, executions, speed }' "$name"
  done
}

sum_up() {
  python3 tests/tools/sum_results.py "$results"
  exit
}

if $fuzz; then
  deploy/setup.sh --all
  check "build fuzz" deploy/build.sh fuzz && run_harnesses
  sum_up
fi
if $all || $campaign; then
  deploy/setup.sh --all
  # Another sample each time.
  export TEST_SEED=${TEST_SEED:-$RANDOM}
  say "TEST_SEED=$TEST_SEED"
fi
# Without a CUDA compiler what it compiles is not built, nor are the tests of that.
cuda=()
if ! command -v nvcc >/dev/null; then
  if $all; then
    deploy/setup.sh --cuda
    cuda=(-DEMA_WITH_CUDA=ON
      -DCMAKE_CUDA_COMPILER="$(ls "$PWD"/build/venv/lib/python3*/site-packages/nvidia/cu13/bin/nvcc)")
  else
    record skipped "CUDA code: no nvcc on the PATH; --all brings one"
  fi
fi
# The benchmarks only with --all: they take minutes to build.
if ! deploy/build.sh release -DEMA_BUILD_TESTS=ON -DEMA_BUILD_BENCHMARKS=$all "${cuda[@]}"; then
  record failed "build release"
  sum_up
fi
if $campaign; then
  export TEST_CAMPAIGN=1
  ctest_report cpp release --label-regex '^campaign$'
  pytest_report python -m campaign "${side_by_side[@]}"
  sum_up
fi
# Finds what Python would notice only when it runs the line, such as a name that is not defined.
check "ruff" build/venv/bin/ruff check --config client/python/pyproject.toml --quiet \
  client/python deploy tests
if ! $all; then
  ctest_report cpp release --label-exclude '^(slow|framework|container|sanitizer)$'
  pytest_report python -m 'not (slow or framework or container)' "${side_by_side[@]}"
  sum_up
fi

ctest_report cpp release
pytest_report python -m 'not container' "${side_by_side[@]}"
# Tests that use the fixture `server`, again: now it is a group of three servers.
EMA_TEST_GROUP=3 pytest_report group -m 'not (slow or framework or container)' "${side_by_side[@]}"
# They build images and measure how long a container takes to start: with the machine to themselves.
pytest_report containers -m container
check "clang-format" check_format
check "shellcheck" check_scripts
check "clang thread-safety analysis and clang-tidy" deploy/build.sh clang "${cuda[@]}"
check "black" build/venv/bin/black --config client/python/pyproject.toml --quiet --check \
  client/python deploy tests
check "mypy" build/venv/bin/mypy --config-file client/python/pyproject.toml --strict \
  --cache-dir build/mypy_cache client/python/ema_client
# With sanitizers they compute.
jobs=$(nproc)
check "build asan" deploy/build.sh asan "${cuda[@]}" &&
  ctest_report asan asan --label-regex '^(unit|integration|sanitizer)$'
check "build tsan" deploy/build.sh tsan "${cuda[@]}" &&
  ctest_report tsan tsan --label-regex '^threads$'
sum_up
