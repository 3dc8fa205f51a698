# SPDX-License-Identifier: Apache-2.0
#
# How scripts of tests count: what passed and failed is kept in the folder $results, where
# sum_results.py finds it. To be sourced after deploy/common.sh.

# new_results FOLDER: begins anew.
new_results() {
  results=$1
  rm -rf "$results"
  mkdir -p "$results"
}

# record passed|failed|skipped|"cut off" NAME
record() { printf '%s\t%s\n' "$1" "$2" >>"$results/checks.tsv"; }

# was_cut_off STATUS: true if `timeout` has ended the command, or had to kill it: that is no verdict.
was_cut_off() { (($1 == 124 || $1 == 137)); }

# check NAME COMMAND...: a check that counts as one test.
check() {
  local name=$1 status=0
  shift
  step "$name" "$results/${name// /-}.log" "$@" || status=$?
  if ((status == 0)); then
    record passed "$name"
  elif was_cut_off "$status"; then
    record "cut off" "$name"
  else
    record failed "$name"
  fi
  return "$status"
}

# report NAME COMMAND...: tests that count themselves, in the JUnit report NAME.xml. True if all have
# passed. A program that ends badly behind its report has failed, too.
report() {
  local name=$1 status=0
  shift
  step "$name tests" "$results/$name.log" "$@" || status=$?
  if was_cut_off "$status"; then
    record "cut off" "$name tests"
  elif [[ ! -f $results/$name.xml ]]; then
    record failed "$name tests wrote no report"
  elif ((status != 0)) && ! grep --quiet --extended-regexp '<(failure|error)\b' "$results/$name.xml"; then
    record failed "$name tests ended with status $status"
  fi
  return "$status"
}
