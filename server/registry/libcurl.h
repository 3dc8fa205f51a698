// SPDX-License-Identifier: Apache-2.0
//
// libcurl, which is loaded when a server first needs it.
#ifndef EMA_SERVER_REGISTRY_LIBCURL_H_
#define EMA_SERVER_REGISTRY_LIBCURL_H_

#include <curl/curl.h>

#include "absl/status/statusor.h"

namespace ema {

// The functions of libcurl that we call, under their names without "curl_".
struct LibCurl {
  decltype(&curl_global_init) global_init = nullptr;
  decltype(&curl_slist_append) slist_append = nullptr;
  decltype(&curl_slist_free_all) slist_free_all = nullptr;
  decltype(&curl_easy_init) easy_init = nullptr;
  decltype(&curl_easy_cleanup) easy_cleanup = nullptr;
  decltype(&curl_easy_reset) easy_reset = nullptr;
  decltype(&curl_easy_setopt) easy_setopt = nullptr;
  decltype(&curl_easy_getinfo) easy_getinfo = nullptr;
  decltype(&curl_easy_perform) easy_perform = nullptr;
  decltype(&curl_easy_strerror) easy_strerror = nullptr;
  decltype(&curl_multi_init) multi_init = nullptr;
  decltype(&curl_multi_cleanup) multi_cleanup = nullptr;
  decltype(&curl_multi_add_handle) multi_add_handle = nullptr;
  decltype(&curl_multi_remove_handle) multi_remove_handle = nullptr;
  decltype(&curl_multi_perform) multi_perform = nullptr;
  decltype(&curl_multi_info_read) multi_info_read = nullptr;
  decltype(&curl_multi_poll) multi_poll = nullptr;
  decltype(&curl_multi_wakeup) multi_wakeup = nullptr;

  // Loads the library, once in a process. It is not linked, because it brings about twenty
  // libraries (Kerberos, LDAP), which each server would load at its start. FAILED_PRECONDITION: the
  // library is missing, or lacks a function. Thread-safe.
  static absl::StatusOr<const LibCurl*> Load();
};

}  // namespace ema

#endif  // EMA_SERVER_REGISTRY_LIBCURL_H_
