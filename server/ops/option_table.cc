// SPDX-License-Identifier: Apache-2.0
#include "server/ops/option_table.h"

#include <sys/un.h>
#include <unistd.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <array>
#include <charconv>
#include <climits>
#include <cstdint>
#include <cstdlib>
#include <functional>
#include <optional>
#include <system_error>
#include <utility>

#include "absl/algorithm/container.h"
#include "absl/status/status.h"
#include "absl/strings/ascii.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_replace.h"
#include "absl/strings/str_split.h"
#include "ema/internal/status_macros.h"
#include "ema/manifest.h"

namespace ema {
namespace {

constexpr std::string_view kVariablePrefix = "EMA_";

// https://kubernetes.io/docs/concepts/services-networking/service/#environment-variables
bool IsKubernetesVariable(std::string_view name) {
  constexpr std::string_view kPort = "_PORT";
  if (name.ends_with("_SERVICE_HOST") || name.find("_SERVICE_PORT") != std::string_view::npos) {
    return true;
  }
  const size_t port = name.find(kPort);
  if (port == std::string_view::npos) return false;
  const std::string_view rest = name.substr(port + kPort.size());
  return rest.empty() || (rest.size() > 1 && rest[0] == '_' && absl::ascii_isdigit(rest[1]));
}

constexpr int64_t kMostSteps = int64_t{1} << 62;
// gRPC counts milliseconds in an int.
constexpr absl::Duration kMostOfTransport = absl::Hours(24);

absl::Status Bad(const std::string& text, const std::string& problem) {
  return absl::InvalidArgumentError(absl::StrCat("\"", text, "\" ", problem));
}

// INVALID_ARGUMENT: names the text and what is expected, not the option.
using Check = std::function<absl::Status(const std::string&)>;

absl::Status Anything(const std::string&) { return absl::OkStatus(); }

Check OneOf(std::vector<std::string> names) {
  return [names = std::move(names)](const std::string& text) {
    if (std::find(names.begin(), names.end(), text) != names.end()) return absl::OkStatus();
    return Bad(text, absl::StrCat("is not one of ", absl::StrJoin(names, ", ")));
  };
}

// The number behind the last colon of "x:7"; -1: there is none.
int NumberAfterColon(const std::string& text) {
  const size_t colon = text.rfind(':');
  if (colon == std::string::npos || colon == 0) return -1;
  int number = -1;
  const char* const end = text.data() + text.size();
  const std::from_chars_result result = std::from_chars(text.data() + colon + 1, end, number);
  return result.ec == std::errc() && result.ptr == end ? number : -1;
}

absl::Status CheckListen(const std::string& text) {
  if (text.starts_with("unix:/")) return absl::OkStatus();
  const int port = NumberAfterColon(text);
  if (port >= 0 && port <= 65535) return absl::OkStatus();
  return Bad(text, "is not host:port, such as 127.0.0.1:50051 or [::]:0, nor unix:/path");
}

// Checks the form only; MakeDevice() checks that the device exists.
absl::Status CheckDevice(const std::string& text) {
  if (text == "auto" || text == "cpu") return absl::OkStatus();
  if (text.starts_with("cuda:") && NumberAfterColon(text) >= 0) return absl::OkStatus();
  return Bad(text, "is not auto, cpu, or a GPU such as cuda:0");
}

absl::Status CheckHttpListen(const std::string& text) {
  const int port = NumberAfterColon(text);
  if (text.empty() || (port >= 0 && port <= 65535 && !text.starts_with("unix:"))) {
    return absl::OkStatus();
  }
  return Bad(text, "is not host:port, such as 127.0.0.1:8080 or [::]:0");
}

// An address that other hosts can connect to.
absl::Status CheckAdvertise(const std::string& text) {
  const int port = NumberAfterColon(text);
  const bool is_any = text.starts_with("0.0.0.0:") || text.starts_with("[::]:");
  if (text.empty() || (port > 0 && port <= 65535 && !text.starts_with("unix:") && !is_any)) {
    return absl::OkStatus();
  }
  return Bad(text, "is not host:port of this server, such as ema-0.example:50051");
}

absl::Status CheckSocketPath(const std::string& text) {
  constexpr size_t kMaxBytes = sizeof(sockaddr_un::sun_path) - 1;
  if (text.empty() || (text.starts_with('/') && text.size() <= kMaxBytes)) return absl::OkStatus();
  return Bad(text, absl::StrCat("is not an absolute path of at most ", kMaxBytes,
                                " bytes, such as /run/ema/lane.sock"));
}

absl::Status CheckName(const std::string& text) {
  return text.empty() ? absl::OkStatus() : ValidateName("name", text);
}

absl::Status CheckFollow(const std::string& text) {
  return text.empty() ? absl::OkStatus() : ParseFollow(text).status();
}

absl::Status CheckNotEmpty(const std::string& text) {
  return text.empty() ? Bad(text, "is empty") : absl::OkStatus();
}

// An integer without a unit.
std::optional<int64_t> ParseCount(const std::string& text) {
  int64_t count = 0;
  const char* const end = text.data() + text.size();
  const std::from_chars_result result = std::from_chars(text.data(), end, count);
  if (result.ec != std::errc() || result.ptr != end) return std::nullopt;
  return count;
}

std::string FormatCount(int64_t count) { return absl::StrCat(count); }

// Units are powers of 1024: "4G", "4GiB" and "4gb" are the same.
std::optional<int64_t> ParseBytes(const std::string& text) {
  std::string bytes = text;
  try {
    if (!CLI::AsSizeValue(/*kb_is_1000=*/false)(bytes).empty()) return std::nullopt;
  } catch (const CLI::ValidationError&) {
    return std::nullopt;
  }
  return ParseCount(bytes);
}

// In the largest unit that gives a whole number: "8MiB", "5000000000".
std::string FormatBytes(int64_t bytes) {
  constexpr std::string_view kUnits = "KMGT";
  size_t unit = 0;  // How many of kUnits have been divided away.
  for (; bytes > 0 && bytes % 1024 == 0 && unit < kUnits.size(); ++unit) bytes /= 1024;
  return unit == 0 ? absl::StrCat(bytes)
                   : absl::StrCat(bytes, std::string(1, kUnits[unit - 1]), "iB");
}

std::optional<absl::Duration> ParseTime(const std::string& text) {
  absl::Duration duration;
  return absl::ParseDuration(text, &duration) ? std::optional(duration) : std::nullopt;
}

// How a quantity is written.
template <typename T>
struct Notation {
  std::string type_name;  // In --help.
  std::string noun;       // In errors, with `examples`.
  std::string examples;
  std::optional<T> (*parse)(const std::string& text);
  std::string (*format)(T value);
};

// Declares the options, a group after the other. Each method declares one option.
class Table {
 public:
  Table(CLI::App& app, OptionProblems& problems) : app_(app), problems_(problems) {}

