# shellcheck shell=bash
# SPDX-License-Identifier: Apache-2.0
#
# What the scripts share. To be sourced; goes to the top folder of the checkout.
cd "$(dirname "${BASH_SOURCE[0]}")/.." || exit
root=$PWD
mkdir -p build

say() { echo "$(basename "$0" .sh): $*"; }

fail() {
  say "$*" >&2
  exit 1
}

# step TEXT LOG COMMAND...: runs the command with its output added to LOG. Prints one line, and the
# end of what the command wrote if it fails. A process that the command leaves behind holds no lock.
step() {
  local text=$1 log=$2 start=$SECONDS status=0
  shift 2
  printf '%s: %s ... ' "$(basename "$0" .sh)" "$text"
  local seen=0
  [[ ! -f $log ]] || seen=$(wc -c <"$log")
  "$@" </dev/null >>"$log" 2>&1 9>&- || status=$?
  if ((status == 0)); then
    echo "ok ($((SECONDS - start)) s)"
  else
    echo "FAILED ($((SECONDS - start)) s). The end of $log:"
    tail -c "+$((seen + 1))" "$log" | tail -n 15 | cut -c -300 | sed 's/^/  | /'
  fi
  return "$status"
}

# lock NAME: one process a checkout from here on; ends with the process.
lock() {
  exec 9>"build/.$1.lock"
  flock --nonblock 9 || {
    say "waiting for another $1 of this checkout"
    flock 9
  }
}

# Limits the parallel compilations by CMake and pip to the memory, at 1.5 GB for each, and lets ccache find
# what another checkout of the same sources has compiled.
limit_compilations() {
  export CCACHE_BASEDIR=${CCACHE_BASEDIR-$root} CCACHE_NOHASHDIR=${CCACHE_NOHASHDIR-true}
  local memory_gb jobs
  memory_gb=$(awk '/^MemAvailable/ { print int($2 / 1e6) }' /proc/meminfo)
  jobs=$((memory_gb * 2 / 3))
  ((jobs <= $(nproc))) || jobs=$(nproc)
  export CMAKE_BUILD_PARALLEL_LEVEL=${CMAKE_BUILD_PARALLEL_LEVEL:-$((jobs > 1 ? jobs : 1))}
}

# build_for_demo [OPTION]: builds the server, emactl and the Python client, after deploy/setup.sh OPTION.
build_for_demo() {
  # With the tests if they have been built here before, or they would have to be configured again.
  local options=() setup
  [[ -f build/release/CMakeCache.txt ]] || options=(-DEMA_BUILD_TESTS=OFF)
  deploy/setup.sh --server
  # Most of what is to be downloaded is not needed before the server has been compiled.
  deploy/setup.sh "$@" &>build/demo-setup.log &
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
}
