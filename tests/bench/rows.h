// SPDX-License-Identifier: Apache-2.0
//
// What makes each row of the report. A row holds the models, memory and processes that it needs,
// from when it is made until it is destroyed.
#ifndef EMA_TESTS_BENCH_ROWS_H_
#define EMA_TESTS_BENCH_ROWS_H_

#include "tests/bench/bench.h"
#include "tests/bench/row.h"

namespace ema::bench {

// rows_wire.cc: one stream beside the same bytes by other means.
Row PushBesideSocket(Bench& bench);
Row PushUnchecked(Bench& bench);
Row PullBesideSocket(Bench& bench);
Row PullBfloat16(Bench& bench);
Row PushThroughMemory(Bench& bench);
Row PullThroughMemory(Bench& bench);
Row PushBesideGrpc(Bench& bench);

// rows_products.cc: what people use today.
Row PushBesideRedis(Bench& bench);
Row PullBesideRedis(Bench& bench);
Row PushBesideRay(Bench& bench);
Row PushBesideTorch(Bench& bench);

// rows_scale.cc: more of something, beside ourselves.
Row FourTracks(Bench& bench);
Row FourTracksThroughMemory(Bench& bench);
Row EightRanks(Bench& bench);
Row ManyTensors(Bench& bench);
Row ManyEvaluators(Bench& bench);

// rows_latency.cc: what must not take long, whatever else happens.
Row PushWhileOthersRead(Bench& bench);
Row CommitAfterIdleness(Bench& bench);
Row ServerMemory(Bench& bench);

// rows_peers.cc: others that do nothing.
Row PairBesideStalledPeers(Bench& bench);

// rows_group.cc: a model on several servers.
Row GroupPush(Bench& bench);
Row GroupPull(Bench& bench);
Row GroupCommit(Bench& bench);

// rows_checkpoint.cc: a version on the disk.
Row SaveBesidePlainFile(Bench& bench);
Row ReadBackBesidePlainFile(Bench& bench);
Row RestoreBesidePlainFile(Bench& bench);
Row SaveBesideTorch(Bench& bench);
Row SaveBesideSyncedTorch(Bench& bench);
Row SaveBesideSafetensors(Bench& bench);
Row SaveBesideSyncedSafetensors(Bench& bench);
Row SaveBesideDcp(Bench& bench);

// rows_saves.cc: what that costs who pushes meanwhile.
Row PushSpeedWhileSaving(Bench& bench);
Row CommitWhileSaving(Bench& bench);

// rows_core.cc: the size of a model, without a network.
Row LargeCommit(Bench& bench);
Row LargeCommitBesideSmall(Bench& bench);
Row LargePinBesideSmall(Bench& bench);

}  // namespace ema::bench

#endif  // EMA_TESTS_BENCH_ROWS_H_
