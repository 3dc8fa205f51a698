#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# Tests and measures on a GPU: the device conformance suite; the tests of the core, of synthesis, of
# RPCs and against real servers, those that ask for a device with averages on cuda:0; the training of
# CUDA models; compute-sanitizer; and the benchmarks. Writes tests/bench/results/DEVICE-DATE.md and
# .json, anew after each program, so that those of a run that is cut off are there. Ends with the line
# "N passed, N failed, N skipped".
#
# The machine with the GPU needs a driver, CUDA 13, Python 3.12, torch==2.11.0, and NumPy, pytest and
# pytest-timeout for the training, but no network. For what trains with torch.compile triton also needs
# a C compiler and Python.h (Ubuntu's python3.12-dev). build/gpu, made elsewhere and brought there with
# the checkout, has the rest, NVIDIA's compute-sanitizer too.
#
# Usage: tests/gpu.sh --pack [CMAKE OPTION...] | [PART...]
#   --pack  builds the release preset and makes build/gpu anew. Once more after each change of the
#           sources. Needs NVIDIA's compiler; where CMake does not find it, CMAKE_CUDA_COMPILER names it
#   PART    tests, training, bench or sanitizer: only those; the results' name says so. Or smoke:
#           a little of each, in minutes, before time goes into the whole. Or link: which slabs and how
#           many streams bring most weights to the GPU
#
#   EMA_GPU_SECONDS  what has not begun by then is skipped, what still runs is cut off; default: no limit
#   OUT              a folder that gets the results, too, and the logs as logs.tgz
set -uo pipefail
source "$(dirname "$0")/../deploy/common.sh"
source tests/tools/checks.sh

archive=build/gpu/programs.tar.xz
# What the programs were made of, and when in history.
sources=build/gpu/sources.sha256
revision=build/gpu/revision
sanitizer_wheel=nvidia-cuda-sanitizer-api==13.0.85
max_archive_bytes=$((56 << 20)) # With the checkout it fits into 64 MiB.

# What programs are linked to, but for LibTorch, CUDA, and what every system has.
list_libraries() {
  ldd "$@" | awk '$2 == "=>" && $3 ~ "^/" { print $3 }' | sort -u |
    grep -vE '/(torch|nvidia)/|/lib((c|dl|m|pthread|rt|util)\.so|gcc_s|stdc\+\+)'
}

