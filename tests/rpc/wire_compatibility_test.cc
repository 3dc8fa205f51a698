// SPDX-License-Identifier: Apache-2.0
//
// That clients of today's contract are understood for ever: everything in frozen_wire.textproto is
// still there, under its number. What is new may be added. group.proto is not there: clients do not
// use it. Until there is a release, a change that is meant to break is made to both:
//   protoc -I proto -o /dev/stdout proto/ema/v1/{types,ema_service,error,lane}.proto |
//     protoc --decode=google.protobuf.FileDescriptorSet google/protobuf/descriptor.proto |
//     grep -v json_name >tests/rpc/frozen_wire.textproto
#include <gmock/gmock.h>
#include <google/protobuf/descriptor.h>
#include <google/protobuf/descriptor.pb.h>
#include <google/protobuf/text_format.h>
#include <gtest/gtest.h>

#include <fstream>
#include <iterator>
#include <string>
#include <vector>

#include "ema/v1/ema_service.pb.h"
#include "ema/v1/lane.pb.h"

namespace ema {
namespace {

namespace pb = google::protobuf;

// Looks for what is frozen in the generated code's pool; notes what is not as it was.
class Comparison {
 public:
  void CompareFile(const pb::FileDescriptorProto& frozen) {
    for (const pb::DescriptorProto& message : frozen.message_type()) {
      CompareMessage(frozen.package() + "." + message.name(), message);
    }
    for (const pb::EnumDescriptorProto& one : frozen.enum_type()) {
      CompareEnum(frozen.package() + "." + one.name(), one);
    }
    for (const pb::ServiceDescriptorProto& service : frozen.service()) {
      for (const pb::MethodDescriptorProto& method : service.method()) {
        CompareMethod(frozen.package() + "." + service.name() + "." + method.name(), method);
      }
    }
  }

  const std::vector<std::string>& problems() const { return problems_; }

 private:
  void Expect(bool is_so, const std::string& what) {
    if (!is_so) problems_.push_back(what);
  }

  void CompareMessage(const std::string& name, const pb::DescriptorProto& frozen) {
    const pb::Descriptor* const now = pool_.FindMessageTypeByName(name);
    if (now == nullptr) return problems_.push_back(name + ": gone");
    for (const pb::FieldDescriptorProto& field : frozen.field()) {
      CompareField(name + "." + field.name(), field, now->FindFieldByNumber(field.number()),
                   field.has_oneof_index() ? frozen.oneof_decl(field.oneof_index()).name() : "");
    }
    for (const pb::DescriptorProto& nested : frozen.nested_type()) {
      CompareMessage(name + "." + nested.name(), nested);
    }
    for (const pb::EnumDescriptorProto& nested : frozen.enum_type()) {
      CompareEnum(name + "." + nested.name(), nested);
    }
  }

  void CompareField(const std::string& name, const pb::FieldDescriptorProto& frozen,
                    const pb::FieldDescriptor* now, const std::string& oneof) {
    if (now == nullptr) return problems_.push_back(name + ": gone");
    pb::FieldDescriptorProto made;
    now->CopyTo(&made);
    Expect(made.name() == frozen.name(), name + ": is called " + made.name());
    Expect(made.type() == frozen.type() && made.type_name() == frozen.type_name(),
           name + ": of another type");
    Expect(made.label() == frozen.label(), name + ": repeated or not");
    Expect(made.proto3_optional() == frozen.proto3_optional(), name + ": optional or not");
    Expect((now->containing_oneof() == nullptr ? "" : now->containing_oneof()->name()) == oneof,
           name + ": in another oneof");
  }

  void CompareEnum(const std::string& name, const pb::EnumDescriptorProto& frozen) {
    const pb::EnumDescriptor* const now = pool_.FindEnumTypeByName(name);
    if (now == nullptr) return problems_.push_back(name + ": gone");
    for (const pb::EnumValueDescriptorProto& value : frozen.value()) {
      const pb::EnumValueDescriptor* const found = now->FindValueByName(value.name());
      Expect(found != nullptr && found->number() == value.number(),
             name + "." + value.name() + ": gone, or of another number");
    }
  }

  void CompareMethod(const std::string& name, const pb::MethodDescriptorProto& frozen) {
    const pb::MethodDescriptor* const now = pool_.FindMethodByName(name);
    if (now == nullptr) return problems_.push_back(name + ": gone");
    pb::MethodDescriptorProto made;
    now->CopyTo(&made);
    Expect(made.input_type() == frozen.input_type() && made.output_type() == frozen.output_type(),
           name + ": of other messages");
    Expect(made.client_streaming() == frozen.client_streaming() &&
               made.server_streaming() == frozen.server_streaming(),
           name + ": streaming or not");
  }

  const pb::DescriptorPool& pool_ = *pb::DescriptorPool::generated_pool();
  std::vector<std::string> problems_;
};

pb::FileDescriptorSet Frozen() {
  // The generated code is linked, so that its files are in the pool.
  (void)v1::CreateModelRequest::descriptor();
  (void)v1::LaneRequest::descriptor();
  std::ifstream file(EMA_FROZEN_WIRE);
  const std::string text{std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>()};
  pb::FileDescriptorSet files;
  EXPECT_TRUE(pb::TextFormat::ParseFromString(text, &files));
  return files;
}

TEST(WireCompatibilityTest, EverythingFrozenIsAsItWas) {
  Comparison comparison;
  const pb::FileDescriptorSet frozen = Frozen();
  ASSERT_GE(frozen.file_size(), 4);
  for (const pb::FileDescriptorProto& file : frozen.file()) comparison.CompareFile(file);
  EXPECT_THAT(comparison.problems(), testing::IsEmpty());
}

TEST(WireCompatibilityTest, AChangeThatBreaksClientsIsFound) {
  pb::FileDescriptorSet frozen = Frozen();
  for (pb::FileDescriptorProto& file : *frozen.mutable_file()) {
    for (pb::DescriptorProto& message : *file.mutable_message_type()) {
      if (message.name() != "DeleteModelRequest") continue;
      message.mutable_field(0)->set_type(pb::FieldDescriptorProto::TYPE_BYTES);
      message.mutable_field(1)->set_number(99);
    }
    for (pb::ServiceDescriptorProto& service : *file.mutable_service()) {
      service.mutable_method(0)->set_name("MakeModel");
    }
  }
  Comparison comparison;
  for (const pb::FileDescriptorProto& file : frozen.file()) comparison.CompareFile(file);
  EXPECT_THAT(comparison.problems(),
              testing::UnorderedElementsAre("ema.v1.DeleteModelRequest.model: of another type",
                                            "ema.v1.DeleteModelRequest.confirm_model: gone",
                                            "ema.v1.EmaService.MakeModel: gone"));
}

}  // namespace
}  // namespace ema
