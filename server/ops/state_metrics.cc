// SPDX-License-Identifier: Apache-2.0
//
// The metrics that are read when they are asked for.
#include <algorithm>
#include <string>
#include <utility>

#include "server/ops/logging.h"
#include "server/ops/metric_families.h"
#include "server/ops/options.h"
#include "server/ops/process_stats.h"

namespace ema {
namespace {

using prometheus::MetricFamily;
using prometheus::MetricType;

double Seconds(absl::Time time) { return absl::ToDoubleSeconds(time - absl::UnixEpoch()); }

FamilyBuilder Gauge(std::string name, std::string help) {
  return {std::move(name), std::move(help), MetricType::Gauge};
}

// What does not work without a thread of this need.
const char* NeedName(Heartbeats::Need need) {
  switch (need) {
    case Heartbeats::Need::kServing:
      return "serving";
    case Heartbeats::Need::kCheckpoints:
      return "checkpoints";
    case Heartbeats::Need::kNeither:
      break;
  }
  return "neither";
}

// Collects families.
class Families {
 public:
  void Add(const char* name, const char* help, double value) {
    all_.push_back(Gauge(name, help).Add(value).Take());
  }
  void Add(FamilyBuilder family) { all_.push_back(family.Take()); }
  std::vector<MetricFamily> Take() { return std::move(all_); }

