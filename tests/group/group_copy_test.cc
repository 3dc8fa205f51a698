// SPDX-License-Identifier: Apache-2.0
//
// Copies of a model's versions in directories of the servers of a group, and crashes after which
// the model returns to them.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <system_error>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/strings/str_cat.h"
#include "absl/synchronization/mutex.h"
#include "ema/client.h"
#include "ema/v1/group.grpc.pb.h"
#include "tests/group/trained_group.h"
#include "tests/testutil/status_matchers.h"

namespace ema::group {
namespace {

namespace fs = std::filesystem;

using ::testing::IsEmpty;
using ::testing::SizeIs;
using ::testing::UnorderedElementsAre;

constexpr int kServers = 3;

// The names of all events, with their texts.
class EventNames {
 public:
  LogSink sink() {
    return [this](const LogEvent& event) {
      absl::MutexLock lock(&mu_);
      ++counts_[event.name];
    };
  }
  int Count(const std::string& name) {
    absl::MutexLock lock(&mu_);
    return counts_[name];
  }

 private:
  absl::Mutex mu_;
  std::map<std::string, int> counts_ ABSL_GUARDED_BY(mu_);
};

class GroupCopyTest : public testing::Test {
 protected:
  GroupCopyTest() : directory_(testing::TempDir() + "/ema_copies_XXXXXX") {
    EXPECT_NE(mkdtemp(directory_.data()), nullptr);
    group_.emplace(
        kServers, /*tensor_count=*/6, directory_ + "/data",
        TrainedGroup::Servers{.copy_dir = directory_ + "/copies", .log = events_.sink()});
    Open();
  }
  ~GroupCopyTest() override {
    group_.reset();
    PosixFileSystem().RemoveTree(directory_).IgnoreError();
  }

  void Open() {
    run_ = group_->Open();
    ASSERT_NE(run_, nullptr);
  }
  ModelRecord Record() { return *group_->servers_.front()->member().model("m"); }
  std::string MemberOf(int partition) {
    return Record().partitions[static_cast<size_t>(partition)].member;
  }
  GroupServer& ServerOf(int partition) {
    const std::string member = MemberOf(partition);
    return **std::find_if(group_->servers_.begin(), group_->servers_.end(),
                          [&](const auto& server) { return server->name() == member; });
  }
  // The directory of that partition's member, with the copies of the model.
  fs::path Copies(int partition) {
    return fs::path(directory_) / "copies/g" / MemberOf(partition) / "m";
  }
  // The one copy that a member has.
  fs::path Copy(int partition) {
    const std::set<std::string> names = Names(Copies(partition));
    EXPECT_THAT(names, SizeIs(1));
    return Copies(partition) / *names.begin();
  }
  static std::set<std::string> Names(const fs::path& path) {
    std::set<std::string> names;
    std::error_code error;  // There is no such folder; the server may just have removed it.
    for (const auto& entry : fs::directory_iterator(path, error)) {
      names.insert(entry.path().filename());
    }
    return names;
  }

  // Pushes the next `count` steps, and returns the averages of the last one, once it is copied
  // everywhere and older copies are gone.
  TrainedGroup::Pulled TrainAndCopy(int count) {
    Version version;
    for (int i = 0; i < count; ++i) {
      const absl::StatusOr<Version> pushed = Push(*run_, ++step_);
      if (pushed.ok()) version = *pushed;
    }
    TrainedGroup::Await([&] {
      const std::optional<GroupCopy> copy = Record().copy;
      return copy.has_value() && copy->id == version.id();
    });
    for (int p = 0; p < kServers; ++p) {
      TrainedGroup::Await([&] { return Names(Copies(p)).size() == 1; });
    }
    const absl::StatusOr<TrainedGroup::Pulled> pulled = group_->Pull("ema");
    EXPECT_THAT(pulled, IsOk());
    EXPECT_EQ(pulled->info.version.id(), version.id());
    return *pulled;
  }
  // Ends the process of a partition, runs `damage`, and starts it again.
  void Crash(
      int partition, const std::function<void()>& damage = [] {}) {
    GroupServer& server = ServerOf(partition);
    server.Stop();
    damage();
    group_->Restart(server);
  }
  // The model has these averages, and training continues with them.
  void ExpectContinuesFrom(const TrainedGroup::Pulled& expected) {
    EMA_ASSERT_OK_AND_ASSIGN(const TrainedGroup::Pulled found, group_->Pull("ema"));
    EXPECT_EQ(found.info.version.id(), expected.info.version.id());
    EXPECT_EQ(found.info.version.step, expected.info.version.step);
    EXPECT_EQ(found.info.version.commit_time, expected.info.version.commit_time);
    EXPECT_EQ(found.tensors, expected.tensors);
    Open();
    step_ = expected.info.version.step;
    EMA_ASSERT_OK_AND_ASSIGN(const Version next, Push(*run_, ++step_));
    EXPECT_EQ(next.number, expected.info.version.number + 1);
    EXPECT_GT(next.incarnation, expected.info.version.incarnation);
  }