# What the client's extension needs of nanobind, for each Python there is.
add_backends() {
  local version
  for version in 3.10 3.11 3.12 3.13 3.14; do
    build/venv/bin/python -m pip --no-input --disable-pip-version-check download --no-deps --dest "$1" \
      --only-binary :all: --platform manylinux_2_28_x86_64 --python-version "$version" \
      "$(grep '^nanobind-backend==' deploy/requirements-client.txt)" || return
  done
  local wheel
  for wheel in "$1"/*.whl; do
    python3 -m zipfile --extract "$wheel" "$1" || return
    rm "$wheel"
  done
}

make_archive() {
  local folder=build/gpu/programs program extension=build/python/client/python/_ema.abi3.so
  rm -rf build/gpu
  mkdir -p "$folder/lib" "$folder/python"
  for program in "$@"; do
    strip -o "$folder/$(basename "$program")" "$program" || return
  done
  (cd client/python &&
    find ema_client -name '*.py' -exec cp --parents --target-directory "$root/$folder/python" {} +) &&
    strip -o "$folder/python/ema_client/_ema.abi3.so" "$extension" &&
    add_backends "$folder/python" || return
  list_libraries "$@" "$extension" | xargs cp --dereference --target-directory "$folder/lib" || return
  build/venv/bin/pip install --quiet --no-deps --target build/gpu/wheel "$sanitizer_wheel" &&
    mkdir "$folder/sanitizer" &&
    cp build/gpu/wheel/nvidia/cu13/{bin/compute-sanitizer,lib/*.so} "$folder/sanitizer" &&
    rm -r build/gpu/wheel || return
  # Most of a program is what the others have, too: a dictionary that holds several of them makes
  # an eighth of their size.
  python3 - "$folder" "$archive" <<'END' || return
import lzma, sys, tarfile

filters = [{"id": lzma.FILTER_LZMA2, "preset": 1, "dict_size": 64 << 20}]
with lzma.open(sys.argv[2], "wb", filters=filters) as file, tarfile.open(fileobj=file, mode="w") as tar:
    tar.add(sys.argv[1], arcname=".")
END
  rm -r "$folder"
}

# pack CMAKE OPTION...
pack() {
  # Tests also where only what is shipped was built before.
  deploy/build.sh release -DEMA_BUILD_TESTS=ON -DEMA_BUILD_BENCHMARKS=ON "$@" || exit
  [[ -f build/release/server/kernel/libema_kernel_cuda.a ]] ||
    fail "the build has no GPU: CMake found no CUDA compiler. With NVIDIA's (deploy/setup.sh --cuda brings it):" \
      "$0 --pack -DCMAKE_CUDA_COMPILER=\"\$(ls $root/build/venv/lib/python3*/site-packages/nvidia/cu13/bin/nvcc)\""
  local built=build/release/tests
  local program packed=(build/release/server/ema-server
    "$built"/bench/{data_bench,gpu_bench,peer_server} "$built/integration/doomed_rank")
  for program in "$built"/{conformance,core,integration,rpc}/*_test "$built/checkpoint/synthesis_test"; do
    case $(basename "$program") in
      # They give their device no work, or have one of their own; tls_test gives it what rpc_test does, and takes
      # a minute.
      device_failure_test | health_test | tls_test | waiting_calls_test) continue ;;
    esac
    # What does not ask which device to use has no use for a GPU.
    ! grep --quiet EMA_TEST_DEVICE "$program" || packed+=("$program")
  done
  step "pack" build/gpu.log make_archive "${packed[@]}" || exit
  local bytes
  bytes=$(stat --format %s "$archive")
  ((bytes <= max_archive_bytes)) || fail "$archive is too large: $bytes bytes"
  git ls-files -z 'CMakeLists.txt' '*/CMakeLists.txt' '*.cmake' '*.cc' '*.cu' '*.h' '*.proto' 'client/python/*.py' |
    xargs -0 sha256sum >"$sources" || exit
  git describe --always --dirty >"$revision"
  say "made $archive, $((bytes >> 20)) MiB"
}

# Prints the folders of the libraries that torch loads, the GPU's name, and versions.
look_around() {
  python3 - <<'END'
import os, re, sys

try:
    import torch
except ImportError as error:
    sys.exit(f"gpu: python3 cannot import torch: {error}")
# What is packed is linked to these.
if not torch.__version__.startswith("2.11.") or (torch.version.cuda or "").split(".")[0] != "13":
    sys.exit(f"gpu: torch 2.11 for CUDA 13 is needed, not {torch.__version__}")
if not torch.cuda.is_available():
    sys.exit("gpu: there is no GPU that torch can use")
with open("/proc/self/maps") as maps:
    files = {line.split()[-1] for line in maps}
# The driver's folder comes last: it may have libraries of the same names.
folders = [
    sorted({os.path.dirname(file) for file in files if re.search(rf"/lib({names})[^/]*$", file)})
    for names in ("c10|cudart|cupti|torch", "cuda[.]so")
]
print(":".join(dict.fromkeys(sum(folders, []))))
print(torch.cuda.get_device_name(0))
print(f"CUDA {torch.version.cuda}, torch {torch.__version__}, Python {sys.version.split()[0]}")
END
}

# The machine's own python3 may need newer ones of these than what is packed, which does
# with both; and all that runs here looks into LD_LIBRARY_PATH.
take_common_libraries() {
  local name
  for name in $(ldd "$programs"/lib/*.so* | awk '$1 ~ /^lib(crypto|ssl|z)\.so/ && $3 ~ "^/" { print $1 }' | sort -u); do
    rm -f "$programs/lib/$name"
  done
}

# A GPU that nothing has open is shut down by its driver, and takes seconds to come back, for each
# program. Keeps it open until the script ends; if that fails, things only take longer. Waits until
# it is: a test that takes all the memory would be in the way.
hold_gpu() {
  local log=$results/hold_gpu.log
  python3 -c '
import time, torch
held = torch.zeros(1, device="cuda")
print("held", flush=True)
time.sleep(36000)' </dev/null >"$log" 2>&1 9>&- &
  held=$!
  trap 'kill "$held" 2>/dev/null' EXIT
  local i
  for ((i = 0; i < 300; i++)); do
    kill -0 "$held" 2>/dev/null && ! grep --quiet '^held' "$log" || break
    sleep 0.1
  done
}

# What the programs need and the machine has not.
check_libraries() {
  local missing
  missing=$(ldd "$programs"/* "$programs"/python/ema_client/*.so 2>&1 | grep 'not found' | sort -u)
  [[ -z $missing ]] || fail "the programs lack: $missing"
}

# at_most SECONDS: so many, or what is left for all.
at_most() {
  local left=$((${EMA_GPU_SECONDS:-1000000} - SECONDS))
  ((left > 0)) || left=1 # To `timeout` 0 is for ever.
  echo $(($1 < left ? $1 : left))
}

# limited SECONDS COMMAND...: at most so long, and not longer than there is time for all.
limited() { timeout --kill-after 5 "$(at_most "$1")" "${@:2}"; }

# has_time NAME [SECONDS]: true if there is time for what takes so long; else records that it is
# skipped.
has_time() {
  ((SECONDS + ${2:-10} < ${EMA_GPU_SECONDS:-1000000})) && return
  record skipped "$1: no time left"
  return 1
}

# run_gtest NAME SECONDS FILTER COMMAND...: a program's tests, those that the filter names.
run_gtest() {
  has_time "$1" || return
  local outcome=0
  report "$1" limited "$2" "${@:4}" --gtest_filter="$3" \
    --gtest_output="xml:$root/$results/$1.xml" || outcome=$?
  write_results
  return "$outcome"
}

# run_program NAME SECONDS [FILTER]
run_program() { run_gtest "$1" "$2" "${3-*}" "$programs/$1"; }

run_tests() {
  local program name seconds
  # First: nothing else works if this does not. Of the suite's devices only the GPU.
  run_program device_conformance_test 240 '*/Cuda:GpuTest.*:MakeDevice*'
  for program in "$programs"/*_test; do
    name=$(basename "$program")
    seconds=120
    case $name in
      device_conformance_test) continue ;;
      uniform_fill_test) seconds=240 ;;
    esac
    run_program "$name" "$seconds"
  done
  has_time "data benchmark" 60 || return
  check "data benchmark" limited 200 env EMA_DEVICE=cuda:0 "$programs/data_bench" \
    --server "$programs/ema-server" --megabytes 8 --large-model 1000000 --idle-commits 1 \
    --rounds 1 --checkpoint-megabytes 4 --data-dir "$results/data"
}

# train NAME SECONDS [TEST]: begun only if there is so much time, since cut off it leaves no report.
train() {
  local client=$root/$programs/python
  has_time "$1" "$2" || return
  # The weights' GPU is what is tested; averages on a GPU have the tests above.
  report "$1" limited 300 env PYTHONPATH="$client" EMA_SERVER_BIN="$root/$programs/ema-server" \
    EMA_DEVICE=cpu python3 -m pytest -c tests/python/pytest.ini -p no:cacheprovider \
    --junitxml "$root/$results/$1.xml" "tests/python/trainer/test_cuda_training.py${3-}"
}

# under_tool TOOL: sets `sanitized`, the conformance suite under a tool of compute-sanitizer.
# What CUDA refuses, such as too much memory, is what some tests are about. Every block is memory of
# its own: inside a larger piece of LibTorch's the tool could not see where one ends.
under_tool() {
  sanitized=(env PYTORCH_NO_CUDA_MEMORY_CACHING=1 "$sanitizer" --tool "$1" --report-api-errors no
    --target-processes application-only --error-exitcode 1 "$programs/device_conformance_test")
}

# Sets `sanitizer`. False if it does not work here, which it does not below every hypervisor.
try_sanitizer() {
  has_time compute-sanitizer 60 || return
  # The machine's own is as new as its driver.
  sanitizer=$(PATH=$PATH:/usr/local/cuda/bin:/usr/local/cuda-13/bin:$root/$programs/sanitizer \
    command -v compute-sanitizer)
  local log=$results/sanitizer.log outcome=0
  under_tool memcheck
  # One test that allocates on the GPU.
  step "try compute-sanitizer" "$log" limited 60 "${sanitized[@]}" \
    --gtest_filter='*.BlocksAreAlignedAndWritableToTheirLastByte/Cuda' || outcome=$?
  if ((outcome == 0)) && grep --quiet 'OK \] .*/Cuda' "$log" && grep --quiet 'ERROR SUMMARY' "$log"; then
    record passed "compute-sanitizer: an allocation"
    return
  fi
  # The last two are said of a program that it cannot get into, and of one that fails before any CUDA call.
  if grep -qiE 'not supported|unable to (find|attach|load)|internal sanitizer error' "$log" ||
    { grep -qi 'before first instrumented' "$log" && ! grep --quiet -F '[ RUN ' "$log"; }; then
    record skipped "compute-sanitizer: it does not work on this machine; see sanitizer.log"
  elif was_cut_off "$outcome"; then
    record "cut off" "compute-sanitizer: an allocation"
  else
    record failed "compute-sanitizer: an allocation; see sanitizer.log"
  fi
  return 1
}

