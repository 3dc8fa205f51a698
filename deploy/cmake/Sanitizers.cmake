# SPDX-License-Identifier: Apache-2.0
# EMA_SANITIZE: what to check at run time, as -fsanitize takes it; the presets asan, tsan and fuzz set it.
include_guard()

set(EMA_SANITIZE "" CACHE STRING "Sanitizers, as -fsanitize takes them")
if(EMA_SANITIZE)
  set(flags -fsanitize=${EMA_SANITIZE} -fno-sanitize-recover=undefined -fno-omit-frame-pointer)
  if(CMAKE_CXX_COMPILER_ID STREQUAL GNU)
    # With their checks in between, GCC wrongly warns of what absl::Cleanup and std::variant hold.
    list(APPEND flags -Wno-maybe-uninitialized -Wno-array-bounds -Wno-stringop-overflow)
  endif()
  # Not for nvcc, which knows none of these.
  foreach(flag IN LISTS flags)
    add_compile_options($<$<COMPILE_LANGUAGE:CXX>:${flag}>)
  endforeach()
  add_link_options(-fsanitize=${EMA_SANITIZE})
  # A program of tests has much of gRPC in it: lld takes a fifth of the time.
  find_program(EMA_LLD ld.lld)
  if(EMA_LLD)
    add_link_options(-fuse-ld=lld)
  endif()
endif()

if(EMA_SANITIZE MATCHES thread)
  include_directories(BEFORE tests/testutil/tsan)
  # In every program that links Abseil, which must be the shared one.
  add_library(ema_tsan_mutex OBJECT tests/testutil/tsan_mutex.cc)
  target_link_libraries(ema::dep_absl INTERFACE
    $<$<STREQUAL:$<TARGET_PROPERTY:TYPE>,EXECUTABLE>:$<TARGET_OBJECTS:ema_tsan_mutex>>)
endif()
