// What the two AVX-512 files share. Not here: anything another file may use.
#pragma once
#include "arithmetic.h"

#if defined(__x86_64__)

#if defined(__GNUC__) && !defined(__clang__)
// GCC 12's own avx512fintrin.h sets its undefined vectors off (GCC bug 105593).
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#pragma GCC diagnostic ignored "-Wuninitialized"
#endif

#define TARGET __attribute__((target("avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,avx2,fma,f16c")))
#define INLINE TARGET inline __attribute__((always_inline))

namespace experts {

// As Isa::dots; costs the same for any number of activations up to kTile.
void dots_wide_avx512(const Shape&, const RowPairs&, const uint8_t* const* activations, int tile, const DotsOut&);

// 64 bytes of codes, the v-th of `codes`, as far as the `bytes` (a multiple of 16) reach; zero behind them.
template <bool Whole>
INLINE __m512i load_vector(const uint8_t* codes, int bytes, int v) {
  if (Whole) return _mm512_loadu_si512(codes + 64 * v);
  const int there = bytes - 64 * v;
  const auto words = there >= 64 ? __mmask16(0xffff) : there <= 0 ? __mmask16(0) : __mmask16((1u << (there / 4)) - 1);
  return _mm512_maskz_loadu_epi32(words, codes + 64 * v);
}

}  // namespace experts

#endif
