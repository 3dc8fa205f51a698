// SPDX-License-Identifier: Apache-2.0
//
// Versions that are only on the disk, as a server reads them.
#include <memory>
#include <string>

#include "absl/strings/str_cat.h"
#include "tests/checkpoint/test_manager.h"
#include "tests/testutil/fake_file_system.h"

namespace ema {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::SizeIs;

class OpenVersionTest : public testing::Test {
 protected:
  // A server of whose version 1 only the disk knows, as `name_`, with the label "best"; version 4
  // is there as `newest_name_`.
  std::unique_ptr<TestServer> Start() {
    auto server = std::make_unique<TestServer>(files_);
    server->PushTo(1);
    name_ = server->Save(0, "best")->name;
    server->PushTo(4);
    newest_name_ = server->Save()->name;
    return server;
  }
  // What a version's checkpoint has in `from` gets the name of version 1's.
  void PutInPlace(FakeFileSystem& from, const std::string& name) {
    for (const char* file :
         {"manifest.json", "tracks/ema/model.safetensors", "tracks/raw/model.safetensors"}) {
      files_.FileBytes(absl::StrCat(kTestFolder, "/", name_, "/", file)) =
          from.FileBytes(absl::StrCat(kTestFolder, "/", name, "/", file));
    }
  }
  void ExpectSetAside(TestServer& server) {
    EXPECT_THAT(server.manager().FindLabel(server.model(), "best"),
                ReasonIs(ErrorReason::kCheckpointCorrupt));
    EXPECT_THAT(server.Complete(), testing::Not(testing::Contains(1)));
    ASSERT_THAT(server.errors(), SizeIs(1));
    EXPECT_THAT(server.errors()[0], AllOf(HasSubstr(name_), HasSubstr("set aside")));
    EXPECT_THAT(server.manager().OpenVersion(server.model(), {1, 0}, "raw"),
                ReasonIs(ErrorReason::kVersionNotKept));
  }
  FakeFileSystem files_;
  std::string name_;
  std::string newest_name_;
};

TEST_F(OpenVersionTest, ATrackThatWasSavedAloneIsServed) {
  TestServer server(files_);
  server.PushTo(1);
  ASSERT_THAT(server.manager().Save(server.model(), {.tracks = {"raw"}}), IsOk());
  server.PushTo(4);
  const auto open = [&](const char* track) {
    return server.manager().OpenVersion(server.model(), {1, 0}, track);
  };
  EMA_ASSERT_OK_AND_ASSIGN(const SnapshotRef opened, open("raw"));
  EXPECT_EQ(opened->record.step, 10);
  EXPECT_THAT(opened->tracks[0].stored->Read(0, 12), IsOk());
  EXPECT_THAT(open("ema"),
              AllOf(ReasonIs(ErrorReason::kVersionNotKept),
                    StatusIs(absl::StatusCode::kOutOfRange,
                             HasSubstr("track \"ema\": version 1 was saved only with these tracks: "
                                       "raw"))));
  EXPECT_THAT(server.manager().OnDisk(server.model(), /*with_partial=*/false),
              IsOkAndHolds(IsEmpty()));
  EXPECT_THAT(server.manager().OnDisk(server.model(), /*with_partial=*/true),
              IsOkAndHolds(SizeIs(1)));
  for (const auto& status :
       {server.manager().SetLabel(server.model(), "stable", {1, 0}).status(),
        server.manager()
            .ReportMetric(server.model(), {.name = "best", .id = {1, 0}, .metric = 1})
            .status()}) {
    EXPECT_THAT(status, ReasonIs(ErrorReason::kPartialCheckpoint));
  }
}

TEST_F(OpenVersionTest, AnotherVersionUnderItsNameIsNotServed) {
  const auto server = Start();
  PutInPlace(files_, newest_name_);
  EXPECT_THAT(server->manager().OpenVersion(server->model(), {1, 0}, "raw"),
              AllOf(StatusIs(absl::StatusCode::kDataLoss, HasSubstr(newest_name_)),
                    ReasonIs(ErrorReason::kCheckpointCorrupt)));
  ExpectSetAside(*server);
}

TEST_F(OpenVersionTest, NorAnotherModel) {
  const auto server = Start();
  FakeFileSystem other_files;
  ModelConfig config = TwoTracks();
  config.manifest = MakeManifest({{"w", Dtype::kFloat32, {3}}, {"v", Dtype::kFloat32, {0}}});
  TestServer other(other_files, {}, config);
  other.PushTo(1);
  ASSERT_EQ(other.Save()->name, name_);
  PutInPlace(other_files, name_);
  EXPECT_THAT(server->manager().OpenVersion(server->model(), {1, 0}, "raw"),
              AllOf(StatusIs(absl::StatusCode::kDataLoss, HasSubstr("here, not there: \"v\"")),
                    ReasonIs(ErrorReason::kCheckpointCorrupt)));
  ExpectSetAside(*server);
}

TEST_F(OpenVersionTest, AByteThatIsFoundToBeBadSetsItAside) {
  const auto server = Start();
  EMA_ASSERT_OK_AND_ASSIGN(const SnapshotRef opened,
                           server->manager().OpenVersion(server->model(), {1, 0}, "raw"));
  files_.FileBytes(absl::StrCat(kTestFolder, "/", name_, "/tracks/raw/model.safetensors")).back() ^=
      1;
  EXPECT_THAT(opened->tracks[0].stored->Read(0, 12),
              AllOf(StatusIs(absl::StatusCode::kDataLoss, HasSubstr("track \"raw\"")),
                    ReasonIs(ErrorReason::kCheckpointCorrupt)));
  ExpectSetAside(*server);
}

}  // namespace
}  // namespace ema
