// SPDX-License-Identifier: Apache-2.0
//
// For trainers and evaluators in C++: pushes the weights of a torch::nn::Module while it trains,
// and pulls an average into it. This is the only header that needs LibTorch; ema::client does not
// depend on it, so link both (see client/docs/cpp.md).
#ifndef EMA_TORCH_H_
#define EMA_TORCH_H_

#include <ATen/Context.h>
#include <ATen/MemoryOverlap.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <torch/nn/module.h>
#include <torch/optim/optimizer.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <span>
#include <string>
#include <string_view>
#include <unordered_map>
#include <unordered_set>
#include <utility>
#include <vector>

#include "absl/container/fixed_array.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/types/span.h"
#include "ema/client.h"
#include "ema/error_reason.h"
#include "ema/internal/pull_memory.h"
#include "ema/internal/status_macros.h"
#include "ema/internal/torch_writes.h"
#include "ema/manifest.h"
#include "ema/step_pusher.h"
#include "ema/tensor_spec.h"
#include "ema/track.h"

namespace ema {

// INVALID_ARGUMENT, BAD_MANIFEST: a dtype that the server does not support, such as a complex one.
inline absl::StatusOr<Dtype> DtypeOf(torch::Dtype dtype) {
  return ParseDtype(c10::getDtypeNames(dtype).first);
}

// The same dtype in LibTorch.
inline torch::Dtype TorchDtypeOf(Dtype dtype) {
  return c10::getStringToDtypeMap().at(std::string(DtypeName(dtype)));
}

// A module's parameters and buffers, in its order. A tensor with several names (tied weights) is
// listed once, under the first.
struct NamedTensors {
  std::vector<at::Tensor> tensors;
  std::vector<TensorSpec> specs;  // In the order of `tensors`.

  // INVALID_ARGUMENT, BAD_MANIFEST: a tensor without plain elements (sparse, meta), or with a dtype
  // that DtypeOf() rejects; the message names it.
  static absl::StatusOr<NamedTensors> Of(const torch::nn::Module& module);
};

inline absl::StatusOr<NamedTensors> NamedTensors::Of(const torch::nn::Module& module) {
  NamedTensors result;
  std::unordered_map<const void*, size_t> seen;
  const auto add = [&](const std::string& name, const at::Tensor& tensor,
                       bool is_buffer) -> absl::Status {
    if (!tensor.defined()) return absl::OkStatus();
    const auto [found, is_new] = seen.emplace(tensor.unsafeGetTensorImpl(), result.specs.size());
    if (!is_new) {
      result.specs[found->second].aliases.push_back(name);
      return absl::OkStatus();
    }
    const absl::StatusOr<Dtype> dtype = DtypeOf(tensor.scalar_type());
    if (!dtype.ok() || tensor.layout() != at::kStrided || tensor.is_meta()) {
      return MakeError(absl::StatusCode::kInvalidArgument, ErrorReason::kBadManifest,
                       absl::StrCat("tensor \"", name, "\": is ", tensor.toString(),
                                    "; expected a dense one of a dtype that the server keeps"));
    }
    result.specs.push_back({name, *dtype, tensor.sizes().vec(), is_buffer, {}});
    result.tensors.push_back(tensor);
    return absl::OkStatus();
  };
  for (const auto& item : module.named_parameters()) {
    EMA_RETURN_IF_ERROR(add(item.key(), item.value(), /*is_buffer=*/false));
  }
  for (const auto& item : module.named_buffers()) {
    EMA_RETURN_IF_ERROR(add(item.key(), item.value(), /*is_buffer=*/true));
  }
  return result;
}

namespace torch_internal {

// Whether a push can read the tensor in place: in host memory, or in that of an NVIDIA GPU.
inline bool IsReadable(const at::Tensor& tensor) {
  return tensor.is_cpu() || (tensor.is_cuda() && !at::globalContext().hasROCM());
}

// The stream on which this thread works.
inline GpuStream CurrentStream(int gpu) {
  const c10::impl::VirtualGuardImpl guard(at::kCUDA);
  const c10::Stream stream =
      guard.getStream(c10::Device(at::kCUDA, static_cast<c10::DeviceIndex>(gpu)));
  return {.device = gpu, .handle = guard.getStreamNativeHandle(stream)};
}

}  // namespace torch_internal

// Pushes a module's weights to an EMA Server while it trains; see StepPusher for how long it waits,
// and for what happens while the server is unreachable. For the training thread:
//
//   ema->Step(optimizer);  // Instead of optimizer.step().
//
// A push reads the parameters in place while the next forward and backward passes run, and the next
// Step() waits until their bytes have left. On an NVIDIA GPU the current stream waits instead, for
// copies on a stream of the client. Buffers, and parameters that the optimizer does not hold, are
// first copied on their device, up to 64 MiB, because other code may change them; so are tensors
// that are not contiguous. Those beyond 64 MiB, and frozen ones, are read in place, and then the
// same Step() waits for them. Weights on other devices are copied to the host inside Step(). No
// call may be made while the stream is captured into a graph.
//
// Parameters that do not require gradients when the Attachment is created are frozen: they are
// pushed again when LibTorch has counted a write, which it does not for writes through .data_ptr().
// Other code that writes weights between steps (torch::load, PullInto) must call WaitReleased()
// first. The average has the weights as optimizer.step() left them: if they are clipped or
// normalised afterwards, call WaitReleased(), optimizer.step(), the clipping and AfterStep()
// instead of Step().
class Attachment {
 public:
  using Options = StepPusher::Options;

