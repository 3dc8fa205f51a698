// SPDX-License-Identifier: Apache-2.0
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "client/cpp/transport/convert_replies.h"
#include "ema/error_reason.h"
#include "ema/v1/error.pb.h"
#include "tests/testutil/status_matchers.h"

namespace ema::client_internal {
namespace {

using ::testing::HasSubstr;

TrackConfig Track(std::string name, std::string_view schedule) {
  return {.name = std::move(name), .schedule = *Schedule::Parse(schedule)};
}

v1::Model TestModel() {
  const Manifest manifest = *Manifest::Create(
      {{.name = "a", .dtype = Dtype::kBFloat16, .shape = {3, 4}}, {.name = "b", .shape = {}}});
  v1::Model model;
  model.set_name("m");
  ToProto(manifest, model.mutable_manifest());
  model.set_manifest_digest(manifest.digest());
  ToProto(Track("fast", "200ba"), model.add_tracks());
  model.set_reserved_bytes(77);
  return model;
}

TEST(ConvertTest, TracksComeBackAsTheyWere) {
  std::vector<TrackConfig> tracks;
  for (const char* schedule :
       {"copy",
        "200ba",
        "half_life=2000ba, update_interval=10ba",
        "0.1dur",
        "1h30m",
        "half_life=2ep, update_interval=3ba",
        "half_life=10ba, debias=true",
        "smoothing=0.999",
        "smoothing=0",
        "smoothing=0.9, zero_init=plain",
        "smoothing=0.9, zero_init=debias",
        "inv_gamma=2, power=0.75, min_decay=0.1, max_decay=0.99",
        "inv_gamma=1",
        "ramp=7",
        "ramp=10, max_decay=0",
        "inv_gamma=1, max_decay=0",
        "sigma_rel=0.05, update_interval=64sp",
        "sigma_rel=0.1, age_offset=1",
        "ramp_ratio=0.09, update_interval=64sp",
        "half_life=10ba, ramp_ratio=0.09",
        "uniform=true, update_interval=1ep",
        "copy=true, update_interval=5ba",
        "smoothing=0.9, interval_phase=1, update_interval=10ba, ema_start=0.1dur, "
        "before_start=copy, ema_end=0.9dur",
        "smoothing=0.9, ema_start=5ba, before_start=hold"}) {
    tracks.push_back(Track("t", schedule));
  }
  tracks[0].paused = true;
  tracks[1].dtype = Dtype::kFloat64;
  tracks[2].buffers = TensorAction::kCopy;
  tracks[4].snapshot_interval = TrainingDuration{0.125, TimeUnit::kProgress};
  tracks[3].tensor_rules = {{"a*", TensorAction::kIgnore}, {"b", TensorAction::kCopy}};
  for (const TrackConfig& track : tracks) {
    SCOPED_TRACE(TrackText(track));
    v1::Track proto;
    ToProto(track, &proto);
    const absl::StatusOr<TrackConfig> back = ema::FromProto(proto);
    ASSERT_THAT(back, IsOk());
    EXPECT_EQ(*back, track) << TrackText(*back);
  }
}

TEST(ConvertTest, AScheduleStateComesBackAsItWas) {
  Schedule::State state{.update_count = 7, .averaged_count = 5};
  state.last_update.emplace().Set(TimeUnit::kBatch, 40);
  state.started.emplace().Set(TimeUnit::kProgress, 0.5);
  for (const Schedule::State& before : {state, Schedule::State()}) {
    v1::ScheduleState proto;
    ToProto(before, &proto);
    EXPECT_EQ(ema::FromProto(proto), before);
  }
}

TEST(ConvertTest, AnUnknownRuleAsksForANewerClient) {
  v1::Model model = TestModel();
  model.mutable_tracks(0)->clear_schedule();
  EXPECT_THAT(FromProto(model).status(),
              StatusIs(absl::StatusCode::kUnimplemented, HasSubstr("newer client")));
}

TEST(ConvertTest, TrainingTimeKeepsWhatIsAbsentAbsent) {
  TrainingTime time;
  time.Set(TimeUnit::kBatch, 40);
  time.Set(TimeUnit::kToken, 9007199254740992.0);
  time.Set(TimeUnit::kProgress, 0.25);
  time.Set(TimeUnit::kSecond, 1.5);
  v1::TrainingTime proto;
  ToProto(time, &proto);
  EXPECT_EQ(proto.batch(), 40);
  EXPECT_FALSE(proto.has_epoch());
  EXPECT_EQ(ema::FromProto(proto), time);
}

TEST(ConvertTest, StatisticsKeepWhatIsAbsentAbsent) {
  v1::VersionRecord proto;
  ToProto(TrackStatistics{.track = "ema", .norm = 5, .distance = 0}, proto.add_statistics());
  ToProto(TrackStatistics{.track = "alone", .norm = 3}, proto.add_statistics());
  const Version version = FromProto(proto);
  ASSERT_EQ(version.statistics.size(), 2U);
  EXPECT_EQ(version.statistics[0].track, "ema");
  EXPECT_EQ(version.statistics[0].norm, 5);
  EXPECT_EQ(version.statistics[0].distance, 0);
  EXPECT_EQ(version.statistics[1].distance, std::nullopt);
}

TEST(ConvertTest, ModelsKeepTheirManifest) {
  const v1::Model proto = TestModel();
  const absl::StatusOr<ModelInfo> info = FromProto(proto);
  ASSERT_THAT(info, IsOk());
  EXPECT_EQ(info->manifest.tensor(0).TypeString(), "bfloat16[3, 4]");
  EXPECT_EQ(info->manifest.tensor(1).shape.size(), 0U);
  EXPECT_EQ(info->reserved_bytes, 77);
  EXPECT_FALSE(info->latest.has_value());
}

TEST(ConvertTest, AModelWithoutManifestHasNoTensors) {
  v1::Model proto = TestModel();
  proto.clear_manifest();
  const absl::StatusOr<ModelInfo> info = FromProto(proto);
  ASSERT_THAT(info, IsOk());
  EXPECT_EQ(info->manifest.tensor_count(), 0);
}

TEST(ConvertTest, MalformedModelsAreTheServersFault) {
  v1::Model digest = TestModel();
  digest.set_manifest_digest(1);
  EXPECT_THAT(FromProto(digest), StatusIs(absl::StatusCode::kInternal, HasSubstr("digest")));
  v1::Model doubled = TestModel();
  *doubled.mutable_manifest()->add_tensors() = doubled.manifest().tensors(0);
  EXPECT_THAT(FromProto(doubled), StatusIs(absl::StatusCode::kInternal, HasSubstr("manifest")));
  v1::Model dtype = TestModel();
  dtype.mutable_manifest()->mutable_tensors(0)->set_dtype(static_cast<v1::Dtype>(77));
  EXPECT_THAT(FromProto(dtype), StatusIs(absl::StatusCode::kUnimplemented, HasSubstr("77")));
}

TEST(ConvertTest, NoAttachedFileLeadsOutOfItsFolder) {
  for (const char* name : {"../x", "/etc/x", "a/b", "..", ".x", "", "a\nb"}) {
    v1::Model model = TestModel();
    model.add_attached_files()->set_name(name);
    EXPECT_THAT(FromProto(model), StatusIs(absl::StatusCode::kInternal, HasSubstr("attached file")))
        << name;
  }
  v1::Model model = TestModel();
  model.add_attached_files()->set_name("config.json");
  EXPECT_THAT(FromProto(model), IsOk());
}

TEST(ConvertTest, PullHeadersMustFitTheirBytes) {
  v1::PullHeader header;
  header.set_total_bytes(100);
  v1::PullHeader::Tensor* const tensor = header.add_tensors();
  tensor->mutable_spec()->set_name("a");
  tensor->mutable_spec()->set_dtype(v1::DTYPE_FLOAT32);
  tensor->mutable_spec()->add_shape(10);
  tensor->set_offset(60);
  tensor->set_length_bytes(40);
  EXPECT_THAT(FromProto(header), IsOk());
  for (const int64_t offset : {-1, 61, 1000}) {
    tensor->set_offset(offset);
    EXPECT_THAT(FromProto(header), StatusIs(absl::StatusCode::kInternal, HasSubstr("\"a\"")));
  }
  tensor->set_offset(0);
  tensor->set_length_bytes(44);
  EXPECT_THAT(FromProto(header), StatusIs(absl::StatusCode::kInternal, HasSubstr("\"a\"")));
}

TEST(ConvertTest, ErrorsKeepReasonAndDelay) {
  v1::ErrorDetail detail;
  detail.set_reason(v1::ERROR_REASON_TOO_MANY_STREAMS);
  detail.set_retry_delay_ms(250);
  const grpc::Status status(grpc::StatusCode::RESOURCE_EXHAUSTED, "full");
  const absl::Status error = ErrorFromDetail(status, detail.SerializeAsString());
  EXPECT_THAT(error, StatusIs(absl::StatusCode::kResourceExhausted, "full"));
  EXPECT_THAT(error, ReasonIs(ErrorReason::kTooManyStreams));
  EXPECT_EQ(GetRetryDelay(error), absl::Milliseconds(250));

  const absl::Status unreadable = ErrorFromDetail(status, "\xff\xff\xff");
  EXPECT_THAT(unreadable, StatusIs(absl::StatusCode::kResourceExhausted, "full"));
  EXPECT_THAT(unreadable, ReasonIs(ErrorReason::kUnspecified));
}

TEST(ConvertTest, PushStatesAreChecked) {
  v1::QueryPushResponse proto;
  EXPECT_THAT(FromProto(proto), StatusIs(absl::StatusCode::kInternal, HasSubstr("state")));
  proto.set_state(v1::QueryPushResponse::STATE_COMMITTED);
  EXPECT_THAT(FromProto(proto), StatusIs(absl::StatusCode::kInternal, HasSubstr("version")));
  proto.mutable_version()->set_version(3);
  const absl::StatusOr<PushProgress> progress = FromProto(proto);
  ASSERT_THAT(progress, IsOk());
  EXPECT_EQ(progress->version->number, 3);
}

}  // namespace
}  // namespace ema::client_internal
