// SPDX-License-Identifier: Apache-2.0
#include "server/ops/port_file.h"

#include <cerrno>
#include <cstdio>
#include <fstream>
#include <system_error>

#include "absl/strings/str_cat.h"

namespace ema {

absl::Status WritePortFile(const std::string& path, int port) {
  const std::string temporary = path + ".tmp";
  std::ofstream file(temporary, std::ios::trunc);
  file << port << '\n';
  file.close();
  if (!file.fail() && std::rename(temporary.c_str(), path.c_str()) == 0) return absl::OkStatus();
  const int error = errno;
  std::remove(temporary.c_str());
  return absl::UnavailableError(absl::StrCat(
      "--port-file: \"", path, "\" cannot be written: ", std::generic_category().message(error)));
}

}  // namespace ema
