// SPDX-License-Identifier: Apache-2.0
//
// Coverage, layouts and sessions against a bitmap: random N-d shards, ranks, orders and chunks. A
// step is accepted exactly when the bitmap says that each element has come once.
#include <algorithm>
#include <cmath>
#include <numeric>
#include <random>
#include <set>

#include "server/core/coverage.h"
#include "tests/core/test_model.h"
#include "tests/testutil/random_layout.h"

namespace ema {
namespace {

using ::testing::AnyOf;
using ::testing::HasSubstr;

constexpr std::array<Dtype, 4> kDtypes = {Dtype::kFloat32, Dtype::kFloat64, Dtype::kInt32,
                                          Dtype::kInt8};

// One to four tensors of 0 to 4 dimensions, some hundred elements at most.
std::shared_ptr<const Manifest> RandomManifest(std::mt19937& random) {
  constexpr std::array<int64_t, 5> kMaxExtents = {0, 300, 17, 7, 5};
  std::vector<TensorSpec> tensors(1 + Below(random, 4));
  for (size_t i = 0; i < tensors.size(); ++i) {
    tensors[i].name = absl::StrCat("t", i);
    tensors[i].dtype = kDtypes[Below(random, kDtypes.size())];
    tensors[i].shape.resize(Below(random, 5));
    for (int64_t& extent : tensors[i].shape) {
      extent = 1 + Below(random, kMaxExtents[tensors[i].shape.size()]);
    }
  }
  return MakeManifest(std::move(tensors));
}

// How often each element of a manifest is in a shard.
class ElementCounts {
 public:
  explicit ElementCounts(const Manifest& manifest) : manifest_(manifest) {
    for (const TensorSpec& spec : manifest.tensors()) counts_.emplace_back(spec.element_count());
  }
  void Add(const std::vector<Shard>& shards) {
    for (const Shard& shard : shards) {
      const auto& shape = manifest_.tensor(shard.tensor_index).shape;
      for (const int64_t i : ElementsOf(shard, shape)) ++counts_[shard.tensor_index][i];
    }
  }
  bool HasOverlap() const {
    return Any([](int count) { return count > 1; });
  }
  bool HasHole() const {
    return Any([](int count) { return count == 0; });
  }

