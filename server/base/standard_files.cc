// SPDX-License-Identifier: Apache-2.0
#include "server/base/standard_files.h"

#include <fcntl.h>
#include <sys/syscall.h>
#include <unistd.h>

namespace ema {

// Uses system calls only: a sanitizer replaces open().
[[gnu::no_sanitize_address, gnu::no_sanitize_thread]] void OccupyStandardFiles() {
  for (int fd = STDIN_FILENO; fd <= STDERR_FILENO; ++fd) {
    if (syscall(SYS_fcntl, fd, F_GETFD) >= 0) continue;
    // Opened in the opposite direction, so that using it stays an error. It gets the lowest free
    // number, which is `fd`. If /dev/null is missing, nothing can be done.
    syscall(SYS_openat, AT_FDCWD, "/dev/null", fd == STDIN_FILENO ? O_WRONLY : O_RDONLY);
  }
}

}  // namespace ema
