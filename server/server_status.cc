// SPDX-License-Identifier: Apache-2.0
//
// The part of Server that HTTP shows.
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "ema/error_reason.h"
#include "ema/internal/status_macros.h"
#include "server/core/version_statistics.h"
#include "server/ops/logging.h"
#include "server/ops/status_page.h"
#include "server/server.h"

namespace ema {

absl::Status Server::StartHttp() {
  if (options_.http_listen.empty()) return absl::OkStatus();
  HttpServer::Pages pages;
  pages["/livez"] = [] { return HttpServer::Answer{.body = "ok\n"}; };
  pages["/readyz"] = [this] {
    const absl::Status health = Health();
    if (health.ok()) return HttpServer::Answer{.body = "ok\n"};
    return HttpServer::Answer{.code = 503,
                              .body = absl::StrCat(std::string(health.message()), "\n")};
  };
  pages["/metrics"] = [this] {
    return HttpServer::Answer{.type = "text/plain; version=0.0.4; charset=utf-8",
                              .body = metrics_.Text(State(/*with_history=*/false))};
  };
  pages["/"] = [] {
    return HttpServer::Answer{.type = "text/html; charset=utf-8", .body = kStatusPageHtml};
  };
  pages["/status.js"] = [] {
    return HttpServer::Answer{.type = "text/javascript; charset=utf-8", .body = kStatusPageScript};
  };
  pages["/status.json"] = [this] {
    return HttpServer::Answer{
        .type = "application/json",
        .body = StatusJson(State(/*with_history=*/true), metrics_.Problems())};
  };
  EMA_ASSIGN_OR_RETURN(http_, HttpServer::Start(options_.http_listen, std::move(pages)));
  Log(LogLevel::kInfo, "serving metrics, probes and the status page", {{"url", http_->url()}});
  return absl::OkStatus();
}

absl::Status Server::Health() const {
  absl::MutexLock lock(&mu_);
  if (serving_ != nullptr) return serving_->health();
  return absl::UnavailableError(group_ != nullptr
                                    ? "recovering: the server has not joined its group yet"
                                    : "recovering: the checkpoints are being read");
}

ServerState Server::State(bool with_history) const {
  constexpr size_t kPlottedPoints = 160;
  const Device& device = store_->device();
  ServerState state{.now = absl::Now(),
                    .start_time = start_time_,
                    .health = Health(),
                    .device_health = device.health(),
                    .has_data_dir = checkpoints_ != nullptr,
                    .device = device.name(),
                    .cuda_version = CudaVersion(),
                    .incarnation = incarnation_,
                    .statistics_every_commits = options_.statistics_every_commits,
                    .max_models = store_->max_models(),
                    .limits = options_.limits,
                    .max_sessions = options_.max_sessions};
  state.memory = {.budget_bytes = store_->budget().total_bytes(),
                  .reserved_bytes = store_->budget().reserved_bytes(),
                  .host_model_bytes = device.is_host() ? store_->budget().total_bytes() : 0,
                  .formula = formula_,
                  .device_bytes = device.total_memory_bytes(),
                  .device_use = device.memory_use()};
  if (checkpoints_ != nullptr) {
    state.is_store_read_only =
        GetErrorReason(checkpoints_->health()) == ErrorReason::kStoreReadOnly;
    state.data_dir_free_bytes = checkpoints_->free_bytes();
    state.scrub_time = checkpoints_->scrub_time();
    state.checkpoints = checkpoints_->CountAll();
    if (options_.save_every > absl::ZeroDuration()) state.save_interval = options_.save_every;
  }
  {
    absl::MutexLock lock(&mu_);
    if (serving_ != nullptr) {
      if (checkpoints_ != nullptr) state.checkpoints_health = serving_->checkpoints_health();
      state.usage = serving_->usage();
      if (const auto certificate = serving_->certificate()) {
        state.tls = {.expiry = certificate->expiry, .has_rejected_files = certificate->is_rejected};
      }
    } else {
      state.is_recovering = true;
    }
  }
  if (group_ != nullptr) state.group = group_->Describe();
  if (follower_ != nullptr) state.follow_contact = follower_->last_contact();
  state.has_rejected_tokens = tokens_ != nullptr && !tokens_->problem().ok();
  state.workers = heartbeats_->Ages(Heartbeats::Clock::now());
  for (const std::shared_ptr<Model>& model : store_->List()) {
    ServerState::Model& shown = state.models.emplace_back();
    shown.name = model->config().name;
    shown.overview = OverviewOf(*model);
    if (checkpoints_ != nullptr) state.checkpoints.try_emplace(shown.name);
    if (with_history) shown.history = StatisticsHistory(model->history(), kPlottedPoints);
  }
  return state;
}

}  // namespace ema