 private:
  template <typename Predicate>
  bool Any(Predicate predicate) const {
    return std::any_of(counts_.begin(), counts_.end(), [&](const std::vector<int>& tensor) {
      return std::any_of(tensor.begin(), tensor.end(), predicate);
    });
  }
  const Manifest& manifest_;
  std::vector<std::vector<int>> counts_;
};

// Drops, doubles, moves, stretches or shrinks one of the shards, inside its tensor.
void Damage(std::mt19937& random, const Manifest& manifest,
            std::vector<std::vector<Shard>>& ranks) {
  std::vector<Shard>& shards = ranks[Below(random, static_cast<int64_t>(ranks.size()))];
  if (shards.empty()) return;
  const size_t i = Below(random, static_cast<int64_t>(shards.size()));
  const int64_t kind = Below(random, 4);
  if (kind == 0) {
    shards.erase(shards.begin() + static_cast<std::ptrdiff_t>(i));
  } else if (kind == 1) {
    ranks[Below(random, static_cast<int64_t>(ranks.size()))].push_back(Shard(shards[i]));
  } else {
    Shard& shard = shards[i];
    if (shard.extents.empty()) return;
    const std::vector<int64_t>& shape = manifest.tensor(shard.tensor_index).shape;
    const size_t d = Below(random, static_cast<int64_t>(shape.size()));
    if (kind == 2) {
      shard.offsets[d] = Below(random, shape[d] - shard.extents[d] + 1);
    } else {
      shard.extents[d] = Below(random, shape[d] - shard.offsets[d] + 1);
    }
  }
}

// --- Coverage alone ---

// Claims stay open while others come and go, as streams on many threads do it.
TEST(CoveragePropertyTest, ClaimsInFlightAgreeWithABitmap) {
  enum class State { kMissing, kClaimed, kCovered };
  for (unsigned seed = 0; seed < 300; ++seed) {
    SCOPED_TRACE(absl::StrCat("seed ", seed));
    std::mt19937 random(seed);
    const int64_t total = 1 + Below(random, 120);
    std::vector<State> bytes(total, State::kMissing);
    std::vector<Coverage::Range> claimed;
    std::vector<Coverage::Range> covered;
    Coverage coverage(total, /*max_ranges=*/1000);
    // A checksum that only its range has.
    const auto checksum = [](const Coverage::Range& range) {
      return static_cast<uint32_t>(range.offset * 1000 + range.length_bytes);
    };
    for (int action = 0; action < 200; ++action) {
      if (!claimed.empty() && OneIn(random, 2)) {
        const auto it = claimed.begin() + Below(random, static_cast<int64_t>(claimed.size()));
        const bool is_right = !OneIn(random, 3);
        is_right ? coverage.Cover(*it, checksum(*it)) : coverage.Release(*it);
        if (is_right) covered.push_back(*it);
        std::fill_n(bytes.begin() + it->offset, it->length_bytes,
                    is_right ? State::kCovered : State::kMissing);
        claimed.erase(it);
      } else {
        Coverage::Range range;
        if (!covered.empty() && OneIn(random, 4)) {
          range = covered[Below(random, static_cast<int64_t>(covered.size()))];
        } else {
          range.offset = Below(random, total);
          range.length_bytes = 1 + Below(random, std::min<int64_t>(total - range.offset, 20));
        }
        const bool other_content = OneIn(random, 10);
        const auto begin = bytes.begin() + range.offset;
        const auto end = begin + range.length_bytes;
        const bool is_duplicate =
            std::any_of(covered.begin(), covered.end(), [&](const Coverage::Range& r) {
              return r.offset == range.offset && r.length_bytes == range.length_bytes;
            });
        const auto claim = coverage.Claim(range, checksum(range) + (other_content ? 1 : 0));
        if (std::count(begin, end, State::kCovered) > 0) {
          if (is_duplicate && !other_content) {
            ASSERT_THAT(claim, IsOkAndHolds(Coverage::ClaimResult::kDuplicate));
          } else {
            ASSERT_THAT(claim, ReasonIs(ErrorReason::kChunkOverlap));
          }
        } else if (std::count(begin, end, State::kClaimed) > 0) {
          ASSERT_THAT(claim, ReasonIs(ErrorReason::kRangeBusy));
        } else {
          ASSERT_THAT(claim, IsOkAndHolds(Coverage::ClaimResult::kClaimed));
          std::fill(begin, end, State::kClaimed);
          claimed.push_back(range);
        }
      }
      const int64_t covered_bytes = std::count(bytes.begin(), bytes.end(), State::kCovered);
      ASSERT_EQ(coverage.covered_bytes(), covered_bytes);
      ASSERT_EQ(coverage.is_complete(), covered_bytes == total);
      std::vector<bool> is_missing(total);
      for (const Coverage::Range& gap : coverage.Missing(total)) {
        std::fill_n(is_missing.begin() + gap.offset, gap.length_bytes, true);
      }
      for (int64_t i = 0; i < total; ++i) ASSERT_EQ(is_missing[i], bytes[i] != State::kCovered);
    }
  }
}

// --- Layouts ---

TEST(LayoutPropertyTest, ARunIsReadyExactlyWhenEachElementIsInOneShard) {
  int ready_count = 0;
  int overlap_count = 0;
  int hole_count = 0;
  for (unsigned seed = 0; seed < 600; ++seed) {
    SCOPED_TRACE(absl::StrCat("seed ", seed));
    std::mt19937 random(seed);
    const auto manifest = RandomManifest(random);
    const int64_t world_size = 1 + Below(random, 6);
    auto ranks = CutForRanks(random, *manifest, world_size, 1 + Below(random, 8));
    for (int64_t i = Below(random, 3); i > 0; --i) Damage(random, *manifest, ranks);

    EMA_ASSERT_OK_AND_ASSIGN(auto run, TrainerRun::Create(manifest.get(), "launch", 1, world_size));
    std::vector<int64_t> order(world_size);
    std::iota(order.begin(), order.end(), 0);
    std::shuffle(order.begin(), order.end(), random);
    ElementCounts joined(*manifest);
    bool is_refused = false;
    for (size_t k = 0; k < order.size() && !is_refused; ++k) {
      ElementCounts own(*manifest);
      own.Add(ranks[order[k]]);
      auto layout = RankLayout::Create(*manifest, ranks[order[k]]);
      ASSERT_EQ(layout.ok(), !own.HasOverlap()) << layout.status();
      if (!layout.ok()) {
        ASSERT_THAT(layout, ReasonIs(ErrorReason::kLayoutOverlap));
        ++overlap_count;
        is_refused = true;
        break;
      }
      joined.Add(ranks[order[k]]);
      const absl::Status join = run->Join(order[k], world_size, *std::move(layout));
      if (k + 1 < order.size()) {
        ASSERT_THAT(join, IsOk());
      } else if (joined.HasOverlap()) {
        ASSERT_THAT(join, ReasonIs(ErrorReason::kLayoutOverlap));
        ASSERT_THAT(std::string(join.message()), HasSubstr("tensor \"t"));
        ++overlap_count;
        is_refused = true;
      } else if (joined.HasHole()) {
        ASSERT_THAT(join, ReasonIs(ErrorReason::kLayoutHole));
        ASSERT_THAT(std::string(join.message()), HasSubstr("tensor \"t"));
        ++hole_count;
        is_refused = true;
      } else {
        ASSERT_THAT(join, IsOk());
      }
    }
    ASSERT_EQ(run->is_ready(), !is_refused);
    if (run->is_ready()) ++ready_count;
  }
  EXPECT_GT(ready_count, 100);
  EXPECT_GT(overlap_count, 50);
  EXPECT_GT(hole_count, 50);
}

// --- Sessions ---

// What the trainer has: by tensor, an integer for each element.
using Values = std::vector<std::vector<int>>;

Values RandomValues(std::mt19937& random, const Manifest& manifest) {
  Values values;
  for (const TensorSpec& spec : manifest.tensors()) {
    std::vector<int>& tensor = values.emplace_back(spec.element_count());
    for (int& value : tensor) value = static_cast<int>(Below(random, 128));
  }
  return values;
}

std::vector<std::byte> Encode(Dtype dtype, int value) {
  std::vector<std::byte> bytes(DtypeSize(dtype));
  const auto put = [&bytes](auto typed) { std::memcpy(bytes.data(), &typed, sizeof(typed)); };
  if (dtype == Dtype::kFloat32) put(static_cast<float>(value));
  if (dtype == Dtype::kFloat64) put(static_cast<double>(value));
  if (dtype == Dtype::kInt32) put(static_cast<int32_t>(value));
  if (dtype == Dtype::kInt8) put(static_cast<int8_t>(value));
  return bytes;
}

// One rank: its bytes, which of them the server must have, and its stream.
struct PropertyRank {
  PropertyRank(std::shared_ptr<Model> model, int64_t number, int64_t world_size,
               std::vector<Shard> its_shards)
      : shards(std::move(its_shards)),
        rank(std::move(model), "launch", number, world_size, shards, /*whole=*/false) {}

