// SPDX-License-Identifier: Apache-2.0
#include "client/cpp/chunk_plan.h"

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
  gate.HaveRead();
  ASSERT_TRUE(gate.TryRelease(absl::ZeroDuration()));
  EXPECT_EQ(writer.Digest(), std::nullopt);
  EXPECT_FALSE(writer.Write(2, scratch).has_value());

  WeightsGate open_gate;
  ChunkWriter complete(&layout, &plan, plan.chunk_count(), buffers.spans, &open_gate);
  for (int64_t i = 0; i < plan.chunk_count(); ++i) (void)complete.Write(i, scratch);
  open_gate.HaveRead();
  ASSERT_TRUE(open_gate.TryRelease(absl::ZeroDuration()));
  const std::string before = buffers.all;
  std::fill(buffers.shards[0].begin(), buffers.shards[0].end(), 'x');
  EXPECT_EQ(complete.Digest(), CrcOf(before));
}

}  // namespace
}  // namespace ema::client_internal
