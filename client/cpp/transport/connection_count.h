// SPDX-License-Identifier: Apache-2.0
#ifndef EMA_CLIENT_CPP_TRANSPORT_CONNECTION_COUNT_H_
#define EMA_CLIENT_CPP_TRANSPORT_CONNECTION_COUNT_H_

#include <algorithm>
#include <cstdint>
#include <vector>

namespace ema::client_internal {

// Chooses the number of connections for pushes of a run: for some pushes twice as many are tried,
// and kept if they are faster. The effect of more connections depends on processors, network cards,
// limits of a cloud and other traffic, so it is measured. For one thread at a time.
class ConnectionCount {
 public:
  // The first pushes are not measured: memory is new, and windows are small.
  static constexpr int64_t kWarmUp = 2;
  // Number of pushes whose median speed counts for a number of connections.
  static constexpr int64_t kPushes = 3;
  // A higher number is kept if it is faster by this factor.
  static constexpr double kGain = 1.15;
  // Number of pushes until a higher number is tried again.
  static constexpr int64_t kRest = 200;

  explicit ConnectionCount(int64_t max) : max_(max) {}

  int64_t get() const { return count_; }

  // Records the speed of a push by get() connections, in any unit.
  void Note(double speed) {
    if (rest_ > 0) {
      --rest_;
      return;
    }
    speeds_.push_back(speed);
    if (static_cast<int64_t>(speeds_.size()) < kPushes) return;
    std::nth_element(speeds_.begin(), speeds_.begin() + kPushes / 2, speeds_.end());
    const double median = speeds_[kPushes / 2];
    speeds_.clear();
    if (count_ != best_count_ && median < kGain * best_speed_) {
      count_ = best_count_;
      rest_ = kRest;
      return;
    }
    best_count_ = count_;
    best_speed_ = median;
    if (2 * count_ <= max_) count_ *= 2;
  }

  // Records that get() connections could not be opened, or have failed.
  void NoteFailure() {
    count_ = best_count_ = 1;
    rest_ = kRest;
    speeds_.clear();
  }

 private:
  const int64_t max_;
  int64_t count_ = 1;
  int64_t best_count_ = 1;  // If it is not count_, count_ is being tried.
  double best_speed_ = 0;
  int64_t rest_ = kWarmUp;
  std::vector<double> speeds_;
};

}  // namespace ema::client_internal

#endif  // EMA_CLIENT_CPP_TRANSPORT_CONNECTION_COUNT_H_