  // What it pushes of `values`, and where its elements begin.
  void Fill(const Manifest& manifest, const Values& values) {
    bytes.clear();
    starts.clear();
    for (const Shard& shard : shards) {
      const TensorSpec& spec = manifest.tensor(shard.tensor_index);
      for (const int64_t i : ElementsOf(shard, spec.shape)) {
        starts.push_back(static_cast<int64_t>(bytes.size()));
        const auto encoded = Encode(spec.dtype, values[shard.tensor_index][i]);
        bytes.insert(bytes.end(), encoded.begin(), encoded.end());
      }
    }
    starts.push_back(static_cast<int64_t>(bytes.size()));
    arrived.assign(bytes.size(), false);
    accepted.clear();
    committed = false;
  }
  int64_t element_count() const { return static_cast<int64_t>(starts.size()) - 1; }
  bool is_complete() const {
    return std::find(arrived.begin(), arrived.end(), false) == arrived.end();
  }

  const std::vector<Shard> shards;
  TestRank rank;
  std::vector<std::byte> bytes;
  std::vector<int64_t> starts;
  std::vector<bool> arrived;
  std::set<std::pair<int64_t, int64_t>> accepted;
  bool committed = false;
  std::unique_ptr<RankPush> push;
  std::shared_ptr<PushOutcome> outcome;
  int64_t stream_chunks = 0;
  int64_t stream_bytes = 0;
};

class SessionPropertyTest : public testing::Test {
 protected:
  // A run of random ranks on a random model with an average and a copy.
  void Start(unsigned seed) {
    random_.seed(seed);
    manifest_ = RandomManifest(random_);
    ModelConfig config;
    config.name = "m";
    config.manifest = manifest_;
    config.tracks = {{"ema", MakeSchedule("1ba")}, {"raw", MakeSchedule("copy")}};
    EMA_ASSERT_OK_AND_ASSIGN(const auto created, store_.Create(std::move(config)));
    model_ = created.model;
    const int64_t world_size = 1 + Below(random_, 5);
    const auto cut = CutForRanks(random_, *manifest_, world_size, 1 + Below(random_, 6));
    ranks_.clear();
    for (int64_t r = 0; r < world_size; ++r) {
      ranks_.push_back(std::make_unique<PropertyRank>(model_, r, world_size, cut[r]));
      ASSERT_THAT(ranks_.back()->rank.Join(), IsOk());
    }
    average_.clear();
    copy_.clear();
  }

