// SPDX-License-Identifier: Apache-2.0
#include "server/group/member.h"

#include "absl/strings/str_cat.h"
#include "ema/internal/status_macros.h"
#include "server/base/quoted.h"

namespace ema::group {
namespace {

constexpr std::string_view kMembers = "members/";
constexpr std::string_view kModels = "models/";
// etcd ends leases within a second of their TTL, and extends them when it elects a leader. In
// Kubernetes an expired lease is noticed by a member, which may be this one.
constexpr absl::Duration kExpirySlack = absl::Seconds(5);
// For a watch to report what is in the registry already.
constexpr absl::Duration kWatchTimeout = absl::Seconds(10);

}  // namespace

Member::Member(Options options)
    : options_(std::move(options)), prefix_(absl::StrCat("/ema/", options_.group, "/")) {}

Member::~Member() = default;

absl::StatusOr<std::unique_ptr<Member>> Member::Join(Options options) {
  std::unique_ptr<Member> member(new Member(std::move(options)));
  Registry& registry = *member->options_.registry;
  const std::string key = member->MemberKey();
  // The watch would only retry. This says why the registry cannot be reached.
  EMA_RETURN_IF_ERROR(registry.Read(key).status());
  member->watch_ = registry.Watch(
      member->prefix_,
      [self = member.get()](const RegistryUpdate& update) { self->OnUpdate(update); });
  EMA_RETURN_IF_ERROR(member->AwaitFreeName());
  EMA_ASSIGN_OR_RETURN(
      member->membership_,
      registry.Join(key, FormatMemberRecord(member->options_.record), member->options_.ttl));
  EMA_RETURN_IF_ERROR(member->AwaitOwnRecord());
  return member;
}

std::string Member::MemberKey() const {
  return absl::StrCat(prefix_, std::string(kMembers), options_.name);
}

std::string Member::ModelKey(std::string_view model) const {
  return absl::StrCat(prefix_, std::string(kModels), std::string(model));
}

absl::Status Member::AwaitFreeName() {
  if (!AwaitCache(kWatchTimeout, [](const Cache&) { return true; })) {
    return absl::UnavailableError(absl::StrCat("registry: the keys with the prefix ",
                                               Quoted(prefix_), " were not reported within ",
                                               absl::FormatDuration(kWatchTimeout)));
  }
  std::string address;  // Of the process that has the name.
  const auto is_free = [&](const Cache& cache) {
    const auto found = cache.members.find(options_.name);
    if (found == cache.members.end()) return true;
    address = found->second.address;
    return false;
  };
  if (AwaitCache(absl::ZeroDuration(), is_free)) return absl::OkStatus();
  const absl::Duration longest_wait = options_.ttl + kExpirySlack;
  LogTo(options_.log, LogLevel::kWarning, "member name in use",
        {{"member", options_.name}, {"address", address}, {"longest_wait", longest_wait}});
  if (AwaitCache(longest_wait, is_free)) return absl::OkStatus();
  return absl::AlreadyExistsError(
      absl::StrCat("group ", Quoted(options_.group), ": the process at ", address, " is member ",
                   Quoted(options_.name), "; give this process another name with --member"));
}

absl::Status Member::AwaitOwnRecord() {
  const auto is_reported = [this](const Cache& cache) {
    const auto found = cache.members.find(options_.name);
    return found != cache.members.end() && found->second.boot == options_.record.boot;
  };
  if (AwaitCache(kWatchTimeout, is_reported)) return absl::OkStatus();
  return absl::UnavailableError(absl::StrCat("registry: the key ", Quoted(MemberKey()),
                                             " was put, but not reported within ",
                                             absl::FormatDuration(kWatchTimeout)));
}

bool Member::AwaitCache(absl::Duration timeout, absl::FunctionRef<bool(const Cache&)> predicate) {
  absl::MutexLock lock(&mu_);
  const auto is_true = [&]() ABSL_SHARED_LOCKS_REQUIRED(mu_) {
    return is_filled_ && predicate(cache_);
  };
  return cache_changed_.AwaitUntil(mu_, After(SteadyNow(), timeout), is_true);
}

void Member::SetOnChange(std::function<void()> on_change) {
  absl::MutexLock lock(&mu_);
  on_change_ = std::move(on_change);
}

std::map<std::string, MemberRecord> Member::members() const {
  absl::MutexLock lock(&mu_);
  return {cache_.members.begin(), cache_.members.end()};
}

std::map<std::string, ModelRecord> Member::models() const {
  absl::MutexLock lock(&mu_);
  std::map<std::string, ModelRecord> models;
  for (const auto& [name, stored] : cache_.models) models.emplace(name, stored.record);
  return models;
}

std::optional<ModelRecord> Member::model(std::string_view name) const {
  absl::MutexLock lock(&mu_);
  const auto found = cache_.models.find(name);
  return found != cache_.models.end() ? std::optional(found->second.record) : std::nullopt;
}

std::optional<std::string> Member::AddressOf(std::string_view member, std::string_view boot) const {
  absl::MutexLock lock(&mu_);
  const auto found = cache_.members.find(member);
  if (found == cache_.members.end() || found->second.boot != boot) return std::nullopt;
  return found->second.address;
}

absl::StatusOr<std::optional<Member::StoredModel>> Member::Read(std::string_view model) {
  EMA_ASSIGN_OR_RETURN(const RegistryEntry entry, options_.registry->Read(ModelKey(model)));
  if (entry.revision == 0) return std::nullopt;
  EMA_ASSIGN_OR_RETURN(ModelRecord record, ParseModelRecord(entry.key, entry.value));
  StoredModel stored{std::move(record), entry.revision};
  Remember(model, stored);
  return stored;
}

absl::StatusOr<int64_t> Member::Write(std::string_view model, const ModelRecord& record,
                                      int64_t revision) {
  const std::string key = ModelKey(model);
  EMA_ASSIGN_OR_RETURN(const std::string text, FormatModelRecord(key, record));
  EMA_ASSIGN_OR_RETURN(const int64_t written,
                       options_.registry->CompareAndPut(key, revision, text));
  Remember(model, {record, written});
  return written;
}

void Member::Remember(std::string_view model, const StoredModel& stored) {
  absl::MutexLock lock(&mu_);
  // One that is not in the cache may have been deleted since.
  const auto cached = cache_.models.find(model);
  if (cached != cache_.models.end() && cached->second.revision < stored.revision) {
    cached->second = stored;
  }
}

absl::Status Member::Erase(std::string_view model, int64_t revision) {
  return options_.registry->CompareAndDelete(ModelKey(model), revision);
}

void Member::OnUpdate(const RegistryUpdate& update) {
  Cache cache;
  if (!update.is_complete) {
    absl::MutexLock lock(&mu_);
    cache = cache_;
  }
  for (const RegistryEntry& entry : update.entries) Apply(entry, cache);
  std::function<void()> on_change;
  {
    absl::MutexLock lock(&mu_);
    KeepNewerLocked(cache);
    cache_ = std::move(cache);
    is_filled_ = true;
    cache_changed_.WakeAll();
    on_change = on_change_;
  }
  if (on_change) on_change();
}

void Member::KeepNewerLocked(Cache& cache) const {
  for (auto& [name, stored] : cache.models) {
    const auto known = cache_.models.find(name);
    if (known != cache_.models.end() && known->second.revision > stored.revision) {
      stored = known->second;
    }
  }
}

void Member::Apply(const RegistryEntry& entry, Cache& cache) {
  const auto apply = [&](std::string_view folder, auto& records, auto parse) {
    const std::string_view key = std::string_view(entry.key).substr(prefix_.size());
    if (!key.starts_with(folder)) return;
    const std::string name(key.substr(folder.size()));
    records.erase(name);
    if (entry.revision == 0) return;
    auto record = parse(entry.key, entry.value);
    if (record.ok()) {
      records.emplace(name, *std::move(record));
    } else {
      ReportDamage(entry, record.status());
    }
  };
  apply(kMembers, cache.members, ParseMemberRecord);
  apply(kModels, cache.models,
        [&](std::string_view key, std::string_view text) -> absl::StatusOr<StoredModel> {
          EMA_ASSIGN_OR_RETURN(ModelRecord record, ParseModelRecord(key, text));
          return StoredModel{std::move(record), entry.revision};
        });
}

void Member::ReportDamage(const RegistryEntry& entry, const absl::Status& error) {
  int64_t& reported = reported_damage_[entry.key];
  // All keys are reported again after an interruption of the watch.
  if (std::exchange(reported, entry.revision) == entry.revision) return;
  LogTo(options_.log, LogLevel::kError, "registry record damaged",
        {{"key", entry.key}, {"revision", entry.revision}, {"error", error}});
}

}  // namespace ema::group
