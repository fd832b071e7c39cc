// A row's bytes as fp32 numbers, exactly: what `decode_rows` of shared_experts/ngram.py gives.
#pragma once
#include <stdint.h>
#include <string.h>

#include "rows.h"

namespace rows {

inline uint32_t bits_of_half(uint16_t half) {
  const uint32_t sign = uint32_t(half & 0x8000) << 16, rest = half & 0x7fff;
  if (rest >= 0x7c00) return sign | 0x7f800000 | (rest & 0x3ff) << 13;  // infinite, or no number
  if (rest >= 0x0400) return sign | ((rest << 13) + (112u << 23));
  if (!rest) return sign;
  const uint32_t shift = __builtin_clz(rest) - 21;  // that makes its first one the eleventh bit
  return sign | ((113 - shift) << 23) | ((rest << shift & 0x3ff) << 13);
}

inline void numbers(const uint8_t* row, uint64_t columns, int32_t kind, float* out) {
  if (kind == ROWS_F32) {
    memcpy(out, row, 4 * columns);
    return;
  }
  for (uint64_t c = 0; c < columns; ++c) {
    uint16_t half;
    memcpy(&half, row + 2 * c, 2);
    const uint32_t bits = kind == ROWS_BF16 ? uint32_t(half) << 16 : bits_of_half(half);
    memcpy(out + c, &bits, 4);
  }
}

}  // namespace rows
