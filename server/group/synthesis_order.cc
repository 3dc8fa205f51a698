// SPDX-License-Identifier: Apache-2.0
#include "server/group/synthesis_order.h"

#include <utility>

#include "ema/internal/status_macros.h"
#include "server/wire/convert_types.h"

namespace ema::group {
namespace {

using ProtoSource = v1::SynthesizePartRequest::Source;

void ToProto(const SynthesisOrder::Source& source, ProtoSource* proto) {
  proto->mutable_version()->set_version(source.checkpoint.version);
  proto->mutable_version()->set_incarnation(source.checkpoint.incarnation);
  proto->set_step(source.checkpoint.step);
  proto->set_track(source.track);
  proto->set_weight(source.weight);
}

SynthesisOrder::Source FromProto(const ProtoSource& proto) {
  return {.checkpoint = {proto.version().incarnation(), proto.version().version(), proto.step()},
          .track = proto.track(),
          .weight = proto.weight()};
}

}  // namespace

v1::SynthesizePartRequest ToProto(const SynthesisOrder& order) {
  v1::SynthesizePartRequest request;
  ema::ToProto(order.config, request.mutable_track());
  *request.mutable_record() = ema::ToProto(order.record);
  for (const SynthesisOrder::Source& source : order.sources) {
    ToProto(source, request.add_sources());
  }
  ToProto(order.newest, request.mutable_newest());
  return request;
}

absl::StatusOr<SynthesisOrder> FromProto(const v1::SynthesizePartRequest& request) {
  EMA_ASSIGN_OR_RETURN(TrackConfig config, ema::FromProto(request.track()));
  SynthesisOrder order{.config = std::move(config),
                       .newest = FromProto(request.newest()),
                       .record = ema::FromProto(request.record())};
  for (const ProtoSource& source : request.sources()) order.sources.push_back(FromProto(source));
  return order;
}

}  // namespace ema::group