  void Group(std::string_view name) { group_ = name; }

  void Text(const std::string& name, std::string& value, const std::string& type,
            const std::string& help, Check check = Anything) {
    const auto set = [&value, check = std::move(check)](const std::string& text) {
      EMA_RETURN_IF_ERROR(check(text));
      value = text;
      return absl::OkStatus();
    };
    Add(name, type, help, set, [&value] { return value; });
  }

  // Texts that are separated by commas. None is valid if that is the default.
  void Texts(const std::string& name, std::vector<std::string>& values, const std::string& type,
             const std::string& help, Check check) {
    const auto set = [&values, may_be_empty = values.empty(),
                      check = std::move(check)](const std::string& text) {
      std::vector<std::string> given;
      if (!text.empty() || !may_be_empty) given = absl::StrSplit(text, ',');
      for (const std::string& element : given) EMA_RETURN_IF_ERROR(check(element));
      values = std::move(given);
      return absl::OkStatus();
    };
    Add(name, type, help, set, [&values] {
      return absl::StrJoin(values, ",");
    })->expected(CLI::detail::expected_max_vector_size);
  }

  // On the command line it needs no value.
  void Switch(const std::string& name, bool& value, const std::string& help) {
    const auto set = [&value](const std::string& text) {
      if (!absl::SimpleAtob(text, &value)) return Bad(text, "is neither true nor false");
      return absl::OkStatus();
    };
    Add(name, "", help, set, [&value] { return value ? "true" : "false"; })
        ->type_size(0)
        ->expected(0)
        ->multi_option_policy(CLI::MultiOptionPolicy::TakeLast);
  }

  void Count(const std::string& name, int64_t& value, int64_t least, const std::string& help,
             int64_t most = int64_t{1} << 20) {
    Quantity<int64_t>(name, value, {"N", "an integer", "", ParseCount, FormatCount}, least, most,
                      help);
  }