  // Creates the model if it does not exist, and joins its run; to be called on every rank. `client`
  // and `module` outlive the result. Errors as NamedTensors::Of() and StepPusher::Create().
  static absl::StatusOr<std::unique_ptr<Attachment>> Create(Client& client, std::string_view model,
                                                            const torch::nn::Module& module,
                                                            Options options) {
    EMA_ASSIGN_OR_RETURN(const NamedTensors own, NamedTensors::Of(module));
    EMA_ASSIGN_OR_RETURN(Manifest manifest, Manifest::Create(own.specs));
    absl::FixedArray<bool> frozen(own.specs.size());
    for (size_t i = 0; i < frozen.size(); ++i) {
      frozen[i] = !own.specs[i].is_buffer && !own.tensors[i].requires_grad();
    }
    std::set<int64_t> sent_frozen = SentFrozen(manifest, frozen, options.tracks);
    EMA_ASSIGN_OR_RETURN(std::unique_ptr<StepPusher> pusher,
                         StepPusher::Create(client, model, manifest, frozen, std::move(options)));
    return std::unique_ptr<Attachment>(
        new Attachment(module, std::move(manifest), std::move(sent_frozen), std::move(pusher)));
  }
  Attachment(const Attachment&) = delete;
  Attachment& operator=(const Attachment&) = delete;

  // Calls optimizer.step(closure), whose result it returns, then AfterStep(). A closure runs before
  // the wait, since LibTorch's optimizers change no weights before they have called it.
  at::Tensor Step(torch::optim::Optimizer& optimizer,
                  torch::optim::Optimizer::LossClosure closure = nullptr) {
    torch::optim::Optimizer::LossClosure waits;
    if (closure) {
      waits = [&] {
        at::Tensor loss = closure();
        WaitReleased();
        return loss;
      };
    } else {
      WaitReleased();
    }
    at::Tensor loss = optimizer.step(std::move(waits));
    PushIfDue(&optimizer);
    return loss;
  }

  // For other loops (several optimizers, a scaler that may omit the step): waits before the weights
  // change, and counts the step afterwards. All parameters are then read in place.
  void WaitReleased() {
    std::vector<GpuStream> streams;
    for (const int gpu : gpus_) streams.push_back(torch_internal::CurrentStream(gpu));
    pusher_->WaitReleased(streams);
  }
  void AfterStep() { PushIfDue(nullptr); }

  // With on_error kRaise and kWait: to be checked after each step.
  absl::Status TakeError() { return pusher_->TakeError(); }

  // These forward to StepPusher.
  absl::StatusOr<std::optional<Version>> WaitPushed(absl::Duration timeout = absl::ZeroDuration()) {
    return pusher_->WaitPushed(timeout);
  }
  void Close() { pusher_->Close(); }
  StepPusher::Stats stats() { return pusher_->stats(); }
  int64_t step() const { return pusher_->step(); }
  std::optional<Version> version() { return pusher_->version(); }

 private:
  // Limit of the copies of tensors that may change before the next step.
  static constexpr int64_t kCopyBytes = int64_t{64} << 20;

  // The weights that one step reads.
  struct StepTensors {
    NamedTensors own;
    // The parameters that the optimizer holds; absent: no optimizer was passed.
    std::optional<std::unordered_set<const void*>> held;
    int64_t copied_bytes = 0;
    // A tensor that may change before the next step is read in place.
    bool must_wait = false;
  };

  Attachment(const torch::nn::Module& module, Manifest manifest, std::set<int64_t> frozen,
             std::unique_ptr<StepPusher> pusher)
      : module_(module),
        manifest_(std::move(manifest)),
        frozen_(std::move(frozen)),
        pusher_(std::move(pusher)) {}

