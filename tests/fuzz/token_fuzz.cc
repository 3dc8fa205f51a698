// SPDX-License-Identifier: Apache-2.0
//
// Token files. The input is a file and, after a line of its own with "---", the text that replaces
// it. Every token of a file that is accepted authenticates, and no message shows a token.
#include <memory>
#include <string>
#include <vector>

#include "absl/strings/str_split.h"
#include "server/ops/token_file.h"
#include "tests/fuzz/memory_text_file.h"

namespace ema {
namespace {

std::vector<std::string> WordsOf(std::string_view line) {
  return absl::StrSplit(absl::string_view(line.data(), line.size()), absl::ByAnyChar(" \t\r"),
                        absl::SkipEmpty());
}

// A word of 16 bytes or more may be a token.
void CheckShowsNoToken(const absl::Status& status, std::string_view path, std::string_view text) {
  CheckMessage(status);
  std::string message(status.message());
  if (const size_t at = message.find(path); at != message.npos) message.erase(at, path.size());
  FuzzInput lines(reinterpret_cast<const uint8_t*>(text.data()), text.size());
  while (!lines.empty()) {
    for (const std::string& word : WordsOf(lines.Until('\n'))) {
      EMA_FUZZ_CHECK(word.size() < 16 || message.find(word) == message.npos);
    }
  }
}

// `text`: of a file that was accepted.
void CheckTokensAreKnown(const TokenFile& file, std::string_view text) {
  FuzzInput lines(reinterpret_cast<const uint8_t*>(text.data()), text.size());
  while (!lines.empty()) {
    const std::vector<std::string> words = WordsOf(lines.Until('\n'));
    if (words.empty() || words[0][0] == '#') continue;
    const absl::StatusOr<Access> access = file.Authenticate("Bearer " + words[1]);
    EMA_FUZZ_CHECK(access.ok() && RoleName(access->role) == words[0]);
    EMA_FUZZ_CHECK(access->models == std::vector<std::string>(words.begin() + 2, words.end()));
  }
}

}  // namespace
}  // namespace ema

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  static ema::MemoryTextFile* const file = new ema::MemoryTextFile();
  const std::string_view input = ema::FuzzInput(data, size).rest();
  constexpr std::string_view kSeparator = "\n---\n";
  const size_t separator = input.find(kSeparator);
  const std::string_view text = input.substr(0, separator);

  file->Write(text);
  const auto tokens = ema::TokenFile::Open(file->path());
  ema::CheckShowsNoToken(tokens.status(), file->path(), text);
  if (!tokens.ok()) return 0;
  ema::CheckTokensAreKnown(**tokens, text);
  ema::CheckMessage((*tokens)->Authenticate(input).status());

  if (separator == input.npos) return 0;
  const std::string_view next = input.substr(separator + kSeparator.size());
  file->Write(next);
  EMA_FUZZ_CHECK(!(*tokens)->Refresh());
  const bool is_reloaded = (*tokens)->Refresh();
  const absl::Status problem = (*tokens)->problem();
  ema::CheckShowsNoToken(problem, file->path(), next);
  EMA_FUZZ_CHECK(is_reloaded == (problem.ok() && next != text));
  ema::CheckTokensAreKnown(**tokens, is_reloaded ? next : text);
  return 0;
}
