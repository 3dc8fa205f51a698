// SPDX-License-Identifier: Apache-2.0
//
// fold_many: the server's update, on arrays of this process.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <numeric>
#include <optional>
#include <string>
#include <string_view>
#include <system_error>
#include <thread>
#include <utility>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "absl/types/span.h"
#include "client/python/src/array.h"
#include "client/python/src/bind.h"
#include "client/python/src/dlpack_exchange.h"
#include "client/python/src/gil.h"
#include "client/python/src/python_error.h"
#include "ema/error_reason.h"
#include "ema/internal/status_macros.h"
#include "ema/tensor_spec.h"
#include "server/kernel/fold.h"

namespace nb = nanobind;
using namespace nb::literals;  // NOLINT: the only way to "name"_a.

namespace ema::python {
namespace {

// What a thread takes at a time: 1 MiB of float32, which it works on much longer than it takes to
// start a thread (tens of microseconds).
constexpr int64_t kPieceElements = int64_t{1} << 18;

// One array of a list, and what keeps its memory: one of the owners. To be destroyed with the GIL
// held.
struct Operand {
  std::byte* data = nullptr;  // Written only if it was read as writable.
  int64_t element_count = 0;
  Dtype dtype = Dtype::kFloat32;
  OwnedDlpackTensor dlpack_owner;
  std::shared_ptr<const void> array_owner;
};

// The arrays of one argument.
class OperandList {
 public:
  // REQUIRES: `list_name` outlives it.
  OperandList(std::string_view list_name, const nb::object& sequence, bool is_written)
      // A copy: reading an array may run Python code that changes the sequence.
      : objects_(nb::steal<nb::tuple>(PySequence_Tuple(sequence.ptr()))),
        list_name_(list_name),
        is_written_(is_written) {
    if (!objects_.is_valid()) throw nb::python_error();
  }

  size_t size() const { return objects_.size(); }
  std::string NameOf(size_t index) const {
    return absl::StrCat(std::string(list_name_), "[", index, "]");
  }

  // INVALID_ARGUMENT: names the element.
  absl::StatusOr<Operand> Read(size_t index) {
    const nb::handle object = objects_[index];
    if (std::optional<Operand> operand = ReadFast(object)) return *std::move(operand);
    return ReadAny(NameOf(index), object);
  }

 private:
  // nullopt: ReadAny() says why, if it cannot either.
  std::optional<Operand> ReadFast(nb::handle object) {
    OwnedDlpackTensor owner = reader_.Read(object);
    if (owner == nullptr || (is_written_ && (owner->flags & DlpackTensor::kReadOnly) != 0)) {
      return std::nullopt;
    }
    const nb::dlpack::dltensor& tensor = owner->tensor;
    const std::optional<Dtype> dtype = DtypeOf(tensor.dtype);
    const absl::Span<const int64_t> shape(tensor.shape, tensor.ndim);
    if (!dtype.has_value() || tensor.device.device_type != nb::device::cpu::value ||
        (tensor.strides != nullptr && !IsContiguous(shape, {tensor.strides, shape.size()}))) {
      return std::nullopt;
    }
    std::byte* data = static_cast<std::byte*>(tensor.data) + tensor.byte_offset;
    const int64_t count =
        std::accumulate(shape.begin(), shape.end(), int64_t{1}, std::multiplies());
    return Operand{data, count, *dtype, std::move(owner)};
  }

  absl::StatusOr<Operand> ReadAny(const std::string& name, nb::handle object) const {
    Array array;
    if (!is_written_ && nb::isinstance<Array>(object)) {
      array = nb::cast<Array>(object);
    } else {
      nb::object readable = nb::borrow(object);
      // PyTorch gives nothing that requires a gradient.
      if (nb::hasattr(object, "detach")) readable = object.attr("detach")();
      EMA_ASSIGN_OR_RETURN(array, Array::Read(name, readable, ""));
      if (is_written_) {
        nb::ndarray<> writable;
        if (!nb::try_cast(readable, writable, /*convert=*/false)) {
          return BadRequest(absl::StrCat(name, ": expected a writable array, found a read-only ",
                                         nb::type_name(object.type()).c_str()));
        }
        array.owner = std::make_shared<nb::ndarray<>>(writable);
      }
    }
    EMA_RETURN_IF_ERROR(array.CheckOnHost());
    // Const for the arrays that are only read.
    auto* data = const_cast<std::byte*>(array.bytes.data());
    return Operand{data, array.spec.element_count(), array.spec.dtype, nullptr,
                   std::move(array.owner)};
  }

