# SPDX-License-Identifier: Apache-2.0
# ema::dep_torch: LibTorch's core (c10), which has its memory for the host, from the `torch` wheel of
# the virtual environment, so that the server runs the very code that the trainers run. Not the
# operators, libtorch_cpu.so: 450 MB, of which a process takes a quarter of a second to start.
# ema::dep_torch_cuda: the core's memory and streams for GPUs, and the CUDA runtime that they use,
# which works without a driver. ema::dep_torch_api: all of LibTorch for the CPU, for programs that
# train. The wheel's own find_package(Torch) needs a CUDA toolkit, and a newer CMake with it.
include_guard()

set(EMA_VENV "${PROJECT_SOURCE_DIR}/build/venv" CACHE PATH "Virtual environment with the torch wheel")
set(EMA_TORCH_DIR "" CACHE PATH "Folder of the torch package; empty: that of the Python in EMA_VENV")

set(torch_dir "${EMA_TORCH_DIR}")
if(NOT torch_dir)
  if(NOT EMA_PYTHON)
    set(EMA_PYTHON ${EMA_VENV}/bin/python)
  endif()
  # Looking it up, not importing it: an import takes seconds.
  execute_process(
    COMMAND ${EMA_PYTHON} -c
            "from importlib.util import find_spec; print(*find_spec('torch').submodule_search_locations)"
    OUTPUT_VARIABLE torch_dir OUTPUT_STRIP_TRAILING_WHITESPACE ERROR_QUIET)
endif()
if(NOT EXISTS "${torch_dir}/lib/libc10.so")
  message(FATAL_ERROR "No LibTorch, neither in EMA_TORCH_DIR (\"${EMA_TORCH_DIR}\") nor as a package of "
                      "\"${EMA_PYTHON}\": install the package torch (in a checkout: deploy/setup.sh), or "
                      "set EMA_TORCH_DIR to the folder of an installed one.")
endif()
message(STATUS "LibTorch: ${torch_dir}")
set(EMA_TORCH_FOUND_DIR "${torch_dir}")

foreach(name IN ITEMS c10 torch_cpu)
  add_library(ema::${name} SHARED IMPORTED)
  set_target_properties(ema::${name} PROPERTIES IMPORTED_LOCATION ${torch_dir}/lib/lib${name}.so)
endforeach()

add_library(ema::dep_torch INTERFACE IMPORTED)
target_link_libraries(ema::dep_torch INTERFACE ema::c10)
# Last in the search order: the wheel carries old fmt and protobuf headers, which must not win.
target_compile_options(ema::dep_torch INTERFACE "SHELL:-idirafter ${torch_dir}/include")
# torch::nn and torch::optim, as include/ema/torch.h needs them.
add_library(ema::dep_torch_api INTERFACE IMPORTED)
target_link_libraries(ema::dep_torch_api INTERFACE ema::torch_cpu ema::dep_torch)
target_compile_options(
  ema::dep_torch_api INTERFACE "SHELL:-idirafter ${torch_dir}/include/torch/csrc/api/include")
set(cudart ${torch_dir}/../nvidia/cu13/lib/libcudart.so.13)
if(EXISTS ${cudart} AND EXISTS ${torch_dir}/lib/libc10_cuda.so)
  foreach(path IN ITEMS ${cudart} ${torch_dir}/lib/libc10_cuda.so)
    get_filename_component(name ${path} NAME_WE)
    add_library(ema::${name} SHARED IMPORTED)
    set_target_properties(ema::${name} PROPERTIES IMPORTED_LOCATION ${path})
  endforeach()
  add_library(ema::dep_torch_cuda INTERFACE IMPORTED)
  target_link_libraries(ema::dep_torch_cuda INTERFACE ema::libc10_cuda ema::libcudart)
endif()
