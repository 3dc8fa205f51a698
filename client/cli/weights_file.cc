// SPDX-License-Identifier: Apache-2.0
#include "client/cli/weights_file.h"

#include <algorithm>
#include <filesystem>
#include <iterator>
#include <map>
#include <nlohmann/json.hpp>
#include <set>
#include <string_view>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"
#include "ema/attached_file.h"
#include "ema/error_reason.h"
#include "ema/internal/status_macros.h"
#include "server/format/safetensors.h"

namespace ema::cli {
namespace {

// 200 000 tensors with long names.
constexpr int64_t kMaxIndexBytes = 256 << 20;
constexpr int64_t kReadBytes = 16 << 20;
constexpr const char* kFolderFiles[] = {"model.safetensors", "diffusion_pytorch_model.safetensors"};

absl::Status Malformed(const std::string& path, const std::string& problem) {
  return BadRequest(absl::StrCat(path, ": ", problem));
}

// Gives the tensors the names that attach() has, without what torch.compile, activation
// checkpointing and DistributedDataParallel add to those of a state_dict.
void Unwrap(std::vector<TensorSpec>& specs) {
  constexpr std::string_view kDataParallel = "module.";
  for (TensorSpec& spec : specs) {
    std::vector<std::string> parts = absl::StrSplit(spec.name, '.');
    std::erase_if(parts, [](const std::string& part) {
      return part == "_orig_mod" || part == "_checkpoint_wrapped_module";
    });
    spec.name = absl::StrJoin(parts, ".");
  }
  const auto is_wrapped = [&](const TensorSpec& spec) {
    return spec.name.starts_with(kDataParallel);
  };
  while (!specs.empty() && std::all_of(specs.begin(), specs.end(), is_wrapped)) {
    for (TensorSpec& spec : specs) spec.name.erase(0, kDataParallel.size());
  }
}

bool IsThere(const std::string& path) {
  std::error_code error;
  return std::filesystem::exists(path, error);
}

}  // namespace

std::string WeightsName(const std::string& config) {
  const auto json = nlohmann::json::parse(config, nullptr, /*allow_exceptions=*/false);
  const bool is_of_diffusers =
      json.is_object() && (json.contains("_diffusers_version") || json.contains("_class_name"));
  return kFolderFiles[is_of_diffusers ? 1 : 0];
}

std::string ReadConfig(const std::string& folder) {
  return PosixFileSystem()
      .ReadSmallFile(RealPath(JoinPath(folder, kConfigName)), kMaxAttachedFileBytes)
      .value_or("");
}

std::string RealPath(const std::string& path) {
  std::error_code error;
  const std::string real_path = std::filesystem::canonical(path, error).string();
  return error ? path : real_path;
}

absl::Status FileError(const std::string& path, const absl::Status& status) {
  if (absl::IsUnavailable(status)) {
    return absl::UnknownError(absl::StrCat(path, ": ", status.message()));
  }
  return WithPrefix(status, absl::StrCat(path, ": "));
}

absl::StatusOr<WeightsFile> WeightsFile::Open(const std::string& path) {
  WeightsFile result;
  std::error_code error;
  if (!std::filesystem::is_directory(path, error)) {
    EMA_RETURN_IF_ERROR(result.Add(path, [](const std::string&) { return true; }));
  } else {
    std::vector<std::string> names(std::begin(kFolderFiles), std::end(kFolderFiles));
    if (WeightsName(ReadConfig(path)) != names[0]) std::swap(names[0], names[1]);
    for (const std::string& name : names) {
      const std::string file = JoinPath(path, name);
      const std::string index = absl::StrCat(file, ".index.json");
      if (IsThere(index)) {
        EMA_RETURN_IF_ERROR(result.AddPieces(path, index));
      } else if (IsThere(file)) {
        EMA_RETURN_IF_ERROR(result.Add(file, [](const std::string&) { return true; }));
      } else {
        continue;
      }
      break;
    }
    if (result.files_.empty()) {
      return absl::NotFoundError(absl::StrCat(path, ": has neither ", kFolderFiles[0], " nor ",
                                              kFolderFiles[1], ", whole or with .index.json"));
    }
  }
  Unwrap(result.specs_);
  absl::StatusOr<Manifest> manifest = Manifest::Create(std::move(result.specs_));
  if (!manifest.ok()) return FileError(path, manifest.status());
  result.manifest_ = *std::move(manifest);
  return result;
}

absl::Status WeightsFile::Add(const std::string& path,
                              const std::function<bool(const std::string&)>& is_wanted) {
  absl::StatusOr<std::unique_ptr<RandomAccessFile>> file =
      PosixFileSystem().OpenFile(RealPath(path));
  if (!file.ok()) return FileError(path, file.status());
  absl::StatusOr<SafetensorsHeader> header = ReadSafetensorsHeader(**file);
  if (!header.ok()) return FileError(path, header.status());
  for (SafetensorsTensor& tensor : header->tensors) {
    if (!is_wanted(tensor.spec.name)) continue;
    places_.push_back({static_cast<int64_t>(files_.size()), header->header_bytes + tensor.begin});
    specs_.push_back(std::move(tensor.spec));
  }
  files_.push_back(*std::move(file));
  return absl::OkStatus();
}

absl::Status WeightsFile::AddPieces(const std::string& folder, const std::string& index_path) {
  absl::StatusOr<std::string> text =
      PosixFileSystem().ReadSmallFile(RealPath(index_path), kMaxIndexBytes);
  if (!text.ok()) return FileError(index_path, text.status());
  const nlohmann::json index = nlohmann::json::parse(*text, nullptr, /*allow_exceptions=*/false);
  const auto weight_map = index.is_object() ? index.find("weight_map") : index.end();
  if (weight_map == index.end() || !weight_map->is_object() || weight_map->empty()) {
    return Malformed(index_path, "has no weight_map");
  }
  std::map<std::string, std::set<std::string>> tensors_of;
  for (const auto& [tensor, file] : weight_map->items()) {
    const std::string* const name = file.get_ptr<const std::string*>();
    if (name == nullptr || name->find('/') != std::string::npos) {
      return Malformed(index_path, absl::StrCat("tensor \"", tensor,
                                                "\": its file is not a name in this folder"));
    }
    tensors_of[*name].insert(tensor);
  }
  for (auto& [name, tensors] : tensors_of) {
    const std::string path = JoinPath(folder, name);
    // Adds the listed tensors, and removes them from the list.
    EMA_RETURN_IF_ERROR(Add(path, [&tensors = tensors](const std::string& tensor) {
      return tensors.erase(tensor) > 0;
    }));
    if (!tensors.empty()) {
      return Malformed(
          path, absl::StrCat("has no tensor \"", *tensors.begin(), "\", which the index lists"));
    }
  }
  return absl::OkStatus();
}

absl::StatusOr<WeightsFile::Weights> WeightsFile::Read(
    const std::function<bool(int64_t)>& on_progress) const {
  Weights weights;
  // Not std::vector, which would write zeros first.
  weights.memory.reset(new std::byte[static_cast<size_t>(manifest_.total_bytes())]);
  std::span<std::byte> rest(weights.memory.get(), static_cast<size_t>(manifest_.total_bytes()));
  int64_t done_bytes = 0;
  for (int64_t i = 0; i < manifest_.tensor_count(); ++i) {
    const TensorSpec& spec = manifest_.tensor(i);
    const Place& place = places_[i];
    const std::span<std::byte> bytes = rest.first(static_cast<size_t>(spec.byte_count()));
    for (int64_t begin = 0; begin < spec.byte_count(); begin += kReadBytes) {
      const int64_t size = std::min(kReadBytes, spec.byte_count() - begin);
      const absl::Status read =
          files_[place.file]->Read(place.offset + begin, bytes.subspan(begin, size));
      if (!read.ok()) return FileError(absl::StrCat("tensor \"", spec.name, "\""), read);
      done_bytes += size;
      if (!on_progress(done_bytes)) return absl::CancelledError("interrupted");
    }
    weights.tensors.push_back(bytes);
    rest = rest.subspan(bytes.size());
  }
  return weights;
}

}  // namespace ema::cli
