# SPDX-License-Identifier: Apache-2.0
# ema_install_program(target): installs a program, and has deploy/cmake/Install.cmake install the
# libraries that it needs.
include(GNUInstallDirs)

set(ema_library_dir ${CMAKE_INSTALL_LIBDIR}/ema)
file(RELATIVE_PATH ema_program_rpath /${CMAKE_INSTALL_BINDIR} /${ema_library_dir})

function(ema_install_program target)
  set_target_properties(${target} PROPERTIES INSTALL_RPATH "$ORIGIN/${ema_program_rpath}")
  # The old kind of path also holds for what the libraries need: spdlog's fmt, say.
  target_link_options(${target} PRIVATE LINKER:--disable-new-dtags)
  install(TARGETS ${target} RUNTIME_DEPENDENCY_SET ema_programs
          RUNTIME COMPONENT server)
endfunction()
