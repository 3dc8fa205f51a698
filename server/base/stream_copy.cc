// SPDX-License-Identifier: Apache-2.0
#include "server/base/stream_copy.h"

#include <algorithm>
#include <cstdint>
#include <cstring>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace ema {
namespace {

constexpr size_t kLineBytes = 64;

#if defined(__x86_64__)

// Copies 3 * `stream_bytes`, one line at each of three places in turn.
__attribute__((target("avx2"))) void FetchCopyStreams(const std::byte* from, std::byte* to,
                                                      size_t stream_bytes) {
  constexpr size_t kPrefetchBytes = 1024;
  for (size_t line = 0; line < stream_bytes; line += kLineBytes) {
#pragma GCC unroll 3
    for (int stream = 0; stream < 3; ++stream) {
      const size_t at = line + stream * stream_bytes;
      _mm_prefetch(reinterpret_cast<const char*>(from) + at + kPrefetchBytes, _MM_HINT_T0);
      std::memcpy(to + at, from + at, kLineBytes);
    }
  }
}

#endif

}  // namespace

void StreamCopy(std::span<const std::byte> from, std::byte* to) {
#if defined(__x86_64__)
  // Storing parts of lines past the caches costs more than it saves.
  const size_t before_line = -reinterpret_cast<uintptr_t>(to) % kLineBytes;
  const size_t head = std::min(before_line, from.size());
  std::memcpy(to, from.data(), head);
  const std::byte* source = from.data() + head;
  const std::byte* const end = from.data() + from.size();
  to += head;
  for (; end - source >= static_cast<ptrdiff_t>(kLineBytes);
       source += kLineBytes, to += kLineBytes) {
    const auto* const words = reinterpret_cast<const __m128i*>(source);
    auto* const line = reinterpret_cast<__m128i*>(to);
    const __m128i a = _mm_loadu_si128(words);
    const __m128i b = _mm_loadu_si128(words + 1);
    const __m128i c = _mm_loadu_si128(words + 2);
    const __m128i d = _mm_loadu_si128(words + 3);
    _mm_stream_si128(line, a);
    _mm_stream_si128(line + 1, b);
    _mm_stream_si128(line + 2, c);
    _mm_stream_si128(line + 3, d);
  }
  _mm_sfence();
  std::memcpy(to, source, end - source);
#else
  std::memcpy(to, from.data(), from.size());
#endif
}

void FetchCopy(std::span<const std::byte> from, std::byte* to) {
  size_t copied = 0;
#if defined(__x86_64__)
  static const bool has_avx2 = __builtin_cpu_supports("avx2");
  constexpr size_t kMinStreamBytes = 4096;
  const size_t stream_bytes = from.size() / 3 / kLineBytes * kLineBytes;
  if (has_avx2 && stream_bytes >= kMinStreamBytes) {
    FetchCopyStreams(from.data(), to, stream_bytes);
    copied = 3 * stream_bytes;
  }
#endif
  std::memcpy(to + copied, from.data() + copied, from.size() - copied);
}

}  // namespace ema