run_sanitizer() {
  try_sanitizer || return
  local test tests=(InPlace AtEveryPosition EveryAlignment EverySize) excluded
  # Those make 95 % of the suite's launches. They come last, each by itself.
  excluded=$(printf ':*%s*' "${tests[@]}")
  under_tool memcheck
  run_gtest memcheck 240 "*/Cuda:GpuTest.*-${excluded#:}" "${sanitized[@]}"
  # It looks at shared memory only, which our kernels have none of.
  under_tool racecheck
  run_gtest racecheck 120 'GpuTest.*:*.ManyTargetsAtOnce*/Cuda' "${sanitized[@]}"
  under_tool memcheck
  for test in "${tests[@]}"; do
    run_gtest "memcheck-$test" 1200 "*$test*/Cuda" "${sanitized[@]}"
  done
}

# measure_row KEY OPTION... False also if there is no ratio: what is missing is in the report and the log.
measure_row() {
  limited 60 "$programs/gpu_bench" --server "$programs/ema-server" --python python3 --row "$@" \
    >"$results/row.jsonl" || return
  cat "$results/row.jsonl" >>"$results/rows.jsonl"
  grep --quiet '"ratio":[0-9]' "$results/row.jsonl"
}

report_rows() {
  [[ ! -f $results/rows.jsonl ]] ||
    python3 tests/bench/report.py "$results/rows.jsonl" "$results" >"$results/report.log"
  write_results
}

