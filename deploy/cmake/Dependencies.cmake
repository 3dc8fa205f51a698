# SPDX-License-Identifier: Apache-2.0
# Everything we link that is not ours, as targets. Nothing is downloaded.
#
#   ema::dep_absl  ema::dep_protobuf  ema::dep_grpc     Abseil; + protobuf; + gRPC C++
#   ema::dep_re2  ema::dep_isal                         RE2: patterns; ISA-L: CRC32C
#   ema::dep_torch  ema::dep_hwy                        LibTorch's core, of the wheel; Highway
#   ema::dep_toml  ema::dep_microhttpd  ema::dep_curl   toml++; libmicrohttpd; libcurl
#   spdlog::spdlog  CLI11::CLI11  nlohmann_json::nlohmann_json  prometheus-cpp::core
#   GTest::gmock  benchmark::benchmark
include_guard()

find_package(Threads REQUIRED)
find_package(PkgConfig REQUIRED)
find_package(Protobuf REQUIRED)  # For protoc and protobuf_generate() only.
find_program(EMA_GRPC_CPP_PLUGIN grpc_cpp_plugin REQUIRED)

# --- Abseil, protobuf, gRPC -------------------------------------------------------------------
# The distribution's CMake targets are the shared libraries, so the archives come from pkg-config.
# Abseil must exist once in a program: all three are static, or all three are shared. Static is for
# programs. A shared object cannot take the archives (their thread-local variables are compiled for
# programs), so the Python extension has the shared libraries; Python loads them into a scope of the
# extension's own. ThreadSanitizer needs the shared ones too, see tests/testutil/tsan_mutex.cc.
if(EMA_BUILD_PYTHON OR EMA_SANITIZE MATCHES thread)
  set(static OFF)
else()
  set(static ON)
endif()
option(EMA_STATIC_GRPC "Link gRPC, protobuf and Abseil statically" ${static})

# One call for all, and not pkg_check_modules(), which makes fifty: each of them takes seconds here.
execute_process(
  COMMAND ${PKG_CONFIG_EXECUTABLE} --static --libs-only-l grpc++ protobuf absl_btree
  OUTPUT_VARIABLE output COMMAND_ERROR_IS_FATAL ANY)
string(REGEX MATCHALL "-l[^ \n]+" names "${output}")
list(TRANSFORM names REPLACE "^-l" "")
# Part of glibc since 2.34; no 64-bit platform of ours needs libatomic.
list(REMOVE_ITEM names dl rt pthread atomic)
# A library comes behind all that use it: of several mentions the last counts.
list(REVERSE names)
list(REMOVE_DUPLICATES names)
list(REVERSE names)

foreach(name IN LISTS names)
  unset(file)
  if(EMA_STATIC_GRPC)
    find_library(file NAMES lib${name}.a NO_CACHE REQUIRED)
  else()
    find_library(file NAMES ${name} NO_CACHE REQUIRED)
  endif()
  if(name MATCHES "^absl_")
    list(APPEND absl_files ${file})
  elseif(name MATCHES "^(protobuf|z)$")
    list(APPEND protobuf_files ${file})
  else()
    list(APPEND grpc_files ${file})
  endif()
  if(name STREQUAL re2)
    set(re2_file ${file})
  endif()
endforeach()

add_library(ema::dep_absl INTERFACE IMPORTED)
target_link_libraries(ema::dep_absl INTERFACE ${absl_files} Threads::Threads)
# Symbols from an archive stay inside: LibTorch and other libraries must not bind to them. But they must bind to the
# malloc() of clang's AddressSanitizer, which is an archive, too.
if(NOT EMA_SANITIZE MATCHES fuzzer)
  target_link_options(ema::dep_absl INTERFACE LINKER:--exclude-libs,ALL)
endif()
# Of the shared ones a program gets only what it uses; with ThreadSanitizer also what only
# tsan_mutex.cc uses, which asks for it at run time.
if(NOT EMA_SANITIZE MATCHES thread)
  target_link_options(ema::dep_absl INTERFACE LINKER:--as-needed)
endif()

add_library(ema::dep_protobuf INTERFACE IMPORTED)
target_link_libraries(ema::dep_protobuf INTERFACE ${protobuf_files} Threads::Threads)

add_library(ema::dep_grpc INTERFACE IMPORTED)
# A group, since CMake puts archives that our other layers name, too, before gRPC's.
list(JOIN grpc_files "," grpc_group)
list(JOIN protobuf_files "," protobuf_group)
list(JOIN absl_files "," absl_group)
target_link_libraries(ema::dep_grpc
  INTERFACE "$<LINK_GROUP:RESCAN,${grpc_group},${protobuf_group},${absl_group}>" ema::dep_absl)

# gRPC uses it, too.
add_library(ema::dep_re2 INTERFACE IMPORTED)
target_link_libraries(ema::dep_re2 INTERFACE ${re2_file} Threads::Threads)

# --- Checksums --------------------------------------------------------------------------------
pkg_check_modules(EMA_ISAL REQUIRED QUIET IMPORTED_TARGET GLOBAL libisal)
add_library(ema::dep_isal ALIAS PkgConfig::EMA_ISAL)

# --- Kernels ----------------------------------------------------------------------------------
find_package(hwy REQUIRED)
add_library(ema::dep_hwy ALIAS hwy::hwy)

# --- Server and tests -------------------------------------------------------------------------
if(EMA_BUILD_SERVER)
  find_package(spdlog REQUIRED)
  find_package(CLI11 REQUIRED)
  find_package(nlohmann_json REQUIRED)
  find_package(prometheus-cpp REQUIRED)
  # The headers alone: the distribution's library, which its CMake target links, throws.
  find_path(EMA_TOML_INCLUDE_DIR toml++/toml.h REQUIRED)
  add_library(ema::dep_toml INTERFACE IMPORTED)
  target_include_directories(ema::dep_toml SYSTEM INTERFACE ${EMA_TOML_INCLUDE_DIR})
  target_compile_definitions(ema::dep_toml INTERFACE TOML_HEADER_ONLY=1 TOML_EXCEPTIONS=0)
  find_library(EMA_MICROHTTPD microhttpd REQUIRED)
  add_library(ema::dep_microhttpd INTERFACE IMPORTED)
  target_link_libraries(ema::dep_microhttpd INTERFACE ${EMA_MICROHTTPD})
  # Loaded by its name, and not linked: server/registry/libcurl.h. The one with GnuTLS, which libmicrohttpd uses, too.
  # Debian has the same headers for it and the one with OpenSSL, but their -dev packages exclude each other, and
  # prometheus-cpp-dev needs that of OpenSSL.
  find_path(EMA_CURL_INCLUDE_DIR curl/curl.h REQUIRED)
  find_library(EMA_CURL NAMES libcurl-gnutls.so.4 libcurl.so.4 REQUIRED)
  get_filename_component(EMA_CURL_NAME ${EMA_CURL} NAME)
  add_library(ema::dep_curl SHARED IMPORTED)
  set_target_properties(ema::dep_curl PROPERTIES IMPORTED_LOCATION ${EMA_CURL})
  include(${CMAKE_CURRENT_LIST_DIR}/Torch.cmake)
endif()
if(EMA_BUILD_TESTS)
  find_package(GTest REQUIRED)
endif()
if(EMA_BUILD_BENCHMARKS)
  find_package(benchmark REQUIRED)
endif()
