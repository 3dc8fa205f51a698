// SPDX-License-Identifier: Apache-2.0
#include "ema/manifest.h"

#include <algorithm>
#include <cstddef>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/ascii.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "ema/error_reason.h"
#include "ema/internal/status_macros.h"
#include "server/base/crc32c.h"
#include "server/base/quoted.h"

namespace ema {
namespace {

constexpr int64_t kMaxTotalBytes = int64_t{1} << 62;
constexpr size_t kMaxNameBytes = 128;

absl::Status BadManifest(std::string_view message) {
  return MakeError(absl::StatusCode::kInvalidArgument, ErrorReason::kBadManifest, message);
}

absl::Status AliasGivenTwice(const TensorSpec& spec, const std::string& alias) {
  return BadManifest(absl::StrCat("tensor \"", spec.name, "\": its alias \"", alias,
                                  "\" is a name in the manifest already; names must differ"));
}

bool IsNameStart(char c) { return absl::ascii_isalnum(static_cast<unsigned char>(c)); }
bool IsNameByte(char c) { return IsNameStart(c) || c == '.' || c == '_' || c == '-'; }

// What `spec` takes at most in any storage layout, with the padding before it.
bool AddStoredBytes(const TensorSpec& spec, int64_t& sum) {
  const int64_t size = DtypeSize(IsFloat(spec.dtype) ? Dtype::kFloat64 : spec.dtype);
  int64_t bytes = 0;
  return !__builtin_mul_overflow(spec.element_count(), size, &bytes) &&
         !__builtin_add_overflow(bytes, size - 1, &bytes) &&
         !__builtin_add_overflow(sum, bytes, &sum) && sum <= kMaxTotalBytes;
}

// Texts of which only the first few are said, and made.
class FirstFew {
 public:
  template <typename MakeText>
  void Add(MakeText make_text) {
    // With names of 70 bytes the three kinds of a difference fit into a status' message.
    constexpr int64_t kMost = 5;
    if (++count_ <= kMost) texts_.push_back(make_text());
  }
  bool empty() const { return count_ == 0; }
  std::string Join() const {
    const int64_t untold = count_ - static_cast<int64_t>(texts_.size());
    return absl::StrCat(absl::StrJoin(texts_, ", "),
                        untold > 0 ? absl::StrCat(" and ", untold, " more") : "");
  }

