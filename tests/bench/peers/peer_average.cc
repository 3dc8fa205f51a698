// SPDX-License-Identifier: Apache-2.0
#include <filesystem>

#include "server/kernel/fold.h"
#include "tests/bench/peers/peer_server.h"

namespace ema::bench {

std::string PeerServerPath() {
  return std::filesystem::read_symlink("/proc/self/exe").parent_path() / "peer_server";
}

void PeerAverage::Fold(size_t offset, const std::byte* data, size_t size) {
  const FoldTarget target{FoldTarget::Kind::kAverage, 0.25, current().data() + offset,
                          next().data() + offset};
  FoldOnCpu({Dtype::kFloat32, data, static_cast<int64_t>(size / sizeof(float)), {&target, 1}});
}

}  // namespace ema::bench
