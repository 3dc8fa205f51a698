// SPDX-License-Identifier: Apache-2.0
//
// The bearer token with which a client authenticates its calls.
#ifndef EMA_CLIENT_CPP_TRANSPORT_TOKEN_H_
#define EMA_CLIENT_CPP_TRANSPORT_TOKEN_H_

#include <string>
#include <utility>

#include "absl/status/status.h"

namespace ema::client_internal {

// A bearer token, or a file that contains one and is read at each use. Immutable.
class Token {
 public:
  Token() = default;
  Token(std::string token, std::string file) : token_(std::move(token)), file_(std::move(file)) {}

  // INVALID_ARGUMENT, BAD_REQUEST: both are given, the file cannot be read, or the text is not a
  // token; the message does not repeat it.
  absl::Status Check() const;
  // The value of the header "authorization"; empty: there is no token (any more).
  std::string Authorization() const;

 private:
  std::string token_;
  std::string file_;
};

}  // namespace ema::client_internal

#endif  // EMA_CLIENT_CPP_TRANSPORT_TOKEN_H_
