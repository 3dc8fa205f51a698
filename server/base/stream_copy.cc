// SPDX-License-Identifier: Apache-2.0
#include "server/base/stream_copy.h"

#include <algorithm>
#include <cstdint>
#include <cstring>

#if defined(__x86_64__)
#include <emmintrin.h>
#endif

namespace ema {

void StreamCopy(std::span<const std::byte> from, std::byte* to) {
#if defined(__x86_64__)
  // Lines that are not stored as a whole cost more than they spare.
  constexpr size_t kLineBytes = 64;
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

}  // namespace ema
