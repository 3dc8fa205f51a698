// SPDX-License-Identifier: Apache-2.0
#include "server/ops/environment.h"

#include <unistd.h>

#include <algorithm>

#include "absl/strings/ascii.h"
#include "absl/strings/str_cat.h"

namespace ema {
namespace {

constexpr std::string_view kPrefix = "EMA_";

// https://kubernetes.io/docs/concepts/services-networking/service/#environment-variables
bool IsOfKubernetes(std::string_view name) {
  constexpr std::string_view kPort = "_PORT";
  if (name.ends_with("_SERVICE_HOST") || name.find("_SERVICE_PORT") != std::string_view::npos) {
    return true;
  }
  const size_t port = name.find(kPort);
  if (port == std::string_view::npos) return false;
  const std::string_view rest = name.substr(port + kPort.size());
  return rest.empty() || (rest.size() > 1 && rest[0] == '_' && absl::ascii_isdigit(rest[1]));
}

}  // namespace

std::string EnvironmentName(std::string_view option) {
  std::string name = absl::StrCat(std::string(kPrefix), absl::AsciiStrToUpper(std::string(option)));
  std::replace(name.begin(), name.end(), '-', '_');
  return name;
}

std::vector<std::string> EmaVariables() {
  std::vector<std::string> names;
  for (char** variable = environ; variable != nullptr && *variable != nullptr; ++variable) {
    const std::string_view text = *variable;
    const size_t equals = text.find('=');
    if (!text.starts_with(kPrefix) || equals == std::string_view::npos) continue;
    const std::string_view name = text.substr(0, equals);
    if (equals + 1 < text.size() && !IsOfKubernetes(name)) names.emplace_back(name);
  }
  std::sort(names.begin(), names.end());
  return names;
}

}  // namespace ema
