// SPDX-License-Identifier: Apache-2.0
#include "server/ops/option_conflicts.h"

#include <arpa/inet.h>
#include <netinet/in.h>

#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/time/time.h"
#include "ema/manifest.h"
#include "server/base/socket_address.h"
#include "server/ops/option_table.h"

namespace ema {
namespace {

void AddFollowConflicts(const ServerOptions& o, std::vector<OptionConflict>& problems) {
  const std::pair<const char*, bool> needing[] = {
      {"follow-token-file", !o.follow_token_file.empty()},
      {"follow-ca", !o.follow_ca.empty()},
  };
  const std::pair<const char*, bool> excluded[] = {
      {"data-dir", !o.data_dir.empty()},
      {"group", !o.group.empty()},
  };
  for (const auto& [name, is_given] : needing) {
    if (is_given && o.follow.empty()) problems.push_back({name, "given without --follow"});
  }
  for (const auto& [name, is_given] : excluded) {
    if (is_given && !o.follow.empty()) {
      problems.push_back({name, "given with --follow: a follower only copies a model for readers"});
    }
  }
  if (!o.follow_ca.empty() && o.follow.starts_with("ema://")) {
    problems.push_back({"follow-ca", "given, but the URL of --follow does not begin with emas://"});
  }
}

// True: tokens or client certificates restrict who may use the server.
bool HasAuthentication(const ServerOptions& options) {
  return !options.tls_client_ca.empty() || !options.auth_tokens.empty();
}

// Of a server in a group.
void AddRegistryConflicts(const ServerOptions& o, std::vector<OptionConflict>& problems) {
  const bool is_etcd = !o.etcd.empty();
  if (!is_etcd && !o.kubernetes) {
    problems.push_back({"group", "given without --etcd or --kubernetes"});
  }
  if (is_etcd && o.kubernetes) problems.push_back({"kubernetes", "given with --etcd"});
  const std::pair<const char*, bool> of_etcd[] = {
      {"etcd-ca", !o.etcd_ca.empty()},
      {"etcd-cert", !o.etcd_cert.empty()},
      {"etcd-key", !o.etcd_key.empty()},
      {"etcd-user", !o.etcd_user.empty()},
      {"etcd-password-file", !o.etcd_password_file.empty()},
  };
  const std::pair<const char*, bool> of_kubernetes[] = {
      {"kubernetes-api", !o.kubernetes_api.empty()},
      {"kubernetes-namespace", !o.kubernetes_namespace.empty()},
      {"kubernetes-token-file", !o.kubernetes_token_file.empty()},
      {"kubernetes-ca", !o.kubernetes_ca.empty()},
  };
  for (const auto& [name, is_given] : of_etcd) {
    if (is_given && !is_etcd) problems.push_back({name, "given without --etcd"});
  }
  for (const auto& [name, is_given] : of_kubernetes) {
    if (is_given && !o.kubernetes) problems.push_back({name, "given without --kubernetes"});
  }
  if (!o.etcd_user.empty() && o.etcd_password_file.empty()) {
    problems.push_back({"etcd-user", "given without --etcd-password-file"});
  }
  if (o.etcd_user.empty() && !o.etcd_password_file.empty()) {
    problems.push_back({"etcd-password-file", "given without --etcd-user"});
  }
  if (!o.kubernetes_api.empty() && o.kubernetes_namespace.empty()) {
    problems.push_back({"kubernetes-api", "given without --kubernetes-namespace"});
  }
}

void AddGroupConflicts(const ServerOptions& o, std::vector<OptionConflict>& problems) {
  if (o.group.empty()) {
    const std::pair<const char*, bool> given[] = {
        {"member", !o.member.empty()},
        {"advertise", !o.advertise.empty()},
        {"etcd", !o.etcd.empty()},
        {"etcd-ca", !o.etcd_ca.empty()},
        {"etcd-cert", !o.etcd_cert.empty()},
        {"etcd-key", !o.etcd_key.empty()},
        {"etcd-user", !o.etcd_user.empty()},
        {"etcd-password-file", !o.etcd_password_file.empty()},
        {"kubernetes", o.kubernetes},
        {"kubernetes-api", !o.kubernetes_api.empty()},
        {"kubernetes-namespace", !o.kubernetes_namespace.empty()},
        {"kubernetes-token-file", !o.kubernetes_token_file.empty()},
        {"kubernetes-ca", !o.kubernetes_ca.empty()},
        {"max-registry-outage", o.max_registry_outage != ServerOptions().max_registry_outage},
        {"replace-after", o.replace_after != absl::ZeroDuration()},
        {"copy-dir", !o.copy_dir.empty()},
        {"copy-every", o.copy_every != ServerOptions().copy_every},
        {"group-token-file", !o.group_token_file.empty()},
        {"group-ca", !o.group_ca.empty()},
    };
    for (const auto& [name, is_given] : given) {
      if (is_given) problems.push_back({name, "given without --group"});
    }
    return;
  }
  AddRegistryConflicts(o, problems);
  if (o.advertise.empty()) problems.push_back({"group", "given without --advertise"});
  if (o.replace_after > absl::ZeroDuration()) {
    if (o.data_dir.empty()) problems.push_back({"replace-after", "given without --data-dir"});
    if (o.replace_after < o.max_registry_outage) {
      problems.push_back(
          {"replace-after",
           "shorter than --max-registry-outage: a server that does not reach the registry could "
           "still commit steps after it was replaced"});
    }
  }
  if (!o.copy_dir.empty() && o.data_dir.empty()) {
    problems.push_back({"copy-dir", "given without --data-dir"});
  }
  if (o.copy_dir.empty() && o.copy_every != ServerOptions().copy_every) {
    problems.push_back({"copy-every", "given without --copy-dir"});
  }
  if (!o.auth_tokens.empty() && o.group_token_file.empty()) {
    problems.push_back({"group", "given with --auth-tokens, but without --group-token-file"});
  }
  if (!o.group_ca.empty() && o.tls_cert.empty()) {
    problems.push_back({"group-ca", "given without --tls-cert and --tls-key"});
  }
  const std::string host = HostName();
  if (o.member.empty() && !ValidateName("name", host).ok()) {
    problems.push_back({"member", absl::StrCat("not given, and the host's name \"", host,
                                               "\" is not a valid name")});
  }
}

// Only this host can reach `listen`. A name other than localhost may be any address.
bool IsLocal(const std::string& listen) {
  if (listen.starts_with("unix:")) return true;
  std::string host = listen.substr(0, listen.rfind(':'));
  if (host == "localhost") return true;
  if (host.size() > 2 && host.front() == '[' && host.back() == ']') {
    host = host.substr(1, host.size() - 2);
  }
  sockaddr_in v4{.sin_family = AF_INET};
  sockaddr_in6 v6{.sin6_family = AF_INET6};
  return (inet_pton(AF_INET, host.c_str(), &v4.sin_addr) == 1 &&
          IsLoopback(reinterpret_cast<const sockaddr*>(&v4))) ||
         (inet_pton(AF_INET6, host.c_str(), &v6.sin6_addr) == 1 &&
          IsLoopback(reinterpret_cast<const sockaddr*>(&v6)));
}

}  // namespace

std::vector<LogEvent> OptionWarnings(const ServerOptions& options) {
  std::vector<LogEvent> doubts;
  if (!options.group.empty() && options.data_dir.empty()) {
    doubts.push_back({LogLevel::kWarning,
                      "a crash of one server loses the averages of its group",
                      {{"group", options.group}, {"expected", "--data-dir"}}});
  }
  if (options.auth_tokens.empty() || !options.tls_cert.empty()) return doubts;
  for (const std::string& listen : options.listen) {
    if (IsLocal(listen)) continue;
    doubts.push_back({LogLevel::kWarning,
                      "tokens are sent without TLS",
                      {{"listen", listen}, {"expected", "--tls-cert and --tls-key"}}});
  }
  return doubts;
}

std::vector<OptionConflict> OptionConflicts(const ServerOptions& options) {
  std::vector<OptionConflict> problems;
  if (options.tls_cert.empty() != options.tls_key.empty()) {
    problems.push_back(options.tls_key.empty()
                           ? OptionConflict{"tls-cert", "given without --tls-key"}
                           : OptionConflict{"tls-key", "given without --tls-cert"});
  }
  if (!options.tls_client_ca.empty() && options.tls_cert.empty()) {
    problems.push_back({"tls-client-ca", "given without --tls-cert and --tls-key"});
  }
  if (options.block_bytes % kBlockGranule != 0) {
    problems.push_back({"block-bytes", absl::StrCat(options.block_bytes, " is not a multiple of ",
                                                    kBlockGranule)});
  }
  if (!options.lane_socket.empty() && options.same_host_lane == "off") {
    problems.push_back({"lane-socket", "given with --same-host-lane off"});
  }
  AddGroupConflicts(options, problems);
  AddFollowConflicts(options, problems);
  if (HasAuthentication(options) || options.allow_unauthenticated) return problems;
  for (const std::string& listen : options.listen) {
    if (IsLocal(listen)) continue;
    problems.push_back(
        {"listen",
         absl::StrCat(
             "\"", listen,
             "\" can be reached from other hosts, but clients do not have to authenticate. Set "
             "--auth-tokens or --tls-client-ca (with --tls-cert and --tls-key); or "
             "--allow-unauthenticated, to serve everybody who can reach the server; or listen on a "
             "loopback address, such as 127.0.0.1:50051")});
  }
  return problems;
}

}  // namespace ema
