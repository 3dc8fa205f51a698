# SPDX-License-Identifier: Apache-2.0
# The C++ client for other projects: find_package(ema), then link ema::client.
include(CMakePackageConfigHelpers)
include(GNUInstallDirs)

set(package_dir ${CMAKE_INSTALL_LIBDIR}/cmake/ema)
install(TARGETS ema_base ema_client ema_includes ema_kernel ema_proto EXPORT ema)
install(EXPORT ema NAMESPACE ema:: DESTINATION ${package_dir} FILE emaTargets.cmake)
write_basic_package_version_file(emaConfigVersion.cmake COMPATIBILITY SameMinorVersion)
install(
  FILES ${CMAKE_CURRENT_LIST_DIR}/emaConfig.cmake ${CMAKE_CURRENT_LIST_DIR}/Dependencies.cmake
        ${CMAKE_CURRENT_BINARY_DIR}/emaConfigVersion.cmake
  DESTINATION ${package_dir})
install(DIRECTORY include/ema DESTINATION ${CMAKE_INSTALL_INCLUDEDIR})