# measure_rows OPTION...: of gpu_bench.
measure_rows() {
  local key keys clocks
  keys=$("$programs/gpu_bench" --list 2>"$results/gpu_bench.log") ||
    record failed "gpu_bench lists no rows; see gpu_bench.log"
  for key in $keys; do
    has_time "benchmark $key" 30 || continue
    clocks=
    # During the first row: at rest they are others.
    [[ -e $results/clocks.csv ]] || {
      nvidia-smi --query-gpu=driver_version,clocks.sm,clocks.mem,clocks.max.sm,clocks.max.mem \
        --format=csv --loop-ms=1000 >"$results/clocks.csv" 2>/dev/null 9>&- &
      clocks=$!
    }
    check "benchmark $key" measure_row "$key" "$@"
    [[ -z $clocks ]] || kill "$clocks" 2>/dev/null
    report_rows
  done
}

# measure_training NAME SECONDS OPTION...: begins no round that may end too late.
measure_training() {
  has_time "$1" 90 || return
  check "$1" limited "$2" env PYTHONPATH="$root/$programs/python" \
    python3 tests/bench/train_gpu_bench.py --server "$programs/ema-server" \
    --seconds "$(($(at_most "$2") - 20))" "${@:3}"
}

run_bench() { measure_rows; }

run_link() {
  local streams mib
  for mib in 2 4 8 16; do
    for streams in 4 6 8; do
      has_time "$streams streams, slabs of $mib MiB" 20 || return
      check "$streams streams, slabs of $mib MiB" measure_row gpu_receive --seconds 3 \
        --streams "$streams" --slab-bytes $((mib << 20))
    done
    report_rows
  done
}

