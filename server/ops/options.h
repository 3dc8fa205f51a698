// SPDX-License-Identifier: Apache-2.0
//
// The operator's settings. Precedence: command line, EMA_* environment, file, defaults.
#ifndef EMA_SERVER_OPS_OPTIONS_H_
#define EMA_SERVER_OPS_OPTIONS_H_

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "server/base/log_event.h"
#include "server/base/rpc_limits.h"

namespace ema {

// option_table.cc gives each its flag (`--data-dir`; `--threads` for thread_count), environment
// variable (`EMA_DATA_DIR`), key in the file (`data-dir`) and help.
struct ServerOptions {
  // Each host:port (port 0: any free one) or unix:/path. Only loopback addresses, unless there is
  // authentication or `allow_unauthenticated`.
  std::vector<std::string> listen = {"127.0.0.1:50051"};
  // host:port of metrics, health and the status page, which need no authentication. Empty: not
  // served.
  std::string http_listen;
  std::string port_file;        // Empty: none. Where the bound port is written when serving.
  std::string device = "auto";  // "auto", "cpu" or "cuda:N".
  int64_t memory_bytes = 0;     // Of all models. 0: 80 % of the memory that other parts leave.
  std::string data_dir;         // Empty: no checkpoints.
  // When versions are saved automatically, counted from the last save; 0: never for this reason.
  int64_t save_every_commits = 0;
  absl::Duration save_every = absl::Minutes(10);
  int64_t save_step_multiple = 0;
  // Checkpoints that are kept of each model: the newest `keep_last`, and multiples of
  // `keep_every_steps`.
  int64_t keep_last = 3;
  int64_t keep_every_steps = 0;                     // 0: none.
  absl::Duration scrub_interval = absl::Hours(24);  // Between re-reads of checkpoints. 0: never.
  // Statistics are computed of every N-th version of a model; 0: only on request.
  int64_t statistics_every_commits = 0;
  int64_t thread_count = 0;  // Completion-queue threads; 1 or more after ParseOptions().
  RpcLimits limits;
  int64_t max_sessions = 64;  // Steps that are pushed at once, over all models.
  int64_t max_models = 64;
  // PEM files. With a certificate, host:port addresses speak TLS only; with a client CA, clients
  // must have a certificate of it.
  std::string tls_cert;
  std::string tls_key;
  std::string tls_client_ca;
  std::string auth_tokens;  // Empty: no authentication by tokens.
  bool allow_unauthenticated = false;
  std::string same_host_lane = "on";  // "on" or "off": shared memory for clients of this host.
  // Path of the socket file through which they open it. Empty: an abstract socket, which only
  // clients in the server's network namespace can reach.
  std::string lane_socket;
  // Of all windows together (SharedMemory::CreateWindow()); 0: 1/16 of the host's memory.
  int64_t max_window_bytes = 0;
  // Name of the group of servers that keep models together. Empty: no group, and `member` to
  // `group_ca` are not used.
  std::string group;
  std::string member;     // This server's name in the group; not empty after ParseOptions().
  std::string advertise;  // HOST:PORT for clients and the other members.
  // Endpoints, such as "http://a:2379". All endpoints use the scheme of the first.
  std::vector<std::string> etcd;
  std::string etcd_ca;  // PEM files, for https.
  std::string etcd_cert;
  std::string etcd_key;
  std::string etcd_user;  // Empty: none.
  std::string etcd_password_file;
  // In place of etcd: the Kubernetes API.
  bool kubernetes = false;
  // URL of the API server. Empty: that of the cluster which this server runs in; the pod's service
  // account then has what the next three leave empty.
  std::string kubernetes_api;
  std::string kubernetes_namespace;
  std::string kubernetes_token_file;
  std::string kubernetes_ca;  // PEM file, for https.
  // How long the server may commit steps while the registry, etcd or the Kubernetes API, does not
  // answer.
  absl::Duration max_registry_outage = absl::Minutes(10);
  // How long a server may be missing before the others replace it; zero: for ever.
  absl::Duration replace_after;
  // A directory of this host for copies of the newest version, such as on a tmpfs; empty: none.
  std::string copy_dir;
  absl::Duration copy_every = absl::Minutes(1);
  std::string group_token_file;  // With this server's token for the other members.
  std::string group_ca;  // PEM file with the CA of the members' certificates; empty: tls_client_ca.
  // URL of a model on another server, or group of servers, that this server copies for readers,
  // such as "ema://a:50051/m": see ParseFollow(). Empty: none, and the next two are not used.
  std::string follow;
  std::string follow_token_file;  // With the token for that server; empty: none.
  std::string follow_ca;          // PEM file, for emas://; empty: the system's CAs.
  // After SIGTERM: how long all calls are still served while probes report NOT_SERVING; then how
  // long running calls may take.
  absl::Duration drain_delay = absl::ZeroDuration();
  absl::Duration drain_grace = absl::Seconds(25);
  std::string log_level = "info";           // "debug", "info", "warn" or "error".
  std::string log_format = "text";          // "text" or "json".
  int64_t block_bytes = int64_t{32} << 20;  // For tests; not in --help.
  int64_t max_file_bytes = 5'000'000'000;   // Of weights, in one file of a checkpoint.
};

// The parts of ServerOptions::follow.
struct FollowedModel {
  std::string address;  // As Client::Create() takes it.
  std::string model;
};
// INVALID_ARGUMENT: `url` is not ema://HOST:PORT[,HOST:PORT...]/MODEL, or that with emas://.
absl::StatusOr<FollowedModel> ParseFollow(const std::string& url);

struct ParsedOptions {
  ServerOptions options;
  std::string config_file;  // The file that was read; empty: none.
  // For the log, or for stderr if the process should exit: EMA_* variables that nothing reads, and
  // settings that are probably not intended.
  std::vector<LogEvent> warnings;
  // Set after --help, --version, --print-config or a usage error: the process should print `text`
  // (to stdout if exit_code is 0, else to stderr) and exit.
  bool should_exit = false;
  int exit_code = 0;  // 2: usage error.
  std::string text;
};

// Reads argv, the environment, and the file that --config or EMA_CONFIG names. `text` holds all
// errors, each on a line that names the option, its value, and what is expected; those in the file
// also the line. A value in the file that a flag or the environment replaces is not checked. Not
// safe against a concurrent setenv().
ParsedOptions ParseOptions(int argc, const char* const* argv);

// The version of this program, such as "0.1.0", as --version prints it.
std::string_view ServerVersion();

// The event that names every limit with its value.
LogEvent LimitsEvent(const ServerOptions& options);

}  // namespace ema

#endif  // EMA_SERVER_OPS_OPTIONS_H_
