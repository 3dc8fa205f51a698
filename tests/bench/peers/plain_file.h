// SPDX-License-Identifier: Apache-2.0
//
// A file as `dd` would write and read it: what the disk can do.
#ifndef EMA_TESTS_BENCH_PEERS_PLAIN_FILE_H_
#define EMA_TESTS_BENCH_PEERS_PLAIN_FILE_H_

#include <cstddef>
#include <span>
#include <string>

namespace ema::bench {

// A new file of `bytes`, synced (fsync). REQUIRES: it is not there.
void WritePlainFile(const std::string& path, std::span<const std::byte> bytes);

// All of a file, through one buffer.
void ReadPlainFile(const std::string& path);

// Makes the next reading of a file, or of all files below a folder, come from the disk. REQUIRES:
// they are synced.
void DropCache(const std::string& path);

}  // namespace ema::bench

#endif  // EMA_TESTS_BENCH_PEERS_PLAIN_FILE_H_
