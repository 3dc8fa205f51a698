// SPDX-License-Identifier: Apache-2.0
//
// What the layers above know of memory and arithmetic: blocks and streams. Two implementations,
// CPU and accelerators (CUDA); both give the same bits. Knows no models and no RPCs.
#ifndef EMA_SERVER_DEVICE_DEVICE_H_
#define EMA_SERVER_DEVICE_DEVICE_H_

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/statusor.h"
#include "ema/tensor_spec.h"
#include "server/kernel/fold_op.h"
#include "server/kernel/sum_element.h"

namespace ema {

// A reference-counted piece of device memory, 64-byte aligned. Whoever holds a reference may read
// it from any thread; only the session that allocated it writes it, before it is published.
// Dropping the last reference is cheap: it gives the memory back to its device's pool.
class Block {
 public:
  virtual ~Block() = default;
  // On the CPU device a host address; on a GPU a device address, of no use to the host.
  std::byte* data() const { return data_; }
  int64_t size_bytes() const { return size_bytes_; }

 protected:
  Block(std::byte* data, int64_t size_bytes) : data_(data), size_bytes_(size_bytes) {}

 private:
  std::byte* const data_;
  const int64_t size_bytes_;
};
using BlockRef = std::shared_ptr<const Block>;

// A value that is NaN or infinity, by the names of FoldOp.
struct NonFiniteElement {
  int64_t source_id = 0;
  int64_t element = 0;

  bool operator==(const NonFiniteElement&) const = default;
};

// INTERNAL, BUG: the elements of `op` are no floats, and a target does not only copy them. OK: `op`
// can be folded. `device` is named in the message.
absl::Status CheckFold(const FoldOp& op, std::string_view device);

// A queue of work on the device. Each stream of a push has one; so has whoever fills or copies
// blocks otherwise: a session that allocates or restores tensors, a load, a synthesis. Not
// thread-safe; many queues may be used at once on ranges that do not overlap.
//
// On a GPU the work is asynchronous. It is done in the order of the calls, with one exception:
// Fold() and CopyFromHost() calls that follow each other are done together, in any order. So none
// of these may read or write what another of them writes, unless Synchronize() was called between
// the two.
class DeviceStream {
 public:
  virtual ~DeviceStream() = default;

  // Folds `op`. When it returns, the source has been read (or copied to pinned memory) and may be
  // freed; the targets are complete after Synchronize(). NaN and infinity are folded like any
  // value, and reported: gives the index in `op` of the first element whose float value is not
  // finite, if that is known already. A device that learns it later reports it from Synchronize().
  // The double of a float64 source is checked before it is rounded to float32, and after.
  // INTERNAL, DEVICE: the device has failed; the targets hold anything. RESOURCE_EXHAUSTED,
  // MEMORY_BUDGET: there is no memory to begin with; only of a stream's first fold or copy from
  // the host, of which nothing is done.
  virtual absl::StatusOr<std::optional<int64_t>> Fold(const FoldOp& op) = 0;

  // Sets `size_bytes` bytes of device memory to zero.
  virtual absl::Status Zero(std::byte* data, int64_t size_bytes) = 0;

  // Copies device memory to device memory; the ranges do not overlap.
  virtual absl::Status Copy(std::byte* to, const std::byte* from, int64_t size_bytes) = 0;

  // Copies host memory to device memory. When it returns, `host` has been read, as Fold()'s source.
  virtual absl::Status CopyFromHost(std::byte* device, const std::byte* host,
                                    int64_t size_bytes) = 0;

  // Waits until everything queued so far is done. Gives, by `source_id`, the first of each source's
  // elements that were folded since the last call, are not finite, and that Fold() did not tell of.
  // INTERNAL, DEVICE: as Fold().
  virtual absl::StatusOr<std::vector<NonFiniteElement>> Synchronize() = 0;
};

// One place where averages live. Thread-safe.
class Device {
 public:
  virtual ~Device() = default;

  // "cpu", "cuda:0".
  virtual std::string name() const = 0;

  // Memory of any content. RESOURCE_EXHAUSTED, MEMORY_BUDGET: there is none; nothing else has
  // changed.
  virtual absl::StatusOr<std::shared_ptr<Block>> Allocate(int64_t size_bytes) = 0;