  const nb::tuple objects_;
  const std::string_view list_name_;
  const bool is_written_;
  DlpackReader reader_;
};

// What to do with one average: a fold in place.
struct Update {
  Operand param;
  Operand ema;
  std::vector<Operand> earlier;  // Weights that are averaged with `param`, the oldest first.
};

absl::StatusOr<Update> ReadUpdate(OperandList& emas, OperandList& params,
                                  std::vector<std::unique_ptr<OperandList>>& earlier,
                                  size_t index) {
  Update update;
  EMA_ASSIGN_OR_RETURN(update.param, params.Read(index));
  if (!IsFloat(update.param.dtype)) {
    return BadRequest(absl::StrCat(params.NameOf(index),
                                   ": expected float32, float16, bfloat16 or float64, found ",
                                   std::string(DtypeName(update.param.dtype))));
  }
  EMA_ASSIGN_OR_RETURN(update.ema, emas.Read(index));
  if (update.ema.dtype != Dtype::kFloat32 && update.ema.dtype != Dtype::kFloat64) {
    return BadRequest(absl::StrCat(emas.NameOf(index), ": expected float32 or float64, found ",
                                   std::string(DtypeName(update.ema.dtype))));
  }
  if (update.ema.element_count != update.param.element_count) {
    return BadRequest(absl::StrCat(emas.NameOf(index), ": expected ", update.param.element_count,
                                   " elements, as many as ", params.NameOf(index), " has, found ",
                                   update.ema.element_count));
  }
  for (const auto& weights : earlier) {
    EMA_ASSIGN_OR_RETURN(update.earlier.emplace_back(), weights->Read(index));
    const Operand& operand = update.earlier.back();
    if (operand.dtype != update.ema.dtype || operand.element_count != update.ema.element_count) {
      return BadRequest(absl::StrCat(
          weights->NameOf(index), ": expected ", update.ema.element_count, " elements of ",
          std::string(DtypeName(update.ema.dtype)), ", as ", emas.NameOf(index), " has, found ",
          operand.element_count, " of ", std::string(DtypeName(operand.dtype))));
    }
  }
  return update;
}

// Two threads must not write the same memory; a caller that passes it twice has made a mistake.
absl::Status CheckNoOverlap(const std::vector<Update>& updates, const OperandList& emas) {
  struct Range {
    const std::byte* begin;
    const std::byte* end;
    size_t index;
  };
  std::vector<Range> ranges;
  ranges.reserve(updates.size());
  for (size_t i = 0; i < updates.size(); ++i) {
    const Operand& ema = updates[i].ema;
    if (ema.element_count == 0) continue;
    ranges.push_back({ema.data, ema.data + ema.element_count * DtypeSize(ema.dtype), i});
  }
  std::sort(ranges.begin(), ranges.end(),
            [](const Range& a, const Range& b) { return a.begin < b.begin; });
  for (size_t i = 1; i < ranges.size(); ++i) {
    const Range& a = ranges[i - 1];
    const Range& b = ranges[i];
    if (b.begin < a.end) {
      return BadRequest(absl::StrCat(emas.NameOf(a.index), " and ", emas.NameOf(b.index),
                                     " share memory: expected each array once"));
    }
  }
  return absl::OkStatus();
}

// Does all updates, in pieces that threads take in turn.
class Folder {
 public:
  Folder(const std::vector<Update>& updates, double update_weight)
      : updates_(updates), update_weight_(update_weight) {
    ends_.reserve(updates.size());
    for (const Update& update : updates) {
      element_count_ += update.param.element_count;
      ends_.push_back(element_count_);
    }
  }

  // In this thread and up to `thread_count - 1` more.
  void Run(int64_t thread_count) {
    const int64_t piece_count = (element_count_ + kPieceElements - 1) / kPieceElements;
    std::vector<std::jthread> helpers;
    try {
      for (int64_t i = 1; i < std::min(thread_count, piece_count); ++i) {
        helpers.emplace_back([this] { Work(); });
      }
    } catch (const std::system_error&) {
      // No more threads for now: those there are do it all.
    }
    Work();
  }

 private:
  void Work() {
    while (true) {
      const int64_t begin = next_.fetch_add(kPieceElements, std::memory_order_relaxed);
      if (begin >= element_count_) return;
      FoldPiece(begin, std::min(begin + kPieceElements, element_count_));
    }
  }

  // Elements are numbered through all updates.
  void FoldPiece(int64_t begin, int64_t end) const {
    size_t i = std::upper_bound(ends_.begin(), ends_.end(), begin) - ends_.begin();
    for (; begin < end; ++i) {
      const int64_t first = begin - (ends_[i] - updates_[i].param.element_count);
      const int64_t count = std::min(end, ends_[i]) - begin;
      FoldPart(updates_[i], first, count);
      begin += count;
    }
  }

