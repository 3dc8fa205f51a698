#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# Builds the container image of the Dockerfile without a container engine or a registry, on a base
# that debootstrap makes, and uses the server in it: a push and a pull from outside, a stop, a second
# start on the same volume. Needs root. Everything is under build/container. Last line:
# "container_test: ok".
#
# Usage: deploy/container_test.sh
set -euo pipefail
source "$(dirname "$0")/common.sh"
((EUID == 0)) || fail "needs root (debootstrap, chroot): run it as root"

deploy/setup.sh --all
deploy/build.sh release
lock container

work=$root/build/container
log=build/container/test.log
mkdir -p "$work/ccache" "$work/host/etc/apt/apt.conf.d"
: >"$log"
source /etc/os-release

buildah() {
  command buildah --storage-driver vfs --root "$work/storage" --runroot "$work/run" "$@"
}

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

build_image() {
  local pip_cache
  pip_cache=$(build/venv/bin/python -m pip cache dir)
  mkdir -p "$pip_cache"
  buildah build --isolation chroot --pull-never --build-arg BASE=localhost/ema-base \
    --volume "$work/ccache:/root/.cache/ccache" --volume "$pip_cache:/root/.cache/pip" \
    --target cpu --tag localhost/ema-server .
}

check_settings() {
  local settings
  settings=$(buildah inspect --type image --format \
    '{{.OCIv1.Config.User}} {{.OCIv1.Config.Entrypoint}} {{.OCIv1.Config.Cmd}} {{.OCIv1.Config.Volumes}}' \
    localhost/ema-server)
  echo "$settings"
  [[ $settings == "65532:65532 [/usr/local/bin/ema-server] [--listen 0.0.0.0:50051 --data-dir /data] map[/data:{}]" ]]
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

start_server() {
  rm -f "$work/port/port"
  # What ENTRYPOINT and CMD run, but on a free port, and for this machine only.
  buildah run --isolation chroot --volume "$work/volume:/data" --volume "$work/port:/port" \
    "$container" -- /usr/local/bin/ema-server --listen 127.0.0.1:0 --data-dir /data \
    --port-file /port/port </dev/null >>"$log" 2>&1 &
  runner=$!
  until [[ -s $work/port/port ]]; do
    kill -0 "$runner" || return 1
    sleep 0.1
  done
}

# SIGTERM, as a container engine stops it; fails if it does not exit with 0.
stop_server() {
  kill -TERM "$(find_server "$runner")" && wait "$runner" && runner=
}

# use_server push|pull: both check the average, which is exact in binary.
use_server() {
  build/venv/bin/python - "$1" "$(<"$work/port/port")" <<'END'
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

clean_up() {
  [[ -z $runner ]] || kill -KILL "$(find_server "$runner")" || true
  [[ -z $container ]] || buildah rm "$container" >/dev/null
}

runner=
container=
trap clean_up EXIT
step "read the package lists" "$log" apt-get update
buildah rm --all >>"$log" 2>&1 # Of a run that was killed.
copy_host_settings
if [[ ! -f $work/base.tar ]]; then
  mirror=$(awk -v suite="$VERSION_CODENAME" '$3 == suite { print $2; exit }' "$work/host/etc/apt/sources.list")
  rm -rf "$work/base"
  step "debootstrap $VERSION_CODENAME" "$log" \
    debootstrap --variant=minbase "$VERSION_CODENAME" "$work/base" "$mirror"
  tar --create --file "$work/base.tar.part" --directory "$work/base" .
  rm -rf "$work/base"
  mv "$work/base.tar.part" "$work/base.tar"
fi
container=$(buildah from scratch)
step "base image" "$log" buildah add --quiet "$container" "$work/base.tar" /
buildah add --quiet "$container" "$work/host" / >>"$log"
buildah commit --quiet --rm "$container" localhost/ema-base >>"$log" 2>&1
container=
step "build the image (minutes; gigabytes to download, the first time)" "$log" build_image
buildah rmi --prune >>"$log" 2>&1 # Those that the new ones replace.
step "check its settings" "$log" check_settings

rm -rf "$work/volume" "$work/port"
install --directory --owner=65532 --group=65532 "$work/volume" "$work/port"
container=$(buildah from --pull-never localhost/ema-server)
step "start it" "$log" start_server
step "push and pull" "$log" use_server push
step "stop it" "$log" stop_server
step "start it on the same volume" "$log" start_server
step "pull what was pushed" "$log" use_server pull
step "stop it" "$log" stop_server
echo "container_test: ok"
