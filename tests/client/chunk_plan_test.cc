// SPDX-License-Identifier: Apache-2.0
#include "client/cpp/push/chunk_plan.h"

#include <gmock/gmock.h>
#include <grpcpp/grpcpp.h>
#include <grpcpp/impl/codegen/proto_utils.h>
#include <gtest/gtest.h>

#include <numeric>
#include <string>

#include "absl/strings/str_cat.h"
#include "ema/v1/ema_service.pb.h"
#include "server/base/crc32c.h"
#include "tests/testutil/status_matchers.h"

namespace ema::client_internal {
namespace {

using ::testing::ElementsAre;
using ::testing::IsEmpty;

RankLayout WholeLayout(std::vector<TensorSpec> tensors) {
  const Manifest manifest = *Manifest::Create(std::move(tensors));
  std::vector<Shard> shards;
  for (int64_t i = 0; i < manifest.tensor_count(); ++i) shards.push_back(WholeTensor(manifest, i));
  return *RankLayout::Create(manifest, std::move(shards));
}

// Bytes of a layout, one buffer for each shard.
struct Buffers {
  explicit Buffers(const RankLayout& layout) {
    unsigned char next = 1;
    for (size_t i = 0; i < layout.shards().size(); ++i) {
      std::string bytes(layout.shard_start(static_cast<int64_t>(i) + 1) -
                            layout.shard_start(static_cast<int64_t>(i)),
                        '\0');
      for (char& byte : bytes) byte = static_cast<char>(next++ * 7);
      all += bytes;
      shards.push_back(std::move(bytes));
    }
    for (const std::string& shard : shards) {
      spans.push_back(std::as_bytes(std::span(shard.data(), shard.size())));
    }
  }
  std::vector<std::string> shards;
  std::vector<std::span<const std::byte>> spans;
  std::string all;
};

v1::PushRequest Parse(grpc::ByteBuffer message) {
  v1::PushRequest request;
  EXPECT_TRUE(grpc::SerializationTraits<v1::PushRequest>::Deserialize(&message, &request).ok());
  return request;
}

uint32_t CrcOf(const std::string& bytes) {
  return Crc32c(0, std::as_bytes(std::span(bytes.data(), bytes.size())));
}

TEST(ChunkPlanTest, ChunksEndBetweenElements) {
  const RankLayout layout = WholeLayout({{.name = "a", .dtype = Dtype::kUInt8, .shape = {5}},
                                         {.name = "b", .dtype = Dtype::kFloat64, .shape = {4}},
                                         {.name = "c", .dtype = Dtype::kBFloat16, .shape = {3}}});
  const ChunkPlan plan(layout, 10);
  std::vector<int64_t> ends;
  for (int64_t i = 0; i < plan.chunk_count(); ++i)
    ends.push_back(plan.offset(i) + plan.length_bytes(i));
  EXPECT_THAT(ends, ElementsAre(5, 13, 21, 29, 39, 43));
}

TEST(ChunkPlanTest, NothingMakesNoChunks) {
  const Manifest manifest = *Manifest::Create({{.name = "a", .shape = {5}}});
  const ChunkPlan plan(*RankLayout::Create(manifest, {}), 100);
  EXPECT_EQ(plan.chunk_count(), 0);
  EXPECT_EQ(plan.ChunksBefore(0), 0);
  EXPECT_THAT(plan.ChunksIn({{0, 10}}), IsEmpty());
}

TEST(ChunkPlanTest, FindsTheChunksOfRanges) {
  const ChunkPlan plan(WholeLayout({{.name = "a", .dtype = Dtype::kUInt8, .shape = {100}}}), 10);
  EXPECT_THAT(plan.ChunksIn({{10, 10}}), ElementsAre(1));
  EXPECT_THAT(plan.ChunksIn({{9, 2}, {15, 1}, {95, 5}}), ElementsAre(0, 1, 9));
  EXPECT_THAT(plan.ChunksIn({{95, 1000}, {20, 0}}), ElementsAre(9));
}

TEST(ChunkPlanTest, ManySmallTensorsShareChunks) {
  std::vector<TensorSpec> tensors;
  for (int i = 0; i < 10'000; ++i)
    tensors.push_back({.name = absl::StrCat("t", i), .shape = {i % 7}});
  const RankLayout layout = WholeLayout(std::move(tensors));
  EXPECT_EQ(ChunkPlan(layout, 4 << 20).chunk_count(), 1);
}

class ChunkWriterTest : public testing::TestWithParam<int64_t> {};

TEST_P(ChunkWriterTest, MessagesAreWhatProtobufReads) {
  const RankLayout layout =
      WholeLayout({{.name = "small", .shape = {3}},
                   {.name = "big", .shape = {5000}},
                   {.name = "none", .shape = {0}},
                   {.name = "odd", .dtype = Dtype::kUInt8, .shape = {4097}},
                   {.name = "tail", .dtype = Dtype::kFloat16, .shape = {9}},
                   {.name = "more", .dtype = Dtype::kFloat64, .shape = {9000}}});
  const Buffers buffers(layout);
  const ChunkPlan plan(layout, GetParam());
  WeightsGate gate;
  ChunkWriter::Scratch scratch;
  {
    ChunkWriter writer(&layout, &plan, plan.chunk_count(), buffers.spans, &gate);
    std::string received;
    for (int64_t i = 0; i < plan.chunk_count(); ++i) {
      const std::optional<grpc::ByteBuffer> message = writer.Write(i, scratch);
      ASSERT_TRUE(message.has_value());
      const v1::PushRequest request = Parse(*message);
      EXPECT_EQ(request.chunk().offset(), static_cast<int64_t>(received.size()));
      EXPECT_EQ(request.chunk().crc32c(), CrcOf(request.chunk().data()));
      received += request.chunk().data();
    }
    EXPECT_EQ(received, buffers.all);
    EXPECT_EQ(writer.Digest(), CrcOf(buffers.all));
  }
  EXPECT_FALSE(gate.HasSlices());
}

INSTANTIATE_TEST_SUITE_P(ChunkBytes, ChunkWriterTest,
                         testing::Values(8, 100, 4096, 10'000, 1 << 20),
                         [](const auto& test) { return absl::StrCat(test.param); });

TEST(ChunkWriterTest, LargePiecesAreNotCopied) {
  const RankLayout layout =
      WholeLayout({{.name = "small", .shape = {3}}, {.name = "big", .shape = {5000}}});
  const Buffers buffers(layout);
  const ChunkPlan plan(layout, 1 << 20);
  WeightsGate gate;
  ChunkWriter::Scratch scratch;
  ChunkWriter writer(&layout, &plan, plan.chunk_count(), buffers.spans, &gate);
  std::optional<grpc::ByteBuffer> message = writer.Write(0, scratch);
  EXPECT_TRUE(gate.HasSlices());
  std::vector<grpc::Slice> slices;
  ASSERT_TRUE(message->Dump(&slices).ok());
  ASSERT_EQ(slices.size(), 3U);  // The prefix, a copy of the small one, the big one.
  EXPECT_EQ(static_cast<const void*>(slices[2].begin()),
            static_cast<const void*>(buffers.shards[1].data()));
  slices.clear();
  EXPECT_TRUE(gate.HasSlices());
  message.reset();
  EXPECT_FALSE(gate.HasSlices());
}

TEST(ChunkWriterTest, DigestReadsOnlyWhatWasNeverWritten) {
  const RankLayout layout = WholeLayout({{.name = "big", .shape = {5000}}});
  Buffers buffers(layout);
  const ChunkPlan plan(layout, 8000);
  WeightsGate gate;
  ChunkWriter::Scratch scratch;
  ChunkWriter writer(&layout, &plan, plan.chunk_count(), buffers.spans, &gate);
  (void)writer.Write(0, scratch);
  (void)writer.Write(1, scratch);
  gate.FinishReading();
  ASSERT_TRUE(gate.TryRelease(absl::ZeroDuration()));
  EXPECT_EQ(writer.Digest(), std::nullopt);
  EXPECT_FALSE(writer.Write(2, scratch).has_value());

  WeightsGate open_gate;
  ChunkWriter complete(&layout, &plan, plan.chunk_count(), buffers.spans, &open_gate);
  for (int64_t i = 0; i < plan.chunk_count(); ++i) (void)complete.Write(i, scratch);
  open_gate.FinishReading();
  ASSERT_TRUE(open_gate.TryRelease(absl::ZeroDuration()));
  const std::string before = buffers.all;
  std::fill(buffers.shards[0].begin(), buffers.shards[0].end(), 'x');
  EXPECT_EQ(complete.Digest(), CrcOf(before));
}

// One of two shards is stored column by column.
class StridedChunksTest : public testing::TestWithParam<WireDtype> {};

TEST_P(StridedChunksTest, AreThoseOfTheSameWeightsInOrder) {
  constexpr int64_t kRows = 37;
  constexpr int64_t kColumns = 113;
  const Manifest manifest =
      *Manifest::Create({{.name = "a", .shape = {500}}, {.name = "b", .shape = {kRows, kColumns}}});
  const RankLayout layout = *RankLayout::Create(
      manifest, {WholeTensor(manifest, 0), WholeTensor(manifest, 1)}, 0, GetParam());
  std::vector<float> a(500), rows(kRows * kColumns), columns(kRows * kColumns);
  std::iota(a.begin(), a.end(), 1000.3F);
  std::iota(rows.begin(), rows.end(), 0.7F);
  for (int64_t row = 0; row < kRows; ++row) {
    for (int64_t column = 0; column < kColumns; ++column) {
      columns[column * kRows + row] = rows[row * kColumns + column];
    }
  }
  const std::vector<std::span<const std::byte>> in_order = {std::as_bytes(std::span(a)),
                                                            std::as_bytes(std::span(rows))};
  const std::vector<std::span<const std::byte>> strided = {std::as_bytes(std::span(a)),
                                                           std::as_bytes(std::span(columns))};
  const std::vector<Strides> strides = {{}, {1, kRows}};
  const ChunkPlan plan(layout, 1500);
  WeightsGate gate;
  ChunkWriter expected(&layout, &plan, plan.chunk_count(), in_order, &gate);
  ChunkWriter written(&layout, &plan, plan.chunk_count(), strided, &gate, nullptr, strides);
  ChunkWriter copied(&layout, &plan, plan.chunk_count(), strided, &gate, nullptr, strides);
  ChunkWriter unread(&layout, &plan, plan.chunk_count(), strided, &gate, nullptr, strides);
  ChunkWriter::Scratch scratch;
  for (int64_t i = 0; i < plan.chunk_count(); ++i) {
    const v1::PushRequest request = Parse(*expected.Write(i, scratch));
    const v1::PushRequest gathered = Parse(*written.Write(i, scratch));
    EXPECT_TRUE(gathered.chunk().data() == request.chunk().data()) << "chunk " << i;
    EXPECT_EQ(gathered.chunk().crc32c(), request.chunk().crc32c());
    std::string copy(plan.length_bytes(i), '\0');
    EXPECT_EQ(copied.Copy(i, reinterpret_cast<std::byte*>(copy.data())), request.chunk().crc32c());
    EXPECT_TRUE(copy == request.chunk().data()) << "chunk " << i;
  }
  EXPECT_EQ(written.Digest(), expected.Digest());
  EXPECT_EQ(copied.Digest(), expected.Digest());
  EXPECT_EQ(unread.Digest(), expected.Digest());
  EXPECT_FALSE(gate.HasSlices());
}

INSTANTIATE_TEST_SUITE_P(WireDtypes, StridedChunksTest,
                         testing::Values(WireDtype::kAsPushed, WireDtype::kBFloat16),
                         [](const auto& test) {
                           return test.param == WireDtype::kAsPushed ? "AsPushed" : "BFloat16";
                         });

}  // namespace
}  // namespace ema::client_internal
