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

# record passed|failed|skipped NAME
record() { printf '%s\t%s\n' "$1" "$2" >>"$results/checks.tsv"; }

# check NAME COMMAND...: a check that counts as one test.
check() {
  local name=$1
  shift
  if step "$name" "$results/${name// /-}.log" "$@"; then
    record passed "$name"
  else
    record failed "$name"
    return 1
  fi
}

# report NAME COMMAND...: tests that count themselves, in the JUnit report NAME.xml. True if all have
# passed. A program that ends badly behind its report has failed, too.
report() {
  local name=$1 status=0
  shift
  step "$name tests" "$results/$name.log" "$@" || status=$?
  if [[ ! -f $results/$name.xml ]]; then
    record failed "$name tests wrote no report"
  elif ((status != 0)) && ! grep --quiet --extended-regexp '<(failure|error)\b' "$results/$name.xml"; then
    record failed "$name tests ended with status $status"
  fi
  return "$status"
}
