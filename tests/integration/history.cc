// SPDX-License-Identifier: Apache-2.0
#include "tests/integration/history.h"

#include <algorithm>
#include <cmath>
#include <utility>

#include "absl/strings/str_cat.h"

namespace ema {
namespace {

// Of the track "ema"; -1: the version has none.
double WeightOf(const Version& version) {
  for (const TrackVersion& track : version.tracks) {
    if (track.track == "ema") return track.update_weight;
  }
  return -1;
}

void Raise(std::atomic<int64_t>& value, int64_t to) {
  int64_t now = value;
  while (now < to && !value.compare_exchange_weak(now, to)) {
  }
}

}  // namespace

// Counts violations, and keeps the first of them.
class History::Report {
 public:
  void Add(std::string text) {
    if (lines_.size() < kMaxLines) lines_.push_back(std::move(text));
    ++count_;
  }
  std::vector<std::string> Take() && {
    if (count_ > lines_.size())
      lines_.push_back(absl::StrCat("and ", count_ - lines_.size(), " more"));
    return std::move(lines_);
  }

 private:
  static constexpr size_t kMaxLines = 20;
  std::vector<std::string> lines_;
  size_t count_ = 0;
};

int64_t History::version_count() const {
  absl::MutexLock lock(&mu_);
  return static_cast<int64_t>(versions_.size());
}

void History::OnBegin(int64_t step) { Raise(begun_step_, step); }

void History::OnAck(int64_t step, const Version& version) {
  Raise(acked_version_, version.number);
  absl::MutexLock lock(&mu_);
  acks_.push_back({step, version.number, WeightOf(version)});
  if (version.step != step) {
    violations_.push_back(absl::StrCat("a push of step ", step, " was answered with version ",
                                       version.number, " of step ", version.step));
  }
}

void History::OnPull(Pull pull) {
  absl::MutexLock lock(&mu_);
  pulls_.push_back(std::move(pull));
  ++pull_count_;
}

void History::OnVersion(const Version& version, int64_t skipped) {
  absl::MutexLock lock(&mu_);
  if (skipped != 0) violations_.push_back(absl::StrCat("the watcher missed ", skipped));
  versions_.push_back({version.number, {version.step, WeightOf(version), 0}});
}

void History::OnFault(const std::string& name) {
  absl::MutexLock lock(&mu_);
  faults_.push_back({name, static_cast<int64_t>(pulls_.size())});
}

void History::OnViolation(const std::string& text) {
  absl::MutexLock lock(&mu_);
  violations_.push_back(text);
}

bool History::AwaitTraffic(int64_t pulls, int64_t versions, absl::Duration timeout) {
  absl::MutexLock lock(&mu_);
  const size_t pulls_needed = pulls_.size() + pulls;
  const size_t versions_needed = versions_.size() + versions;
  const auto enough = [&]() ABSL_SHARED_LOCKS_REQUIRED(mu_) {
    return pulls_.size() >= pulls_needed && versions_.size() >= versions_needed;
  };
  return mu_.AwaitWithTimeout(absl::Condition(&enough), timeout);
}

std::map<int64_t, History::Committed> History::Replay(Report& report) const {
  std::map<int64_t, Committed> replayed;
  int64_t last_version = 0;
  int64_t last_step = -1;
  float average = 0;
  for (auto [number, committed] : versions_) {
    if (number != last_version + 1 || committed.step <= last_step) {
      report.Add(absl::StrCat("watched: version ", number, " of step ", committed.step,
                              " after version ", last_version, " of step ", last_step));
    }
    last_version = number;
    last_step = committed.step;
    const auto value = static_cast<float>(FillValue(committed.step));
    const auto weight = static_cast<float>(committed.weight);
    average = weight == 1.0f ? value : std::fma(weight, value - average, average);
    committed.average = average;
    replayed[number] = committed;
  }
  return replayed;
}

std::vector<std::string> History::Check(int64_t least_pulls) const {
  absl::MutexLock lock(&mu_);
  Report report;
  for (const std::string& violation : violations_) report.Add(violation);
  const std::map<int64_t, Committed> versions = Replay(report);

  for (const Ack& ack : acks_) {
    const auto found = versions.find(ack.version);
    if (found == versions.end() || found->second.step != ack.step ||
        found->second.weight != ack.weight) {
      report.Add(absl::StrCat("acknowledged, but not committed so: version ", ack.version,
                              " of step ", ack.step, " with weight ", ack.weight));
    }
  }

  std::map<int, int64_t> last_of_puller;
  for (const Pull& pull : pulls_) {
    const std::string name =
        absl::StrCat("pull of ", pull.is_copy ? "raw" : "ema", " by ", pull.puller, ": version ",
                     pull.version, " of step ", pull.step);
    if (!pull.sight.torn.empty()) report.Add(absl::StrCat(name, " is torn: ", pull.sight.torn));
    const auto found = versions.find(pull.version);
    if (found == versions.end() || found->second.step != pull.step) {
      report.Add(absl::StrCat(name, " was never committed"));
      continue;
    }
    if (pull.sight.copied != FillValue(pull.step)) {
      report.Add(absl::StrCat(name, " has ", pull.sight.copied, " copied, expected ",
                              FillValue(pull.step)));
    }
    if (!pull.is_copy && pull.sight.average != found->second.average) {
      report.Add(absl::StrCat(name, " has the average ", pull.sight.average, ", expected ",
                              found->second.average));
    }
    if (pull.step > pull.begun_after) report.Add(absl::StrCat(name, " before any rank began it"));
    if (pull.asked != 0) {
      if (pull.version != pull.asked) {
        report.Add(absl::StrCat(name, ", but ", pull.asked, " was asked for"));
      }
      continue;
    }
    if (pull.version < pull.acked_before) {
      report.Add(absl::StrCat(name, ", but ", pull.acked_before,
                              " had been acknowledged before it began"));
    }
    int64_t& last = last_of_puller[pull.puller];
    if (pull.version < last) report.Add(absl::StrCat(name, " after version ", last));
    last = pull.version;
  }

  int64_t before = 0;
  for (size_t i = 0; i <= faults_.size(); ++i) {
    const int64_t end =
        i < faults_.size() ? faults_[i].pulls_before : static_cast<int64_t>(pulls_.size());
    if (end - before < least_pulls) {
      report.Add(absl::StrCat("too thin: ", end - before, " pulls between ",
                              i == 0 ? "the start" : faults_[i - 1].name, " and ",
                              i < faults_.size() ? faults_[i].name : "the end"));
    }
    before = end;
  }
  return std::move(report).Take();
}

}  // namespace ema