  void OpenStream(PropertyRank& rank, int64_t step) {
    rank.push = nullptr;
    rank.outcome = std::make_shared<PushOutcome>();
    rank.stream_chunks = rank.stream_bytes = 0;
    EMA_ASSERT_OK_AND_ASSIGN(rank.push, rank.rank.Open(step, rank.outcome));
  }

  // The elements [begin, end) of a rank's bytes as one chunk; `wrong_bit`: of its content, with the
  // right checksum for that; `wrong_crc`: another checksum.
  absl::Status Send(PropertyRank& rank, int64_t begin, int64_t end, bool wrong_bit,
                    bool wrong_crc) {
    const int64_t offset = rank.starts[begin];
    const int64_t length = rank.starts[end] - offset;
    std::vector<std::byte> data(rank.bytes.begin() + offset, rank.bytes.begin() + offset + length);
    if (wrong_bit) data[Below(random_, length)] ^= std::byte{1};
    const uint32_t crc32c = Crc32c(0, data) ^ (wrong_crc ? 1 : 0);
    // In two pieces, cut anywhere.
    const std::span<const std::byte> all(data);
    const auto cut = static_cast<size_t>(Below(random_, length + 1));
    const std::vector<std::span<const std::byte>> pieces = {all.first(cut), all.subspan(cut)};
    ++rank.stream_chunks;
    rank.stream_bytes += length;
    return rank.push->AddChunk({offset, crc32c, length}, pieces);
  }

  // A random chunk, and what must come of it.
  void SendRandomChunk(PropertyRank& rank, int64_t step) {
    if (rank.element_count() == 0) return;
    int64_t begin = Below(random_, rank.element_count());
    int64_t end = begin + 1 + Below(random_, std::min<int64_t>(rank.element_count() - begin, 40));
    const auto first_missing = std::find(rank.arrived.begin(), rank.arrived.end(), false);
    if (first_missing != rank.arrived.end() && !OneIn(random_, 4)) {
      // One that fits: most chunks do.
      const int64_t byte = first_missing - rank.arrived.begin();
      begin = std::lower_bound(rank.starts.begin(), rank.starts.end(), byte) - rank.starts.begin();
      end = begin + 1;
      const int64_t longest = 1 + Below(random_, 40);
      while (end < rank.element_count() && end - begin < longest &&
             !rank.arrived[rank.starts[end]]) {
        ++end;
      }
    } else if (!rank.accepted.empty() && OneIn(random_, 2)) {
      auto it = rank.accepted.begin();
      std::advance(it, Below(random_, static_cast<int64_t>(rank.accepted.size())));
      std::tie(begin, end) = *it;
    }
    const bool wrong_bit = OneIn(random_, 20);
    const bool wrong_crc = !wrong_bit && OneIn(random_, 20);
    const auto from = rank.arrived.begin() + rank.starts[begin];
    const auto to = rank.arrived.begin() + rank.starts[end];
    const bool is_free = std::find(from, to, true) == to;
    if (is_free && wrong_bit) return;  // Other content with a right checksum: what is pushed then.
    const bool is_duplicate = rank.accepted.contains({begin, end});
    const absl::Status status = Send(rank, begin, end, wrong_bit, wrong_crc);
    if (is_free && !wrong_crc) {
      ASSERT_THAT(status, IsOk());
      std::fill(from, to, true);
      rank.accepted.insert({begin, end});
    } else if (is_free) {
      ASSERT_THAT(status, ReasonIs(ErrorReason::kChunkCorrupt));
    } else if (is_duplicate && !wrong_bit && !wrong_crc) {
      ASSERT_THAT(status, IsOk());
    } else {
      ASSERT_THAT(status, ReasonIs(ErrorReason::kChunkOverlap));
    }
    // As the server does it: a stream ends with its first error, the session goes on.
    if (!status.ok()) OpenStream(rank, step);
  }

