// SPDX-License-Identifier: Apache-2.0
#include "client/cpp/transport/token.h"

#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <fstream>

#include "absl/strings/str_cat.h"
#include "ema/error_reason.h"

namespace ema::client_internal {
namespace {

// gRPC fails a call with other characters in a header, and a blank would be another token.
bool IsToken(const std::string& text) {
  return !text.empty() &&
         std::all_of(text.begin(), text.end(), [](char c) { return c > ' ' && c <= '~'; });
}

// The first word of a file; "": there is none.
std::string ReadWord(const std::string& path) {
  std::string word;
  std::ifstream(path) >> word;
  return word;
}

}  // namespace

absl::Status Token::Check() const {
  const auto bad = [](const std::string& problem) { return BadRequest(problem); };
  if (!token_.empty() && !file_.empty()) {
    return bad(absl::StrCat("token, token_file \"", file_, "\": expected only one of them"));
  }
  if (!token_.empty() && !IsToken(token_)) {
    return bad("token: expected printable characters without blanks");
  }
  if (!file_.empty() && access(file_.c_str(), R_OK) != 0) {
    return bad(absl::StrCat("token_file \"", file_, "\": ", std::strerror(errno)));
  }
  if (!file_.empty() && !IsToken(ReadWord(file_))) {
    return bad(absl::StrCat("token_file \"", file_, "\": expected a file of one token"));
  }
  return absl::OkStatus();
}

std::string Token::Authorization() const {
  const std::string token = file_.empty() ? token_ : ReadWord(file_);
  return IsToken(token) ? absl::StrCat("Bearer ", token) : "";
}

}  // namespace ema::client_internal
