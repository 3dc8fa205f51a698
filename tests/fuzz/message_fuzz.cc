// SPDX-License-Identifier: Apache-2.0
//
// The protobuf messages that describe models, shards, selections and versions. What is accepted is
// written and read back.
#include <utility>
#include <vector>

#include "ema/v1/ema_service.pb.h"
#include "server/core/model_config.h"
#include "server/format/record_json.h"
#include "server/wire/convert_types.h"
#include "tests/fuzz/fuzz.h"

namespace ema {
namespace {

// A message of which `value` is written, read back.
template <typename Message, typename Value>
auto RoundTrip(const Value& value) {
  Message message;
  ToProto(value, &message);
  return FromProto(message);
}

void CheckTrack(const TrackConfig& track, const Manifest& manifest) {
  CheckMessage(CheckRulesMatch(track, manifest));
  const absl::Status status = ValidateTrack(track, manifest);
  CheckMessage(status);
  if (!status.ok()) return;
  const absl::StatusOr<TrackConfig> from_proto = RoundTrip<v1::Track>(track);
  EMA_FUZZ_CHECK(from_proto.ok() && *from_proto == track);
  TrackConfig from_json = Blank<TrackConfig>();
  EMA_FUZZ_CHECK(ReadJson(ParsedJson::parse(Json(track).dump()), from_json).empty());
  EMA_FUZZ_CHECK(from_json == track);
  const StorageLayout storage(manifest, ActionsOf(track, manifest), track.dtype);
  EMA_FUZZ_CHECK(storage.total_bytes() >= 0);
  EMA_FUZZ_CHECK(ScheduleIndicesOf(track, manifest).size() == manifest.tensors().size());
  EMA_FUZZ_CHECK(TrackText(track) == TrackText(WithoutUnmatchedRules(track, manifest)));
}

void CheckModel(const v1::CreateModelRequest& request) {
  const absl::StatusOr<Manifest> manifest = FromProto(request.manifest());
  CheckMessage(manifest.status());
  if (!manifest.ok()) return;
  EMA_FUZZ_CHECK(RoundTrip<v1::Manifest>(*manifest) == manifest);
  EMA_FUZZ_CHECK(manifest->total_bytes() >= 0 && manifest->DifferenceFrom(*manifest).empty());
  ModelConfig config{.name = request.model(),
                     .manifest = std::make_shared<const Manifest>(*manifest),
                     .max_pinned_versions = request.max_pinned_versions(),
                     .non_finite = static_cast<NonFinitePolicy>(request.non_finite())};
  for (const v1::Track& proto : request.tracks()) {
    const absl::StatusOr<TrackConfig> track = FromProto(proto);
    CheckMessage(track.status());
    if (!track.ok()) return;
    CheckTrack(*track, *manifest);
    config.tracks.push_back(*track);
  }
  CheckMessage(config.Validate(GlobBudget()));
  EMA_FUZZ_CHECK(config.DifferenceFrom(config).empty());
}

// The ranges of a layout follow each other, from its first byte to its last one.
void CheckRanges(const RankLayout& layout) {
  for (const auto walk : {&RankLayout::ForEachRange, &RankLayout::ForEachJoinedRange}) {
    int64_t next = 0;
    int visited = 0;
    (layout.*walk)(0, layout.total_bytes(), [&](const RankLayout::ContiguousRange& range) {
      EMA_FUZZ_CHECK(range.byte_offset == next && range.element_count > 0);
      EMA_FUZZ_CHECK(layout.FindShard(next) == range.shard_index);
      EMA_FUZZ_CHECK(layout.IsElementBoundary(next));
      next += range.element_count * DtypeSize(range.dtype);
      return ++visited < 100;
    });
    EMA_FUZZ_CHECK(visited == 100 || next == layout.total_bytes());
  }
}

// A manifest, as the request that creates the model has it, and the layout of a rank.
void CheckLayout(const v1::CreateModelRequest& model, const v1::RankLayout& proto) {
  const absl::StatusOr<Manifest> manifest = FromProto(model.manifest());
  if (!manifest.ok()) return;
  const auto layout = RankLayout::Create(*manifest, FromProto(proto), proto.frozen_shard_count(),
                                         static_cast<WireDtype>(proto.wire_dtype()));
  CheckMessage(layout.status());
  if (!layout.ok()) return;
  const std::vector<Shard> shards = RoundTrip<v1::RankLayout>(*layout);
  EMA_FUZZ_CHECK(layout->shards() == absl::MakeConstSpan(shards));
  EMA_FUZZ_CHECK(layout->total_bytes() >= layout->trained_bytes() && layout->trained_bytes() >= 0);
  CheckRanges(*layout);
}

void CheckSelection(const v1::Selection& proto) {
  const absl::StatusOr<Selection> selection = FromProto(proto);
  CheckMessage(selection.status());
  if (selection.ok()) EMA_FUZZ_CHECK(RoundTrip<v1::Selection>(*selection) == selection);
}

void CheckVersion(const v1::VersionRecord& proto) {
  // NaN differs from itself, so texts are compared. Times outside of their range become one in it.
  const v1::VersionRecord written = ToProto(FromProto(proto));
  const v1::VersionRecord again = ToProto(FromProto(written));
  EMA_FUZZ_CHECK(again.SerializeAsString() == written.SerializeAsString());
  CheckMessage(FromProto(proto.time()).Validate());
}

template <typename Message>
Message ReadMessage(std::string_view bytes) {
  Message message;
  // What was read before an error is a message, too.
  (void)message.ParseFromArray(bytes.data(), static_cast<int>(bytes.size()));
  return message;
}

}  // namespace
}  // namespace ema

// A byte says which message follows.
extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  ema::FuzzInput input(data, size);
  switch (input.Byte() % 4) {
    case 0:
      ema::CheckModel(ema::ReadMessage<ema::v1::CreateModelRequest>(input.rest()));
      break;
    case 1:
      // Both are read from the same bytes: the manifest is field 2 of the one, the layout field 5
      // of the other.
      ema::CheckLayout(ema::ReadMessage<ema::v1::CreateModelRequest>(input.rest()),
                       ema::ReadMessage<ema::v1::OpenRunRequest>(input.rest()).layout());
      break;
    case 2:
      ema::CheckSelection(ema::ReadMessage<ema::v1::PullRequest>(input.rest()).selection());
      break;
    default:
      ema::CheckVersion(ema::ReadMessage<ema::v1::VersionRecord>(input.rest()));
  }
  return 0;
}