  // Commits, and checks that this is right exactly when everything has arrived.
  void TryCommit(PropertyRank& rank, int64_t step, int64_t version_before, bool is_last) {
    const uint32_t digest = Crc32c(0, rank.bytes);
    const bool wrong_digest = OneIn(random_, 8);
    const absl::Status status =
        rank.push->Commit({rank.stream_chunks, rank.stream_bytes, digest ^ (wrong_digest ? 1 : 0)});
    if (!rank.is_complete()) {
      ASSERT_THAT(status, ReasonIs(ErrorReason::kPushIncomplete));
    } else if (wrong_digest) {
      ASSERT_THAT(status, ReasonIs(ErrorReason::kDigestMismatch));
    } else {
      ASSERT_THAT(status, IsOk());
      rank.committed = true;
    }
    const int64_t version =
        model_->history().latest().has_value() ? model_->history().latest()->number : 0;
    ASSERT_EQ(version, version_before + (rank.committed && is_last ? 1 : 0));
    if (!status.ok()) OpenStream(rank, step);
  }

  // One step, in random order, until it has committed; or, if `gives_up`, until the next step must
  // end it.
  void RunStep(int64_t step, bool gives_up) {
    const Values values = RandomValues(random_, *manifest_);
    const int64_t before =
        model_->history().latest().has_value() ? model_->history().latest()->number : 0;
    for (const auto& rank : ranks_) {
      rank->Fill(*manifest_, values);
      OpenStream(*rank, step);
    }
    std::vector<PropertyRank*> open;
    for (const auto& rank : ranks_) open.push_back(rank.get());
    while (!open.empty()) {
      // The last to commit never does.
      if (gives_up && open.size() == 1 && open[0]->is_complete()) return;
      const auto it = open.begin() + Below(random_, static_cast<int64_t>(open.size()));
      PropertyRank& rank = **it;
      if ((!rank.is_complete() || OneIn(random_, 4)) && !OneIn(random_, 12)) {
        ASSERT_NO_FATAL_FAILURE(SendRandomChunk(rank, step));
        if (rank.element_count() > 0) continue;
      }
      if (gives_up && open.size() == 1) continue;
      ASSERT_NO_FATAL_FAILURE(TryCommit(rank, step, before, open.size() == 1));
      if (rank.committed) open.erase(it);
    }
    for (const auto& rank : ranks_) {
      ASSERT_EQ(rank->outcome->calls, 1);
      ASSERT_THAT(rank->outcome->result, IsOk());
      ASSERT_EQ(rank->outcome->result->record.number, before + 1);
      ASSERT_FALSE(rank->outcome->result->is_duplicate);
    }
    Apply(values);
    CheckWeights();
  }

  void Apply(const Values& values) {
    // 1/2, or 3/4 after a step that was given up.
    const auto weight = static_cast<float>(model_->history().latest()->tracks[0].update_weight);
    const bool is_first = average_.empty();
    if (is_first) average_.resize(values.size());
    for (size_t t = 0; t < values.size(); ++t) {
      if (is_first) average_[t].resize(values[t].size());
      for (size_t i = 0; i < values[t].size(); ++i) {
        const auto p = static_cast<float>(values[t][i]);
        const float e = average_[t][i];
        const bool is_copied = is_first || !IsFloat(manifest_->tensor(t).dtype);
        average_[t][i] = is_copied ? p : std::fma(weight, p - e, e);
      }
    }
    copy_ = values;
  }

