// SPDX-License-Identifier: Apache-2.0
//
// Replaces protobuf's header of the same name in builds with ThreadSanitizer. If the macro below is
// set, protobuf's class for map fields has two additional members. The installed library was
// compiled without them, so its functions and ours would disagree on the layout of the class.
#ifndef EMA_TESTS_TESTUTIL_TSAN_GOOGLE_PROTOBUF_MAP_FIELD_H_
#define EMA_TESTS_TESTUTIL_TSAN_GOOGLE_PROTOBUF_MAP_FIELD_H_

#pragma GCC system_header  // No warning of #include_next.

// These must see the macro: std::shared_ptr depends on it.
#include <atomic>
#include <functional>
#include <memory>
#include <mutex>

#pragma push_macro("__SANITIZE_THREAD__")
#undef __SANITIZE_THREAD__
#include_next <google/protobuf/map_field.h>
#pragma pop_macro("__SANITIZE_THREAD__")

#endif  // EMA_TESTS_TESTUTIL_TSAN_GOOGLE_PROTOBUF_MAP_FIELD_H_