  void Bytes(const std::string& name, int64_t& value, int64_t least, const std::string& help,
             int64_t most = int64_t{1} << 62) {
    Quantity<int64_t>(
        name, value,
        {"BYTES", "a number of bytes", ", such as 1048576, 512M or 4G", ParseBytes, FormatBytes},
        least, most, help);
  }

  void Duration(const std::string& name, absl::Duration& value, absl::Duration least,
                const std::string& help, absl::Duration most = absl::Hours(24 * 365)) {
    Quantity<absl::Duration>(
        name, value,
        {"DURATION", "a duration", ", such as 30s or 1m30s", ParseTime, absl::FormatDuration},
        least, most, help);
  }

 private:
  template <typename T>
  void Quantity(const std::string& name, T& value, const Notation<T>& notation, T least, T most,
                const std::string& help) {
    const auto set = [&value, notation, least, most](const std::string& text) {
      const std::optional<T> given = notation.parse(text);
      if (!given.has_value() || *given < least || *given > most) {
        return Bad(text, absl::StrCat("is not ", notation.noun, " from ", notation.format(least),
                                      " to ", notation.format(most), notation.examples));
      }
      value = *given;
      return absl::OkStatus();
    };
    Add(name, notation.type_name, help, set,
        [&value, format = notation.format] { return format(value); });
  }

  CLI::Option* Add(const std::string& name, const std::string& type, const std::string& help,
                   Check set, std::function<std::string()> get) {
    const CLI::callback_t callback = [&app = app_, &problems = problems_, name,
                                      set = std::move(set)](const CLI::results_t& given) {
      const absl::Status status = set(absl::StrJoin(given, ","));
      if (!status.ok()) {
        problems.texts.push_back(absl::StrCat(NameWhereSet(app, name, problems.file), ": ",
                                              std::string(status.message())));
      }
      return true;
    };
    const std::string variable = absl::StrReplaceAll(absl::AsciiStrToUpper(name), {{"-", "_"}});
    return app_.add_option("--" + name, callback, help, /*defaulted=*/true, std::move(get))
        ->type_name(type)
        ->envname(absl::StrCat(std::string(kVariablePrefix), variable))
        ->group(group_);
  }