  // Every element of both tracks.
  void CheckWeights() {
    EMA_ASSERT_OK_AND_ASSIGN(const auto ema, ReadAll(*model_, "ema"));
    EMA_ASSERT_OK_AND_ASSIGN(const auto raw, ReadAll(*model_, "raw"));
    for (int64_t t = 0; t < manifest_->tensor_count(); ++t) {
      const Dtype dtype = manifest_->tensor(t).dtype;
      const auto check = [&](const std::vector<std::byte>& bytes, const std::string& track,
                             Dtype stored, const auto& encoded_at) {
        const std::vector<TensorAction> actions = ActionsOf(
            {.name = "x", .schedule = MakeSchedule(track == "raw" ? "copy" : "1ba")}, *manifest_);
        const int64_t start = StorageLayout(*manifest_, actions, Dtype::kFloat32).entry(t).offset;
        for (size_t i = 0; i < copy_[t].size(); ++i) {
          const std::vector<std::byte> expected = encoded_at(i);
          const auto at = bytes.begin() + start + static_cast<int64_t>(i) * DtypeSize(stored);
          ASSERT_TRUE(std::equal(expected.begin(), expected.end(), at))
              << track << ", tensor " << t << ", element " << i;
        }
      };
      ASSERT_NO_FATAL_FAILURE(
          check(raw, "raw", dtype, [&](size_t i) { return Encode(dtype, copy_[t][i]); }));
      ASSERT_NO_FATAL_FAILURE(
          check(ema, "ema", IsFloat(dtype) ? Dtype::kFloat32 : dtype, [&](size_t i) {
            if (!IsFloat(dtype)) return Encode(dtype, copy_[t][i]);
            std::vector<std::byte> bytes(sizeof(float));
            std::memcpy(bytes.data(), &average_[t][i], sizeof(float));
            return bytes;
          }));
    }
  }

  std::mt19937 random_;
  ModelStore store_{TestDevice(), SmallBlocks()};
  std::shared_ptr<const Manifest> manifest_;
  std::shared_ptr<Model> model_;
  std::vector<std::unique_ptr<PropertyRank>> ranks_;
  std::vector<std::vector<float>> average_;
  Values copy_;
};

TEST_F(SessionPropertyTest, AStepCommitsExactlyWhenEachElementHasComeOnce) {
  for (unsigned seed = 0; seed < 150; ++seed) {
    SCOPED_TRACE(absl::StrCat("seed ", seed));
    ASSERT_NO_FATAL_FAILURE(Start(seed));
    for (int64_t step = 1; step <= 4; ++step) {
      // Ended by the one that never commits, when it begins the next step.
      const bool gives_up = step == 3 && OneIn(random_, 2);
      ASSERT_NO_FATAL_FAILURE(RunStep(step, gives_up));
      if (!gives_up) continue;
      for (const auto& rank : ranks_) {
        if (rank->committed) continue;
        ASSERT_NO_FATAL_FAILURE(OpenStream(*rank, step + 1));
      }
      for (const auto& rank : ranks_) {
        if (!rank->committed) continue;
        ASSERT_EQ(rank->outcome->calls, 1);
        ASSERT_THAT(rank->outcome->result, ReasonIs(ErrorReason::kStepAbandoned));
      }
      ASSERT_NO_FATAL_FAILURE(CheckWeights());
    }
    ranks_.clear();
    ASSERT_TRUE(store_.Delete("m"));
  }
}

TEST_F(SessionPropertyTest, ChunksOutsideARanksBytesOrAcrossElementsAreRefused) {
  int refused_count = 0;
  for (unsigned seed = 0; seed < 60; ++seed) {
    SCOPED_TRACE(absl::StrCat("seed ", seed));
    ASSERT_NO_FATAL_FAILURE(Start(seed));
    const Values values = RandomValues(random_, *manifest_);
    PropertyRank& rank = *ranks_[0];
    rank.Fill(*manifest_, values);
    OpenStream(rank, 1);
    const auto total = static_cast<int64_t>(rank.bytes.size());
    const std::vector<std::byte> data(total + 64);
    for (int i = 0; i < 40; ++i) {
      const int64_t offset = Below(random_, total + 20) - 10;
      const int64_t length = Below(random_, 40);
      const auto is_boundary = [&rank](int64_t byte) {
        return std::binary_search(rank.starts.begin(), rank.starts.end(), byte);
      };
      if (length > 0 && offset >= 0 && is_boundary(offset) && is_boundary(offset + length)) {
        continue;
      }
      const std::span<const std::byte> piece(data.data(), length);
      ASSERT_THAT(rank.push->AddChunk({offset, Crc32c(0, piece), length}, {piece}),
                  StatusIs(absl::StatusCode::kInvalidArgument,
                           AnyOf(HasSubstr("is not inside the rank's"),
                                 HasSubstr("cuts an element"), HasSubstr("expected 1 to"))));
      ++refused_count;
    }
    ranks_.clear();
    ASSERT_TRUE(store_.Delete("m"));
  }
  EXPECT_GT(refused_count, 500);
}

}  // namespace
}  // namespace ema
