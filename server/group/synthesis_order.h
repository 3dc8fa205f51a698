// SPDX-License-Identifier: Apache-2.0
//
// Converts between SynthesizePartRequest and SynthesisOrder.
#ifndef EMA_SERVER_GROUP_SYNTHESIS_ORDER_H_
#define EMA_SERVER_GROUP_SYNTHESIS_ORDER_H_

#include "absl/status/statusor.h"
#include "ema/v1/group.pb.h"
#include "server/checkpoint/synthesis_plan.h"

namespace ema::group {

// Without the fields that identify the model and the called process.
v1::SynthesizePartRequest ToProto(const SynthesisOrder& order);
// INVALID_ARGUMENT: the track.
absl::StatusOr<SynthesisOrder> FromProto(const v1::SynthesizePartRequest& request);

}  // namespace ema::group

#endif  // EMA_SERVER_GROUP_SYNTHESIS_ORDER_H_
