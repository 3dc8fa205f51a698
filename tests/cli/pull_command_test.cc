// SPDX-License-Identifier: Apache-2.0
#include "client/cli/pull_command.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>
#include <map>
#include <sstream>
#include <string>

#include "tests/client/fake_server.h"
#include "tests/testutil/status_matchers.h"

namespace ema::cli {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::UnorderedElementsAre;

class PullCommandTest : public testing::Test {
 protected:
  void SetUp() override {
    char path[] = "/tmp/ema_pull_test.XXXXXX";
    ASSERT_NE(mkdtemp(path), nullptr);
    folder_ = path;
    for (const char* name : {"out", "from"}) std::filesystem::create_directory(folder_ / name);
    server_.pulled_bytes.assign(5500, 'x');
    EMA_ASSERT_OK_AND_ASSIGN(client_, Client::Create(server_.address()));
  }
  void TearDown() override { std::filesystem::remove_all(folder_); }

  absl::Status PullInto(const std::string& output, const std::string& config_from = "") {
    return Pull({.client = client_.get(), .json = true},
                {.model = "m", .track = "ema", .output = output, .config_from = config_from});
  }
  absl::Status PullIntoFolder() { return PullInto(folder_ / "out/", folder_ / "from"); }
  std::string Read(const char* name) const {
    std::ostringstream text;
    text << std::ifstream(folder_ / name).rdbuf();
    return text.str();
  }
  std::vector<std::string> Names() const {
    std::vector<std::string> names;
    for (const auto& entry : std::filesystem::directory_iterator(folder_ / "out")) {
      names.push_back(entry.path().filename());
    }
    return names;
  }

  std::filesystem::path folder_;
  FakeServer server_{*Manifest::Create({{.name = "w", .shape = {4}}})};
  std::unique_ptr<Client> client_;
};

TEST_F(PullCommandTest, AFailedPullLeavesTheFolderAsItWas) {
  std::ofstream(folder_ / "out/config.json") << "old";
  std::ofstream(folder_ / "from/config.json") << "new";
  server_.pull_scripts = {{.wrong_digest = true}};
  EXPECT_THAT(PullIntoFolder(), ReasonIs(ErrorReason::kDigestMismatch));
  EXPECT_EQ(Read("out/config.json"), "old");
  EXPECT_THAT(Names(), UnorderedElementsAre("config.json"));
  ASSERT_THAT(PullIntoFolder(), IsOk());
  EXPECT_EQ(Read("out/config.json"), "new");
  EXPECT_THAT(Names(), UnorderedElementsAre("config.json", "model.safetensors"));
}

TEST_F(PullCommandTest, TheConfigSaysHowTheWeightsAreCalled) {
  constexpr char kModel[] = "model.safetensors";
  constexpr char kDiffusers[] = "diffusion_pytorch_model.safetensors";
  for (const auto& [config, name] :
       std::map<std::string, std::string>{{R"({"_class_name": "UNet2DModel"})", kDiffusers},
                                          {R"({"_diffusers_version": "0.30.0"})", kDiffusers},
                                          {R"({"architectures": ["BertModel"]})", kModel},
                                          {"[1]", kModel},
                                          {"no JSON", kModel}}) {
    SCOPED_TRACE(config);
    for (const bool is_there : {true, false}) {
      std::filesystem::remove_all(folder_ / "out");
      std::filesystem::create_directory(folder_ / "out");
      // What comes takes the place of what is there.
      std::ofstream(folder_ / "out/config.json")
          << (is_there ? config : R"({"_class_name": "Old"})");
      std::ofstream(folder_ / "from/config.json") << config;
      ASSERT_THAT(is_there ? PullInto(folder_ / "out") : PullIntoFolder(), IsOk());
      EXPECT_THAT(Names(), UnorderedElementsAre("config.json", name));
    }
  }
}

TEST_F(PullCommandTest, OnlyPiecesThatWouldBeReadAreRefused) {
  std::ofstream(folder_ / "from/config.json") << R"({"_class_name": "UNet2DModel"})";
  std::ofstream(folder_ / "out/model.safetensors.index.json") << "{}";
  ASSERT_THAT(PullIntoFolder(), IsOk());
  std::ofstream(folder_ / "out/diffusion_pytorch_model.safetensors.index.json") << "{}";
  EXPECT_THAT(PullIntoFolder(),
              StatusIs(absl::StatusCode::kFailedPrecondition, HasSubstr("in pieces")));
}

TEST_F(PullCommandTest, AFileSaysWhatItIsByItsName) {
  const std::filesystem::path file = folder_ / "out/w.safetensors";
  ASSERT_THAT(PullInto(file), IsOk());
  const std::filesystem::path link = folder_ / "latest";
  std::filesystem::create_symlink(file, link);
  ASSERT_THAT(PullInto(link), IsOk());
  EXPECT_TRUE(std::filesystem::is_symlink(link));
  for (const std::string& output : {std::string(folder_ / "out/w.pt"), std::string("-")}) {
    EXPECT_THAT(PullInto(output), StatusIs(absl::StatusCode::kInvalidArgument,
                                           AllOf(HasSubstr("--output " + output),
                                                 HasSubstr("must end in .safetensors"))));
  }
  EXPECT_THAT(Names(), UnorderedElementsAre("w.safetensors"));
}

}  // namespace
}  // namespace ema::cli