  CLI::App& app_;
  OptionProblems& problems_;
  std::string group_;
};

void AddAddresses(Table& table, ServerOptions& o) {
  table.Group("Addresses");
  table.Texts("listen", o.listen, "HOST:PORT",
              "Addresses to serve gRPC on, separated by commas: host:port (port 0 picks a "
              "free port) or unix:/path",
              CheckListen);
  table.Text("http-listen", o.http_listen, "HOST:PORT",
             "Address for Prometheus metrics (/metrics), probes (/livez, /readyz) and a "
             "status page (/), such as 127.0.0.1:8080. It has no authentication: everybody "
             "who can reach it can read it. Empty: disabled",
             CheckHttpListen);
  table.Text("port-file", o.port_file, "FILE",
             "Write the bound port to this file, atomically, once the server serves. Empty: "
             "do not write it");
  table.Text("same-host-lane", o.same_host_lane, "on|off",
             "Let clients on this host that run as the same user push and pull through "
             "shared memory",
             OneOf({"on", "off"}));
  table.Text("lane-socket", o.lane_socket, "PATH",
             "Open the same-host lane through this socket file, for clients in containers with "
             "a network of their own: share its folder with them, at the same path. Empty: through "
             "a socket that only clients in the server's network namespace can reach",
             CheckSocketPath);
}

void AddSecurity(Table& table, ServerOptions& o) {
  table.Group("Security");
  table.Text("tls-cert", o.tls_cert, "FILE",
             "PEM file with the server's certificate and its chain. With it, host:port "
             "addresses accept only TLS. A changed file is reloaded, unless it is invalid. "
             "Empty: no TLS");
  table.Text("tls-key", o.tls_key, "FILE", "PEM file with the private key of the certificate");
  table.Text("tls-client-ca", o.tls_client_ca, "FILE",
             "PEM file with the CA that must have signed the certificate of every client. "
             "Without --auth-tokens, each client with such a certificate has the rights of "
             "an admin. Empty: clients need no certificate");
  table.Text("auth-tokens", o.auth_tokens, "FILE",
             "File of bearer tokens. Each line holds a role (evaluator, trainer, admin or server), "
             "a token, and optionally the models that it is valid for, such as vision-*. Calls "
             "without a valid token are rejected. A changed file is reloaded; replace it by "
             "a rename. Empty: clients need no token");
  table.Switch("allow-unauthenticated", o.allow_unauthenticated,
               "Serve without authentication. By default a server without tokens or client "
               "certificates listens on loopback addresses and unix sockets only");
}

void AddDevice(Table& table, ServerOptions& o) {
  table.Group("Memory and device");
  table.Text("device", o.device, "NAME",
             "Where the averages are kept: cpu, a GPU such as cuda:0, or auto, which takes "
             "the first GPU that this build supports, or cpu if there is none",
             CheckDevice);
  table.Bytes("memory-bytes", o.memory_bytes, 0,
              "Memory for all models together, such as 512M or 4G. 0: 80 % of the device's memory "
              "that is left after the server's other parts");
  table.Bytes("max-window-bytes", o.max_window_bytes, 0,
              "Limit of the memory that trainers on this host with weights on a GPU share with the "
              "server, by default 64 MiB each and for each lane. 0: 1/16 of the host's memory");
  table.Count("threads", o.thread_count, 0,
              "Threads that serve RPCs. 0: half of the processors, at least 1", 1024);
  table.Group("");  // Not in --help.
  table.Bytes("block-bytes", o.block_bytes, kBlockGranule, "Size of a block of weights");
}

void AddCheckpoints(Table& table, ServerOptions& o) {
  table.Group("Checkpoints");
  table.Text("data-dir", o.data_dir, "DIR",
             "Directory for checkpoints, for one server, or for all servers of one group. It is "
             "created if it does not exist. Empty: no checkpoints");
  table.Count("save-every-commits", o.save_every_commits, 0,
              "Save a model automatically N commits after its last save. 0: disabled");
  table.Duration("save-every", o.save_every, absl::ZeroDuration(),
                 "Save a model automatically this long after its last save, if it has new "
                 "commits. 0: disabled");
  table.Count("save-step-multiple", o.save_step_multiple, 0,
              "Save a model automatically when its step has reached a multiple of this "
              "number. 0: disabled",
              kMostSteps);
  table.Count("keep-last", o.keep_last, 1,
              "Keep the newest N checkpoints of each model. Those with a label or a KEEP file "
              "are always kept");
  table.Count("keep-every-steps", o.keep_every_steps, 0,
              "Also keep the checkpoints whose step is a multiple of this number. 0: disabled",
              kMostSteps);
  table.Duration("scrub-interval", o.scrub_interval, absl::ZeroDuration(),
                 "Re-read every checkpoint at this interval, to find corrupt bytes. 0: never");
  table.Bytes("max-file-bytes", o.max_file_bytes, 1,
              "Largest size of the weights in one file of a checkpoint. A larger track is "
              "split into several files, in the format of Hugging Face");
}

void AddStatistics(Table& table, ServerOptions& o) {
  table.Group("Statistics");
  table.Count("statistics-every-commits", o.statistics_every_commits, 0,
              "Every N commits of a model, compute the norms of its averages and their distances "
              "from the raw weights, in the background. The computation pins one version, as a "
              "reader does. 0: only on request");
}

void AddLimits(Table& table, ServerOptions& o) {
  table.Group(kLimits);
  table.Count("max-push-streams", o.limits.max_push_streams, 1,
              "Maximum number of concurrent push streams");
  table.Count("max-pull-streams", o.limits.max_pull_streams, 1,
              "Maximum number of concurrent pull streams");
  table.Count("max-watch-streams", o.limits.max_watch_streams, 1,
              "Maximum number of concurrent watches");
  table.Count("max-sessions", o.max_sessions, 1,
              "Maximum number of steps that are being pushed, over all models; each model has "
              "at most one");
  table.Count("max-connections", o.limits.max_connections, 1,
              "Maximum number of open connections over TCP, and separately over unix sockets");
  table.Count("max-streams-per-connection", o.limits.max_streams_per_connection, 1,
              "Maximum number of concurrent calls on one connection");
  table.Bytes("min-pull-bytes-per-second", o.limits.min_pull_bytes_per_second, 0,
              "When max_pinned_versions prevents a reader from pinning another version, end pulls "
              "that are slower than this. 0: end none",
              int64_t{1} << 40);
  table.Bytes("max-message-bytes", o.limits.max_message_bytes, int64_t{5} << 20,
              "Largest message that the server accepts. Clients send up to 4 MiB and a header",
              int64_t{1} << 30);
  table.Bytes("max-metadata-bytes", o.limits.max_metadata_bytes, int64_t{1} << 10,
              "Largest size of the headers of a call", int64_t{1} << 20);
  table.Count("max-models", o.max_models, 1, "Maximum number of models");
}

void AddTimeLimits(Table& table, ServerOptions& o) {
  table.Group(kTimeLimits);
  table.Duration("handshake-timeout", o.limits.handshake_timeout, absl::Milliseconds(1),
                 "Close a new connection whose peer has not begun to speak HTTP/2 within this "
                 "time",
                 kMostOfTransport);
  table.Duration("keepalive-time", o.limits.keepalive_time, absl::Seconds(1),
                 "Ping a peer that has been silent for this long", kMostOfTransport);
  table.Duration("keepalive-timeout", o.limits.keepalive_timeout, absl::Milliseconds(1),
                 "Close a connection whose peer has not answered that ping within this time",
                 kMostOfTransport);
  table.Duration("max-connection-idle", o.limits.max_connection_idle, absl::Milliseconds(1),
                 "Close a connection that has had no call for this long. Clients reconnect by "
                 "themselves",
                 kMostOfTransport);
  table.Duration("session-timeout", o.limits.session_timeout, absl::Milliseconds(1),
                 "Drop a step that is being pushed and has made no progress for this long");
  table.Duration("stream-timeout", o.limits.stream_timeout, absl::Milliseconds(1),
                 "End a stream whose peer has sent or received nothing for this long");
  table.Duration("drain-delay", o.drain_delay, absl::ZeroDuration(),
                 "After SIGTERM, keep serving for this long while health checks and /readyz "
                 "already fail, so that load balancers can notice");
  table.Duration("drain-grace", o.drain_grace, absl::ZeroDuration(),
                 "After the drain delay, reject new work and wait at most this long for running "
                 "calls");
}

void AddLogging(Table& table, ServerOptions& o) {
  table.Group("Logging");
  table.Text("log-level", o.log_level, "LEVEL",
             "Least severe events to log: debug, info, warn or error",
             OneOf({"debug", "info", "warn", "error"}));
  table.Text("log-format", o.log_format, "text|json",
             "Format of the log: text or one JSON object per line", OneOf({"text", "json"}));
}

void AddGroup(Table& table, ServerOptions& o) {
  table.Group("Group of servers");
  table.Text(
      "group", o.group, "NAME",
      "Name of the group of servers that keep models together, each server a part of every "
      "model. It needs --advertise, and --etcd or --kubernetes, and all servers need the same "
      "directory as --data-dir. Empty: this server is on its own",
      CheckName);
  table.Text("member", o.member, "NAME",
             "Name of this server in its group. A restarted server must have the same name. "
             "Empty: the host's name",
             CheckName);
  table.Text("advertise", o.advertise, "HOST:PORT",
             "Address of this server for clients and for the other servers of its group",
             CheckAdvertise);
  table.Texts("etcd", o.etcd, "URL",
              "Endpoints of the group's etcd, separated by commas, such as http://a:2379,b:2379",
              CheckNotEmpty);
  table.Text("etcd-ca", o.etcd_ca, "FILE",
             "PEM file with the CA of etcd's certificates. Empty: the system's CAs");
  table.Text("etcd-cert", o.etcd_cert, "FILE",
             "PEM file with this server's certificate for etcd. Empty: none");
  table.Text("etcd-key", o.etcd_key, "FILE", "PEM file with the private key of --etcd-cert");
  table.Text("etcd-user", o.etcd_user, "NAME", "User name of this server in etcd. Empty: none");
  table.Text("etcd-password-file", o.etcd_password_file, "FILE",
             "File with the password of --etcd-user");
  table.Switch("kubernetes", o.kubernetes,
               "Keep the group's records in the Kubernetes API, in place of etcd. The server must "
               "be able to change ConfigMaps and Leases of its namespace");
  table.Text("kubernetes-api", o.kubernetes_api, "URL",
             "API server, such as https://10.0.0.1:6443, with --kubernetes-namespace. Empty: that "
             "of the cluster that this server runs in, and the pod's service account");
  table.Text("kubernetes-namespace", o.kubernetes_namespace, "NAME",
             "Namespace of the group's records. Empty: that of the pod");
  table.Text("kubernetes-token-file", o.kubernetes_token_file, "FILE",
             "File with the token for the API server, which is read again for each request. Empty: "
             "that of the pod; with --kubernetes-api: none");
  table.Text("kubernetes-ca", o.kubernetes_ca, "FILE",
             "PEM file with the CA of the API server's certificate. Empty: that of the pod; with "
             "--kubernetes-api: the system's CAs");
  table.Duration(
      "max-registry-outage", o.max_registry_outage, absl::Seconds(10),
      "While the registry, which is etcd or the Kubernetes API, does not answer or rejects "
      "this server, keep committing steps for this long. Afterwards reject them, because "
      "another server may have replaced this one");
  table.Duration("replace-after", o.replace_after, absl::ZeroDuration(),
                 "Move the tensors of a server of the group to the others when it has been missing "
                 "for this long. All steps after the newest checkpoint are lost. 0: never");
  table.Text("copy-dir", o.copy_dir, "DIR",
             "Directory of this host, such as one on a tmpfs, for copies of the newest version: of "
             "this server's part of each model, and of another server's. After a crash of one "
             "server, models return to them if they are newer than the newest checkpoint. All "
             "servers of the group need such a directory. Empty: no copies");
  table.Duration("copy-every", o.copy_every, absl::Seconds(1),
                 "Copy the newest version to --copy-dir at this interval");
  table.Text("group-token-file", o.group_token_file, "FILE",
             "File with the token that this server presents to the others, which must have it in "
             "their --auth-tokens with the role server. Empty: none");
  table.Text("group-ca", o.group_ca, "FILE",
             "PEM file with the CA that must have signed the --tls-cert of all servers of the "
             "group. Clients need no certificate of it. Empty: the CA of --tls-client-ca, and "
             "without that the system's CAs");
}

void AddFollow(Table& table, ServerOptions& o) {
  table.Group("Read replica");
  table.Text(
      "follow", o.follow, "URL",
      "Copy each version of this model from another server, or a group of servers, and serve "
      "it to readers under the same version numbers, such as ema://ema.example:50051/my-model "
      "(emas:// with TLS). Versions that the copy has no time for are skipped. Empty: this "
      "server accepts pushes",
      CheckFollow);
  table.Text(
      "follow-token-file", o.follow_token_file, "FILE",
      "File with the token that this server presents to the followed one. The role evaluator "
      "is enough. Empty: none");
  table.Text("follow-ca", o.follow_ca, "FILE",
             "PEM file with the CA of the followed server's certificate. Empty: the system's CAs. "
             "If that server asks for a certificate, this server presents its --tls-cert");
}

}  // namespace

std::string SourceOf(const CLI::App& app, const CLI::Option& option) {
  if (option.empty()) return "default";
  if (absl::c_linear_search(app.parse_order(), &option)) return "flag";
  const char* const variable = std::getenv(option.get_envname().c_str());
  return variable == nullptr || *variable == '\0' ? "file" : option.get_envname();
}

std::string NameWhereSet(const CLI::App& app, const std::string& name, const std::string& file) {
  const std::string source = SourceOf(app, *app.get_option("--" + name));
  if (source == "file") return absl::StrCat(file, ": ", name);
  return source == "flag" || source == "default" ? "--" + name : source;
}

std::vector<std::string> EmaVariables() {
  std::vector<std::string> names;
  for (char** variable = environ; variable != nullptr && *variable != nullptr; ++variable) {
    const std::string_view text = *variable;
    const size_t equals = text.find('=');
    if (!text.starts_with(kVariablePrefix) || equals == std::string_view::npos) continue;
    const std::string_view name = text.substr(0, equals);
    if (equals + 1 < text.size() && !IsKubernetesVariable(name)) names.emplace_back(name);
  }
  std::sort(names.begin(), names.end());
  return names;
}

void AddOptions(ServerOptions& options, CLI::App& app, OptionProblems& problems) {
  Table table(app, problems);
  AddAddresses(table, options);
  AddSecurity(table, options);
  AddDevice(table, options);
  AddCheckpoints(table, options);
  AddStatistics(table, options);
  AddGroup(table, options);
  AddFollow(table, options);
  AddLimits(table, options);
  AddTimeLimits(table, options);
  AddLogging(table, options);
}

std::string HostName() {
  std::array<char, HOST_NAME_MAX + 1> name{};
  return gethostname(name.data(), name.size()) == 0 ? name.data() : "";
}

}  // namespace ema
