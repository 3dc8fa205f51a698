// SPDX-License-Identifier: Apache-2.0
//
// The library's values as plain Python ones (dict, list, tuple, str, number), and back.
// ema_client/_client/types.py makes its dataclasses of them. All of it needs the GIL.
#ifndef EMA_CLIENT_PYTHON_SRC_CONVERT_H_
#define EMA_CLIENT_PYTHON_SRC_CONVERT_H_

#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <optional>
#include <string>
#include <tuple>
#include <vector>

#include "absl/time/time.h"
#include "ema/client.h"

namespace ema::python {

// (name, dtype, shape, is_buffer, aliases)
using SpecTuple =
    std::tuple<std::string, std::string, std::vector<int64_t>, bool, std::vector<std::string>>;
// (tensor index, offsets, extents)
using ShardTuple = std::tuple<int64_t, std::vector<int64_t>, std::vector<int64_t>>;

// {"batch": 40, "progress": 0.1, ...}: only the units that are counted.
nanobind::dict FromTime(const TrainingTime& time);
// Throws InvalidArgumentError, BAD_TIME: an unknown unit or a value that is not a number.
TrainingTime ToTime(const nanobind::dict& time);

nanobind::dict FromVersion(const Version& version);
nanobind::dict FromModel(const ModelInfo& model);
// (version, incarnation)
nanobind::object FromVersionId(const VersionId& id);
// As the dataclasses CheckpointInfo and Label of ema_client/_client/types.py take them.
nanobind::dict FromCheckpoint(const Client::CheckpointInfo& checkpoint);
nanobind::dict FromLabel(const Client::Label& label);
// As ServerInfo of ema_client/_client/server_info.py takes it.
nanobind::dict FromServerInfo(const Client::ServerInfo& info);
// Throws InvalidArgumentError: not "reject", "skip" or "allow".
NonFinitePolicy ToNonFinite(const std::string& name);
// Throws InvalidArgumentError: not "as pushed" or "bfloat16".
WireDtype ToWireDtype(const std::string& name);
SpecTuple FromSpec(const TensorSpec& spec);
// Throws InvalidArgumentError, BAD_MANIFEST.
Manifest ToManifest(const std::vector<SpecTuple>& specs);

// Seconds; infinity means for ever. Throws ValueError: NaN or less than 0.
absl::Duration ToDuration(double seconds);

}  // namespace ema::python

#endif  // EMA_CLIENT_PYTHON_SRC_CONVERT_H_
