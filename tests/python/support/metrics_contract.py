# SPDX-License-Identifier: Apache-2.0
"""The metrics that the server promises, and dashboards and alerts may use: names and labels, without what
Prometheus adds."""

HISTOGRAMS = {
    "ema_push_duration_seconds": {"model"},
    "ema_push_phase_seconds": {"model", "phase"},
    "ema_pull_duration_seconds": {"model"},
    "ema_checkpoint_save_duration_seconds": {"model"},
}
METRICS: dict[str, set[str]] = {
    "ema_rpcs_total": {"rpc", "code"},
    "ema_rejects_total": {"rpc", "reason"},
    "ema_pushes_total": {"model", "result"},
    "ema_push_received_bytes_total": {"model"},
    "ema_pulls_total": {"model", "result"},
    "ema_pull_sent_bytes_total": {"model"},
    "ema_checkpoint_saves_total": {"model", "result"},
    "ema_connections_refused_total": {"reason"},
    "ema_skipped_tensors_total": {"model"},
    "ema_model_step": {"model"},
    "ema_model_version": {"model"},
    "ema_model_durable_step": {"model"},
    "ema_model_created_timestamp_seconds": {"model"},
    "ema_model_last_commit_timestamp_seconds": {"model"},
    "ema_model_lag_steps": {"model"},
    "ema_model_unsaved_steps": {"model"},
    "ema_model_reserved_bytes": {"model"},
    "ema_memory_budget_bytes": set(),
    "ema_memory_reserved_bytes": set(),
    "ema_memory_used_bytes": {"kind"},
    "ema_device_memory_bytes": set(),
    "ema_memory_formula_bytes": {"part"},
    "ema_sessions_open": {"model"},
    "ema_session_age_seconds": {"model"},
    "ema_streams_open": {"kind"},
    "ema_streams_limit": {"kind"},
    "ema_sessions_limit": set(),
    "ema_connections_open": set(),
    "ema_connections_limit": set(),
    "ema_models": set(),
    "ema_models_limit": set(),
    "ema_checkpoint_last_success_timestamp_seconds": {"model"},
    "ema_checkpoint_store_read_only": set(),
    "ema_save_interval_seconds": set(),
    "ema_checkpoints": {"model", "state"},
    "ema_checkpoints_last_scrub_timestamp_seconds": set(),
    "ema_data_dir_free_bytes": set(),
    "ema_track_norm": {"model", "track"},
    "ema_track_distance": {"model", "track"},
    "ema_track_update_weight": {"model", "track"},
    "ema_device_usable": set(),
    "ema_health_serving": set(),
    "ema_recovering": set(),
    "ema_worker_heartbeat_age_seconds": {"worker", "need"},
    "ema_tls_certificate_expiry_timestamp_seconds": set(),
    "ema_tls_files_rejected": set(),
    "ema_token_file_rejected": set(),
    "ema_build_info": {"version", "device", "cuda"},
    "ema_log_lines_dropped_total": set(),
    "ema_heap_allocated_bytes": set(),
    "process_resident_memory_bytes": set(),
    "process_open_fds": set(),
    "process_max_fds": set(),
    "process_start_time_seconds": set(),
    "process_cpu_seconds_total": set(),
}
# Of a server of a group.
GROUP_ONLY: dict[str, set[str]] = {
    "ema_group_members": set(),
    "ema_group_registry_contact_age_seconds": set(),
    "ema_group_incarnation": {"model"},
    "ema_group_round": {"model"},
    "ema_group_degraded_seconds": {"model"},
    "ema_group_checkpoint_returns_total": {"model"},
    "ema_group_commit_wait_seconds_total": {"model"},
    "ema_group_checkpoint_age_seconds": {"model"},
    "ema_group_copy_step": {"model"},
}
# Of a server that follows another one.
FOLLOWER_ONLY: dict[str, set[str]] = {"ema_follow_contact_age_seconds": set()}
METRICS |= GROUP_ONLY | FOLLOWER_ONLY
for _name, _labels in HISTOGRAMS.items():
    METRICS |= {f"{_name}_{suffix}": _labels for suffix in ("bucket", "sum", "count")}
# Of a server that speaks TLS.
TLS_ONLY = {"ema_tls_certificate_expiry_timestamp_seconds"}
