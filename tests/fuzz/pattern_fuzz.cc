// SPDX-License-Identifier: Apache-2.0
//
// Patterns of tensor names. The input is a pattern and names, each on a line. A pattern matches the
// names that fnmatch(3) matches, and the one that it is.
#include <fnmatch.h>

#include <set>
#include <vector>

#include "include/ema/internal/tensor_pattern.h"
#include "tests/fuzz/fuzz.h"

namespace ema {
namespace {

// True: `text` begins with a class, such as [:digits:], that does not exist.
bool BeginsWithUnknownClass(std::string_view text) {
  static const std::set<std::string_view> kClasses = {"alnum", "alpha", "blank", "cntrl",
                                                      "digit", "graph", "lower", "print",
                                                      "punct", "space", "upper", "xdigit"};
  constexpr size_t kBegin = 2;  // The length of "[:".
  const size_t end = text.find_first_not_of("abcdefghijklmnopqrstuvwxyz", kBegin);
  return text.starts_with("[:") && end != text.npos && text.substr(end, 2) == ":]" &&
         !kClasses.contains(text.substr(kBegin, end - kBegin));
}

// False: fnmatch() differs on purpose. It knows collating symbols and equivalence classes, rejects
// an escape at the end of a pattern, ignores ranges such as [z-a], with which ours match nothing,
// and takes [:z:] for single characters. It compares with the members of a bracket before it reads
// an unknown class, with which ours match nothing.
bool IsComparable(std::string_view pattern) {
  for (size_t i = 0; i + 1 < pattern.size(); ++i) {
    const std::string_view two = pattern.substr(i, 2);
    if (two == "[." || two == "[=" || two == "-\\" || two == "-[") return false;
    if (two == "[:" && pattern.find('z') != pattern.npos) return false;
    const bool is_first_member = i > 0 && pattern[i - 1] == '[';
    if (!is_first_member && BeginsWithUnknownClass(pattern.substr(i))) return false;
    const std::string_view range_end = pattern.substr(i + 1, 2);
    if (range_end.size() == 2 && range_end[0] == '-' && range_end[1] != ']' &&
        static_cast<unsigned char>(pattern[i]) > static_cast<unsigned char>(range_end[1])) {
      return false;
    }
  }
  return !pattern.ends_with('\\');
}

}  // namespace
}  // namespace ema

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  ema::FuzzInput input(data, size);
  const std::string pattern(input.Until('\n'));
  std::vector<ema::TensorSpec> tensors;
  while (!input.empty()) {
    tensors.push_back({std::string(input.Until('\n')), ema::Dtype::kInt8, {1}});
  }
  const absl::StatusOr<ema::Manifest> manifest = ema::Manifest::Create(std::move(tensors));
  ema::CheckMessage(manifest.status());
  if (!manifest.ok()) return 0;
  ema::GlobBudget budget;
  const absl::StatusOr<std::vector<int64_t>> matches =
      ema::MatchTensors(pattern, *manifest, budget);
  ema::CheckMessage(matches.status());
  ema::CheckMessage(ema::FindTensors(pattern, *manifest, budget).status());
  if (!matches.ok() || !ema::IsComparable(pattern)) return 0;
  std::vector<int64_t> expected;
  for (int64_t i = 0; i < manifest->tensor_count(); ++i) {
    const std::string& name = manifest->tensor(i).name;
    if (name == pattern || fnmatch(pattern.c_str(), name.c_str(), 0) == 0) expected.push_back(i);
  }
  EMA_FUZZ_CHECK(*matches == expected);
  return 0;
}
