// SPDX-License-Identifier: Apache-2.0
//
// The interface to memory and arithmetic: blocks and streams. Two implementations, CPU and
// accelerators (CUDA), give the same bits. Knows no models and no RPCs.
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
// it from any thread. Only the code that has allocated it (the session of a step, a load, a
// synthesis) writes it, and only before it is published.
// Dropping the last reference is cheap: it gives the memory back to its device's pool.
class Block {
 public:
  virtual ~Block() = default;
  // On the CPU device a host address; on a GPU a device address, which the host cannot use.
  std::byte* data() const { return data_; }
  int64_t size_bytes() const { return size_bytes_; }

 protected:
  Block(std::byte* data, int64_t size_bytes) : data_(data), size_bytes_(size_bytes) {}

 private:
  std::byte* const data_;
  const int64_t size_bytes_;
};
using BlockRef = std::shared_ptr<const Block>;

// A value that is NaN or infinity, identified as in FoldOp.
struct NonFiniteElement {
  int64_t source_id = 0;
  int64_t element = 0;

  bool operator==(const NonFiniteElement&) const = default;
};

// INTERNAL, BUG: the elements of `op` are not floats, but a target does more than copy them. OK:
// `op` can be folded. `device` is named in the message.
absl::Status CheckFold(const FoldOp& op, std::string_view device);

// A queue of work on the device. Each stream of a push has one, and so has any other code that
// fills or copies blocks: a session that allocates or restores tensors, a load, a synthesis. Not
// thread-safe; many queues may be used at once on ranges that do not overlap.
//
// On a GPU the work is asynchronous. It is done in the order of the calls, with one exception:
// consecutive Fold() and CopyFromHost() calls are done together, in any order. So none of these may
// read or write what another of them writes, unless Synchronize() was called between the two.
class DeviceStream {
 public:
  virtual ~DeviceStream() = default;

  // Folds `op`. When it returns, the source has been read (or copied to pinned memory) and may be
  // freed; the targets are complete after Synchronize(). NaN and infinity are folded like any
  // value, and reported: returns the index in `op` of the first element that is not finite, if that
  // is known already. A device that finds it later reports it from Synchronize(). A float64 that is
  // too large for float32 counts as not finite only if a target keeps float32 averages. INTERNAL,
  // DEVICE: the device has failed; the targets hold anything. RESOURCE_EXHAUSTED, MEMORY_BUDGET:
  // only from a stream's first fold or copy from the host: there is no memory for it, and nothing
  // has been folded.
  virtual absl::StatusOr<std::optional<int64_t>> Fold(const FoldOp& op) = 0;

  // Sets `size_bytes` bytes of device memory to zero.
  virtual absl::Status Zero(std::byte* data, int64_t size_bytes) = 0;

  // Copies device memory to device memory; the ranges do not overlap.
  virtual absl::Status Copy(std::byte* to, const std::byte* from, int64_t size_bytes) = 0;

  // Copies host memory to device memory. When it returns, `host` has been read, as Fold()'s source.
  virtual absl::Status CopyFromHost(std::byte* device, const std::byte* host,
                                    int64_t size_bytes) = 0;

  // Waits until everything queued so far is done. Returns, for each `source_id`, the first element
  // that has been folded since the last call, is not finite, and was not reported by Fold().
  // INTERNAL, DEVICE: as Fold().
  virtual absl::StatusOr<std::vector<NonFiniteElement>> Synchronize() = 0;
};

// One place where averages live. Thread-safe.
class Device {
 public:
  virtual ~Device() = default;

  // "cpu", "cuda:0".
  virtual std::string name() const = 0;

  // Allocates memory with undefined content. RESOURCE_EXHAUSTED, MEMORY_BUDGET: there is none;
  // nothing else has changed.
  virtual absl::StatusOr<std::shared_ptr<Block>> Allocate(int64_t size_bytes) = 0;

  // RESOURCE_EXHAUSTED, MEMORY_BUDGET: there is no memory for one.
  virtual absl::StatusOr<std::unique_ptr<DeviceStream>> NewStream() = 0;

  // True: blocks are host memory, so a block that may be written can be written without a stream.
  virtual bool is_host() const = 0;

  // Host memory with a block's bytes, valid while the result is held. On the CPU device that is the
  // block itself, or a new copy if it is cast; on a GPU a pinned copy, made once for all callers.
  // `cast`: the block must hold only float32s, each of which is cast to that; from a GPU, half the
  // bytes are moved. Blocks the caller. REQUIRES: the block is published (no writer); `cast` is
  // float16 or bfloat16, if anything.
  virtual absl::StatusOr<std::shared_ptr<const std::byte>> HostView(const BlockRef& block,
                                                                    std::optional<Dtype> cast) = 0;
  // False: HostView() would wait for a copy. True may be outdated when HostView() is called.
  virtual bool HasHostView(const BlockRef& block, std::optional<Dtype> cast) = 0;

  // Sums of squares over all elements of `runs`, in float64; the same runs give the same bits. NaN
  // and infinity are summed like any value. Blocks the caller. REQUIRES: no thread writes these
  // elements. INTERNAL, DEVICE. RESOURCE_EXHAUSTED, MEMORY_BUDGET: no memory for a stream.
  virtual absl::StatusOr<SquareSums> SumSquares(std::span<const SumRun> runs) = 0;

  // All memory of the device that the server may use, in bytes: on the CPU the smaller of physical
  // memory and the control group's limit.
  virtual int64_t total_memory_bytes() const = 0;
  // Memory in use now, in bytes.
  struct MemoryUse {
    int64_t block_bytes = 0;      // Of all blocks that are referenced.
    int64_t kept_bytes = 0;       // Of freed blocks, kept for reuse.
    int64_t host_copy_bytes = 0;  // Of copies for readers, pinned; none on the CPU device.
  };
  virtual MemoryUse memory_use() const = 0;

  // Streams that move weights besides those of pushes: one of a restore, and one of a synthesis.
  static constexpr int kOtherStreams = 2;
  // Memory besides blocks, in bytes; none on the CPU device.
  struct Overhead {
    int64_t bytes_per_stream = 0;       // Of the device.
    int64_t shared_bytes = 0;           // Of the device, for kOtherStreams, all readers and sums.
    int64_t host_bytes_per_stream = 0;  // Pinned, like the next two.
    // For the results of two HostView() calls: of a chunk that is being made, and of one that is
    // being sent.
    int64_t host_bytes_per_reader = 0;
    int64_t shared_host_bytes = 0;  // For shared_bytes' users, and kept for later readers.
  };
  // `block_bytes`: the largest block that readers read.
  virtual Overhead overhead(int64_t block_bytes) const = 0;

  // Returns kept memory to the system until all blocks, including free ones, take at most
  // `most_bytes`; with 0 it also returns that of idle streams. It returns the memory of readers if
  // no block that they have read exists any more; copies of existing blocks stay.
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

// Describes the GPUs that "auto" chooses from, for the log: "2 GPUs", and why one cannot be used,
// or why there is none.
std::string DescribeGpus();
// The CUDA toolkit of this build, such as "13.0"; "none" without.
std::string CudaVersion();

}  // namespace ema

#endif  // EMA_SERVER_DEVICE_DEVICE_H_