run_training() {
  train training 120
  measure_training "training benchmark" 200 --output "$results/training.md"
}

run_smoke() {
  notes+=$'A smoke run: a little of each part, to see that it works. Its figures are of too few rounds to count.\n\n'
  # One test of each kernel.
  run_program device_conformance_test 60 \
    'GpuTest.*:*.ManyTargetsAtOnce*/Cuda:*.ManyRunsAreOneSum/Cuda:*.AViewInAnotherDtype*/Cuda'
  run_program rpc_test 60
  try_sanitizer
  measure_rows --megabytes 100 --rounds 1
  train smoke-training 60 '::test_training[float32-foreach]'
  measure_training "training benchmark in short" 120 --layers 1 --steps 2 --rounds 1
}

# What there is by now.
write_results() {
  python3 tests/tools/sum_results.py "$results" >"$results/summary.txt"
  status=$?
  mkdir -p tests/bench/results
  {
    printf '# %s, %s\n\n%s; built at revision %s\n\n' "$device" "$(date +%F)" "$versions" "$(<"$revision")"
    printf 'Begun:%s%s. Not begun:%s.\n\n%s' "$begun" "$running" "${to_come:- nothing}" "$notes"
    [[ ! -s $results/clocks.csv ]] || printf 'During the first row, each second:\n\n```\n%s\n```\n\n' "$(<"$results/clocks.csv")"
    printf '```\n%s\n```\n' "$(<"$results/summary.txt")"
    [[ ! -f $results/report.md ]] || printf '\n%s\n' "$(<"$results/report.md")"
    [[ ! -f $results/training.md ]] || printf '\n%s\n' "$(<"$results/training.md")"
  } >"$output.md"
  [[ ! -f $results/report.json ]] || cp "$results/report.json" "$output.json"
  [[ -z ${OUT-} ]] || {
    cp "$output".* "$OUT"
    tar --create --gzip --file "$OUT/logs.tgz" --directory "$results" --exclude programs --exclude data .
  }
}

if [[ ${1-} == --pack ]]; then
  pack "${@:2}"
  exit
fi
for part in "$@"; do
  [[ $part =~ ^(smoke|tests|training|bench|link|sanitizer)$ ]] || fail "unknown part $part; see the top of $0"
done
[[ -f $archive && -f $sources && -f $revision ]] ||
  fail "$archive is missing: tests/gpu.sh --pack makes it, on a machine that can build"
sha256sum --check --quiet "$sources" >&2 ||
  fail "$archive was made of other sources: tests/gpu.sh --pack makes it anew"
# Where it was built, torch is there.
[[ ! -x build/venv/bin/python3 ]] || PATH=$root/build/venv/bin:$PATH
# Servers run beside their clients and what holds the GPU.
mode=$(nvidia-smi --query-gpu=compute_mode --format=csv,noheader --id=0 2>/dev/null)
[[ $mode != Exclusive* && $mode != Prohibited ]] ||
  fail "the GPU is in the mode $mode: several processes need it"
found=$(look_around) || exit
{
  read -r libraries
  read -r device
  read -r versions
} <<<"$found"

lock gpu
new_results build/tests-gpu
hold_gpu
programs=$results/programs
step "unpack $archive" "$results/unpack.log" python3 -m tarfile -e "$archive" "$programs" || exit
take_common_libraries
export LD_LIBRARY_PATH=$root/$programs/lib:$libraries${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}
export EMA_TEST_DEVICE=cuda:0 EMA_TEST_PROGRAMS=$root/$programs
check_libraries
parts=("$@")
((${#parts[@]})) || parts=(tests training bench sanitizer)
output=${device// /-}-$(date +%F)
for part in "$@"; do output+=-$part; done
output=tests/bench/results/${output,,}
# For the report: the parts, and how things ran.
begun="" running="" to_come=" tests training bench sanitizer" notes=
for part in "${parts[@]}"; do
  begun+=" $part" running=", not ended" to_come=${to_come/ $part/}
  "run_$part"
  running=
  write_results
  say "wrote $output.md"
done
cat "$results/summary.txt"
exit "$status"
