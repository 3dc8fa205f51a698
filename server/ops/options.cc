// SPDX-License-Identifier: Apache-2.0
#include "server/ops/options.h"

#include <CLI/CLI.hpp>
#include <algorithm>
#include <array>
#include <cerrno>
#include <charconv>
#include <cstdio>
#include <fstream>
#include <functional>
#include <limits>
#include <sstream>
#include <system_error>
#include <thread>
#include <utility>

#include "absl/strings/ascii.h"
#include "absl/strings/str_cat.h"

namespace ema {
namespace {

constexpr int kUsageExitCode = 2;
constexpr int64_t kMostSteps = int64_t{1} << 62;
// gRPC counts milliseconds in an int.
constexpr absl::Duration kMostOfTransport = absl::Hours(24);

// "--data-dir" -> "EMA_DATA_DIR".
std::string EnvironmentName(const std::string& flag) {
  std::string name = absl::StrCat("EMA_", absl::AsciiStrToUpper(flag.substr(2)));
  std::replace(name.begin(), name.end(), '-', '_');
  return name;
}

CLI::Option* AddText(CLI::App& app, const std::string& flag, std::string& value,
                     const std::string& help) {
  return app.add_option(flag, value, help)->envname(EnvironmentName(flag))->capture_default_str();
}

CLI::Option* AddCount(CLI::App& app, const std::string& flag, int64_t& value, int64_t least,
                      const std::string& help, int64_t most = int64_t{1} << 20) {
  return app.add_option(flag, value, help)
      ->envname(EnvironmentName(flag))
      ->capture_default_str()
      ->check(CLI::Range(least, most));
}

CLI::Option* AddDuration(CLI::App& app, const std::string& flag, absl::Duration& value,
                         absl::Duration least, const std::string& help,
                         absl::Duration most = absl::Hours(24 * 365)) {
  const auto set = [&value, flag, least, most](const std::string& text) {
    if (!absl::ParseDuration(text, &value) || value < least || value > most) {
      throw CLI::ValidationError(
          flag, absl::StrCat("\"", text, "\" is not a duration from ", absl::FormatDuration(least),
                             " to ", absl::FormatDuration(most), ", such as 30s or 1m30s"));
    }
  };
  return app.add_option_function<std::string>(flag, set, help)
      ->envname(EnvironmentName(flag))
      ->type_name("DURATION")
      ->default_str(absl::FormatDuration(value));
}

CLI::Option* AddBytes(CLI::App& app, const std::string& flag, int64_t& value,
                      const std::string& help, int64_t least = 0,
                      int64_t most = std::numeric_limits<int64_t>::max()) {
  const auto set = [&value, flag, least, most](const std::string& text) {
    const absl::StatusOr<int64_t> bytes = ParseByteCount(text);
    if (!bytes.ok()) throw CLI::ValidationError(flag, std::string(bytes.status().message()));
    if (*bytes < least || *bytes > most) {
      throw CLI::ValidationError(
          flag, absl::StrCat("\"", text, "\" is not from ", least, " to ", most, " bytes"));
    }
    value = *bytes;
  };
  return app.add_option_function<std::string>(flag, set, help)
      ->envname(EnvironmentName(flag))
      ->type_name("BYTES")
      ->default_str(absl::StrCat(value));
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

// Empty if `text` is host:port or unix:/path.
std::string CheckListen(const std::string& text) {
  if (text.starts_with("unix:/")) return "";
  const int port = NumberAfterColon(text);
  if (port >= 0 && port <= 65535) return "";
  return absl::StrCat("\"", text,
                      "\" is not host:port, such as 127.0.0.1:50051 or [::]:0, nor unix:/path");
}

// Empty if `text` is host:port, or empty.
std::string CheckHttpListen(const std::string& text) {
  const int port = NumberAfterColon(text);
  if (text.empty() || (port >= 0 && port <= 65535 && !text.starts_with("unix:"))) return "";
  return absl::StrCat("\"", text, "\" is not host:port, such as 127.0.0.1:8080 or [::]:0");
}

// Empty if `text` could be a device; whether it is there, MakeDevice() finds out.
std::string CheckDevice(const std::string& text) {
  if (text == "auto" || text == "cpu") return "";
  if (text.starts_with("cuda:") && NumberAfterColon(text) >= 0) return "";
  return absl::StrCat("\"", text, "\" is not auto, cpu, or a GPU such as cuda:0");
}

// Empty if blocks of `text` bytes are allowed.
std::string CheckBlockBytes(const std::string& text) {
  constexpr int64_t kGranule = 4096;
  const absl::StatusOr<int64_t> bytes = ParseByteCount(text);
  if (bytes.ok() && *bytes > 0 && *bytes % kGranule == 0) return "";
  return absl::StrCat("--block-bytes: \"", text, "\" is not a multiple of ", kGranule, " bytes");
}

void AddOptions(CLI::App& app, ServerOptions& o) {
  app.add_option(
         "--listen", o.listen,
         "Addresses to serve gRPC on, separated by commas: host:port (port 0 takes any free "
         "one) or unix:/path")
      ->envname(EnvironmentName("--listen"))
      ->capture_default_str()
      ->delimiter(',')
      ->type_name("HOST:PORT")
      ->check(CheckListen);
  AddText(
      app, "--http-listen", o.http_listen,
      "Address of Prometheus metrics (/metrics), probes (/livez, /readyz) and a status page (/), "
      "such as 127.0.0.1:8080; for all who get there. Empty: none")
      ->type_name("HOST:PORT")
      ->check(CheckHttpListen);
  AddText(app, "--port-file", o.port_file,
          "Write the bound port to this file, at once, when serving. Empty: do not")
      ->type_name("FILE");
  AddText(app, "--device", o.device,
          "Where averages live: cpu, cuda:0 or the index of another GPU, or auto: the first GPU "
          "that can be used, or cpu")
      ->type_name("NAME")
      ->check(CheckDevice);
  AddBytes(app, "--memory-bytes", o.memory_bytes,
           "Memory for all models together, such as 512M or 4G. 0: 80 % of what push streams leave "
           "of the device's");
  AddText(
      app, "--data-dir", o.data_dir,
      "Directory of the checkpoints, made if need be; used by one server. Empty: no checkpoints")
      ->type_name("DIR");
  AddCount(app, "--save-every-commits", o.save_every_commits, 0,
           "Save a model by itself so many commits after its last save. 0: not by their number")
      ->type_name("N");
  AddDuration(app, "--save-every", o.save_every, absl::ZeroDuration(),
              "The same after so long, if anything has been committed. 0: not by time");
  AddCount(app, "--save-step-multiple", o.save_step_multiple, 0,
           "The same when a step has reached a multiple of this. 0: not by steps", kMostSteps)
      ->type_name("STEPS");
  AddCount(app, "--keep-last", o.keep_last, 1,
           "Checkpoints of a model that are kept, the newest; those with a label or a KEEP file "
           "are kept anyway")
      ->type_name("N");
  AddCount(app, "--keep-every-steps", o.keep_every_steps, 0,
           "Keep those whose step is a multiple of this, too. 0: not because of their step",
           kMostSteps)
      ->type_name("STEPS");
  AddDuration(app, "--scrub-interval", o.scrub_interval, absl::ZeroDuration(),
              "Read every checkpoint again once in so long, to find bytes that have gone bad. 0: "
              "never");
  AddCount(
      app, "--statistics-every-commits", o.statistics_every_commits, 0,
      "After every so many commits of a model, compute its averages' norms and their distances "
      "from the raw weights, in the background; holds one version as a reader does. 0: only "
      "when asked for")
      ->type_name("N");
  AddCount(app, "--threads", o.thread_count, 0,
           "Threads that serve RPCs. 0: half of the processors, at least 1")
      ->type_name("N");
  AddCount(app, "--max-push-streams", o.max_push_streams, 1, "Pushes that may run at once")
      ->type_name("N");
  AddCount(app, "--max-pull-streams", o.max_pull_streams, 1, "Pulls that may run at once")
      ->type_name("N");
  AddCount(app, "--max-calls-per-second", o.max_calls_per_second, 0,
           "Calls that one address may begin in a second, but health probes. 0: any number")
      ->type_name("N");
  AddCount(app, "--max-connections", o.max_connections, 1, "Connections that may be open at once")
      ->type_name("N");
  AddCount(app, "--max-connections-per-peer", o.max_connections_per_peer, 1,
           "The same of one IP address that is not loopback")
      ->type_name("N");
  AddCount(app, "--max-streams-per-connection", o.max_streams_per_connection, 1,
           "Calls that may run at once on one connection")
      ->type_name("N");
  AddBytes(app, "--max-message-bytes", o.max_message_bytes,
           "The longest message that is taken; clients send up to 4 MiB and a header",
           int64_t{5} << 20, int64_t{1} << 30);
  AddBytes(app, "--max-metadata-bytes", o.max_metadata_bytes, "The longest headers of a call",
           int64_t{1} << 10, int64_t{1} << 20);
  AddCount(app, "--max-models", o.max_models, 1, "Models that there may be at once")
      ->type_name("N");
  AddDuration(app, "--handshake-timeout", o.handshake_timeout, absl::Milliseconds(1),
              "Close a new connection that has not begun to speak HTTP/2 after so long",
              kMostOfTransport);
  AddDuration(app, "--keepalive-time", o.keepalive_time, absl::Seconds(1),
              "Ask a peer that has been silent for so long whether it is there", kMostOfTransport);
  AddDuration(app, "--keepalive-timeout", o.keepalive_timeout, absl::Milliseconds(1),
              "Close a connection whose peer does not answer that for so long", kMostOfTransport);
  CLI::Option* const cert =
      AddText(app, "--tls-cert", o.tls_cert,
              "PEM file of the server's certificate and its chain: host:port addresses speak TLS, "
              "and nothing else. A changed file is read again. Empty: no TLS")
          ->type_name("FILE");
  CLI::Option* const key =
      AddText(app, "--tls-key", o.tls_key, "PEM file of the certificate's key")->type_name("FILE");
  cert->needs(key);
  key->needs(cert);
  AddText(app, "--tls-client-ca", o.tls_client_ca,
          "PEM file: clients must have a certificate that this signs. Empty: they need none")
      ->type_name("FILE")
      ->needs(cert);
  AddText(app, "--auth-tokens", o.auth_tokens,
          "File of bearer tokens: each line a role (evaluator, trainer, admin), a token, and the "
          "models that it is for, such as vision-*. Calls without one are refused. A changed file "
          "is read again; replace it by a rename. Empty: whoever reaches the server may do all")
      ->type_name("FILE");
  AddText(app, "--same-host-lane", o.same_host_lane,
          "Let clients of this host and user push and pull through shared memory: on or off")
      ->type_name("on|off")
      ->check(CLI::IsMember({"on", "off"}));
  AddDuration(app, "--session-timeout", o.session_timeout, absl::Milliseconds(1),
              "End a push that makes no progress for so long");
  AddDuration(app, "--stream-timeout", o.stream_timeout, absl::Milliseconds(1),
              "End a push or pull whose peer sends or takes nothing for so long");
  AddDuration(app, "--drain-grace", o.drain_grace, absl::ZeroDuration(),
              "After SIGTERM, wait so long for running calls");
  AddText(app, "--log-level", o.log_level, "Least severe events to log: debug, info, warn, error")
      ->type_name("LEVEL")
      ->check(CLI::IsMember({"debug", "info", "warn", "error"}));
  AddBytes(app, "--block-bytes", o.block_bytes, "Size of a block of weights")
      ->check(CheckBlockBytes)
      ->group("");  // Not in --help.
  AddBytes(app, "--max-file-bytes", o.max_file_bytes,
           "Weights in one file of a checkpoint; a track that has more is split, as Hugging Face "
           "splits it",
           /*least=*/1);
}

}  // namespace

ParsedOptions ParseOptions(int argc, const char* const* argv) {
  ParsedOptions parsed;
  CLI::App app(
      "EMA Server: keeps exponential moving averages of a model's weights outside the training "
      "job.\nEach option can be given by the environment variable shown with it; the command line "
      "wins.",
      "ema-server");
  app.set_version_flag("--version", "ema-server " EMA_VERSION, "Print the version and exit");
  app.get_formatter()->column_width(36);
  AddOptions(app, parsed.options);
  try {
    app.parse(argc, argv);
  } catch (const CLI::ParseError& error) {
    std::ostringstream out;
    std::ostringstream problem;
    parsed.exit_code = app.exit(error, out, problem) == 0 ? 0 : kUsageExitCode;
    parsed.should_exit = true;
    parsed.text = parsed.exit_code == 0 ? out.str() : problem.str();
    return parsed;
  }
  if (parsed.options.thread_count == 0) {
    parsed.options.thread_count = std::max<int64_t>(1, std::thread::hardware_concurrency() / 2);
  }
  return parsed;
}

absl::StatusOr<int64_t> ParseByteCount(std::string_view text) {
  constexpr std::array<char, 4> kUnits = {'k', 'm', 'g', 't'};
  constexpr int64_t kLimit = int64_t{1} << 62;
  const absl::Status bad = absl::InvalidArgumentError(absl::StrCat(
      "\"", std::string(text), "\" is not a number of bytes, such as 1048576, 512M or 4G"));
  int64_t bytes = 0;
  const char* const end = text.data() + text.size();
  const std::from_chars_result result = std::from_chars(text.data(), end, bytes);
  if (result.ec != std::errc() || bytes < 0 || bytes >= kLimit) return bad;
  std::string unit = absl::AsciiStrToLower(std::string(result.ptr, end - result.ptr));
  if (unit.size() == 3 && unit.substr(1) == "ib") unit.resize(1);
  if (unit.size() == 2 && unit[1] == 'b') unit.resize(1);
  if (unit.empty() || unit == "b") return bytes;
  const auto found = std::find(kUnits.begin(), kUnits.end(), unit[0]);
  if (unit.size() != 1 || found == kUnits.end()) return bad;
  for (auto it = kUnits.begin(); it <= found; ++it) {
    if (__builtin_mul_overflow(bytes, int64_t{1024}, &bytes) || bytes >= kLimit) return bad;
  }
  return bytes;
}

absl::Status WritePortFile(const std::string& path, int port) {
  const std::string temporary = path + ".tmp";
  std::ofstream file(temporary, std::ios::trunc);
  file << port << '\n';
  file.close();
  if (!file.fail() && std::rename(temporary.c_str(), path.c_str()) == 0) return absl::OkStatus();
  const int error = errno;
  std::remove(temporary.c_str());
  return absl::UnavailableError(
      absl::StrCat("cannot write the port file: ", std::generic_category().message(error)));
}

}  // namespace ema
