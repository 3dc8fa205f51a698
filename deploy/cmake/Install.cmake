# SPDX-License-Identifier: Apache-2.0
# Component client: the C++ client for other projects: find_package(ema), then link ema::client;
# or find_package(ema COMPONENTS torch), then link ema::torch.
# Component server: ema-server and emactl with the libraries that Debian's base does not have. The
# tree may be moved, and taken to another machine: programs look for libraries beside themselves.
include(CMakePackageConfigHelpers)

set(package_dir ${CMAKE_INSTALL_LIBDIR}/cmake/ema)
install(TARGETS ema_base ema_client ema_common ema_includes ema_kernel ema_proto ema_wire EXPORT ema COMPONENT client)
install(
  EXPORT ema COMPONENT client NAMESPACE ema:: DESTINATION ${package_dir} FILE emaTargets.cmake)
write_basic_package_version_file(emaConfigVersion.cmake COMPATIBILITY SameMinorVersion)
install(
  FILES ${CMAKE_CURRENT_LIST_DIR}/emaConfig.cmake ${CMAKE_CURRENT_LIST_DIR}/Dependencies.cmake
        ${CMAKE_CURRENT_LIST_DIR}/Torch.cmake ${CMAKE_CURRENT_BINARY_DIR}/emaConfigVersion.cmake
  DESTINATION ${package_dir} COMPONENT client)
install(
  DIRECTORY include/ema DESTINATION ${CMAKE_INSTALL_INCLUDEDIR} COMPONENT client
  FILES_MATCHING PATTERN "*.h" PATTERN internal EXCLUDE)
# Of the internal headers only those that ema/torch.h includes.
install(
  FILES include/ema/internal/pull_memory.h include/ema/internal/status_macros.h
        include/ema/internal/torch_writes.h
  DESTINATION ${CMAKE_INSTALL_INCLUDEDIR}/ema/internal COMPONENT client)

if(EMA_BUILD_SERVER)
  install(
    IMPORTED_RUNTIME_ARTIFACTS ema::dep_curl RUNTIME_DEPENDENCY_SET ema_programs
    LIBRARY DESTINATION ${ema_library_dir} COMPONENT server)
  # What was just installed is a symbolic link; this is the file that it names.
  file(REAL_PATH ${EMA_CURL} curl_file)
  install(FILES ${curl_file} DESTINATION ${ema_library_dir} COMPONENT server)
  install(
    RUNTIME_DEPENDENCY_SET ema_programs
    # The libraries of glibc and of the compiler belong to the system.
    PRE_EXCLUDE_REGEXES "^(ld-linux-|libc\\.so|libm\\.so|libdl\\.so|librt\\.so|libutil\\.so|libpthread\\.so|libresolv\\.so)"
                        "^(libgcc_s|libstdc\\+\\+)\\.so"
    DESTINATION ${ema_library_dir} COMPONENT server)
  install(FILES LICENSE DESTINATION ${CMAKE_INSTALL_DOCDIR} COMPONENT server)
  set(site_packages ${EMA_TORCH_FOUND_DIR}/..)
  ema_install_licenses(
    server ${CMAKE_INSTALL_DOCDIR}/licenses
    DEBIAN ${ema_server_packages}
    PIP ${site_packages}/torch ${site_packages}/nvidia_cuda_runtime)
  install(
    FILES deploy/systemd/ema-server.service DESTINATION lib/systemd/system COMPONENT server)
endif()
