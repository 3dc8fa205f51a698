// SPDX-License-Identifier: Apache-2.0
#include <torch/nn/modules/linear.h>

#include "ema/torch.h"

// Succeeds if header and libraries are complete: there is no server, and nothing changes.
int main() {
  torch::nn::Linear linear(2, 2);
  const torch::Tensor before = linear->weight.detach().clone();
  const auto client = ema::Client::Create("127.0.0.1:1");
  if (!client.ok()) return 1;
  const auto attached = ema::Attachment::Create(
      **client, "m", *linear,
      {.tracks = {{.name = "ema", .schedule = *ema::Schedule::Parse("200ba")}},
       .timeout = absl::Milliseconds(100)});
  const auto pulled = ema::PullInto(**client, "m", *linear, {.timeout = absl::Milliseconds(100)});
  return !attached.ok() && !pulled.ok() && torch::equal(before, linear->weight) ? 0 : 1;
}
