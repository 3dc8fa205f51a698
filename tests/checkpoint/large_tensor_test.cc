// SPDX-License-Identifier: Apache-2.0
//
// A tensor above 4 GiB goes through a push, a save and a start bit for bit, and so does what lies
// after it. Takes 4.3 GB of memory and of the disk, one version at a time: what was pushed is made
// again to be compared.
#include <algorithm>
#include <cstring>
#include <memory>
#include <random>
#include <span>
#include <utility>
#include <vector>

#include "tests/checkpoint/test_data_dir.h"
#include "tests/core/test_model.h"

namespace ema {
namespace {

constexpr int64_t kGiB = int64_t{1} << 30;
constexpr int64_t kChunkBytes = int64_t{1} << 20;
constexpr int64_t kPageBytes = 4096;

// A tensor's bytes. No two pages of any are the same, so that one in the place of another is seen;
// taken as float32, they are finite.
class Pattern {
 public:
  explicit Pattern(int64_t tensor_index)
      : first_page_(tensor_index * 8 * kGiB / kPageBytes), chunk_(kChunkBytes) {
    std::mt19937 random(3);
    std::uniform_real_distribution<float> value(-1, 1);
    for (size_t at = 0; at < chunk_.size(); at += sizeof(float)) Put(value(random), at);
  }

  // `length_bytes` bytes from `offset` on, a multiple of kChunkBytes; valid until the next call.
  std::span<const std::byte> At(int64_t offset, int64_t length_bytes) {
    for (int64_t at = 0; at < kChunkBytes; at += kPageBytes) {
      const int64_t page = first_page_ + (offset + at) / kPageBytes;
      // Both are whole numbers that a float holds.
      Put(static_cast<float>(page / 1000), at);
      Put(static_cast<float>(page % 1000), at + sizeof(float));
    }
    return std::span(chunk_).first(length_bytes);
  }

 private:
  void Put(float value, size_t at) { std::memcpy(&chunk_[at], &value, sizeof(value)); }

  const int64_t first_page_;
  std::vector<std::byte> chunk_;
};

// Calls `use` with the pieces that tensor `i` is pushed and compared in.
template <typename Use>
void ForEachPiece(const Manifest& manifest, int64_t i, const Use& use) {
  Pattern pattern(i);
  const int64_t bytes = manifest.tensor(i).byte_count();
  for (int64_t offset = 0; offset < bytes; offset += kChunkBytes) {
    use(offset, pattern.At(offset, std::min(kChunkBytes, bytes - offset)));
  }
}

void Push(const std::shared_ptr<Model>& model) {
  TestRank rank(model, "launch");
  ASSERT_THAT(rank.Join(), IsOk());
  auto outcome = std::make_shared<PushOutcome>();
  EMA_ASSERT_OK_AND_ASSIGN(const auto push, rank.Open(10, outcome));
  PushTotals end;
  for (int64_t i = 0; i < model->manifest().tensor_count(); ++i) {
    ForEachPiece(model->manifest(), i, [&](int64_t, std::span<const std::byte> bytes) {
      const auto length_bytes = static_cast<int64_t>(bytes.size());
      const uint32_t crc = Crc32c(0, bytes);
      ASSERT_THAT(push->AddChunk({end.total_bytes, crc, length_bytes}, {bytes}), IsOk());
      end.digest = Crc32cCombine(end.digest, crc, length_bytes);
      end.total_bytes += length_bytes;
      ++end.chunk_count;
    });
  }
  ASSERT_THAT(push->Commit(end), IsOk());
  ASSERT_THAT(outcome->result, IsOk());
}

// Of the first push, the average is what was pushed.
void ExpectPattern(Model& model, const TrackSnapshot& of_track) {
  const Track& track = *of_track.track;
  for (int64_t i = 0; i < model.manifest().tensor_count(); ++i) {
    int64_t wrong_pieces = 0;
    ForEachPiece(model.manifest(), i, [&](int64_t offset, std::span<const std::byte> expected) {
      EMA_ASSERT_OK_AND_ASSIGN(
          const std::vector<HostPiece> pieces,
          ReadBlocks(model.device(), track, of_track.blocks,
                     track.layout().entry(i).offset + offset, expected.size()));
      bool is_same = true;
      for (const HostPiece& piece : pieces) {
        is_same &= std::memcmp(piece.bytes.data(), expected.data(), piece.bytes.size()) == 0;
        expected = expected.subspan(piece.bytes.size());
      }
      wrong_pieces += !is_same || !expected.empty();
    });
    EXPECT_EQ(wrong_pieces, 0) << model.manifest().tensor(i).name;
  }
}

class LargeTensorTest : public DataDirTest, public testing::WithParamInterface<Dtype> {};

TEST_P(LargeTensorTest, ComesBackBitForBit) {
  // Of bytes, it also has more than 2^32 elements. The tensors after it begin above 4 GiB, also in
  // the file, which has tensors of larger elements first.
  const int64_t extent = DtypeSize(GetParam()) == 1 ? 65'537 : 32'769;
  ModelConfig config;
  config.name = "m";
  config.manifest = MakeManifest({{"before", GetParam(), {3, 5}},
                                  {"large", GetParam(), {extent, extent}},
                                  {"after", GetParam(), {600, 1000}},
                                  {"last", Dtype::kUInt8, {11}}});
  ASSERT_GT(config.manifest->tensor(1).byte_count(), 4 * kGiB);
  config.tracks = {{"ema", MakeSchedule("10ba")}};
  config.max_pinned_versions = 1;
  if (TestDevice()->total_memory_bytes() < 8 * kGiB) GTEST_SKIP() << "needs a machine of 8 GiB";
  if (*PosixFileSystem().FreeBytes(directory()) < 6 * kGiB) {
    GTEST_SKIP() << "needs 6 GiB in " << testing::TempDir();
  }
  ModelStore::Options options;
  options.memory_bytes = 16 * kGiB;  // Of which a third is used.
  {
    ModelStore models(TestDevice(), options);
    EMA_ASSERT_OK_AND_ASSIGN(const auto created, models.Create(config));
    Push(created.model);
    EMA_ASSERT_OK_AND_ASSIGN(const SnapshotRef snapshot, created.model->history().Pin(0));
    ASSERT_THAT(Save(*created.model, snapshot, /*max_file_bytes=*/5'000'000'000), IsOk());
  }
  ModelStore models(TestDevice(), options);
  EMA_ASSERT_OK_AND_ASSIGN(const auto loaded, Start(models));
  EXPECT_EQ(loaded->manifest(), *config.manifest);
  EMA_ASSERT_OK_AND_ASSIGN(const SnapshotRef snapshot, loaded->history().Pin(0));
  ExpectPattern(*loaded, snapshot->tracks[0]);
}

INSTANTIATE_TEST_SUITE_P(Checkpoint, LargeTensorTest,
                         testing::Values(Dtype::kUInt8, Dtype::kFloat32),
                         [](const auto& param) { return std::string(DtypeName(param.param)); });

}  // namespace
}  // namespace ema
