#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# Installs what is missing: Debian packages, and Python packages in a virtual environment, build/venv.
# Composer, DeepSpeed, a few libraries and Ray, which only tests and comparisons use, get virtual environments
# of their own: build/venv-composer, build/venv-deepspeed, build/venv-libraries, build/venv-bench.
# Where nothing is missing it needs neither network nor root and is done at once.
#
# Usage: deploy/setup.sh [--server|--cuda|--client|--demo|--all|--bench]
#   --server  only what building the server and emactl needs
#   --cuda    the same, and NVIDIA's compiler
#   --client  only what building the Python client needs
#   --demo    what deploy/demo.sh needs: not what building the tests needs
#   --all     also what only tests/run.sh --all needs
#   --bench   also the peers of tests/bench/run.sh
set -euo pipefail
source "$(dirname "$0")/common.sh"

packages=(deploy/packages-server.txt deploy/packages.txt)
requirements=(-r deploy/requirements.txt)
case ${1-} in
  "") ;;
  --server | --cuda)
    packages=(deploy/packages-server.txt)
    # Of the wheel the server uses a part: without the packages of the rest, a third to download.
    requirements=(--no-deps -r "deploy/requirements-${1#--}.txt")
    ;;
  --client)
    packages=(deploy/packages-server.txt)
    requirements=(-r deploy/requirements-client.txt)
    ;;
  --demo) packages=(deploy/packages-server.txt) ;;
  --all)
    packages+=(deploy/packages-all.txt)
    requirements=(-r deploy/requirements-all.txt)
    ;;
  --bench) packages+=(deploy/packages-bench.txt) ;;
  *) fail "unknown option $1; see the top of $0" ;;
esac
log=build/setup.log

install_packages() {
  command -v dpkg-query >/dev/null ||
    fail "this is not Debian: install what ${packages[*]} list, by your system's names, then use cmake --preset"
  local missing
  mapfile -t missing < <(comm -23 <(sed '/^#/d' "${packages[@]}" | sort) \
    <(dpkg-query -W -f '${db:Status-Status} ${Package}\n' | sed -n 's/^installed //p' | sort))
  ((${#missing[@]})) || return 0

  local by_hand="As root: apt-get install ${missing[*]}" as_root=()
  if ((EUID != 0)); then
    command -v sudo >/dev/null || fail "system packages are missing, and there is no sudo. $by_hand"
    # Asks for the password here, if one is needed: `step` gives commands no terminal.
    sudo -n true 2>/dev/null || sudo -v || fail "no rights to install system packages. $by_hand"
    as_root=(sudo)
  fi
  local install=("${as_root[@]}" env DEBIAN_FRONTEND=noninteractive apt-get install --yes
    --no-install-recommends -o DPkg::Lock::Timeout=600)
  # Old lists may suffice, so a failed update is reported only if the installation fails, too.
  step "read the package lists" "$log" "${as_root[@]}" apt-get update || true
  step "install ${missing[*]}" "$log" "${install[@]}" "${missing[@]}" ||
    fail "apt-get failed. No network? Connect, or point apt to a mirror. Not Debian 12? Names may differ."
  command -v ccache >/dev/null || step "install ccache" "$log" "${install[@]}" ccache ||
    say "going on without ccache"
}

install_python_packages() {
  # A line for each set of packages that is installed.
  local stamp=build/venv/.installed installed base state clear=()
  installed=$(cat "$stamp" 2>/dev/null) || true
  base="$root $(python3 --version) $(cat deploy/requirements*.txt | sha256sum)"
  state="$base ${requirements[*]}"
  ! grep --quiet --line-regexp --fixed-strings -- "$state" <<<"$installed" || return 0

  python3 -c 'import sys; sys.exit(sys.version_info < (3, 11))' ||
    fail "$(python3 --version) is too old: put Python 3.11 or newer first on PATH (Debian 12: /usr/bin)"
  refuse_link build/venv
  # One that was moved here with the checkout, or is of another Python, cannot be mended.
  [[ -z $installed || $installed == "$root $(python3 --version) "* ]] || clear=(--clear)
  step "make the virtual environment build/venv" "$log" python3 -m venv "${clear[@]}" build/venv ||
    fail "is $(command -v python3) without its venv module? Debian 12 has one in /usr/bin"
  step "install Python packages (the first time gigabytes to download)" "$log" \
    pip_install build/venv/bin/python "${requirements[@]}" ||
    fail "pip failed. No network? Connect, or set PIP_FIND_LINKS to a folder of wheels. Disk full? It takes 6 GB."
  # The other sets of the same lists are still there.
  installed=$(grep --fixed-strings -- "$base" <<<"$installed") || true
  printf '%s\n' ${installed:+"$installed"} "$state" >"$stamp"
}

# refuse_link FOLDER: venv would empty the folder that a link names, perhaps one of another checkout.
refuse_link() {
  [[ ! -L $1 ]] || fail "$1 is a link, expected a folder: remove the link"
}

# pip_install PYTHON ARGUMENT...: pip repeats connections that fail, but not downloads that break off.
pip_install() {
  local pip=("$1" -m pip --no-input --disable-pip-version-check install --progress-bar off "${@:2}") pause
  for pause in 5 20; do
    ! "${pip[@]}" || return 0
    echo "pip failed: once more in $pause s"
    sleep "$pause"
  done
  "${pip[@]}"
}

# install_beside NAME: what deploy/requirements-NAME.txt lists in a virtual environment of its own,
# build/venv-NAME, over the packages of build/venv. That list says why.
install_beside() {
  local list=deploy/requirements-$1.txt venv=build/venv-$1 state
  state="$root $(python3 --version) $(sha256sum <"$list")"
  [[ $state != "$(cat "$venv/.installed" 2>/dev/null)" ]] || return 0
  refuse_link "$venv"
  step "make the virtual environment $venv" "$log" python3 -m venv --clear "$venv"
  local site='import sysconfig; print(sysconfig.get_path("purelib"))'
  build/venv/bin/python -c "$site" >"$("$venv/bin/python" -c "$site")/build-venv.pth"
  step "install Python packages there" "$log" pip_install "$venv/bin/python" --no-deps -r "$list" ||
    fail "pip failed. No network? Connect, or set PIP_FIND_LINKS to a folder of wheels."
  printf '%s\n' "$state" >"$venv/.installed"
}

lock setup
: >"$log"
install_packages
install_python_packages
# NVIDIA's compiler looks for the libraries of its other packages in a folder that they do not have.
[[ ${1-} != --cuda ]] || for toolkit in build/venv/lib/python3*/site-packages/nvidia/cu13; do
  ln --symbolic --force --no-dereference lib "$toolkit/lib64"
done
case ${1-} in
  --all)
    install_beside composer
    DS_BUILD_OPS=0 install_beside deepspeed
    install_beside libraries
    ;;
  --bench) install_beside bench ;;
esac
