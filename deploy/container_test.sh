#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# Builds the server's images and the client's wheel by the Dockerfile, without a container engine or a
# registry, on a base that debootstrap makes. Uses the server with that client: a push and a pull from
# outside, a stop, a second start on the same volume, as PID 1 on a read-only root without a shell. The
# image for GPUs is used without one, by the demo in its own image, too. Needs root. Everything is under
# build/container. Last line: "container_test: ok".
#
# Usage: deploy/container_test.sh
set -euo pipefail
source "$(dirname "$0")/common.sh"
((EUID == 0)) || fail "needs root (debootstrap, chroot): run it as root"

deploy/setup.sh --all
deploy/build.sh release
lock container

max_megabytes=150
work=$root/build/container
log=build/container/test.log
mkdir -p "$work/host/etc/apt/apt.conf.d"
: >"$log"
source /etc/os-release

storage=(--storage-driver vfs --root "$work/storage" --runroot "$work/run")
buildah() { command buildah "${storage[@]}" "$@"; }

# The sources, index and certificate that apt and pip of this machine use: the Dockerfile names none.
copy_host_settings() {
  local etc=$work/host/etc certificate
  apt-get indextargets --format 'deb $(REPO_URI) $(RELEASE) $(COMPONENT)' \
    "Created-By: Packages" "Origin: Debian" | sort -u >"$etc/apt/sources.list"
  apt-config dump | grep -E '^Acquire::(https?::Proxy|Check-)' >"$etc/apt/apt.conf.d/90host" || true
  {
    echo "[global]"
    build/venv/bin/python -m pip config list |
      sed -nE "s/^[^.]*\.(index-url|extra-index-url|proxy|trusted-host)='(.*)'\$/\1 = \2/p"
    certificate=$(build/venv/bin/python -m pip config list | sed -nE "s/^[^.]*\.cert='(.*)'\$/\1/p" | head -n 1)
    if [[ -n $certificate ]]; then
      cp --dereference "$certificate" "$etc/pip-certificate.crt"
      echo "cert = /etc/pip-certificate.crt"
    fi
  } >"$etc/pip.conf"
}

# build TARGET IMAGE
build() {
  # What this machine has compiled is not compiled again: the image's compiler is the same.
  local ccache pip_cache
  ccache=$(ccache --get-config cache_dir || echo "$work/ccache")
  pip_cache=$(build/venv/bin/python -m pip cache dir)
  mkdir -p "$ccache" "$pip_cache"
  buildah build --isolation chroot --pull-never --format docker --build-arg BASE=localhost/ema-base \
    --volume "$ccache:/root/.cache/ccache" --volume "$pip_cache:/root/.cache/pip" \
    --target "$1" --tag "$2" .
}

