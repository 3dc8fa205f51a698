// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <optional>
#include <tuple>
#include <utility>

#include "absl/strings/str_cat.h"
#include "client/cpp/client_impl.h"
#include "client/cpp/convert.h"
#include "client/cpp/message_reader.h"
#include "client/cpp/retry.h"
#include "ema/client.h"
#include "ema/internal/status_macros.h"

namespace ema {
namespace {

using client_internal::Call;
using client_internal::MessageReader;

// One watch, over as many calls as it takes.
class Watcher {
 public:
  Watcher(v1::WatchRequest request, absl::Duration timeout,
          const std::function<bool(const Version&, int64_t)>* on_version)
      : request_(std::move(request)),
        timeout_(timeout),
        on_version_(*on_version),
        give_up_(After(SteadyNow(), timeout)) {}

  // One call, from where the one before has ended.
  absl::Status Attempt(Call& call);

  // `on_version` has returned false.
  bool is_done() const { return is_done_; }
  SteadyTime give_up() const { return give_up_; }
  bool TakeProgress() { return std::exchange(has_progress_, false); }

 private:
  absl::Status OnMessage(grpc::ByteBuffer& message);

  v1::WatchRequest request_;
  const absl::Duration timeout_;
  const std::function<bool(const Version&, int64_t)>& on_version_;

  SteadyTime give_up_;  // `timeout_` after the last commit.
  bool is_done_ = false;
  bool has_progress_ = false;
};

absl::Status Watcher::Attempt(Call& call) {
  MessageReader reader(&call, "/ema.v1.EmaService/Watch", request_);
  while (true) {
    switch (reader.Next(give_up_)) {
      case MessageReader::Event::kMessage:
        EMA_RETURN_IF_ERROR(OnMessage(reader.message()));
        if (is_done_) return absl::OkStatus();
        break;
      case MessageReader::Event::kTimeout:
        return absl::DeadlineExceededError(absl::StrCat(
            "model \"", request_.model(), "\": no commit for ", absl::FormatDuration(timeout_)));
      case MessageReader::Event::kEnd:
        EMA_RETURN_IF_ERROR(reader.Finish());
        // A watch has no end of its own.
        return absl::UnavailableError("the server ended the watch");
    }
  }
}

absl::Status Watcher::OnMessage(grpc::ByteBuffer& message) {
  v1::WatchResponse response;
  if (!grpc::SerializationTraits<v1::WatchResponse>::Deserialize(&message, &response).ok() ||
      !response.has_version()) {
    return client_internal::MalformedReply("not a WatchResponse");
  }
  has_progress_ = true;
  const Version version = client_internal::FromProto(response.version());
  // After a restart the server sends all records that it has restored, also those that were seen
  // before.
  const auto position = std::tuple(version.incarnation, version.number);
  if (request_.incarnation() != 0 &&
      position <= std::tuple(request_.incarnation(), request_.after_version())) {
    return absl::OkStatus();
  }
  request_.set_after_version(version.number);
  request_.set_incarnation(version.incarnation);
  is_done_ = !on_version_(version, response.skipped_count());
  give_up_ = After(SteadyNow(), timeout_);
  return absl::OkStatus();
}

}  // namespace

absl::Status Client::Watch(std::string_view model, std::optional<VersionId> after,
                           const std::function<bool(const Version&, int64_t skipped)>& on_version,
                           absl::Duration timeout) {
  if (timeout == absl::ZeroDuration()) timeout = impl_->options().timeout;
  const SteadyTime start = SteadyNow();
  client_internal::Interrupt interrupt(&impl_->options().is_interrupted);
  v1::WatchRequest request;
  request.set_model(std::string(model));
  if (after.has_value()) {
    request.set_after_version(after->version);
    request.set_incarnation(after->incarnation);
  } else {
    // "From now on" is fixed here, so that what is committed while a connection is broken is not
    // lost.
    v1::GetModelRequest model_request;
    model_request.set_model(request.model());
    EMA_ASSIGN_OR_RETURN(
        const v1::GetModelResponse response,
        impl_->Unary(&v1::EmaService::Stub::PrepareAsyncGetModel, model_request,
                     std::min(After(start, timeout), impl_->Deadline(absl::ZeroDuration())),
                     &interrupt));
    request.set_after_version(response.model().latest().version());
    request.set_incarnation(response.model().latest().incarnation());
  }

  Watcher watcher(std::move(request), timeout, &on_version);
  client_internal::Backoff backoff;
  const auto attempt = [&]() -> absl::Status {
    EMA_ASSIGN_OR_RETURN(auto connection, impl_->Connect(watcher.give_up(), &interrupt));
    // The call has no deadline: every commit puts the end off.
    Call call(std::move(connection), SteadyTime::max(), &interrupt);
    return watcher.Attempt(call);
  };
  while (true) {
    absl::Status status = attempt();
    if (!client_internal::IsRetryable(status)) return status;
    if (watcher.TakeProgress()) backoff.Reset();
    const absl::Duration delay = backoff.Next(status);
    if (After(SteadyNow(), delay) >= watcher.give_up()) {
      return absl::DeadlineExceededError(
          absl::StrCat("model \"", std::string(model), "\": no commit for ",
                       absl::FormatDuration(timeout), "; last error: ", status.message()));
    }
    const auto& on_wait = impl_->options().on_wait;
    if (on_wait && backoff.IsTimeToTell()) on_wait(status);
    if (!interrupt.Sleep(delay)) return absl::CancelledError("interrupted");
  }
}

}  // namespace ema
