# SPDX-License-Identifier: Apache-2.0
# ema::client and ema::common of an installed EMA Server. For a shared library set EMA_STATIC_GRPC=OFF.
# With COMPONENTS torch also ema::torch, for ema/torch.h: LibTorch for the CPU, from the torch package
# of the first python3 on the PATH, or from the folder EMA_TORCH_DIR.
include(${CMAKE_CURRENT_LIST_DIR}/Dependencies.cmake)
include(${CMAKE_CURRENT_LIST_DIR}/emaTargets.cmake)
if("torch" IN_LIST ema_FIND_COMPONENTS)
  find_package(Python3 REQUIRED COMPONENTS Interpreter)
  set(EMA_PYTHON ${Python3_EXECUTABLE})
  include(${CMAKE_CURRENT_LIST_DIR}/Torch.cmake)
  add_library(ema::torch INTERFACE IMPORTED)
  target_link_libraries(ema::torch INTERFACE ema::client ema::dep_torch_api)
endif()
