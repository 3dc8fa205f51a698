// SPDX-License-Identifier: Apache-2.0
#include "server/rpc/generic_service.h"

#include <google/protobuf/descriptor.h>
#include <grpcpp/impl/rpc_service_method.h>

#include <algorithm>
#include <iterator>
#include <utility>

#include "absl/strings/str_cat.h"
#include "ema/v1/ema_service.pb.h"

namespace ema {

GenericService::GenericService(std::vector<std::string> methods) : methods_(std::move(methods)) {
  for (size_t i = 0; i < methods_.size(); ++i) {
    AddMethod(new grpc::internal::RpcServiceMethod(
        methods_[i].c_str(), grpc::internal::RpcMethod::BIDI_STREAMING, /*handler=*/nullptr));
    MarkMethodAsync(static_cast<int>(i));
  }
}

void GenericService::Request(std::string_view method, grpc::ServerContext* context,
                             grpc::internal::ServerAsyncStreamingInterface* stream,
                             grpc::ServerCompletionQueue* queue, void* tag) {
  const auto found = std::find(methods_.begin(), methods_.end(), method);
  GPR_ASSERT(found != methods_.end());
  RequestAsyncBidiStreaming(static_cast<int>(std::distance(methods_.begin(), found)), context,
                            stream, queue, queue, tag);
}

std::vector<std::string> EmaMethods() {
  const google::protobuf::ServiceDescriptor* const service =
      v1::CreateModelRequest::descriptor()->file()->FindServiceByName("EmaService");
  std::vector<std::string> methods;
  methods.reserve(service->method_count());
  for (int i = 0; i < service->method_count(); ++i) {
    methods.push_back(absl::StrCat("/", service->full_name(), "/", service->method(i)->name()));
  }
  return methods;
}

std::string_view ShortName(std::string_view method) { return method.substr(method.rfind('/') + 1); }

}  // namespace ema
