// SPDX-License-Identifier: Apache-2.0
#include "server/base/standard_files.h"

#include <fcntl.h>
#include <sys/syscall.h>
#include <unistd.h>

namespace ema {

// Calls of the kernel only: a sanitizer has its own open().
[[gnu::no_sanitize_address, gnu::no_sanitize_thread]] void OccupyStandardFiles() {
  for (int fd = STDIN_FILENO; fd <= STDERR_FILENO; ++fd) {
    if (syscall(SYS_fcntl, fd, F_GETFD) >= 0) continue;
    // The other way round, so that using it is an error, as it was. Gets the lowest free number,
    // which is this one. Where there is no such file, nothing can be done.
    syscall(SYS_openat, AT_FDCWD, "/dev/null", fd == STDIN_FILENO ? O_WRONLY : O_RDONLY);
  }
}

}  // namespace ema
