// SPDX-License-Identifier: Apache-2.0
#ifndef EMA_TESTS_BENCH_FOLDER_H_
#define EMA_TESTS_BENCH_FOLDER_H_

#include <filesystem>
#include <string>
#include <utility>

namespace ema::bench {

// A folder that is there, empty at first, until it is destroyed.
class Folder {
 public:
  explicit Folder(std::filesystem::path path) : path_(std::move(path)) {
    std::filesystem::remove_all(path_);
    std::filesystem::create_directories(path_);
  }
  ~Folder() { std::filesystem::remove_all(path_); }
  Folder(const Folder&) = delete;
  Folder& operator=(const Folder&) = delete;

  std::string path() const { return path_; }
  std::string Path(const std::string& name) const { return path_ / name; }

 private:
  const std::filesystem::path path_;
};

}  // namespace ema::bench

#endif  // EMA_TESTS_BENCH_FOLDER_H_