  std::string directory_;
  EventNames events_;  // Outlives the servers.
  std::optional<TrainedGroup> group_;
  std::unique_ptr<ema::Run> run_;
  int64_t step_ = 0;
};

TEST_F(GroupCopyTest, EachPartIsAtItsMemberAndAtTheNextOne) {
  TrainAndCopy(2);
  EXPECT_THAT(Names(Copy(0)), UnorderedElementsAre("manifest.json", "part-00000", "part-00002"));
  EXPECT_THAT(Names(Copy(1)), UnorderedElementsAre("manifest.json", "part-00001", "part-00000"));
  EXPECT_THAT(Names(Copy(2)), UnorderedElementsAre("manifest.json", "part-00002", "part-00001"));
  // A copy is not a checkpoint.
  EXPECT_THAT(Record().checkpoints, IsEmpty());
  EMA_ASSERT_OK_AND_ASSIGN(const Version pushed, Push(*run_, ++step_));
  EXPECT_EQ(ServerOf(0).store().Get("m").value()->durable().step(), 0);
  EXPECT_EQ(pushed.number, 3);
}

TEST_F(GroupCopyTest, AfterACrashOfAnyServerTheModelReturnsToItsCopy) {
  ASSERT_THAT(Push(*run_, ++step_), IsOk());
  ASSERT_THAT(group_->client().CreateCheckpoint("m", kPatience), IsOk());
  const VersionId durable = Record().NewestCheckpoint()->id;
  for (const int crashed : {2, 0, 1}) {
    SCOPED_TRACE(crashed);
    const TrainedGroup::Pulled expected = TrainAndCopy(2);
    Crash(crashed);
    ExpectContinuesFrom(expected);
    // Trainers that restart must still be able to rely on the durable step.
    EXPECT_EQ(Record().NewestCheckpoint()->id, durable);
    for (int p = 0; p < kServers; ++p) {
      EXPECT_EQ(ServerOf(p).store().Get("m").value()->durable().version(), durable);
    }
  }
  EXPECT_EQ(events_.Count("model returns to its newest copy"), 3);
  EXPECT_EQ(events_.Count("copy fetched from another member"), 0);
  // The next save makes the newest version durable.
  ASSERT_THAT(group_->client().CreateCheckpoint("m", kPatience), IsOk());
  EXPECT_EQ(Record().NewestCheckpoint()->step, step_);
}

TEST_F(GroupCopyTest, ASecondCrashBeforeTheNextCopyReturnsToTheSameOne) {
  const TrainedGroup::Pulled expected = TrainAndCopy(2);
  Crash(1);
  EMA_ASSERT_OK_AND_ASSIGN(const TrainedGroup::Pulled once, group_->Pull("ema"));
  EXPECT_EQ(once.tensors, expected.tensors);
  Crash(2);
  ExpectContinuesFrom(expected);
  // That copy was not a checkpoint, so it is the base of no history on the disk.
  ASSERT_THAT(group_->client().CreateCheckpoint("m", kPatience), IsOk());
  Crash(0);
  EMA_ASSERT_OK_AND_ASSIGN(const TrainedGroup::Pulled found, group_->Pull("ema"));
  EXPECT_EQ(found.info.version.step, step_);
}

TEST_F(GroupCopyTest, ALostOrDamagedPartIsFetchedFromTheNextMember) {
  // They belong to the home, which has them at no other place.
  ASSERT_THAT(group_->client().AttachFile("m", "config.json", "{}", kPatience), IsOk());
  struct Damage {
    const char* name;
    std::function<void(const fs::path& copy, const std::string& part)> apply;
  };
  const auto change = [](const fs::path& path, std::streamoff from_end) {
    std::fstream file(path, std::ios::in | std::ios::out | std::ios::binary);
    file.seekp(-from_end, std::ios::end);
    file.put('\x55');
    ASSERT_TRUE(file.good());
  };
  const std::vector<Damage> damages = {
      {"all", [](const fs::path& copy, const std::string&) { fs::remove_all(copy.parent_path()); }},
      {"part", [](const fs::path& copy, const std::string& part) { fs::remove_all(copy / part); }},
      {"manifest", [](const fs::path& copy,
                      const std::string&) { ASSERT_TRUE(fs::remove(copy / "manifest.json")); }},
      {"changed manifest",
       [&](const fs::path& copy, const std::string& part) {
         change(copy / part / "manifest.json", 10);
       }},
      {"changed byte",
       [&](const fs::path& copy, const std::string& part) {
         change(copy / part / "tracks/raw/model.safetensors", 1);
       }},
      {"short file",
       [](const fs::path& copy, const std::string& part) {
         fs::resize_file(copy / part / "tracks/ema/model.safetensors", 100);
       }},
      {"missing file", [](const fs::path& copy, const std::string& part) {
         ASSERT_TRUE(fs::remove(copy / part / "tracks/ema/model.safetensors"));
       }}};
  int count = 0;
  for (const Damage& damage : damages) {
    const int partition = count % kServers;
    SCOPED_TRACE(absl::StrCat(damage.name, " of partition ", partition));
    const TrainedGroup::Pulled expected = TrainAndCopy(2);
    const std::string part = absl::StrCat("part-0000", partition);
    const fs::path copy = Copy(partition);
    const int fetched = events_.Count("copy fetched from another member");
    Crash(partition, [&] { damage.apply(copy, part); });
    ExpectContinuesFrom(expected);
    EXPECT_GT(events_.Count("copy fetched from another member"), fetched);
    EXPECT_EQ(events_.Count("model returns to its newest copy"), ++count);
  }
  EMA_ASSERT_OK_AND_ASSIGN(const std::string attached,
                           group_->client().GetAttachedFile("m", "config.json", kPatience));
  EXPECT_EQ(attached, "{}");
}

TEST_F(GroupCopyTest, IfBothCopiesOfAPartAreLostTheModelReturnsToItsCheckpoint) {
  ASSERT_THAT(Push(*run_, ++step_), IsOk());
  ASSERT_THAT(group_->client().CreateCheckpoint("m", kPatience), IsOk());
  EMA_ASSERT_OK_AND_ASSIGN(const TrainedGroup::Pulled saved, group_->Pull("ema"));
  for (const int partition : {1, 0}) {
    SCOPED_TRACE(partition);
    TrainAndCopy(2);
    const fs::path own = Copies(partition);
    const fs::path next = Copies((partition + 1) % kServers);
    Crash(partition, [&] {
      fs::remove_all(own);
      fs::remove_all(next);
    });
    ExpectContinuesFrom(saved);
    EXPECT_FALSE(Record().BeginsWithCopy());
  }
  EXPECT_EQ(events_.Count("copy lost; model returns to its newest checkpoint"), 2);
  // Good checkpoints are not set aside.
  EXPECT_EQ(events_.Count("model returns to an older checkpoint"), 0);
  // Copies are made and used again.
  const TrainedGroup::Pulled expected = TrainAndCopy(1);
  Crash(2);
  ExpectContinuesFrom(expected);
}

TEST_F(GroupCopyTest, AModelWhoseOnlyCopyIsLostCanBeCreatedAgain) {
  TrainAndCopy(1);
  const fs::path own = Copies(1);
  const fs::path next = Copies(2);
  Crash(1, [&] {
    fs::remove_all(own);
    fs::remove_all(next);
  });
  TrainedGroup::Await([&] { return !group_->servers_[0]->member().model("m").has_value(); });
  TrainedGroup::Await([&] { return events_.Count("model lost") == 1; });
  group_->Create("m");
  Open();
  EXPECT_THAT(Push(*run_, 1), IsOk());
}

TEST_F(GroupCopyTest, CopiesOfADeletedModelAreRemoved) {
  TrainAndCopy(1);
  std::vector<fs::path> paths;
  for (int p = 0; p < kServers; ++p) paths.push_back(Copies(p));
  run_ = nullptr;
  ASSERT_THAT(group_->client().DeleteModel("m", /*purge=*/false, kPatience), IsOk());
  for (const fs::path& path : paths) {
    TrainedGroup::Await([&] { return Names(path).empty(); });
  }
}

TEST_F(GroupCopyTest, AMoveToOtherServersDoesNotUseTheCopy) {
  TrainAndCopy(2);
  EMA_ASSERT_OK_AND_ASSIGN(const TrainedGroup::Pulled expected, group_->Pull("ema"));
  const std::string without = MemberOf(1);
  ASSERT_THAT(group_->client().RebalanceModel("m", {without}, kPatience), IsOk());
  EXPECT_FALSE(Record().BeginsWithCopy());
  EXPECT_THAT(Record().partitions, SizeIs(2));
  ExpectContinuesFrom(expected);
}

TEST_F(GroupCopyTest, AMemberWithoutTheOptionIsReportedOnce) {
  ASSERT_THAT(Push(*run_, ++step_), IsOk());
  ASSERT_THAT(group_->client().CreateCheckpoint("m", kPatience), IsOk());
  EMA_ASSERT_OK_AND_ASSIGN(const TrainedGroup::Pulled saved, group_->Pull("ema"));
  TrainAndCopy(1);
  group_->copy_dir_ = "";
  Crash(2);  // It has no --copy-dir now, so it cannot use the copy.
  ExpectContinuesFrom(saved);
  TrainedGroup::Await([&] { return events_.Count("version not copied") == 1; });
  for (int i = 0; i < 5; ++i) ASSERT_THAT(Push(*run_, ++step_), IsOk());
  EXPECT_FALSE(Record().copy.has_value());
  EXPECT_EQ(events_.Count("version not copied"), 1);
}

// It would be lost otherwise.
TEST_F(GroupCopyTest, AModelThatHasOnlyACopyWaitsForAMemberWithoutTheOption) {
  const TrainedGroup::Pulled expected = TrainAndCopy(3);
  const std::string copies = std::exchange(group_->copy_dir_, "");
  Crash(2);
  TrainedGroup::Await([&] { return events_.Count("partition not loaded") > 0; });
  group_->copy_dir_ = copies;
  Crash(2);
  ExpectContinuesFrom(expected);
}

// --- The calls between servers ---

struct BadName {
  const char* model;
  const char* track;
  const char* file;
};

TEST_F(GroupCopyTest, ACallReadsOnlyFilesOfCopies) {
  const TrainedGroup::Pulled pulled = TrainAndCopy(1);
  const auto stub = v1::GroupService::NewStub(
      grpc::CreateChannel(ServerOf(0).address(), grpc::InsecureChannelCredentials()));
  const auto read = [&](const v1::ReadCopyRequest& request, v1::ReadCopyResponse* response) {
    grpc::ClientContext context;
    return stub->ReadCopy(&context, request, response).error_code();
  };
  v1::ReadCopyRequest good;
  good.set_model("m");
  good.mutable_version()->set_version(pulled.info.version.number);
  good.mutable_version()->set_incarnation(pulled.info.version.incarnation);
  good.set_step(pulled.info.version.step);
  good.set_partition(2);
  good.set_track("raw");
  good.set_file("model.safetensors");
  v1::ReadCopyResponse response;
  ASSERT_EQ(read(good, &response), grpc::StatusCode::OK);
  EXPECT_GT(response.total_bytes(), 0);
  EXPECT_EQ(static_cast<int64_t>(response.data().size()), response.total_bytes());
  v1::ReadCopyRequest past = good;
  past.set_offset(response.total_bytes());
  ASSERT_EQ(read(past, &response), grpc::StatusCode::OK);
  EXPECT_THAT(response.data(), IsEmpty());

  for (const BadName& bad :
       {BadName{"../m", "raw", "model.safetensors"}, BadName{"", "raw", "model.safetensors"},
        BadName{"m", "..", "model.safetensors"}, BadName{"m", "a/b", "model.safetensors"},
        BadName{"m", "raw", "../../manifest.json"}, BadName{"m", "raw", "/etc/passwd"},
        BadName{"m", "raw", ".."}, BadName{"m", "raw", ""}}) {
    SCOPED_TRACE(absl::StrCat(bad.model, "|", bad.track, "|", bad.file));
    v1::ReadCopyRequest request = good;
    request.set_model(bad.model);
    request.set_track(bad.track);
    request.set_file(bad.file);
    EXPECT_EQ(read(request, &response), grpc::StatusCode::INVALID_ARGUMENT);
  }
  v1::ReadCopyRequest other = good;
  other.set_partition(1);  // Of the other two members.
  EXPECT_EQ(read(other, &response), grpc::StatusCode::NOT_FOUND);
  other = good;
  other.set_step(good.step() + 1);
  EXPECT_EQ(read(other, &response), grpc::StatusCode::NOT_FOUND);
}

TEST_F(GroupCopyTest, AProcessThatTheRegistryDoesNotNameWritesNothing) {
  const TrainedGroup::Pulled pulled = TrainAndCopy(1);
  const auto stub = v1::GroupService::NewStub(
      grpc::CreateChannel(ServerOf(1).address(), grpc::InsecureChannelCredentials()));
  v1::WriteCopyRequest write;
  write.set_model("m");
  write.set_incarnation(Record().incarnation);
  write.set_boot("another");
  write.mutable_version()->set_version(pulled.info.version.number);
  v1::WriteCopyResponse written;
  grpc::ClientContext write_context;
  EXPECT_EQ(stub->WriteCopy(&write_context, write, &written).error_code(),
            grpc::StatusCode::ABORTED);
  v1::FetchCopyRequest fetch;
  fetch.set_model("m");
  fetch.set_incarnation(Record().incarnation - 1);
  fetch.set_boot(Record().partitions[1].boot);
  v1::FetchCopyResponse fetched;
  grpc::ClientContext fetch_context;
  EXPECT_EQ(stub->FetchCopy(&fetch_context, fetch, &fetched).error_code(),
            grpc::StatusCode::ABORTED);
}

}  // namespace
}  // namespace ema::group
