// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <memory>
#include <optional>
#include <tuple>
#include <utility>

#include "absl/strings/str_cat.h"
#include "client/cpp/client_impl.h"
#include "client/cpp/transport/convert_replies.h"
#include "client/cpp/transport/fork_guard.h"
#include "client/cpp/transport/message_reader.h"
#include "client/cpp/transport/retry.h"
#include "ema/client.h"
#include "ema/error_reason.h"
#include "ema/internal/status_macros.h"

namespace ema {

using client_internal::MakeRequest;
using client_internal::MessageReader;
using client_internal::Stub;

// One watch, over as many calls as it takes.
class VersionWatch::Impl {
 public:
  Impl(std::shared_ptr<Client::Impl> client, v1::WatchRequest request, absl::Duration timeout)
      : client_(std::move(client)),
        interrupt_(&client_->options().is_interrupted),
        request_(std::move(request)),
        timeout_(timeout) {}
  // Nobody is to be asked while the call is cancelled: the user's code would run in a destructor.
  ~Impl() { interrupt_.Fire(); }
  Impl(const Impl&) = delete;
  Impl& operator=(const Impl&) = delete;

  bool forked() const { return client_->fork_guard().forked(); }
  absl::StatusOr<Item> Next();

 private:
  struct Stream {
    Stream(std::shared_ptr<client_internal::Connection> connection,
           client_internal::Interrupt* interrupt, const v1::WatchRequest& request)
        // The call has no deadline: every commit puts the end off.
        : call(std::move(connection), SteadyTime::max(), interrupt),
          reader(&call, "/ema.v1.EmaService/Watch", request) {}

    client_internal::Call call;
    MessageReader reader;
  };

  // As Next(), by the call that is open, or a new one from where the one before has ended.
  absl::StatusOr<Item> Attempt(SteadyTime wait_end);
  // nullopt: it has been seen.
  absl::StatusOr<std::optional<Item>> Take(grpc::ByteBuffer& message);

  const std::shared_ptr<Client::Impl> client_;
  std::shared_ptr<Client::Impl> home_;  // Where the client's server refers to; null: nowhere.
  client_internal::Interrupt interrupt_;
  v1::WatchRequest request_;  // After the last item.
  const absl::Duration timeout_;
  std::unique_ptr<Stream> stream_;  // Null: to be opened.
};

absl::StatusOr<VersionWatch::Item> VersionWatch::Impl::Next() {
  EMA_RETURN_IF_ERROR(client_->fork_guard().Check());
  const SteadyTime wait_end = After(SteadyNow(), timeout_);
  client_internal::Backoff backoff;
  while (true) {
    absl::StatusOr<Item> item = Attempt(wait_end);
    if (item.ok()) return item;
    const absl::Status& status = item.status();
    if (!client_internal::IsRetryable(status)) return item;
    const absl::Duration delay = backoff.Next(status);
    if (After(SteadyNow(), delay) >= wait_end) {
      return absl::DeadlineExceededError(
          absl::StrCat("model \"", request_.model(), "\": no commit for ",
                       absl::FormatDuration(timeout_), "; last error: ", status.message()));
    }
    const auto& on_wait = client_->options().on_wait;
    if (on_wait && backoff.ShouldLog()) on_wait(status);
    if (!interrupt_.Sleep(delay)) return absl::CancelledError("interrupted");
  }
}

absl::StatusOr<VersionWatch::Item> VersionWatch::Impl::Attempt(SteadyTime wait_end) {
  if (stream_ == nullptr) {
    Client::Impl& server = home_ != nullptr ? *home_ : *client_;
    absl::StatusOr<std::shared_ptr<client_internal::Connection>> connection =
        server.Connect(wait_end, &interrupt_);
    if (!connection.ok()) {
      home_ = nullptr;  // The next try asks the client's server again.
      return connection.status();
    }
    stream_ = std::make_unique<Stream>(*std::move(connection), &interrupt_, request_);
  }
  while (true) {
    switch (stream_->reader.Next(wait_end)) {
      case MessageReader::Event::kMessage: {
        EMA_ASSIGN_OR_RETURN(std::optional<Item> item, Take(stream_->reader.message()));
        if (item.has_value()) return *std::move(item);
        break;
      }
      case MessageReader::Event::kTimeout:
        return absl::DeadlineExceededError(absl::StrCat(
            "model \"", request_.model(), "\": no commit for ", absl::FormatDuration(timeout_)));
      case MessageReader::Event::kEnd: {
        const absl::Status end = stream_->reader.Finish();
        stream_ = nullptr;
        const bool was_home = std::exchange(home_, nullptr) != nullptr;
        if (GetErrorReason(end) == ErrorReason::kNotHome && !was_home) {
          EMA_ASSIGN_OR_RETURN(home_, client_->ClientOfMember(GetGroupHint(end).home));
          return Attempt(wait_end);
        }
        // A watch has no end of its own.
        return end.ok() ? absl::UnavailableError("the server ended the watch") : end;
      }
    }
  }
}

absl::StatusOr<std::optional<VersionWatch::Item>> VersionWatch::Impl::Take(
    grpc::ByteBuffer& message) {
  v1::WatchResponse response;
  if (!grpc::SerializationTraits<v1::WatchResponse>::Deserialize(&message, &response).ok() ||
      !response.has_version()) {
    return client_internal::MalformedReply("not a WatchResponse");
  }
  Version version = client_internal::FromProto(response.version());
  // After a restart the server sends all records that it has restored, also those that were seen
  // before.
  const auto position = std::tuple(version.incarnation, version.number);
  if (request_.incarnation() != 0 &&
      position <= std::tuple(request_.incarnation(), request_.after_version())) {
    return std::nullopt;
  }
  request_.set_after_version(version.number);
  request_.set_incarnation(version.incarnation);
  return Item{std::move(version), response.skipped_count()};
}

VersionWatch::VersionWatch(std::shared_ptr<Impl> impl) : impl_(std::move(impl)) {}

VersionWatch::~VersionWatch() {
  if (impl_->forked()) client_internal::LeakForever(std::move(impl_));
}

absl::StatusOr<VersionWatch::Item> VersionWatch::Next() { return impl_->Next(); }

absl::StatusOr<std::unique_ptr<VersionWatch>> Client::Watch(std::string_view model,
                                                            std::optional<VersionId> after,
                                                            absl::Duration timeout) {
  if (timeout == absl::ZeroDuration()) timeout = impl_->options().timeout;
  auto request = MakeRequest<v1::WatchRequest>(model);
  if (after.has_value()) {
    request.set_after_version(after->version);
    request.set_incarnation(after->incarnation);
  } else {
    // "From now on" is fixed here, so that what is committed while a connection is broken, or
    // before the first Next(), is not lost.
    EMA_ASSIGN_OR_RETURN(const v1::Model info,
                         impl_->UnaryWithRetries(&Stub::PrepareAsyncGetModel,
                                                 MakeRequest<v1::GetModelRequest>(model),
                                                 std::min(timeout, impl_->options().timeout)));
    request.set_after_version(info.latest().version());
    request.set_incarnation(info.latest().incarnation());
  }
  return std::unique_ptr<VersionWatch>(
      new VersionWatch(std::make_shared<VersionWatch::Impl>(impl_, std::move(request), timeout)));
}

}  // namespace ema
