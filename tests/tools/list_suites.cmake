# SPDX-License-Identifier: Apache-2.0
#
# Run after each link of a test program, by ema_add_suites() in tests/CMakeLists.txt. Writes FILE, which tells ctest the
# tests of PROGRAM: one entry for each suite or, if EACH_TEST is true, for each test. An entry writes a report into the
# folder REPORTS, which has each test. PROPERTIES are those of every entry, LABELS is a list; SUFFIX ends their names,
# which begin with that of the program.
execute_process(COMMAND ${PROGRAM} --gtest_list_tests OUTPUT_VARIABLE output COMMAND_ERROR_IS_FATAL ANY)
# Comments say the parameters. What is left has no character that is special in a list.
string(REGEX REPLACE " +#[^\n]*" "" output "${output}")
string(REPLACE "\n" ";" lines "${output}")

set(entries "")
set(suite "")
foreach(line IN LISTS lines)
  if(line MATCHES "^([^ ].*)\\.$")
    set(suite ${CMAKE_MATCH_1})
    if(NOT EACH_TEST)
      list(APPEND entries ${suite})
    endif()
  elseif(EACH_TEST AND line MATCHES "^  (.+)$")
    list(APPEND entries ${suite}.${CMAKE_MATCH_1})
  endif()
endforeach()

# Two programs may have suites of one name.
get_filename_component(program_name ${PROGRAM} NAME)
set(content "")
foreach(entry IN LISTS entries)
  set(name ${program_name}.${entry}${SUFFIX})
  set(filter ${entry})
  if(NOT EACH_TEST)
    string(APPEND filter ".*")
  endif()
  string(REPLACE "/" "." report ${name})
  string(APPEND content
         "add_test([[${name}]] [[${PROGRAM}]] [[--gtest_filter=${filter}]] [[--gtest_output=xml:${REPORTS}/${report}.xml]])\n"
         "set_tests_properties([[${name}]] PROPERTIES LABELS [[${LABELS}]] ${PROPERTIES})\n")
endforeach()
file(WRITE ${FILE} "${content}")