  // RESOURCE_EXHAUSTED, MEMORY_BUDGET: there is no memory for one.
  virtual absl::StatusOr<std::unique_ptr<DeviceStream>> NewStream() = 0;

  // Blocks are host memory, so that who may write one can do it without a stream.
  virtual bool is_host() const = 0;

  // Host memory with a block's bytes, valid while the result is held. On the CPU device that is the
  // block itself; on a GPU a pinned copy, made once for all who ask. `cast`: of a block of float32s
  // all through, each cast to that; from a GPU, half the bytes are moved. Blocks the caller.
  // REQUIRES: the block is published (no writer); `cast` is float16 or bfloat16, if anything.
  virtual absl::StatusOr<std::shared_ptr<const std::byte>> HostView(const BlockRef& block,
                                                                    std::optional<Dtype> cast) = 0;
  // False: HostView() waits for a copy. True may have become false when it is called.
  virtual bool HasHostView(const BlockRef& block, std::optional<Dtype> cast) = 0;

  // Of all elements of `runs` together, in float64: the same runs give the same bits. NaN and
  // infinity are summed like any value. Blocks the caller. REQUIRES: nobody writes what is read.
  // INTERNAL, DEVICE. RESOURCE_EXHAUSTED, MEMORY_BUDGET: no memory for a stream.
  virtual absl::StatusOr<SquareSums> SumSquares(std::span<const SumRun> runs) = 0;

  // All memory of the device that the server may use, in bytes: on the CPU the smaller of physical
  // memory and the control group's limit.
  virtual int64_t total_memory_bytes() const = 0;
  // Memory that is taken now, in bytes.
  struct MemoryUse {
    int64_t block_bytes = 0;      // Of all blocks that somebody holds.
    int64_t kept_bytes = 0;       // Of freed blocks, kept for reuse.
    int64_t host_copy_bytes = 0;  // Of copies for readers, pinned; none on the CPU device.
  };
  virtual MemoryUse memory_use() const = 0;

  // Streams that move weights beside those of pushes: a restore's and a synthesis's, of which there
  // is one each.
  static constexpr int kOtherStreams = 2;
  // Memory that is taken beside blocks, in bytes; none on the CPU device.
  struct Overhead {
    int64_t bytes_per_stream = 0;       // Of the device.
    int64_t shared_bytes = 0;           // Likewise, for kOtherStreams, all readers and sums.
    int64_t host_bytes_per_stream = 0;  // Pinned, as all that follows.
    // What two HostView() hold: of a chunk that is being made, and of the one that is being sent.
    int64_t host_bytes_per_reader = 0;
    int64_t shared_host_bytes = 0;  // As shared_bytes, and what is kept for the next readers.
  };
  // `block_bytes`: the largest block that readers ask for.
  virtual Overhead overhead(int64_t block_bytes) const = 0;

  // Gives memory that is kept for reuse back to the system, until all blocks, kept ones among them,
  // take `most_bytes` at most; with 0 that of streams, too; and that of readers once no block is
  // left that they have read. Copies of blocks that are there stay.
  virtual void Trim(int64_t most_bytes) = 0;

  // The first error that has broken the device for good; OK while it works.
  virtual absl::Status health() const = 0;
};

// The CPU device. `kept_free_bytes`: freed blocks kept for reuse (fresh pages cost a page fault
// each, about 0.25 us per 4 KiB, which is more than the fold itself).
std::unique_ptr<Device> MakeCpuDevice(int64_t kept_free_bytes);

// "cpu"; "cuda:N", the GPU of that index; "auto", the first GPU that this build has code for, or
// the CPU where there is none.
// `kept_free_bytes`: as MakeCpuDevice(). INVALID_ARGUMENT: any other name. FAILED_PRECONDITION:
// there is no such GPU, or no code for it; the message says why. INTERNAL, DEVICE: it does not
// work.
absl::StatusOr<std::unique_ptr<Device>> MakeDevice(std::string_view name, int64_t kept_free_bytes);

// What "auto" has to choose from, for the log: "2 GPUs", and why one is of no use, or why there is
// none.
std::string DescribeGpus();
// The CUDA toolkit that this was built with, such as "13.0"; "none" without.
std::string CudaVersion();

}  // namespace ema

#endif  // EMA_SERVER_DEVICE_DEVICE_H_
