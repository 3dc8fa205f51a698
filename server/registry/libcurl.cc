// SPDX-License-Identifier: Apache-2.0
#include "server/registry/libcurl.h"

#include <dlfcn.h>

#include <type_traits>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "ema/internal/status_macros.h"

namespace ema {
namespace {

absl::StatusOr<LibCurl> LoadFunctions() {
  void* const library = dlopen(EMA_LIBCURL, RTLD_NOW | RTLD_LOCAL);
  bool has_all = library != nullptr;
  const auto load = [&](const char* name, auto& function) {
    if (!has_all) return;
    function = reinterpret_cast<std::remove_reference_t<decltype(function)>>(dlsym(library, name));
    has_all = function != nullptr;
  };
  LibCurl curl;
  load("curl_global_init", curl.global_init);
  load("curl_slist_append", curl.slist_append);
  load("curl_slist_free_all", curl.slist_free_all);
  load("curl_easy_init", curl.easy_init);
  load("curl_easy_cleanup", curl.easy_cleanup);
  load("curl_easy_reset", curl.easy_reset);
  load("curl_easy_setopt", curl.easy_setopt);
  load("curl_easy_getinfo", curl.easy_getinfo);
  load("curl_easy_perform", curl.easy_perform);
  load("curl_easy_strerror", curl.easy_strerror);
  load("curl_multi_init", curl.multi_init);
  load("curl_multi_cleanup", curl.multi_cleanup);
  load("curl_multi_add_handle", curl.multi_add_handle);
  load("curl_multi_remove_handle", curl.multi_remove_handle);
  load("curl_multi_perform", curl.multi_perform);
  load("curl_multi_info_read", curl.multi_info_read);
  load("curl_multi_poll", curl.multi_poll);
  load("curl_multi_wakeup", curl.multi_wakeup);
  if (!has_all) {
    return absl::FailedPreconditionError(
        absl::StrCat(EMA_LIBCURL, " cannot be loaded: ", dlerror()));
  }
  if (const CURLcode code = curl.global_init(CURL_GLOBAL_DEFAULT); code != CURLE_OK) {
    return absl::FailedPreconditionError(absl::StrCat(EMA_LIBCURL, ": ", curl.easy_strerror(code)));
  }
  return curl;
}

}  // namespace

absl::StatusOr<const LibCurl*> LibCurl::Load() {
  static const absl::StatusOr<LibCurl> curl = LoadFunctions();
  EMA_RETURN_IF_ERROR(curl.status());
  return &*curl;
}

}  // namespace ema
