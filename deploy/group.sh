#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# Runs N servers that keep models together on this machine, with the etcd in which they meet, until
# Ctrl-C. They listen on the loopback interface only. Models and logs are in build/group/; the next
# call continues with these models.
# Usage: deploy/group.sh N [--port P]
#        deploy/group.sh N --demo
#   --port  the first server's port, by default 50051; the others have the next ones
#   --demo  trains a small network while one of the servers is killed and started again, prints a
#           table of what became of the steps, and ends; its logs are in build/group-demo/
set -euo pipefail
source "$(dirname "$0")/common.sh"

build_for_demo
lock group
exec build/venv/bin/python deploy/demo/run_group.py "$@"