  // The frozen tensors that a track has.
  static std::set<int64_t> SentFrozen(const Manifest& manifest, absl::Span<const bool> frozen,
                                      absl::Span<const TrackConfig> tracks) {
    std::set<int64_t> sent;
    const auto add = [&](const auto& is_sent) {
      for (size_t i = 0; i < frozen.size(); ++i) {
        if (frozen[i] && is_sent(i)) sent.insert(static_cast<int64_t>(i));
      }
    };
    for (const TrackConfig& track : tracks) {
      const std::vector<TensorAction> actions = ActionsOf(track, manifest);
      add([&](size_t i) { return actions[i] != TensorAction::kIgnore; });
    }
    return sent;
  }

  // `optimizer` changes the parameters that it holds only after WaitReleased(); other code may
  // change the other ones at any time. Null: all code changes parameters only after WaitReleased().
  void PushIfDue(const torch::optim::Optimizer* optimizer) {
    // Shared by the copies of both functions, some of which the pusher may keep.
    const auto step = std::make_shared<std::optional<StepTensors>>();
    const auto read =
        [this, step](const StepPusher::Piece& piece) -> absl::StatusOr<StepPusher::Weights> {
      try {
        const c10::NoGradGuard no_grad;
        return Elements(piece, **step);
      } catch (const c10::Error& error) {
        return absl::InternalError(error.what_without_backtrace());
      }
    };
    const auto frozen_changed = [this, step, optimizer]() -> absl::StatusOr<bool> {
      try {
        const c10::NoGradGuard no_grad;
        EMA_ASSIGN_OR_RETURN(*step, Begin(optimizer));
        std::vector<at::Tensor> frozen;
        for (const int64_t i : frozen_) frozen.push_back((*step)->own.tensors[i]);
        return frozen_writes_.HaveChanged(frozen);
      } catch (const c10::Error& error) {
        return absl::InternalError(error.what_without_backtrace());
      }
    };
    pusher_->AfterStep(read, frozen_changed);
    if (step->has_value() && (*step)->must_wait) WaitReleased();
  }

  absl::StatusOr<StepTensors> Begin(const torch::optim::Optimizer* optimizer) {
    StepTensors step;
    EMA_ASSIGN_OR_RETURN(step.own, NamedTensors::Of(module_));
    EMA_RETURN_IF_ERROR(CheckSame(step.own));
    if (optimizer != nullptr) step.held = HeldBy(*optimizer);
    return step;
  }

  static std::unordered_set<const void*> HeldBy(const torch::optim::Optimizer& optimizer) {
    std::unordered_set<const void*> held;
    for (const auto& group : optimizer.param_groups()) {
      for (const at::Tensor& tensor : group.params()) held.insert(tensor.unsafeGetTensorImpl());
    }
    return held;
  }

  absl::Status CheckSame(const NamedTensors& own) const {
    if (manifest_.tensors() == own.specs) return absl::OkStatus();
    EMA_ASSIGN_OR_RETURN(const Manifest now, Manifest::Create(own.specs));
    return MakeError(
        absl::StatusCode::kInvalidArgument, ErrorReason::kBadLayout,
        absl::StrCat("the module has changed since it was attached (here: now, there: before): ",
                     now.DifferenceFrom(manifest_)));
  }

  // Whether the tensor, which takes `bytes`, is copied because it may change before the next step.
  bool IsCopied(int64_t tensor_index, int64_t bytes, StepTensors& step) const {
    const bool is_buffer = step.own.specs[tensor_index].is_buffer;
    const void* const tensor = step.own.tensors[tensor_index].unsafeGetTensorImpl();
    if (!is_buffer && (!step.held.has_value() || step.held->count(tensor) > 0)) return false;
    if (frozen_.count(tensor_index) > 0 || bytes > kCopyBytes - step.copied_bytes) {
      step.must_wait = true;
      return false;
    }
    step.copied_bytes += bytes;
    return true;
  }

  // Throws c10::Error.
  StepPusher::Weights Elements(const StepPusher::Piece& piece, StepTensors& step) {
    const at::Tensor& tensor = step.own.tensors[piece.tensor_index];
    at::Tensor source = tensor.detach().contiguous();
    const auto size = static_cast<int64_t>(source.itemsize());
    int64_t first = piece.first;
    const bool is_readable = torch_internal::IsReadable(source);
    if (!is_readable ||
        (source.is_alias_of(tensor) && IsCopied(piece.tensor_index, piece.count * size, step))) {
      source = source.flatten().narrow(0, first, piece.count);
      source = is_readable ? source.clone() : source.cpu();
      first = 0;
    }
    const auto kept = std::make_shared<const at::Tensor>(std::move(source));
    StepPusher::Weights weights;
    weights.bytes = {static_cast<const std::byte*>(kept->const_data_ptr()) + first * size,
                     static_cast<size_t>(piece.count * size)};
    weights.keep_alive = kept;
    if (kept->is_cuda()) {
      gpus_.insert(kept->device().index());
      weights.gpu = torch_internal::CurrentStream(kept->device().index());
    }
    return weights;
  }

