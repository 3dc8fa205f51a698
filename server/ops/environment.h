// SPDX-License-Identifier: Apache-2.0
//
// The EMA_* environment variables.
#ifndef EMA_SERVER_OPS_ENVIRONMENT_H_
#define EMA_SERVER_OPS_ENVIRONMENT_H_

#include <string>
#include <string_view>
#include <vector>

namespace ema {

// "data-dir" -> "EMA_DATA_DIR".
std::string EnvironmentName(std::string_view option);

// The names of the variables that begin with EMA_ and are not empty, sorted; without those that
// Kubernetes makes for a service whose name is, or begins with, "ema" (EMA_SERVICE_HOST, EMA_PORT,
// EMA_PORT_50051_TCP, ...). Not safe against a concurrent setenv().
std::vector<std::string> EmaVariables();

}  // namespace ema

#endif  // EMA_SERVER_OPS_ENVIRONMENT_H_
