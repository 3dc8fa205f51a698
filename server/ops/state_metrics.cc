// SPDX-License-Identifier: Apache-2.0
//
// The metrics that are read when they are asked for.
#include <algorithm>
#include <optional>
#include <string>

#include "server/ops/heap.h"
#include "server/ops/logging.h"
#include "server/ops/metric_families.h"
#include "server/ops/options.h"
#include "server/ops/process_stats.h"

namespace ema {
namespace {

// What does not work while a thread that is needed for it is stuck.
const char* NeededForName(Heartbeats::NeededFor needed_for) {
  switch (needed_for) {
    case Heartbeats::NeededFor::kServing:
      return "serving";
    case Heartbeats::NeededFor::kCheckpoints:
      return "checkpoints";
    case Heartbeats::NeededFor::kNeither:
      break;
  }
  return "neither";
}

void AddModels(const ServerState& state, MetricFamilies& families) {
  // One value of each model that has it.
  const auto add = [&](const char* name, const char* help, auto value) {
    MetricFamily& family = families.Gauge(name, help);
    for (const ServerState::Model& model : state.models) {
      const std::optional<double> given = value(model.overview);
      if (given.has_value()) family.Add(*given, {{"model", model.name}});
    }
  };
  using Of = const ModelOverview&;
  add("ema_model_step", "Step of the newest version; 0 if there is none.",
      [](Of model) { return model.step; });
  add("ema_model_version", "Number of the newest version; 0 if there is none.",
      [](Of model) { return model.version.version; });
  add("ema_model_durable_step",
      "Step of the newest version that is on the disk; 0 if there is none.",
      [](Of model) { return model.durable_step; });
  add("ema_model_unsaved_steps", "Steps that a crash would lose.",
      [](Of model) { return std::max<int64_t>(model.step - model.durable_step, 0); });
  add("ema_model_lag_steps",
      "Steps between the newest version and the newest step that a trainer has begun to push.",
      [](Of model) { return std::max<int64_t>(model.begun_step - model.step, 0); });
  add("ema_model_last_commit_timestamp_seconds", "Commit time of the newest version.",
      [](Of model) {
        return model.version.version > 0 ? std::optional(UnixSeconds(model.commit_time))
                                         : std::nullopt;
      });
  add("ema_model_reserved_bytes", "Memory that is reserved for the model.",
      [](Of model) { return model.reserved_bytes; });
  add("ema_sessions_open", "Steps that are being pushed.",
      [](Of model) { return model.session.has_value() ? 1 : 0; });
  add("ema_session_age_seconds", "Age of the step that is being pushed; 0 if there is none.",
      [](Of model) {
        return model.session.has_value() ? absl::ToDoubleSeconds(model.session->age) : 0;
      });
}

void AddTracks(const ServerState& state, MetricFamilies& families) {
  MetricFamily& norms =
      families.Gauge("ema_track_norm", "Norm of the average, if it has been computed.");
  MetricFamily& distances =
      families.Gauge("ema_track_distance",
                     "Distance of the average from the raw weights, if it has been computed.");
  MetricFamily& weights = families.Gauge("ema_track_update_weight",
                                         "Weight of the track's last update; 0 if it is unknown.");
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
}

void AddMemory(const ServerState& state, MetricFamilies& families) {
  const ServerState::Memory& memory = state.memory;
  families.Gauge("ema_memory_budget_bytes", "Memory budget of all models together.",
                 memory.budget_bytes);
  families.Gauge("ema_memory_reserved_bytes",
                 "Part of the memory budget that is reserved for models.", memory.reserved_bytes);
  families
      .Gauge("ema_memory_used_bytes",
             "Memory in use: blocks of averages and freed blocks kept for reuse, both in "
             "device memory; copies of GPU blocks for readers, in host memory.")
      .Add(memory.device_use.block_bytes, {{"kind", "blocks"}})
      .Add(memory.device_use.kept_bytes, {{"kind", "kept"}})
      .Add(memory.device_use.host_copy_bytes, {{"kind", "host_copies"}});
  families.Gauge("ema_device_memory_bytes", "All memory of the device that the server may use.",
                 memory.device_bytes);
  families.Gauge("ema_memory_formula_bytes", "Maximum host memory of each part of the server.")
      .Add(memory.formula.process_bytes, {{"part", "process"}})
      .Add(memory.host_model_bytes, {{"part", "models"}})
      .Add(memory.formula.host_budget_bytes, {{"part", "files_and_casts"}})
      .Add(memory.formula.stream_bytes, {{"part", "streams"}})
      .Add(memory.formula.waiting_bytes, {{"part", "waiting"}})
      .Add(memory.formula.record_bytes, {{"part", "records"}})
      .Add(memory.formula.kept_bytes, {{"part", "kept"}});
}

void AddUsage(const ServerState& state, MetricFamilies& families) {
  families
      .Gauge("ema_streams_open",
             "Open push, pull and watch streams, including those over same-host lanes.")
      .Add(state.usage.push_streams, {{"kind", "push"}})
      .Add(state.usage.pull_streams, {{"kind", "pull"}})
      .Add(state.usage.watch_streams, {{"kind", "watch"}});
  families.Gauge("ema_streams_limit", "Maximum number of open streams.")
      .Add(state.limits.max_push_streams, {{"kind", "push"}})
      .Add(state.limits.max_pull_streams, {{"kind", "pull"}})
      .Add(state.limits.max_watch_streams, {{"kind", "watch"}});
  families.Gauge("ema_sessions_limit",
                 "Maximum number of steps that are being pushed, over all models.",
                 state.max_sessions);
  families.Gauge("ema_connections_open", "Open gRPC connections.", state.usage.connections);
  families.Gauge("ema_connections_limit", "Maximum number of open connections.",
                 state.limits.max_connections);
  families.Gauge("ema_models", "Number of models.", static_cast<double>(state.models.size()));
  families.Gauge("ema_models_limit", "Maximum number of models.", state.max_models);
}

void AddCheckpoints(const ServerState& state, MetricFamilies& families) {
  MetricFamily& checkpoints = families.Gauge(
      "ema_checkpoints",
      "Checkpoints of a model by state: complete; unreadable (complete, but the disk "
      "returned an error); corrupt (set aside, or missing although LATEST names it; a "
      "corrupt file of labels counts, too); abandoned (set aside, because a crash left it "
      "newer than LATEST); failed (the last attempt to save it failed).");
  for (const auto& [model, counts] : state.checkpoints) {
    checkpoints.Add(counts.complete, {{"model", model}, {"state", "complete"}})
        .Add(counts.unreadable, {{"model", model}, {"state", "unreadable"}})
        .Add(counts.failed, {{"model", model}, {"state", "failed"}})
        .Add(counts.corrupt, {{"model", model}, {"state", "corrupt"}})
        .Add(counts.abandoned, {{"model", model}, {"state", "abandoned"}});
  }
  if (state.data_dir_free_bytes.has_value()) {
    families.Gauge("ema_data_dir_free_bytes",
                   "Free bytes for the server on the disk of the data directory, updated every ten "
                   "seconds and after each queued save.",
                   *state.data_dir_free_bytes);
  }
  if (state.scrub_time.has_value()) {
    families.Gauge("ema_checkpoints_last_scrub_timestamp_seconds",
                   "Time at which this server, or an earlier one, last finished reading all "
                   "checkpoints again; before the first time, when the server started to do so.",
                   UnixSeconds(*state.scrub_time));
  }
  if (state.save_interval.has_value()) {
    families.Gauge("ema_save_interval_seconds", "Time between automatic saves, --save-every.",
                   absl::ToDoubleSeconds(*state.save_interval));
  }
  families.Gauge(
      "ema_checkpoint_store_read_only",
      "1 if nothing can be saved: an fsync has failed, the disk is read-only, or the data "
      "directory is missing or has been replaced.",
      state.is_store_read_only ? 1 : 0);
}

void AddGroup(const GroupInfo& group, MetricFamilies& families) {
  const auto is_there = [](const GroupInfo::Member& member) { return !member.missing.has_value(); };
  families.Gauge(
      "ema_group_members", "Servers that have joined the group.",
      static_cast<double>(std::count_if(group.members.begin(), group.members.end(), is_there)));
  families.Gauge("ema_group_registry_contact_age_seconds",
                 "Time since the group's registry last answered.",
                 absl::ToDoubleSeconds(group.registry.since_contact));
  MetricFamily& incarnations =
      families.Gauge("ema_group_incarnation",
                     "Incarnation of the model: the time at which it began, in microseconds.");
  MetricFamily& degraded = families.Gauge(
      "ema_group_degraded_seconds",
      "For how long no step of the model could be committed, as far as this server knows.");
  MetricFamily& returns =
      families.Counter("ema_group_checkpoint_returns_total",
                       "Times that the model has returned to a checkpoint on all servers.");
  MetricFamily& waits = families.Counter(
      "ema_group_commit_wait_seconds_total",
      "Time that steps, complete at this server, have waited for the other servers.");
  MetricFamily& rounds =
      families.Gauge("ema_group_round", "Round of the model; only at the model's home.");
  MetricFamily& ages = families.Gauge(
      "ema_group_checkpoint_age_seconds",
      "Time since the version of the newest checkpoint was committed; only at the model's home.");
  MetricFamily& copies = families.Gauge(
      "ema_group_copy_step", "Step of the newest copy of the model in the servers' --copy-dir.");
  for (const GroupInfo::Model& model : group.models) {
    const MetricLabels labels = {{"model", model.name}};
    incarnations.Add(static_cast<double>(model.incarnation), labels);
    degraded.Add(absl::ToDoubleSeconds(model.degraded), labels);
    returns.Add(static_cast<double>(model.checkpoint_return_count), labels);
    waits.Add(absl::ToDoubleSeconds(model.commit_wait), labels);
    if (model.copy_step.has_value()) copies.Add(static_cast<double>(*model.copy_step), labels);
    if (!model.progress.has_value()) continue;
    rounds.Add(static_cast<double>(model.progress->round), labels);
    if (const auto age = model.progress->checkpoint_age) {
      ages.Add(absl::ToDoubleSeconds(*age), labels);
    }
  }
}

void AddHealth(const ServerState& state, MetricFamilies& families) {
  families.Gauge("ema_device_usable", "0 after a permanent failure of the device, else 1.",
                 state.device_health.ok() ? 1 : 0);
  families.Gauge("ema_health_serving", "1 if health checks report SERVING.",
                 state.health.ok() ? 1 : 0);
  families.Gauge("ema_recovering",
                 "1 while the server reads its checkpoints after a start and serves nothing yet.",
                 state.is_recovering ? 1 : 0);
  MetricFamily& expiry =
      families.Gauge("ema_tls_certificate_expiry_timestamp_seconds",
                     "Time at which the server's certificate expires; absent without TLS.");
  if (state.tls.has_value()) expiry.Add(UnixSeconds(state.tls->expiry));
  families.Gauge("ema_tls_files_rejected",
                 "1 if the TLS files are invalid and the server uses the previous ones.",
                 state.tls.has_value() && state.tls->has_rejected_files ? 1 : 0);
  families.Gauge(
      "ema_token_file_rejected",
      "1 if the token file is invalid or missing and the server uses the previous tokens.",
      state.has_rejected_tokens ? 1 : 0);
  MetricFamily& workers =
      families.Gauge("ema_worker_heartbeat_age_seconds",
                     "Time that a busy thread has made no progress; 0 if it is idle.");
  for (const Heartbeats::Age& worker : state.workers) {
    workers.Add(absl::ToDoubleSeconds(absl::FromChrono(worker.silent_time)),
                {{"worker", worker.name}, {"need", NeededForName(worker.needed_for)}});
  }
  families
      .Gauge("ema_build_info",
             "Always 1; the labels name the version, the device and the CUDA version.")
      .Add(1, {{"version", std::string(ServerVersion())},
               {"device", state.device},
               {"cuda", state.cuda_version}});
}

void AddProcess(MetricFamilies& families) {
  const ProcessStats stats = ReadProcessStats();
  families.Gauge("process_resident_memory_bytes", "Resident memory.", stats.resident_bytes);
  families.Gauge("ema_heap_allocated_bytes",
                 "Memory that is allocated from the heap, without freed memory that it keeps.",
                 AllocatedHeapBytes());
  families.Gauge("process_open_fds", "Open file descriptors.", stats.open_fds);
  families.Gauge("process_max_fds", "Maximum number of open file descriptors.", stats.max_fds);
  families.Gauge("process_start_time_seconds", "Start time of the process.",
                 stats.start_time_seconds);
  families.Counter("process_cpu_seconds_total", "User and system CPU time.").Add(stats.cpu_seconds);
  families
      .Counter("ema_log_lines_dropped_total",
               "Log lines that were dropped because stderr rejected them or was too slow.")
      .Add(static_cast<double>(DroppedLogLines()));
}

}  // namespace

void AddStateMetrics(const ServerState& state, MetricFamilies& families) {
  AddModels(state, families);
  AddTracks(state, families);
  AddMemory(state, families);
  AddUsage(state, families);
  AddCheckpoints(state, families);
  if (state.group.has_value()) AddGroup(*state.group, families);
  if (state.follow_contact.has_value()) {
    families.Gauge("ema_follow_contact_age_seconds",
                   "Time since the followed server last answered.",
                   absl::ToDoubleSeconds(state.now - *state.follow_contact));
  }
  AddHealth(state, families);
  AddProcess(families);
}

}  // namespace ema
