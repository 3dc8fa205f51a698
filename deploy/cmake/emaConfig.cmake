# SPDX-License-Identifier: Apache-2.0
# ema::client and ema::common of an installed EMA Server. For a shared library set EMA_STATIC_GRPC=OFF.
include(${CMAKE_CURRENT_LIST_DIR}/Dependencies.cmake)
include(${CMAKE_CURRENT_LIST_DIR}/emaTargets.cmake)
