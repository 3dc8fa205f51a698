// SPDX-License-Identifier: Apache-2.0
//
// The library's values as Python's, and back. All of it needs the GIL.
#ifndef EMA_CLIENT_PYTHON_SRC_PYTHON_VALUES_H_
#define EMA_CLIENT_PYTHON_SRC_PYTHON_VALUES_H_

#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <exception>
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
// (step, (version, incarnation), time)
using ResumeTuple =
    std::tuple<int64_t, std::optional<std::tuple<int64_t, int64_t>>, std::optional<nanobind::dict>>;

// {"batch": 40, "progress": 0.1, ...}: only the units that are counted.
nanobind::dict FromTime(const TrainingTime& time);
// Throws InvalidArgumentError, BAD_TIME: an unknown unit or a value that is not a number.
TrainingTime ToTime(const nanobind::dict& time);

// The record as the dataclass of ema_client/_client/types.py.
nanobind::object ToRecord(const Version& version, int64_t skipped = 0);
nanobind::object ToRecord(const Client::ListedVersion& listed);
nanobind::object ToRecord(const Client::ServerInfo& info);
nanobind::object ToRecord(const Client::CheckpointResult& result);
nanobind::object ToRecord(const CheckpointInfo& checkpoint);
nanobind::object ToRecord(const CheckpointLabel& label);
nanobind::object ToRecord(const MetricResult& result);
nanobind::object ToRecord(const Synthesis& synthesis);
nanobind::object ToRecord(const PendingPush::Stats& stats);
// Throws InvalidArgumentError: not "reject", "skip" or "allow".
NonFinitePolicy ToNonFinite(const std::string& name);
// Throws InvalidArgumentError: not "as pushed" or "bfloat16".
WireDtype ToWireDtype(const std::string& name);
SpecTuple FromSpec(const TensorSpec& spec);
std::vector<SpecTuple> SpecsOf(const Manifest& manifest);
// Throws InvalidArgumentError, BAD_MANIFEST.
Manifest ToManifest(const std::vector<SpecTuple>& specs);

std::vector<Shard> ToShards(const std::vector<ShardTuple>& shards);
// Throws as ToTime().
ResumePoint ToResumePoint(const ResumeTuple& resume);

// Seconds; infinity means for ever. Throws ValueError: NaN or less than 0.
absl::Duration ToDuration(double seconds);

}  // namespace ema::python

// Bound functions return such records as they are.
template <class T>
requires requires(const T& value) { ema::python::ToRecord(value); }
struct nanobind::detail::type_caster<T> {
  static constexpr auto Name = const_name("object");

  static handle from_cpp(const T& value, rv_policy /*policy*/, cleanup_list* /*list*/) noexcept {
    try {
      return ema::python::ToRecord(value).release();
    } catch (python_error& error) {
      error.restore();
    } catch (const std::exception& error) {
      PyErr_SetString(PyExc_RuntimeError, error.what());
    }
    return {};
  }
};

#endif  // EMA_CLIENT_PYTHON_SRC_PYTHON_VALUES_H_
