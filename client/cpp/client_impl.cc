// SPDX-License-Identifier: Apache-2.0
#include "client/cpp/client_impl.h"

#include <algorithm>
#include <thread>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "client/cpp/transport/convert_replies.h"
#include "client/cpp/transport/retry.h"
#include "ema/error_reason.h"
#include "ema/internal/status_macros.h"

namespace ema {
namespace {

// How long a server may take to answer whether it offers a lane, or maps a window. Waiting longer
// costs more than the lane gains.
constexpr absl::Duration kMaxLaneWait = absl::Seconds(2);

std::string NameOf(const std::vector<client_internal::Address>& addresses) {
  return absl::StrJoin(addresses, ",", [](std::string* out, const client_internal::Address& one) {
    out->append(one.ToString());
  });
}

}  // namespace

Client::Impl::Impl(std::vector<client_internal::Address> addresses, const Options& options)
    : options_(options),
      token_(options.token, options.token_file),
      addresses_(std::move(addresses)),
      dialers_(addresses_.begin(), addresses_.end()) {}

absl::StatusOr<std::shared_ptr<Client::Impl>> Client::Impl::ClientOfMember(
    std::string_view address) {
  absl::StatusOr<client_internal::Address> parsed = client_internal::Address::Parse(address);
  if (!parsed.ok() || !parsed->path.empty()) {
    return client_internal::MalformedReply(
        absl::StrCat("the address of a server of the group is \"", std::string(address), "\""));
  }
  parsed->is_tls = addresses_.front().is_tls;
  std::string name = parsed->ToString();
  if (addresses_.size() == 1 && name == addresses_.front().ToString()) return shared_from_this();
  absl::MutexLock lock(&members_mu_);
  std::shared_ptr<Impl>& member = members_[std::move(name)];
  if (member == nullptr) {
    member = std::make_shared<Impl>(std::vector{*std::move(parsed)}, options_);
  }
  return member;
}

std::shared_ptr<const client_internal::PartitionMap> Client::Impl::FindPartitions(
    const std::string& model) const {
  absl::MutexLock lock(&members_mu_);
  const auto found = partitions_.find(model);
  return found == partitions_.end() ? nullptr : found->second;
}

void Client::Impl::SetPartitions(const std::string& model,
                                 std::shared_ptr<const client_internal::PartitionMap> partitions) {
  absl::MutexLock lock(&members_mu_);
  if (partitions == nullptr) {
    partitions_.erase(model);
  } else {
    partitions_[model] = std::move(partitions);
  }
}

absl::StatusOr<std::shared_ptr<Client::Impl::Connection>> Client::Impl::Dial(SteadyTime deadline,
                                                                             Interrupt* interrupt) {
  absl::StatusOr<std::shared_ptr<Connection>> opened;
  std::vector<std::string> errors;
  for (size_t tries = 0; tries < dialers_.size(); ++tries) {
    opened = Connection::Open(dialers_[next_dialer_], options_.tls, token_, deadline, interrupt);
    if (opened.ok() || !absl::IsUnavailable(opened.status())) return opened;
    errors.emplace_back(opened.status().message());
    next_dialer_ = (next_dialer_ + 1) % dialers_.size();
  }
  // A single error keeps its reason.
  if (errors.size() == 1) return opened;
  return absl::UnavailableError(absl::StrJoin(errors, "; "));
}

absl::StatusOr<std::shared_ptr<Client::Impl::Connection>> Client::Impl::Connect(
    SteadyTime deadline, Interrupt* interrupt) {
  EMA_RETURN_IF_ERROR(fork_guard_.Check());
  std::shared_ptr<Connection> dead;  // Destroyed without the lock.
  {
    absl::MutexLock lock(&mu_);
    while (is_dialing_) {
      // Not under the lock: asking may run the user's code.
      mu_.Unlock();
      const bool is_fired = interrupt->fired();
      mu_.Lock();
      if (is_fired) return absl::CancelledError("interrupted");
      if (SteadyNow() >= deadline) {
        return absl::DeadlineExceededError(
            absl::StrCat("server ", NameOf(addresses_), ": no answer in time"));
      }
      const auto is_free = [this]() ABSL_SHARED_LOCKS_REQUIRED(mu_) { return !is_dialing_; };
      dialing_wait_.AwaitUntil(
          mu_, std::min(deadline, After(SteadyNow(), Interrupt::kPollInterval)), is_free);
    }
    if (connection_ != nullptr && connection_->is_alive()) return connection_;
    dead = std::exchange(connection_, nullptr);
    is_dialing_ = true;
  }
  // Another server of the group can answer at once, and over TLS a connection that was never
  // established looks like this, too.
  if (dead != nullptr) next_dialer_ = (next_dialer_ + 1) % dialers_.size();
  absl::StatusOr<std::shared_ptr<Connection>> opened = Dial(deadline, interrupt);
  absl::MutexLock lock(&mu_);
  is_dialing_ = false;
  dialing_wait_.WakeAll();
  if (opened.ok()) {
    connection_ = *opened;
    connected_address_ = next_dialer_;
  }
  return opened;
}

void Client::Impl::ConnectMore(int64_t count, Interrupt* interrupt,
                               std::vector<std::shared_ptr<Connection>>* connections) {
  // The push has a connection already, and a trainer that waits for it.
  constexpr absl::Duration kMaxWait = absl::Milliseconds(200);
  const auto has_enough = [&] { return static_cast<int64_t>(connections->size()) >= count; };
  std::vector<std::shared_ptr<Connection>> dead;  // Destroyed without the lock.
  size_t address = 0;
  {
    absl::MutexLock lock(&mu_);
    const auto lost = std::partition(more_connections_.begin(), more_connections_.end(),
                                     [](const auto& one) { return one->is_alive(); });
    dead.assign(lost, more_connections_.end());
    more_connections_.erase(lost, more_connections_.end());
    for (const auto& one : more_connections_) {
      if (!has_enough()) connections->push_back(one);
    }
    address = connected_address_;
  }
  client_internal::Dialer dialer(addresses_[address]);
  const SteadyTime wait_end = After(SteadyNow(), kMaxWait);
  while (!has_enough()) {
    absl::StatusOr<std::shared_ptr<Connection>> opened =
        Connection::Open(dialer, options_.tls, token_, wait_end, interrupt);
    if (!opened.ok()) return;
    absl::MutexLock lock(&mu_);
    more_connections_.push_back(*opened);
    connections->push_back(*std::move(opened));
  }
}

void Client::Impl::DropMoreConnections() {
  std::vector<std::shared_ptr<Connection>> dropped;  // Destroyed without the lock.
  absl::MutexLock lock(&mu_);
  dropped.swap(more_connections_);
}

int64_t Client::Impl::max_connections() const {
  constexpr int64_t kMost = 8;
  if (options_.max_connections > 0) return options_.max_connections;
  const int64_t processors = std::thread::hardware_concurrency();
  return std::clamp<int64_t>(processors / 2, 1, kMost);
}

absl::Status Client::Impl::FindLane(SteadyTime deadline, Interrupt* interrupt) {
  if (!options_.same_host_lane) {
    return absl::UnavailableError("the client's option same_host_lane is false");
  }
  EMA_ASSIGN_OR_RETURN(const std::shared_ptr<Connection> connection, Connect(deadline, interrupt));
  {
    absl::MutexLock lock(&mu_);
    if (lanes_of_.lock() == connection || SteadyNow() < no_lane_until_) return lanes_.status();
  }
  Call call(connection, std::min(deadline, After(SteadyNow(), kMaxLaneWait)), interrupt);
  const absl::StatusOr<v1::GetLaneResponse> offer =
      UnaryOn(call, &client_internal::Stub::PrepareAsyncGetLane, v1::GetLaneRequest());
  // An old server does not know the call; one that does not answer is asked again.
  if (!offer.ok() && !absl::IsUnimplemented(offer.status())) return offer.status();
  lanes_.SetOffer(offer.value_or(v1::GetLaneResponse()));
  absl::MutexLock lock(&mu_);
  lanes_of_ = connection;
  return lanes_.status();
}

absl::StatusOr<std::unique_ptr<LanePipe>> Client::Impl::TakeLane(SteadyTime deadline,
                                                                 Interrupt* interrupt) {
  constexpr absl::Duration kPause = absl::Seconds(1);
  constexpr absl::Duration kMaxPause = absl::Minutes(1);
  EMA_RETURN_IF_ERROR(FindLane(deadline, interrupt));
  absl::StatusOr<std::unique_ptr<LanePipe>> lane = lanes_.Take();
  absl::MutexLock lock(&mu_);
  if (lane.ok()) {
    lane_pause_ = kPause;
    return lane;
  }
  // A server that was started again has others, and over TLS the connection does not tell of that;
  // but they may be out of reach for good.
  lanes_of_.reset();
  no_lane_until_ = After(SteadyNow(), lane_pause_);
  lane_pause_ = std::min(2 * lane_pause_, kMaxPause);
  return lane;
}

absl::StatusOr<std::unique_ptr<LanePipe>> Client::Impl::OpenWindowLane(const SharedMemory& window,
                                                                       SteadyTime deadline,
                                                                       Interrupt* interrupt) {
  EMA_RETURN_IF_ERROR(FindLane(deadline, interrupt));
  const SteadyTime wait_end = std::min(deadline, After(SteadyNow(), kMaxLaneWait));
  return lanes_.OpenWithWindow(window,
                               [&] { return interrupt->fired() || SteadyNow() >= wait_end; });
}

absl::Status Client::Impl::TryAtHome(SteadyTime deadline, Interrupt* interrupt,
                                     absl::FunctionRef<absl::Status(Call&)> attempt) {
  absl::Status status = Try(deadline, interrupt, attempt);
  const std::string address = GetGroupHint(status).home;
  if (GetErrorReason(status) != ErrorReason::kNotHome || address.empty()) return status;
  EMA_ASSIGN_OR_RETURN(const std::shared_ptr<Impl> home, ClientOfMember(address));
  status = home->Try(deadline, interrupt, attempt);
  if (GetErrorReason(status) != ErrorReason::kNotHome) return status;
  const std::string next_address = GetGroupHint(status).home;
  if (next_address.empty() || next_address == address) return status;
  return MakeError(absl::StatusCode::kUnavailable, ErrorReason::kNotHome,
                   absl::StrCat(std::string(status.message()), "; ", address, " has named ",
                                next_address, ": the model moves"));
}

absl::Status Client::Impl::Retry(SteadyTime deadline, Interrupt* interrupt,
                                 absl::FunctionRef<absl::Status(Call&)> attempt) {
  client_internal::Backoff backoff;
  absl::Status last_error;
  while (true) {
    absl::Status status = TryAtHome(deadline, interrupt, attempt);
    // That there was no server says more than that time ran out.
    if (status.code() == absl::StatusCode::kDeadlineExceeded && !last_error.ok()) return last_error;
    if (!client_internal::IsRetryable(status)) return status;
    const absl::Duration delay = backoff.Next(status);
    if (After(SteadyNow(), delay) >= deadline) return status;
    if (options_.on_wait && interrupt->is_of_user() && backoff.ShouldLog()) {
      options_.on_wait(status);
    }
    last_error = std::move(status);
    if (!interrupt->Sleep(delay)) return absl::CancelledError("interrupted");
  }
}

}  // namespace ema