  void FoldPart(const Update& update, int64_t first, int64_t count) const {
    const bool is_float64 = update.ema.dtype == Dtype::kFloat64;
    const int64_t offset = first * DtypeSize(update.ema.dtype);
    const std::byte* source = update.param.data + first * DtypeSize(update.param.dtype);
    FoldTarget target;
    target.update_weight = update_weight_;
    target.current = target.next = update.ema.data + offset;
    if (!update.earlier.empty()) {
      std::vector<FoldTarget> targets;
      target.kind = is_float64 ? FoldKind::kMeanFloat64 : FoldKind::kMean;
      for (const Operand& weights : update.earlier) {
        target.current = weights.data + offset;
        targets.push_back(std::exchange(target, {.kind = target.kind}));
      }
      FoldOnCpu({update.param.dtype, source, count, targets});
      return;
    }
    // As the server decides it.
    if (is_float64) {
      target.kind = update_weight_ == 1 ? FoldKind::kAssignFloat64 : FoldKind::kAverageFloat64;
    } else {
      const bool is_assigned = static_cast<float>(update_weight_) == 1;
      target.kind = is_assigned ? FoldKind::kAssign : FoldKind::kAverage;
    }
    // Where values are not finite is of no use here: the average has them already.
    FoldOnCpu({update.param.dtype, source, count, {&target, 1}});
  }

  const std::vector<Update>& updates_;
  const double update_weight_;
  std::vector<int64_t> ends_;  // Of each update, the number of the element behind its last one.
  int64_t element_count_ = 0;
  std::atomic<int64_t> next_ = 0;  // Shares out pieces; what they hold was there before.
};

absl::StatusOr<std::vector<Update>> ReadUpdates(
    OperandList& emas, OperandList& params, std::vector<std::unique_ptr<OperandList>>& earlier) {
  if (params.size() != emas.size()) {
    return BadRequest(absl::StrCat("params: expected ", emas.size(),
                                   " arrays, one for each of emas, found ", params.size()));
  }
  for (const auto& weights : earlier) {
    if (weights->size() == emas.size()) continue;
    return BadRequest(absl::StrCat("earlier: expected ", emas.size(),
                                   " arrays in each list, one for each of emas, found ",
                                   weights->size()));
  }
  std::vector<Update> updates(emas.size());
  for (size_t i = 0; i < updates.size(); ++i) {
    EMA_ASSIGN_OR_RETURN(updates[i], ReadUpdate(emas, params, earlier, i));
  }
  EMA_RETURN_IF_ERROR(CheckNoOverlap(updates, emas));
  return updates;
}

// emas[i] += update_weight * (params[i] - emas[i]) in place, by the server's kernel; a weight of 1
// assigns. Averages are float32 or float64. `threads`: the most threads; 0 for one per core.
// `earlier`, if any: lists of weights like `emas`, the oldest first; then emas[i] becomes the mean
// of params[i] and the `i`-th array of each list, and the weight is not used.
void FoldMany(const nb::object& emas, const nb::object& params, double update_weight,
              int64_t threads, const nb::list& earlier) {
  if (!(update_weight >= 0 && update_weight <= 1)) {
    ThrowStatus(BadRequest(absl::StrCat("update_weight: expected 0 to 1, found ", update_weight)));
  }
  if (threads < 0) {
    ThrowStatus(BadRequest(absl::StrCat("threads: expected 0 or more, found ", threads)));
  }
  OperandList ema_list("emas", emas, /*is_written=*/true);
  OperandList param_list("params", params, /*is_written=*/false);
  if (earlier.size() > static_cast<size_t>(kMaxEarlierWeights)) {
    ThrowStatus(BadRequest(absl::StrCat("earlier: expected at most ", kMaxEarlierWeights,
                                        " lists, found ", earlier.size())));
  }
  std::vector<std::unique_ptr<OperandList>> earlier_lists;
  for (const nb::handle list : earlier) {
    earlier_lists.push_back(std::make_unique<OperandList>("earlier", nb::borrow(list),
                                                          /*is_written=*/false));
  }
  const std::vector<Update> updates = Unwrap(ReadUpdates(ema_list, param_list, earlier_lists));
  const GilReleased released;
  Folder(updates, update_weight)
      .Run(threads > 0 ? threads : static_cast<int64_t>(std::thread::hardware_concurrency()));
}

}  // namespace

void BindFold(nb::module_& module) {
  module.def("fold_many", &FoldMany, "emas"_a, "params"_a, "update_weight"_a, "threads"_a = 0,
             "earlier"_a = nb::list());
}

}  // namespace ema::python
