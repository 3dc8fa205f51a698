// SPDX-License-Identifier: Apache-2.0
//
// Training time: how far training has come, and lengths of it ("200ba", "2ep", "0.1dur").
#ifndef EMA_TIME_H_
#define EMA_TIME_H_

#include <array>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

#include "absl/status/statusor.h"

namespace ema {

// The unit of a length of training. The suffixes are Composer's.
enum class TimeUnit {
  kBatch,      // ba
  kEpoch,      // ep
  kSample,     // sp
  kToken,      // tok
  kIteration,  // iter
  kProgress,   // dur: share of the whole training, 0 to 1
  kSecond,     // sec
};
inline constexpr int kTimeUnitCount = 7;

// "ba", "ep", ...
std::string_view TimeUnitSuffix(TimeUnit unit);
// "batch", "epoch", ..., "seconds": the field of ema.v1.TrainingTime.
std::string_view TimeUnitField(TimeUnit unit);

// True for ba, ep, sp, tok and iter, whose values are whole numbers.
constexpr bool IsCounted(TimeUnit unit) {
  return unit != TimeUnit::kProgress && unit != TimeUnit::kSecond;
}

// A length of training in one unit.
struct TrainingDuration {
  double value = 0;  // 0 or more. Finite, except as HalfLifeRule::half_life.
  TimeUnit unit = TimeUnit::kBatch;

  // Reads "200ba", "2ep", "5000sp", "3e9tok", "7iter", "0.1dur", "30sec", or hours, minutes and
  // seconds ("1h30m", "90m", "2h"). Ignores case, surrounding spaces, and an underscore between two
  // digits ("1_000ba"). Counted units (ba, ep, sp, tok, iter) must be whole numbers up to 2^53;
  // "dur" at most 1. INVALID_ARGUMENT, BAD_SCHEDULE: anything else (a bare number, a sign, NaN,
  // infinity, an unknown unit); the message quotes `text` and shows a valid one.
  static absl::StatusOr<TrainingDuration> Parse(std::string_view text);

  // A short text that Parse() reads back to the same value, such as "200ba".
  std::string ToString() const;

  friend bool operator==(const TrainingDuration&, const TrainingDuration&) = default;
};

// How far training has come at one step, in every unit that the trainer counts.
class TrainingTime {
 public:
  // The time of a trainer that counts only batches.
  static TrainingTime AtBatch(int64_t batch) {
    TrainingTime time;
    time.Set(TimeUnit::kBatch, static_cast<double>(batch));
    return time;
  }

  // Sets or gets one unit; nullopt if the trainer does not count it.
  void Set(TimeUnit unit, double value) { values_[static_cast<int>(unit)] = value; }
  std::optional<double> Get(TimeUnit unit) const { return values_[static_cast<int>(unit)]; }

  // INVALID_ARGUMENT, BAD_TIME: a value is negative or not finite, a count is not whole, or
  // progress is above 1.
  absl::Status Validate() const;

  // INVALID_ARGUMENT, BAD_TIME: a unit that `earlier` has is missing or has gone back.
  absl::Status CheckNotBefore(const TrainingTime& earlier) const;

  // Such as "batch 40, sample 2560".
  std::string ToString() const;

  friend bool operator==(const TrainingTime&, const TrainingTime&) = default;

 private:
  std::array<std::optional<double>, kTimeUnitCount> values_;
};

}  // namespace ema

#endif  // EMA_TIME_H_