  const torch::nn::Module& module_;
  const Manifest manifest_;
  const std::set<int64_t> frozen_;  // Frozen tensors that are sent, by index.
  torch_internal::WriteMarks frozen_writes_;
  std::set<int> gpus_;  // GPUs from which weights have been pushed.
  // Must be the last member: its destructor may push a step again, which reads all of the above.
  const std::unique_ptr<StepPusher> pusher_;
};

struct PullIntoOptions {
  std::string track = "ema";
  // The version to pull; see Client::PullOptions. By default the newest.
  int64_t version = 0;
  int64_t incarnation = 0;
  std::string label;
  std::optional<int64_t> step;
  // False: tensors that only the module or only the track has are ignored.
  bool strict = true;
  // How to convert a finite value that is too large for the module's dtype.
  OverflowPolicy overflow = OverflowPolicy::kError;
  absl::Duration timeout = absl::ZeroDuration();  // Zero: the client's.
};

namespace torch_internal {

// Casts a pulled tensor to the module's dtype. INVALID_ARGUMENT, BAD_LAYOUT: a finite value would
// become infinite, and `overflow` is kError.
inline absl::StatusOr<at::Tensor> Cast(const std::string& name, const at::Tensor& pulled,
                                       torch::Dtype dtype, OverflowPolicy overflow) {
  at::Tensor cast = pulled.to(dtype);
  if (overflow == OverflowPolicy::kInfinity || !cast.is_floating_point() ||
      pulled.scalar_type() == dtype) {
    return cast;
  }
  const at::Tensor overflows = cast.isinf().logical_and(pulled.isinf().logical_not()).flatten();
  if (!overflows.any().item<bool>()) return cast;
  float largest = std::numeric_limits<float>::max();
  if (dtype == torch::kFloat16) largest = std::numeric_limits<c10::Half>::max();
  if (dtype == torch::kBFloat16) largest = std::numeric_limits<c10::BFloat16>::max();
  if (overflow == OverflowPolicy::kSaturate) {
    return at::where(pulled.isinf(), pulled, pulled.clamp(-largest, largest)).to(dtype);
  }
  const auto first = overflows.nonzero()[0].item<int64_t>();
  return MakeError(absl::StatusCode::kInvalidArgument, ErrorReason::kBadLayout,
                   absl::StrCat("element ", first, " of tensor \"", name, "\" is ",
                                pulled.flatten()[first].item<double>(), ", and ",
                                c10::toString(dtype), " in the module ends at ", largest,
                                "; expected a wider dtype, or overflow kSaturate or kInfinity"));
}

// Maps pulled tensors to those of the module: pairs of (index in `pulled`, index in `own`). A tied
// tensor of the track goes to every tensor of the module that has one of its names.
inline absl::StatusOr<std::vector<std::pair<size_t, size_t>>> Match(
    const std::string& what, const NamedTensors& own, const std::vector<PulledTensor>& pulled,
    bool strict) {
  std::unordered_map<std::string, size_t> index_of;
  for (size_t i = 0; i < own.specs.size(); ++i) {
    index_of.emplace(own.specs[i].name, i);
    for (const std::string& alias : own.specs[i].aliases) index_of.emplace(alias, i);
  }
  std::vector<std::pair<size_t, size_t>> pairs;
  std::map<size_t, std::string> source_of;  // By index in `own`: the pulled tensor's name.
  std::vector<std::string> unexpected;
  std::vector<std::string> different;
  for (size_t p = 0; p < pulled.size(); ++p) {
    const TensorSpec& spec = pulled[p].spec;
    std::vector<std::string> names = spec.aliases;
    names.insert(names.begin(), spec.name);
    bool is_known = false;
    for (const std::string& name : names) {
      const auto found = index_of.find(name);
      if (found == index_of.end()) continue;
      is_known = true;
      const auto [source, is_new] = source_of.emplace(found->second, spec.name);
      if (!is_new) {
        if (source->second == spec.name) continue;
        different.push_back(absl::StrCat(name, ": the same tensor as ", source->second,
                                         " in the module, another one there"));
        continue;
      }
      const TensorSpec& target = own.specs[found->second];
      if (target.shape != spec.shape ||
          !c10::canCast(TorchDtypeOf(spec.dtype), TorchDtypeOf(target.dtype))) {
        different.push_back(absl::StrCat(name, ": ", spec.TypeString(), " there, ",
                                         target.TypeString(), " in the module"));
      }
      pairs.emplace_back(p, found->second);
    }
    if (!is_known) unexpected.push_back(spec.name);
  }
  std::vector<std::string> missing;
  for (size_t i = 0; i < own.specs.size(); ++i) {
    if (source_of.find(i) == source_of.end()) missing.push_back(own.specs[i].name);
  }
  if (different.empty() && (!strict || (missing.empty() && unexpected.empty()))) return pairs;
  std::vector<std::string> parts;
  const auto say = [&](const char* title, const std::vector<std::string>& names, const char* by) {
    if (!names.empty()) parts.push_back(absl::StrCat(title, absl::StrJoin(names, by)));
  };
  if (strict) say("missing: ", missing, ", ");
  if (strict) say("unexpected: ", unexpected, ", ");
  say("different: ", different, "; ");
  return MakeError(absl::StatusCode::kInvalidArgument, ErrorReason::kBadLayout,
                   absl::StrCat(what, ": does not fit the module; ", absl::StrJoin(parts, "; ")));
}

}  // namespace torch_internal

// Copies one version of a track into a module's parameters and buffers, cast to their dtypes and on
// their devices; the tensor objects stay the same. Returns the version. INVALID_ARGUMENT,
// BAD_LAYOUT: names, shapes or dtypes do not fit, and the message lists them all; or a value is too
// large for the module's dtype, unless `options.overflow` permits it. INTERNAL: LibTorch fails, for
// example because a tensor was made by expand(), or was created in inference mode and is written
// outside of it. Other errors as Client::Pull(). After an error the module is unchanged, unless a
// device failed while values were copied to it.
inline absl::StatusOr<Version> PullInto(Client& client, std::string_view model,
                                        torch::nn::Module& module,
                                        const PullIntoOptions& options = {}) {
  EMA_ASSIGN_OR_RETURN(const NamedTensors own, NamedTensors::Of(module));
  try {
    const c10::NoGradGuard no_grad;
    PullMemory bytes;
    std::vector<std::pair<size_t, size_t>> pairs;
    const auto target = [&](const PullInfo& info) -> absl::StatusOr<std::span<std::byte>> {
      EMA_ASSIGN_OR_RETURN(
          pairs, torch_internal::Match(absl::StrCat("model \"", std::string(model), "\", track \"",
                                                    options.track, "\""),
                                       own, info.tensors, options.strict));
      bytes = AllocatePullMemory(info.total_bytes);
      if (bytes == nullptr) {
        return absl::ResourceExhaustedError(
            absl::StrCat("no memory for ", info.total_bytes, " bytes"));
      }
      return std::span(bytes.get(), static_cast<size_t>(info.total_bytes));
    };
    Client::PullOptions pull_options;
    pull_options.version = options.version;
    pull_options.incarnation = options.incarnation;
    pull_options.label = options.label;
    pull_options.step = options.step;
    EMA_ASSIGN_OR_RETURN(const PullInfo info,
                         client.Pull(model, options.track, pull_options, target, options.timeout));
    // Cast and checked here, so that nothing can be rejected after the first tensor has changed.
    std::vector<at::Tensor> values;
    for (const auto& [from, to] : pairs) {
      const PulledTensor& pulled = info.tensors[from];
      const at::Tensor source = at::from_blob(bytes.get() + pulled.offset, pulled.spec.shape,
                                              TorchDtypeOf(pulled.spec.dtype));
      EMA_ASSIGN_OR_RETURN(at::Tensor value,
                           torch_internal::Cast(pulled.spec.name, source,
                                                own.tensors[to].scalar_type(), options.overflow));
      values.push_back(std::move(value));
      at::assert_no_internal_overlap(own.tensors[to]);
      TORCH_CHECK(!own.tensors[to].is_inference() || c10::InferenceMode::is_enabled(), "tensor \"",
                  pulled.spec.name,
                  "\" was created in inference mode, so it can be written only in inference mode");
    }
    for (size_t i = 0; i < pairs.size(); ++i) {
      at::Tensor tensor = own.tensors[pairs[i].second];
      tensor.copy_(values[i]);
    }
    return info.version;
  } catch (const c10::Error& error) {
    return absl::InternalError(error.what_without_backtrace());
  }
}

}  // namespace ema

#endif  // EMA_TORCH_H_
