// SPDX-License-Identifier: Apache-2.0
#include "server/base/crc32c.h"

#include <isa-l/crc.h>

#include <algorithm>
#include <array>

namespace ema {
namespace {

// The reflected Castagnoli polynomial.
constexpr uint32_t kPolynomial = 0x82f63b78;

// A 32 x 32 matrix over GF(2), by columns: what a register becomes when zeros are appended.
using Matrix = std::array<uint32_t, 32>;

uint32_t Apply(const Matrix& matrix, uint32_t vector) {
  uint32_t result = 0;
  for (int i = 0; vector != 0; ++i, vector >>= 1) {
    if (vector & 1) result ^= matrix[i];
  }
  return result;
}

Matrix Square(const Matrix& matrix) {
  Matrix result;
  for (int i = 0; i < 32; ++i) result[i] = Apply(matrix, matrix[i]);
  return result;
}

// Element k appends 2^k zero bytes.
std::array<Matrix, 63> MakePowers() {
  Matrix one_bit;
  one_bit[0] = kPolynomial;
  for (int i = 1; i < 32; ++i) one_bit[i] = uint32_t{1} << (i - 1);
  std::array<Matrix, 63> powers;
  powers[0] = Square(Square(Square(one_bit)));
  for (size_t k = 1; k < powers.size(); ++k) powers[k] = Square(powers[k - 1]);
  return powers;
}

}  // namespace

uint32_t Crc32c(uint32_t crc, std::span<const std::byte> data) {
  // ISA-L counts bytes in an int, and leaves the inversions at both ends to the caller.
  constexpr size_t kMaxBytesPerCall = size_t{1} << 30;
  crc = ~crc;
  while (!data.empty()) {
    const std::span<const std::byte> piece = data.first(std::min(data.size(), kMaxBytesPerCall));
    // ISA-L's pointer is not const, but nothing is written through it.
    auto* bytes = const_cast<unsigned char*>(reinterpret_cast<const unsigned char*>(piece.data()));
    crc = crc32_iscsi(bytes, static_cast<int>(piece.size()), crc);
    data = data.subspan(piece.size());
  }
  return ~crc;
}

uint32_t Crc32cCombine(uint32_t crc_a, uint32_t crc_b, int64_t b_bytes) {
  // Squared once per process: a combination is then one product per set bit of the length.
  static const std::array<Matrix, 63> powers = MakePowers();
  for (int k = 0; b_bytes > 0; ++k, b_bytes >>= 1) {
    if (b_bytes & 1) crc_a = Apply(powers[k], crc_a);
  }
  return crc_a ^ crc_b;
}

}  // namespace ema
