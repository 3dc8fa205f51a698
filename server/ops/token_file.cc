// SPDX-License-Identifier: Apache-2.0
#include "server/ops/token_file.h"

#include <openssl/crypto.h>
#include <openssl/sha.h>

#include <algorithm>
#include <optional>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "absl/strings/strip.h"
#include "ema/error_reason.h"
#include "ema/internal/status_macros.h"
#include "ema/manifest.h"
#include "server/base/quoted.h"
#include "server/base/small_file.h"

namespace ema {
namespace {

constexpr size_t kLeastTokenBytes = 16;
constexpr size_t kMostTokenBytes = 512;
constexpr std::string_view kScheme = "Bearer ";

std::array<unsigned char, 32> Sha256(std::string_view text) {
  std::array<unsigned char, 32> digest;
  SHA256(reinterpret_cast<const unsigned char*>(text.data()), text.size(), digest.data());
  return digest;
}

absl::Status BadFile(const std::string& path, absl::string_view problem) {
  return absl::InvalidArgumentError(absl::StrCat("token file \"", path, "\": ", problem));
}

absl::StatusOr<std::string> Read(const std::string& path) {
  constexpr int64_t kMaxBytes = 1 << 20;
  absl::StatusOr<std::string> text = ReadSmallFile(path, kMaxBytes);
  if (!text.ok()) return BadFile(path, text.status().message());
  return text;
}

std::optional<Role> ParseRole(absl::string_view text) {
  for (const Role role : {Role::kEvaluator, Role::kTrainer, Role::kAdmin, Role::kServer}) {
    if (std::string_view(text.data(), text.size()) == RoleName(role)) return role;
  }
  return std::nullopt;
}

bool IsToken(absl::string_view text) {
  return text.size() >= kLeastTokenBytes && text.size() <= kMostTokenBytes &&
         std::all_of(text.begin(), text.end(), [](char c) { return c > ' ' && c <= '~'; });
}

bool IsModelPattern(absl::string_view word) {
  const bool is_prefix = absl::ConsumeSuffix(&word, "*");
  return (is_prefix && word.empty()) || ValidateName("model", {word.data(), word.size()}).ok();
}

}  // namespace

absl::StatusOr<std::unique_ptr<TokenFile>> TokenFile::Open(const std::string& path) {
  std::unique_ptr<TokenFile> file(new TokenFile(path));
  EMA_ASSIGN_OR_RETURN(file->last_processed_, Read(path));
  absl::StatusOr<std::vector<Entry>> entries = Parse(*file->last_processed_);
  if (!entries.ok()) {
    return absl::InvalidArgumentError(
        absl::StrCat("token file \"", path, "\", ", entries.status().message()));
  }
  absl::MutexLock lock(&file->mu_);
  file->entries_ = *std::move(entries);
  return file;
}

absl::StatusOr<std::vector<TokenFile::Entry>> TokenFile::Parse(std::string_view text) {
  std::vector<Entry> entries;
  int line_number = 0;
  for (const absl::string_view line :
       absl::StrSplit(absl::string_view(text.data(), text.size()), '\n')) {
    ++line_number;
    const auto bad = [line_number](absl::string_view problem) {
      return absl::InvalidArgumentError(absl::StrCat("line ", line_number, ": ", problem));
    };
    const std::vector<absl::string_view> words =
        absl::StrSplit(line, absl::ByAnyChar(" \t\r"), absl::SkipEmpty());
    if (words.empty() || words[0][0] == '#') continue;
    const std::optional<Role> role = ParseRole(words[0]);
    // A token in the wrong place must not get into a log.
    if (!role.has_value()) {
      return bad("the first word is not a role; expected evaluator, trainer, admin or server");
    }
    if (words.size() < 2 || !IsToken(words[1])) {
      return bad(absl::StrCat("expected a token of ", kLeastTokenBytes, " to ", kMostTokenBytes,
                              " printable characters after the role"));
    }
    Entry entry{Sha256({words[1].data(), words[1].size()}), {.role = *role, .models = {}}};
    for (const Entry& other : entries) {
      if (other.token_sha256 == entry.token_sha256) {
        return bad("an earlier line has the same token");
      }
    }
    for (size_t i = 2; i < words.size(); ++i) {
      if (!IsModelPattern(words[i])) {
        // What is as long as a token may be one, or a damaged one.
        const std::string shown =
            words[i].size() >= kLeastTokenBytes
                ? ""
                : absl::StrCat(", ", Quoted({words[i].data(), words[i].size()}));
        return bad(absl::StrCat("word ", i + 1, shown,
                                ": expected a model's name, or the beginning of one followed by "
                                "\"*\"; a comment needs a line of its own"));
      }
      entry.access.models.emplace_back(words[i]);
    }
    entries.push_back(std::move(entry));
  }
  if (entries.empty()) return absl::InvalidArgumentError("line 1: the file has no tokens");
  return entries;
}

absl::StatusOr<Access> TokenFile::Authenticate(std::string_view authorization) const {
  const auto refused = [](absl::string_view problem) {
    return MakeError(absl::StatusCode::kUnauthenticated, ErrorReason::kBadToken,
                     std::string(problem));
  };
  if (authorization.empty()) return refused("the call has no token, but the server requires one");
  if (!authorization.starts_with(kScheme)) {
    return refused("authorization: expected \"Bearer \" and a token");
  }
  const std::array<unsigned char, 32> given = Sha256(authorization.substr(kScheme.size()));
  std::optional<Access> access;
  absl::MutexLock lock(&mu_);
  // All of them, so that the time does not say which.
  for (const Entry& entry : entries_) {
    if (CRYPTO_memcmp(entry.token_sha256.data(), given.data(), given.size()) == 0) {
      access = entry.access;
    }
  }
  if (!access.has_value()) return refused("the server does not know the call's token");
  return *std::move(access);
}

absl::Status TokenFile::problem() const {
  absl::MutexLock lock(&mu_);
  return problem_;
}

void TokenFile::ReportReload(const absl::Status& problem) {
  {
    absl::MutexLock lock(&mu_);
    problem_ = problem;
  }
  if (on_change != nullptr) on_change(problem);
}

bool TokenFile::Refresh() {
  absl::StatusOr<std::string> text = Read(path_);
  if (text == last_processed_) {
    candidate_.reset();
    return false;
  }
  if (candidate_ != text) {
    candidate_ = std::move(text);
    return false;
  }
  candidate_.reset();
  last_processed_ = std::move(text);
  absl::StatusOr<std::vector<Entry>> entries =
      last_processed_.ok() ? Parse(*last_processed_) : last_processed_.status();
  ReportReload(entries.status());
  if (!entries.ok()) return false;
  absl::MutexLock lock(&mu_);
  entries_ = *std::move(entries);
  return true;
}

}  // namespace ema
