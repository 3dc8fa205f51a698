// SPDX-License-Identifier: Apache-2.0
//
// A data directory on a real disk, which a server saves to and the next one starts from.
#ifndef EMA_TESTS_CHECKPOINT_TEST_DATA_DIR_H_
#define EMA_TESTS_CHECKPOINT_TEST_DATA_DIR_H_

#include <unistd.h>

#include <cstdint>
#include <cstdlib>
#include <memory>
#include <string>

#include "ema/internal/status_macros.h"
#include "server/checkpoint/checkpoint_store.h"
#include "tests/testutil/status_matchers.h"

namespace ema {

// Made for the test, and gone with it.
class DataDirTest : public testing::Test {
 protected:
  DataDirTest() : directory_(testing::TempDir() + "/ema_data_XXXXXX") {
    EXPECT_NE(mkdtemp(directory_.data()), nullptr);
  }
  ~DataDirTest() override { PosixFileSystem().RemoveTree(directory_).IgnoreError(); }

  const std::string& directory() const { return directory_; }

  // One life of a server that saves a version.
  absl::Status Save(Model& model, const SnapshotRef& snapshot, int64_t max_file_bytes) const {
    EMA_ASSIGN_OR_RETURN(
        const auto store,
        CheckpointStore::Open(PosixFileSystem(),
                              {.data_dir = directory_, .max_file_bytes = max_file_bytes}));
    return store->FolderOf("m").Save(model, snapshot).status();
  }
  // The next life: what it has of the model "m" when it serves.
  absl::StatusOr<std::shared_ptr<Model>> Start(ModelStore& models) const {
    EMA_ASSIGN_OR_RETURN(const auto store,
                         CheckpointStore::Open(PosixFileSystem(), {.data_dir = directory_}));
    EMA_ASSIGN_OR_RETURN(const auto report, store->LoadAll(models));
    if (!report.corrupt.empty()) return report.corrupt[0].problem;
    return models.Get("m");
  }

 private:
  std::string directory_;
};

}  // namespace ema

#endif  // EMA_TESTS_CHECKPOINT_TEST_DATA_DIR_H_