 private:
  std::vector<MetricFamily> all_;
};

void AddModels(const ServerState& state, Families& families) {
  // One value of each model that has it.
  const auto add = [&](const char* name, const char* help, auto value, auto has_it) {
    FamilyBuilder family = Gauge(name, help);
    for (const ServerState::Model& model : state.models) {
      if (has_it(model.overview)) {
        family.Add(static_cast<double>(value(model.overview)), {{"model", model.name}});
      }
    }
    families.Add(std::move(family));
  };
  using Of = const ModelOverview&;
  const auto always = [](Of) { return true; };
  const auto has_version = [](Of model) { return model.version.version > 0; };
  add(
      "ema_model_step", "Step of the newest version; 0: there is none.",
      [](Of model) { return model.step; }, always);
  add(
      "ema_model_version", "The newest version; 0: there is none.",
      [](Of model) { return model.version.version; }, always);
  add(
      "ema_model_durable_step", "Step of the newest version that is on the disk; 0: none.",
      [](Of model) { return model.durable_step; }, always);
  add(
      "ema_model_unsaved_steps", "Steps that a crash would lose.",
      [](Of model) { return std::max<int64_t>(model.step - model.durable_step, 0); }, always);
  add(
      "ema_model_lag_steps",
      "Steps between the newest version and what a trainer has begun to push.",
      [](Of model) { return std::max<int64_t>(model.begun_step - model.step, 0); }, always);
  add(
      "ema_model_last_commit_timestamp_seconds", "When the newest version was committed.",
      [](Of model) { return Seconds(model.commit_time); }, has_version);
  add(
      "ema_model_reserved_bytes", "Memory that is promised to the model.",
      [](Of model) { return model.reserved_bytes; }, always);
  add(
      "ema_sessions_open", "Steps that are being pushed.",
      [](Of model) { return model.session.has_value() ? 1 : 0; }, always);
  add(
      "ema_session_age_seconds", "Age of the oldest step that is being pushed; 0: there is none.",
      [](Of model) {
        return model.session.has_value() ? absl::ToDoubleSeconds(model.session->age) : 0;
      },
      always);
}

void AddTracks(const ServerState& state, Families& families) {
  FamilyBuilder norms = Gauge("ema_track_norm", "Norm of the average, where it is known.");
  FamilyBuilder distances =
      Gauge("ema_track_distance", "Distance of the average from the raw weights, likewise.");
  FamilyBuilder weights =
      Gauge("ema_track_update_weight", "Weight of the track's last update; 0: not known.");
  for (const ServerState::Model& model : state.models) {
    for (const ModelOverview::Track& track : model.overview.tracks) {
      const MetricLabels labels = {{"model", model.name}, {"track", track.name}};
      weights.Add(track.update_weight, labels);
      if (!track.statistics.has_value()) continue;
      norms.Add(track.statistics->norm, labels);
      if (track.statistics->distance.has_value()) {
        distances.Add(*track.statistics->distance, labels);
      }
    }
  }
  families.Add(std::move(norms));
  families.Add(std::move(distances));
  families.Add(std::move(weights));
}

void AddMemory(const ServerState& state, Families& families) {
  const ServerState::Memory& memory = state.memory;
  families.Add("ema_memory_budget_bytes", "Memory for models.", memory.budget_bytes);
  families.Add("ema_memory_reserved_bytes", "What of it is promised.", memory.reserved_bytes);
  families.Add(
      Gauge("ema_memory_used_bytes",
            "Memory that is taken: blocks of averages and freed ones kept for reuse, both of the "
            "device; copies for readers of what a GPU has, of the host.")
          .Add(memory.device_use.block_bytes, {{"kind", "blocks"}})
          .Add(memory.device_use.kept_bytes, {{"kind", "kept"}})
          .Add(memory.device_use.host_copy_bytes, {{"kind", "host_copies"}}));
  families.Add("ema_device_memory_bytes", "All memory of the device that the server may use.",
               memory.device_bytes);
  families.Add(
      Gauge("ema_memory_formula_bytes", "What each part may take at most of the host's memory.")
          .Add(memory.formula.process_bytes, {{"part", "process"}})
          .Add(memory.host_model_bytes, {{"part", "models"}})
          .Add(memory.formula.host_budget_bytes, {{"part", "files_and_casts"}})
          .Add(memory.formula.stream_bytes, {{"part", "streams"}})
          .Add(memory.formula.waiting_bytes, {{"part", "waiting"}})
          .Add(memory.formula.record_bytes, {{"part", "records"}})
          .Add(memory.formula.kept_bytes, {{"part", "kept"}}));
}

void AddUsage(const ServerState& state, Families& families) {
  families.Add(Gauge("ema_streams_open", "Pushes and pulls, lanes among them, and watches.")
                   .Add(state.usage.push_streams, {{"kind", "push"}})
                   .Add(state.usage.pull_streams, {{"kind", "pull"}})
                   .Add(state.usage.watch_streams, {{"kind", "watch"}}));
  families.Add(Gauge("ema_streams_limit", "How many there may be.")
                   .Add(state.limits.max_push_streams, {{"kind", "push"}})
                   .Add(state.limits.max_pull_streams, {{"kind", "pull"}})
                   .Add(state.limits.max_watch_streams, {{"kind", "watch"}}));
  families.Add("ema_sessions_limit", "Steps that may be pushed at once, over all models.",
               state.max_sessions);
  families.Add("ema_connections_open", "Connections of gRPC that are open.",
               state.usage.connections);
  families.Add("ema_connections_limit", "How many there may be.", state.limits.max_connections);
  families.Add("ema_models", "Models that there are.", static_cast<double>(state.models.size()));
  families.Add("ema_models_limit", "How many there may be.", state.max_models);
}

void AddCheckpoints(const ServerState& state, Families& families) {
  FamilyBuilder checkpoints = Gauge(
      "ema_checkpoints",
      "Checkpoints of a model that are on the disk, complete, complete but found unreadable, "
      "or set aside (corrupt, abandoned), or missing though LATEST names them (corrupt, too, as a "
      "file of labels is), and those that could not be saved and have not been since (failed).");
  for (const auto& [model, counts] : state.checkpoints) {
    checkpoints.Add(counts.complete, {{"model", model}, {"state", "complete"}})
        .Add(counts.unreadable, {{"model", model}, {"state", "unreadable"}})
        .Add(counts.failed, {{"model", model}, {"state", "failed"}})
        .Add(counts.corrupt, {{"model", model}, {"state", "corrupt"}})
        .Add(counts.abandoned, {{"model", model}, {"state", "abandoned"}});
  }
  families.Add(std::move(checkpoints));
  if (state.data_dir_free_bytes.has_value()) {
    families.Add("ema_data_dir_free_bytes",
                 "What the disk of the checkpoints has left for the server, every ten seconds and "
                 "after each save that was waiting.",
                 *state.data_dir_free_bytes);
  }
  if (state.scrub_time.has_value()) {
    families.Add(
        "ema_checkpoints_last_scrub_timestamp_seconds",
        "When all checkpoints of the data directory were last read again, by this server or "
        "an earlier one, or the first began to do so.",
        Seconds(*state.scrub_time));
  }
  families.Add("ema_checkpoint_store_read_only",
               "1: nothing can be saved: an fsync has failed, the disk is read-only, or the data "
               "directory has gone or been replaced.",
               state.is_store_read_only ? 1 : 0);
}

void AddHealth(const ServerState& state, Families& families) {
  families.Add("ema_device_usable", "0: the device has failed for good.",
               state.device_health.ok() ? 1 : 0);
  families.Add("ema_health_serving", "What health checks say: 1 is SERVING.",
               state.health.ok() ? 1 : 0);
  families.Add("ema_recovering", "1: checkpoints are being read, and nothing is served yet.",
               state.is_recovering ? 1 : 0);
  FamilyBuilder expiry = Gauge("ema_tls_certificate_expiry_timestamp_seconds",
                               "When the server's certificate ends; absent without TLS.");
  if (state.tls.has_value()) expiry.Add(Seconds(state.tls->expiry));
  families.Add(std::move(expiry));
  families.Add("ema_tls_files_rejected",
               "1: the TLS files are not what is in use, for they are wrong.",
               state.tls.has_value() && state.tls->has_rejected_files ? 1 : 0);
  families.Add("ema_token_file_rejected",
               "1: the token file is not what is in use, for it is wrong, or gone.",
               state.has_rejected_tokens ? 1 : 0);
  FamilyBuilder workers = Gauge("ema_worker_heartbeat_age_seconds",
                                "How long a thread has been at work without progress; 0: idle.");
  for (const Heartbeats::Age& worker : state.workers) {
    workers.Add(absl::ToDoubleSeconds(absl::FromChrono(worker.silent_time)),
                {{"worker", worker.name}, {"need", NeedName(worker.need)}});
  }
  families.Add(std::move(workers));
  families.Add(Gauge("ema_build_info", "1.")
                   .Add(1, {{"version", std::string(ServerVersion())},
                            {"device", state.device},
                            {"cuda", state.cuda_version}}));
}

void AddProcess(Families& families) {
  const ProcessStats stats = ReadProcessStats();
  families.Add("process_resident_memory_bytes", "Resident memory.", stats.resident_bytes);
  families.Add("process_open_fds", "Open file descriptors.", stats.open_fds);
  families.Add("process_max_fds", "How many there may be.", stats.max_fds);
  families.Add("process_start_time_seconds", "When the process started.", stats.start_time_seconds);
  families.Add(
      FamilyBuilder("process_cpu_seconds_total", "User and system time.", MetricType::Counter)
          .Add(stats.cpu_seconds));
  families.Add(FamilyBuilder("ema_log_lines_dropped_total",
                             "Lines of the log that stderr did not take, or not in time.",
                             MetricType::Counter)
                   .Add(static_cast<double>(DroppedLogLines())));
}

}  // namespace

std::vector<MetricFamily> StateMetrics(const ServerState& state) {
  Families families;
  AddModels(state, families);
  AddTracks(state, families);
  AddMemory(state, families);
  AddUsage(state, families);
  AddCheckpoints(state, families);
  AddHealth(state, families);
  AddProcess(families);
  return families.Take();
}

}  // namespace ema
