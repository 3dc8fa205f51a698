// SPDX-License-Identifier: Apache-2.0
//
// What the fuzz harnesses share. A harness defines LLVMFuzzerTestOneInput(), which libFuzzer calls
// with one input after another, and run_corpus.cc with each file of a corpus.
#ifndef EMA_TESTS_FUZZ_FUZZ_H_
#define EMA_TESTS_FUZZ_FUZZ_H_

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <string>
#include <string_view>

#include "absl/status/status.h"
#include "server/base/printable.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size);

// Ends the process if the condition is false, so that the fuzzer keeps the input.
#define EMA_FUZZ_CHECK(condition)                                                        \
  do {                                                                                   \
    if (!(condition)) {                                                                  \
      std::fprintf(stderr, "%s:%d: check failed: %s\n", __FILE__, __LINE__, #condition); \
      std::abort();                                                                      \
    }                                                                                    \
  } while (false)

namespace ema {

// Reads values off the front of an input. At its end all further values are 0.
class FuzzInput {
 public:
  FuzzInput(const uint8_t* data, size_t size) : rest_(reinterpret_cast<const char*>(data), size) {}

  bool empty() const { return rest_.empty(); }
  // What has not been read yet; in the fuzzer's own memory, so that ASan finds reads beyond it.
  std::string_view rest() const { return rest_; }

  uint8_t Byte() { return static_cast<uint8_t>(Number(1)); }
  // A little-endian number of `bytes` bytes.
  int64_t Number(size_t bytes = 8) {
    uint64_t value = 0;
    const std::string_view taken = rest_.substr(0, bytes);
    for (size_t i = 0; i < taken.size(); ++i) {
      value |= uint64_t{static_cast<unsigned char>(taken[i])} << (8 * i);
    }
    rest_.remove_prefix(taken.size());
    return static_cast<int64_t>(value);
  }
  // The text up to the next `end`, which is skipped, or all that is left.
  std::string_view Until(char end) {
    const std::string_view text = rest_.substr(0, rest_.find(end));
    rest_.remove_prefix(std::min(rest_.size(), text.size() + 1));
    return text;
  }

 private:
  std::string_view rest_;
};

// The message of every error may be shown on a terminal, whatever the input was.
inline void CheckMessage(const absl::Status& status) {
  EMA_FUZZ_CHECK(IsPrintableUtf8({status.message().data(), status.message().size()}));
}

}  // namespace ema

#endif  // EMA_TESTS_FUZZ_FUZZ_H_