 private:
  std::vector<std::string> texts_;
  int64_t count_ = 0;
};

void AppendDigestBytes(const TensorSpec& spec, std::string& bytes) {
  bytes += spec.name;
  bytes += '\0';
  bytes += static_cast<char>(static_cast<int>(spec.dtype) + (spec.is_buffer ? 128 : 0));
  bytes += static_cast<char>(spec.shape.size());
  for (const int64_t extent : spec.shape) {
    for (int shift = 0; shift < 64; shift += 8) bytes += static_cast<char>(extent >> shift);
  }
  for (const std::string& alias : spec.aliases) {
    bytes += '\1';
    bytes += alias;
    bytes += '\0';
  }
}

std::optional<int64_t> FindIn(const absl::flat_hash_map<std::string, int64_t>& index,
                              std::string_view name) {
  const auto it = index.find(absl::string_view(name.data(), name.size()));
  if (it == index.end()) return std::nullopt;
  return it->second;
}

}  // namespace

absl::Status ValidateName(std::string_view what, std::string_view name) {
  const bool is_valid = !name.empty() && name.size() <= kMaxNameBytes && IsNameStart(name[0]) &&
                        std::all_of(name.begin(), name.end(), IsNameByte);
  if (is_valid) return absl::OkStatus();
  return MakeError(
      absl::StatusCode::kInvalidArgument, ErrorReason::kBadName,
      absl::StrCat(std::string(what), " ", Quoted(name),
                   ": a name must be [A-Za-z0-9][A-Za-z0-9._-]{0,127}, such as \"gpt-2.run_1\""));
}

absl::Status Manifest::CheckCount(int64_t tensor_count) {
  if (tensor_count >= 1 && tensor_count <= kMaxTensorCount) return absl::OkStatus();
  return BadManifest(
      absl::StrCat("a manifest of ", tensor_count, " tensors; expected 1 to ", kMaxTensorCount));
}

absl::StatusOr<Manifest> Manifest::Create(std::vector<TensorSpec> tensors) {
  const int64_t tensor_count = static_cast<int64_t>(tensors.size());
  EMA_RETURN_IF_ERROR(CheckCount(tensor_count));
  Manifest manifest;
  manifest.index_.reserve(tensors.size());
  int64_t stored_bytes = 0;
  uint32_t crc = 0;
  std::string digest_bytes;
  for (int64_t i = 0; i < tensor_count; ++i) {
    const TensorSpec& spec = tensors[i];
    EMA_RETURN_IF_ERROR(spec.Validate());
    if (const auto [it, is_new] = manifest.index_.emplace(spec.name, i); !is_new) {
      return BadManifest(absl::StrCat("tensor \"", spec.name, "\": is at ", it->second, " and at ",
                                      i, " in the manifest; names must differ"));
    }
    for (const std::string& alias : spec.aliases) {
      if (!manifest.alias_index_.emplace(alias, i).second) return AliasGivenTwice(spec, alias);
    }
    if (!AddStoredBytes(spec, stored_bytes)) {
      return BadManifest(absl::StrCat("tensor \"", spec.name, "\" (", spec.TypeString(),
                                      "): with it the manifest has more than 2^62 bytes"));
    }
    manifest.total_bytes_ += spec.byte_count();
    digest_bytes.clear();
    AppendDigestBytes(spec, digest_bytes);
    crc = Crc32c(crc, std::as_bytes(std::span(digest_bytes)));
  }
  for (const TensorSpec& spec : tensors) {
    for (const std::string& alias : spec.aliases) {
      if (manifest.index_.contains(alias)) return AliasGivenTwice(spec, alias);
    }
  }
  manifest.tensors_ = std::move(tensors);
  manifest.digest_ = crc;
  return manifest;
}

int64_t Manifest::memory_bytes() const {
  // A place in an index, and besides its text or extents a piece of the heap.
  constexpr size_t kIndexBytes = 2 * sizeof(std::pair<std::string, int64_t>);
  constexpr size_t kHeapBytes = 16;
  size_t bytes = 0;
  const auto add_name = [&bytes](const std::string& name) {
    bytes += kIndexBytes + 2 * (name.size() + kHeapBytes);
  };
  for (const TensorSpec& spec : tensors_) {
    bytes += sizeof(spec) + kHeapBytes + spec.shape.size() * sizeof(int64_t);
    add_name(spec.name);
    for (const std::string& alias : spec.aliases) {
      bytes += sizeof(std::string);
      add_name(alias);
    }
  }
  return static_cast<int64_t>(bytes);
}

std::optional<int64_t> Manifest::Find(std::string_view name) const { return FindIn(index_, name); }

std::optional<int64_t> Manifest::FindAlias(std::string_view alias) const {
  return FindIn(alias_index_, alias);
}

std::string Manifest::DifferenceFrom(const Manifest& there) const {
  // Hundreds of ranks may ask at once, nearly all of them with the same.
  if (digest_ == there.digest_ && *this == there) return "";
  std::vector<std::string> parts;
  const auto add = [&parts](const char* what, const FirstFew& texts) {
    if (!texts.empty()) parts.push_back(absl::StrCat(what, texts.Join()));
  };
  const auto names_without = [](const Manifest& a, const Manifest& b) {
    FirstFew names;
    for (const TensorSpec& spec : a.tensors()) {
      if (!b.Find(spec.name)) names.Add([&] { return absl::StrCat("\"", spec.name, "\""); });
    }
    return names;
  };
  add("here, not there: ", names_without(*this, there));
  add("there, not here: ", names_without(there, *this));
  FirstFew others;
  for (const TensorSpec& spec : tensors_) {
    const std::optional<int64_t> found = there.Find(spec.name);
    if (!found || spec == there.tensor(*found)) continue;
    const auto text = [](const TensorSpec& of) {
      return absl::StrCat(of.TypeString(), of.aliases.empty() ? "" : ", also ",
                          absl::StrJoin(of.aliases, ", "));
    };
    others.Add([&] {
      return absl::StrCat("\"", spec.name, "\" ", text(spec), " here, ", text(there.tensor(*found)),
                          " there");
    });
  }
  add("other tensors of one name: ", others);
  if (!parts.empty()) return absl::StrJoin(parts, "; ");
  for (int64_t i = 0; i < tensor_count(); ++i) {
    if (tensor(i) == there.tensor(i)) continue;
    return absl::StrCat("another order: tensor ", i, " is \"", tensor(i).name, "\" here, \"",
                        there.tensor(i).name, "\" there");
  }
  return "";
}

StorageLayout::StorageLayout(const Manifest& manifest, absl::Span<const TensorAction> actions,
                             Dtype average_dtype) {
  entries_.reserve(manifest.tensors().size());
  for (int64_t i = 0; i < manifest.tensor_count(); ++i) {
    const TensorSpec& spec = manifest.tensor(i);
    if (actions[i] == TensorAction::kIgnore) {
      // Without padding: offsets grow, and never go past the end.
      entries_.push_back({spec.dtype, total_bytes_, 0, /*is_stored=*/false});
      continue;
    }
    const bool is_averaged = actions[i] == TensorAction::kAverage && IsFloat(spec.dtype);
    const Dtype dtype = is_averaged ? average_dtype : spec.dtype;
    // Manifest::Create has checked that these sums fit.
    Append(dtype, spec.element_count() * DtypeSize(dtype));
  }
}

void StorageLayout::Append(Dtype dtype, int64_t length_bytes) {
  constexpr int64_t kLargeAlignment = 64;
  const bool is_large = length_bytes >= kLargeTensorBytes;
  const int64_t alignment = is_large || is_after_large_ ? kLargeAlignment : DtypeSize(dtype);
  const int64_t offset = (total_bytes_ + alignment - 1) / alignment * alignment;
  is_after_large_ = is_large;
  entries_.push_back({dtype, offset, length_bytes});
  total_bytes_ = offset + length_bytes;
}

}  // namespace ema
