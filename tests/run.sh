#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# Builds the release preset and passes every fast test of it: C++, Python, and the demo in its short
# form. Ends with the line "N passed, N failed, N skipped". Reports and logs: build/tests/.
#
# Usage: tests/run.sh [--all | --campaign]
#   --all       also the tests labelled slow, framework, container and sanitizer; the unit and
#               integration tests with AddressSanitizer, and those of threads with ThreadSanitizer;
#               clang's thread-safety analysis, clang-tidy, shellcheck, and the checks of format and
#               types
#   --campaign  only the tests labelled campaign, with all of their cases: every system call that
#               fails, ten thousand losses of power, 200 kills. Without it, these tests
#               try a sample; TEST_SEED=N chooses which
set -uo pipefail
source "$(dirname "$0")/../deploy/common.sh"
source tests/tools/checks.sh

all=false campaign=false
case ${1-} in
  "") ;;
  --all) all=true ;;
  --campaign) campaign=true ;;
  *) fail "unknown option $1; see the top of $0" ;;
esac

lock tests
new_results build/tests

# ctest_report NAME PRESET OPTION...: beside the report of ctest those of the suites, in a folder.
ctest_report() {
  local suites=build/$2/tests/reports
  rm -rf "$suites"
  report "$1" ctest --preset "$2" --parallel "$(nproc)" --timeout 300 \
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

sum_up() {
  python3 tests/tools/sum_results.py "$results"
  exit
}

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
if ! deploy/build.sh release -DEMA_BUILD_TESTS=ON "${cuda[@]}"; then
  record failed "build release"
  sum_up
fi
if $campaign; then
  export TEST_CAMPAIGN=1
  ctest_report cpp release --label-regex '^campaign$'
  pytest_report python -m campaign "${side_by_side[@]}"
  sum_up
fi
if ! $all; then
  ctest_report cpp release --label-exclude '^(slow|framework|container|sanitizer)$'
  pytest_report python -m 'not (slow or framework or container)' "${side_by_side[@]}"
  sum_up
fi

ctest_report cpp release
pytest_report python -m 'not container' "${side_by_side[@]}"
# They build images and measure how long a container takes to start: with the machine to themselves.
pytest_report containers -m container
check "clang-format" check_format
check "shellcheck" check_scripts
check "clang thread-safety analysis and clang-tidy" deploy/build.sh clang "${cuda[@]}"
check "black" build/venv/bin/black --config client/python/pyproject.toml --quiet --check \
  client/python deploy tests
check "mypy" build/venv/bin/mypy --config-file client/python/pyproject.toml --strict \
  --cache-dir build/mypy_cache client/python/ema_client
check "build asan" deploy/build.sh asan "${cuda[@]}" &&
  ctest_report asan asan --label-regex '^(unit|integration|sanitizer)$'
check "build tsan" deploy/build.sh tsan "${cuda[@]}" &&
  ctest_report tsan tsan --label-regex '^threads$'
sum_up