# From the image of the wheel into a virtual environment of its own, build/container/venv.
install_client() {
  local wheel
  wheel=$(buildah from --pull-never localhost/ema-wheel) || return
  python3 -m venv --clear "$work/venv" &&
    "$work/venv/bin/python" -m pip --no-input --disable-pip-version-check install numpy \
      "$(buildah mount "$wheel")"/*.whl && buildah rm "$wheel"
}

# inspect FIELD: of the image's configuration.
inspect() { buildah inspect --type image --format "{{$1}}" localhost/ema-server; }

check_settings() {
  local version
  version=$(build/release/server/ema-server --version)
  echo "$(inspect .Docker.Config.User) $(inspect .Docker.Config.Entrypoint) $(inspect .Docker.Config.Cmd)" \
    "$(inspect .Docker.Config.Env) $(inspect .Docker.Config.Volumes) $(inspect .Docker.Config.Healthcheck.Test)" \
    "$(inspect .Docker.Config.Labels)"
  [[ $(inspect .Docker.Config.User) == 65532:65532 ]] &&
    [[ $(inspect .Docker.Config.Entrypoint) == "[/usr/local/bin/ema-server]" ]] &&
    [[ $(inspect .Docker.Config.Env) == *"EMA_LISTEN=0.0.0.0:50051 "*"EMA_DATA_DIR=/data"* ]] &&
    [[ $(inspect .Docker.Config.Volumes) == "map[/data:{}]" ]] &&
    [[ $(inspect .Docker.Config.Healthcheck.Test) == "[CMD /usr/local/bin/emactl health]" ]] &&
    [[ $(inspect .Docker.Config.Labels) == *"org.opencontainers.image.version:${version#* }"* ]]
}

# open_image IMAGE: makes a container of it. Its size is of all files, the base's among them.
open_image() {
  local megabytes
  container=$(buildah from --pull-never "$1")
  megabytes=$(($(du --summarize --bytes --one-file-system "$(buildah mount "$container")" | cut -f 1) / 1000000))
  say "the image has $megabytes MB, of at most $max_megabytes"
  ((megabytes <= max_megabytes))
}

# The process of the server: a descendant of the `buildah run` that started it.
find_server() {
  local child
  for child in $(pgrep --parent "$1"); do
    if [[ $(cat "/proc/$child/comm") == ema-server ]]; then
      echo "$child"
    else
      find_server "$child"
    fi
  done
}

# Waits until the server that `runner` runs serves, as the image's user.
await_server() {
  until [[ -s $work/port/port ]]; do
    kill -0 "$runner" || return 1
    sleep 0.1
  done
  grep -E '^(Uid|Gid):\s65532\s65532\s' "/proc/$(find_server "$runner")/status" | wc -l | grep -x 2
}

# What an engine runs by ENTRYPOINT, but on a free port, and for this machine only.
server=(/usr/local/bin/ema-server --listen 127.0.0.1:0 --data-dir /data --port-file /port/port)

start_server() {
  rm -f "$work/port/port"
  buildah run --isolation chroot --env EMA_HTTP_LISTEN=127.0.0.1:0 \
    --volume "$work/volume:/data" --volume "$work/port:/port" \
    "$container" -- "${server[@]}" </dev/null >>"$log" 2>&1 &
  runner=$!
  await_server
}

# As PID 1, on a root that cannot be written, without a program of the base: just data, and an empty /tmp.
start_bare_server() {
  local image
  image=$(buildah mount "$container")
  rm -f "$work/port/port"
  mkdir -p "$work/bare" "$image/port"
  unshare --mount --pid --fork --kill-child bash -euc '
    image=$1 bare=$2 volume=$3 port=$4
    shift 4
    mount --bind "$image" "$bare"
    mount --options remount,bind,ro "$bare"
    mount --types tmpfs none "$bare/tmp"
    mount --types tmpfs --options ro none "$bare/usr/bin"
    mount --types proc proc "$bare/proc"
    mount --bind "$volume" "$bare/data"
    mount --bind "$port" "$bare/port"
    exec env --ignore-environment "$(command -v chroot)" --userspec=65532:65532 --groups= "$bare" "$@"
  ' bash "$image" "$work/bare" "$work/volume" "$work/port" "${server[@]}" </dev/null >>"$log" 2>&1 &
  runner=$!
  await_server && grep -E '^NSpid:\s[0-9]+\s1$' "/proc/$(find_server "$runner")/status"
}

# health CODE: what the image's health check exits with.
health() {
  local code=0
  buildah run --isolation chroot "$container" -- \
    /usr/local/bin/emactl health --server "127.0.0.1:$(<"$work/port/port")" || code=$?
  ((code == $1))
}

# SIGTERM, as a container engine stops it; fails if it does not exit with 0.
stop_server() {
  kill -TERM "$(find_server "$runner")" && wait "$runner" && runner=
}

# use_server push|pull: both check the average, which is exact in binary.
use_server() {
  "$work/venv/bin/python" - "$1" "$(<"$work/port/port")" <<'END'
import sys

import ema_client
import numpy

action, port = sys.argv[1:]
weights = {1: numpy.arange(1000, dtype=numpy.float32), 2: numpy.ones(1000, dtype=numpy.float32)}
with ema_client.Client(f"127.0.0.1:{port}") as client:
    if action == "push":
        client.create_model("digits", {"w": weights[1]}, tracks={"ema": "1ba"})
        with client.open_run("digits") as run:
            for step, values in weights.items():
                run.push(step=step, weights={"w": values})
    average = client.pull("digits", track="ema", framework="numpy")["w"]
assert numpy.array_equal(average, (weights[1] + weights[2]) / 2), average
END
}

# As an operator who has forgotten `--gpus`: it says what is missing, and does not serve.
refuse_gpu() {
  local said code=0
  said=$(buildah run --isolation chroot "$container" -- "${server[@]}" --device cuda:0 </dev/null 2>&1) || code=$?
  echo "$said"
  ((code == 1)) && [[ $said == *'device \"cuda:0\": no GPU can be used: there is no NVIDIA driver'* ]]
}

# A short training, with an evaluator beside it, as compose.yaml runs them.
run_demo() {
  local url evaluator
  # buildah tells a chroot no address of its own name, by which torchrun calls itself.
  local in_demo=(timeout 120 buildah "${storage[@]}" run --isolation chroot --hostname localhost "$demo" --)
  url=ema://127.0.0.1:$(<"$work/port/port")/demo
  "${in_demo[@]}" python deploy/demo/evaluator.py "$url" /out &
  evaluator=$!
  "${in_demo[@]}" torchrun --standalone --nproc-per-node 2 deploy/demo/train.py "$url" 500 10 /out || {
    kill "$evaluator"
    wait "$evaluator"
    return 1
  }
  wait "$evaluator" && "${in_demo[@]}" python -c "
import json
evaluated = json.load(open('/out/evaluator.json'))
last = evaluated['series'][-1]
print('the demo:', last, 'missed:', evaluated['missed'])
assert last['step'] == 500 and last['accuracy'].keys() == {'fast', 'slow', 'raw'}"
}

clean_up() {
  [[ -z $runner ]] || kill -KILL "$(find_server "$runner")" || true
  [[ -z $container ]] || buildah rm "$container" >/dev/null || true
  [[ -z $demo ]] || buildah rm "$demo" >/dev/null || true
  buildah rmi localhost/ema-demo >/dev/null 2>&1 || true # It has gigabytes.
}

runner=
container=
demo=
trap clean_up EXIT
step "read the package lists" "$log" apt-get update
buildah rm --all >>"$log" 2>&1 # Of a run that was killed.
copy_host_settings
if [[ ! -f $work/base-slim.tar ]]; then
  mirror=$(awk -v suite="$VERSION_CODENAME" '$3 == suite { print $2; exit }' "$work/host/etc/apt/sources.list")
  rm -rf "$work/base"
  step "debootstrap $VERSION_CODENAME" "$log" \
    debootstrap --variant=minbase "$VERSION_CODENAME" "$work/base" "$mirror"
  # As Debian's slim image: nothing to read, and nothing that apt can download again.
  tar --create --file "$work/base-slim.tar.part" --directory "$work/base" \
    --exclude "./usr/share/doc/*" --exclude "./usr/share/man/*" --exclude "./usr/share/locale/*" \
    --exclude "./usr/share/info/*" --exclude "./var/cache/apt/*" --exclude "./var/lib/apt/lists/*" .
  rm -rf "$work/base"
  mv "$work/base-slim.tar.part" "$work/base-slim.tar"
fi
container=$(buildah from scratch)
step "base image" "$log" buildah add --quiet "$container" "$work/base-slim.tar" /
buildah add --quiet "$container" "$work/host" / >>"$log"
buildah commit --quiet --rm "$container" localhost/ema-base >>"$log" 2>&1
container=
step "build the image (minutes; gigabytes to download, the first time)" "$log" build cpu localhost/ema-server
step "build the client's wheel (minutes)" "$log" build wheel localhost/ema-wheel
step "install it" "$log" install_client
buildah rmi --prune >>"$log" 2>&1 # Those that the new ones replace.
step "check its settings" "$log" check_settings

rm -rf "$work/volume" "$work/port"
install --directory --owner=65532 --group=65532 "$work/volume" "$work/port"
open_image localhost/ema-server
step "start it" "$log" start_server
step "ask for its health" "$log" health 0
step "push and pull" "$log" use_server push
step "stop it" "$log" stop_server
step "ask for its health" "$log" health 1
step "start it on the same volume: read-only, bare, as PID 1" "$log" start_bare_server
step "ask for its health" "$log" health 0
step "pull what was pushed" "$log" use_server pull
step "stop it" "$log" stop_server

buildah rm "$container" >/dev/null
container=
step "build the image for GPUs (minutes)" "$log" build cuda localhost/ema-server-cuda
buildah rmi --prune >>"$log" 2>&1
open_image localhost/ema-server-cuda
step "start it, without a GPU, on the same volume" "$log" start_server
step "ask for its health" "$log" health 0
step "pull what was pushed" "$log" use_server pull
step "stop it" "$log" stop_server
step "ask it for a GPU that is not there" "$log" refuse_gpu

step "build the demo's image (minutes; 7 GB)" "$log" build demo localhost/ema-demo
demo=$(buildah from --pull-never localhost/ema-demo)
step "start the server" "$log" start_server
step "run the demo" "$log" run_demo
step "stop the server" "$log" stop_server
echo "container_test: ok"
