// docs/expert-arithmetic.md with AVX-512 and VNNI: the path of servers. Many activations at once: avx512_wide.cpp.
//
// One step takes eight groups of two weight rows (a, b) and ends in one vector whose lane c is chain c of row a and
// lane 8 + c chain c of row b, so the canonical order costs one fma a step. q4:
//
//   64 code bytes --and, shift--> low and high nibbles --dpbusd with q--> 16 partial sums of four low and four high
//   products, at most 8 * 15 * 127 = 15,240, which fits 16 bits: two such vectors are packed to 16 bits and adjacent
//   lanes added by madd with ones (two instructions; a shuffle and an add in 32 bits take three). A second round fits
//   as well (30,480). What is left are sums of 128-bit lanes, which the last shuffle brings into group order.
//
// q8: 64 code bytes are one group. dpbusd wants one side unsigned, so it takes w + 128 (the top bit flipped) and the
// row's correction takes 128 * sum(q) off again: at most 64 * 255 * 127, exact in 32 bits, for w = -128 too.
//
// Invariant: loads touch no byte behind a row's last code or scale (masked in the last step).
#include "avx512.h"

#include <type_traits>

#if defined(__x86_64__)

namespace experts {
namespace {

constexpr int kAhead = 4096;  // bytes of codes prefetched ahead: a page, further than the hardware looks
constexpr int kScalesAhead = 512;

template <int G, int Bits>
constexpr int kVectors = G * Bits / 64;  // 64-byte vectors of codes per row and step

INLINE __m512i merge(__m512i a, __m512i b) { return _mm512_madd_epi16(_mm512_packs_epi32(a, b), _mm512_set1_epi16(1)); }

// The nibbles of one row's step.
template <int G>
struct Nibbles {
  __m512i low[kVectors<G, 4>], high[kVectors<G, 4>];
};

template <int G, bool Whole>
INLINE void load_codes(Nibbles<G>& n, const uint8_t* codes, int bytes) {
  const __m512i mask = _mm512_set1_epi8(15);
  for (int v = 0; v < kVectors<G, 4>; ++v) {
    const __m512i packed = load_vector<Whole>(codes, bytes, v);
    n.low[v] = _mm512_and_si512(packed, mask);
    n.high[v] = _mm512_and_si512(_mm512_srli_epi16(packed, 4), mask);
  }
}

template <int G>
INLINE __m512i products(const Nibbles<G>& n, const uint8_t* q, int v) {
  const __m512i low = _mm512_dpbusd_epi32(_mm512_setzero_si512(), n.low[v], _mm512_loadu_si512(q + 128 * v));
  return _mm512_dpbusd_epi32(low, n.high[v], _mm512_loadu_si512(q + 128 * v + 64));
}

// Sums of n * q: lanes 0..7 the groups of row a, 8..15 those of row b.
template <int G>
INLINE __m512i group_sums(const Nibbles<G>& a, const Nibbles<G>& b, const uint8_t* q) {
  if constexpr (G == 64) {
    const __m512i x =
        merge(merge(products<G>(a, q, 0), products<G>(a, q, 1)), merge(products<G>(a, q, 2), products<G>(a, q, 3)));
    const __m512i y =
        merge(merge(products<G>(b, q, 0), products<G>(b, q, 1)), merge(products<G>(b, q, 2), products<G>(b, q, 3)));
    // Vector v holds group 2v in its 128-bit lanes 0, 1 and group 2v + 1 in 2, 3; lane l of x is [v0, v1, v2, v3].
    const __m512i first = _mm512_setr_epi32(0, 8, 1, 9, 2, 10, 3, 11, 16, 24, 17, 25, 18, 26, 19, 27);
    const __m512i second = _mm512_setr_epi32(4, 12, 5, 13, 6, 14, 7, 15, 20, 28, 21, 29, 22, 30, 23, 31);
    return _mm512_add_epi32(_mm512_permutex2var_epi32(x, first, y), _mm512_permutex2var_epi32(x, second, y));
  } else {
    // Vector v holds group 4v + l in its 128-bit lane l; lane l of the merged vector is [a v0, a v1, b v0, b v1].
    const __m512i x =
        merge(merge(products<G>(a, q, 0), products<G>(a, q, 1)), merge(products<G>(b, q, 0), products<G>(b, q, 1)));
    return _mm512_permutexvar_epi32(_mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15), x);
  }
}

// The codes of one row's step, plus 128: a group each.
struct Bytes {
  __m512i groups[8];
};

template <int, bool Whole>
INLINE void load_codes(Bytes& n, const uint8_t* codes, int bytes) {
  for (int v = 0; v < 8; ++v)
    n.groups[v] = _mm512_xor_si512(load_vector<Whole>(codes, bytes, v), _mm512_set1_epi8(-128));
}

// [x0 + x2, x1 + x3, y0 + y2, y1 + y3] in each 128-bit lane.
INLINE __m512i halve(__m512i x, __m512i y) {
  return _mm512_add_epi32(_mm512_mask_blend_epi64(0xaa, x, y), _mm512_alignr_epi8(y, x, 8));
}

// Sums of (w + 128) * q of groups v..v+3: one lane each in every 128-bit lane.
INLINE __m512i four_groups(const Bytes& n, const uint8_t* q, int v) {
  __m512i sums[4];
  for (int i = 0; i < 4; ++i)
    sums[i] = _mm512_dpbusd_epi32(_mm512_setzero_si512(), n.groups[v + i], _mm512_loadu_si512(q + 64 * (v + i)));
  const __m512 x = _mm512_castsi512_ps(halve(sums[0], sums[1])), y = _mm512_castsi512_ps(halve(sums[2], sums[3]));
  return _mm512_add_epi32(_mm512_castps_si512(_mm512_shuffle_ps(x, y, 0x88)),
                          _mm512_castps_si512(_mm512_shuffle_ps(x, y, 0xdd)));
}

// [x0 + x2, x1 + x3, y0 + y2, y1 + y3] of 128-bit lanes.
INLINE __m512i halve_lanes(__m512i x, __m512i y) {
  return _mm512_add_epi32(_mm512_mask_blend_epi64(0xf0, x, y), _mm512_shuffle_i64x2(x, y, 0x4e));
}

template <int>
INLINE __m512i group_sums(const Bytes& a, const Bytes& b, const uint8_t* q) {
  const __m512i x = halve_lanes(four_groups(a, q, 0), four_groups(a, q, 4));
  const __m512i y = halve_lanes(four_groups(b, q, 0), four_groups(b, q, 4));
  return _mm512_add_epi32(_mm512_shuffle_i64x2(x, y, 0x88), _mm512_shuffle_i64x2(x, y, 0xdd));
}

// The scales of eight groups of row a, then of row b.
template <bool Whole>
INLINE __m512 load_scales(const uint8_t* a, const uint8_t* b, int groups) {
  const auto there = static_cast<__mmask8>((1u << groups) - 1);
  const __m128i low = Whole ? _mm_loadu_si128(reinterpret_cast<const __m128i*>(a)) : _mm_maskz_loadu_epi16(there, a);
  const __m128i high = Whole ? _mm_loadu_si128(reinterpret_cast<const __m128i*>(b)) : _mm_maskz_loadu_epi16(there, b);
  return _mm512_cvtph_ps(_mm256_inserti128_si256(_mm256_castsi128_si256(low), high, 1));
}

template <int G, int Bits, int Tile, bool Whole>
INLINE void step(const Shape& s, int g, const uint8_t* const* codes, const uint8_t* const* scales,
                 const uint8_t* const* activations, __m512* chains) {
  std::conditional_t<Bits == 8, Bytes, Nibbles<G>> a, b;
  constexpr int bytes = G * Bits / 8;  // of a group's codes
  const int left = s.groups - g;
  load_codes<G, Whole>(a, codes[0] + g * bytes, left * bytes);
  load_codes<G, Whole>(b, codes[1] + g * bytes, left * bytes);
  const __m512 w = load_scales<Whole>(scales[0] + 2 * g, scales[1] + 2 * g, Whole ? 8 : left);
  for (int m = 0; m < Tile; ++m) {
    const uint8_t* row = activations[m];
    const __m512i sums = group_sums<G>(a, b, row + g * G);
    const __m512i corrections =
        _mm512_broadcast_i32x8(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(row + s.correction_offset + 4 * g)));
    const __m512 xs =
        _mm512_broadcast_f32x8(_mm256_loadu_ps(reinterpret_cast<const float*>(row + s.scale_offset + 4 * g)));
    const __m512 d = _mm512_cvtepi32_ps(_mm512_sub_epi32(sums, corrections));
    chains[m] = _mm512_fmadd_ps(d, _mm512_mul_ps(w, xs), chains[m]);
  }
}

template <int G, int Bits, int Tile>
TARGET void dots_tile(const Shape& s, const RowPairs& rows, const uint8_t* const* activations, const DotsOut& out) {
  const int64_t code_stride = int64_t{rows.stride} * s.code_bytes(),
                scale_stride = int64_t{rows.stride} * s.scale_bytes();
  constexpr int bytes = G * Bits / 8;  // of a group's codes
  const int whole = s.groups / kChains * kChains;
  for (int i = 0; i < rows.count; ++i) {
    const uint8_t* const codes[2] = {rows.codes_a + i * code_stride, rows.codes_b + i * code_stride};
    const uint8_t* const scales[2] = {rows.scales_a + i * scale_stride, rows.scales_b + i * scale_stride};
    _mm_prefetch(scales[0] + kScalesAhead, _MM_HINT_T0);
    _mm_prefetch(scales[1] + kScalesAhead, _MM_HINT_T0);
    __m512 chains[Tile];
    for (int m = 0; m < Tile; ++m) chains[m] = _mm512_setzero_ps();
    int g = 0;
    for (; g < whole; g += kChains) {
      for (int v = 0; v < kVectors<G, Bits>; ++v) {
        _mm_prefetch(codes[0] + g * bytes + 64 * v + kAhead, _MM_HINT_T0);
        _mm_prefetch(codes[1] + g * bytes + 64 * v + kAhead, _MM_HINT_T0);
      }
      step<G, Bits, Tile, true>(s, g, codes, scales, activations, chains);
    }
    if (g < s.groups) {
      for (int byte = g * bytes; byte < s.code_bytes(); byte += 64) {
        _mm_prefetch(codes[0] + byte + kAhead, _MM_HINT_T0);
        _mm_prefetch(codes[1] + byte + kAhead, _MM_HINT_T0);
      }
      step<G, Bits, Tile, false>(s, g, codes, scales, activations, chains);
    }
    for (int m = 0; m < Tile; ++m) {
      const __m512 t = _mm512_add_ps(chains[m], _mm512_shuffle_f32x4(chains[m], chains[m], 0xb1));
      const __m512 u = _mm512_add_ps(t, _mm512_permute_ps(t, 0x4e));
      const __m512 dot = _mm512_add_ps(u, _mm512_permute_ps(u, 0xb1));
      out.a[m][i * out.step] = _mm512_cvtss_f32(dot);
      out.b[m][i * out.step] = _mm_cvtss_f32(_mm512_extractf32x4_ps(dot, 2));
    }
  }
}

template <int G, int Bits>
TARGET void dots_format(const Shape& s, const RowPairs& rows, const uint8_t* const* activations, int tile,
                        const DotsOut& out) {
  switch (tile) {
    case 1:
      return dots_tile<G, Bits, 1>(s, rows, activations, out);
    case 2:
      return dots_tile<G, Bits, 2>(s, rows, activations, out);
    case 3:
      return dots_tile<G, Bits, 3>(s, rows, activations, out);
    default:
      return dots_tile<G, Bits, 4>(s, rows, activations, out);
  }
}

void dots(const Shape& s, const RowPairs& rows, const uint8_t* const* activations, int tile, const DotsOut& out) {
  // As measured: from here on sixteen side by side cost less.
  const int wide_from = s.bits == 8 ? 7 : s.group == 64 ? 9 : 13;
  if (tile >= wide_from) return dots_wide_avx512(s, rows, activations, tile, out);
  const auto format = s.bits == 8 ? dots_format<64, 8> : s.group == 64 ? dots_format<64, 4> : dots_format<32, 4>;
  for (int m = 0; m < tile; m += 4) format(s, rows, activations + m, tile - m < 4 ? tile - m : 4, out.from(m));
}

TARGET void quantise(const Shape& s, int first, int count, const float* x, uint8_t* row) {
  const __m512i absolute = _mm512_set1_epi32(0x7fffffff);
  for (int g = first; g < first + count; ++g, x += s.group) {
    __m512i most = _mm512_setzero_si512();
    for (int j = 0; j < s.group; j += 16)
      most = _mm512_max_epu32(most, _mm512_and_si512(_mm512_loadu_si512(x + j), absolute));
    const GroupScale scale(_mm512_reduce_max_epu32(most));
    const __m512 reciprocal = _mm512_set1_ps(scale.reciprocal);
    __m512i sum = _mm512_setzero_si512();
    for (int j = 0; j < s.group; j += 16) {
      const __m512i q =
          scale.usable ? _mm512_cvtps_epi32(_mm512_mul_ps(_mm512_loadu_ps(x + j), reciprocal)) : _mm512_setzero_si512();
      sum = _mm512_add_epi32(sum, q);
      _mm_storeu_si128(reinterpret_cast<__m128i*>(row + s.q_offset(g, j)), _mm512_cvtepi32_epi8(q));
    }
    scale.store(s, g, s.bias() * _mm512_reduce_add_epi32(sum), row);
  }
}

INLINE __m512 exp_of(__m512 x) {
  // The second operand is what max and min return when either is NaN.
  x = _mm512_min_ps(_mm512_set1_ps(88.0f), _mm512_max_ps(_mm512_set1_ps(-87.0f), x));
  const __m512 n =
      _mm512_roundscale_ps(_mm512_mul_ps(x, _mm512_set1_ps(kLog2e)), _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  __m512 r = _mm512_fmadd_ps(n, _mm512_set1_ps(kLn2High), x);
  r = _mm512_fmadd_ps(n, _mm512_set1_ps(kLn2Low), r);
  __m512 p = _mm512_set1_ps(kExp[0]);
  for (int i = 1; i < 6; ++i) p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(kExp[i]));
  p = _mm512_add_ps(_mm512_fmadd_ps(p, _mm512_mul_ps(r, r), r), _mm512_set1_ps(1.0f));
  const __m512i power = _mm512_slli_epi32(_mm512_add_epi32(_mm512_cvtps_epi32(n), _mm512_set1_epi32(127)), 23);
  return _mm512_mul_ps(p, _mm512_castsi512_ps(power));
}

TARGET void gate(int n, const float* g, const float* u, float* h) {
  const __m512 one = _mm512_set1_ps(1.0f);
  for (int i = 0; i < n; i += 16) {
    const auto there = n - i >= 16 ? __mmask16(0xffff) : __mmask16((1u << (n - i)) - 1);
    const __m512 gi = _mm512_maskz_loadu_ps(there, g + i), ui = _mm512_maskz_loadu_ps(there, u + i);
    const __m512 sigmoid = _mm512_div_ps(one, _mm512_add_ps(one, exp_of(_mm512_xor_ps(gi, _mm512_set1_ps(-0.0f)))));
    _mm512_mask_storeu_ps(h + i, there, _mm512_mul_ps(_mm512_mul_ps(gi, sigmoid), ui));
  }
}

TARGET void combine(int rows, int n, const float* weights, const float* const* y, float* out) {
  for (int i = 0; i < n; i += 16) {
    const auto there = n - i >= 16 ? __mmask16(0xffff) : __mmask16((1u << (n - i)) - 1);
    __m512 sum = _mm512_setzero_ps();
    for (int r = 0; r < rows; ++r)
      sum = _mm512_fmadd_ps(_mm512_set1_ps(weights[r]), _mm512_maskz_loadu_ps(there, y[r] + i), sum);
    _mm512_mask_storeu_ps(out + i, there, sum);
  }
}

TARGET uint64_t read(const uint8_t* from, int64_t bytes) {
  __m512i sum[4] = {};
  int64_t i = 0;
  for (; i + 256 <= bytes; i += 256)
    for (int v = 0; v < 4; ++v) {
      _mm_prefetch(from + i + 64 * v + kAhead, _MM_HINT_T0);
      sum[v] = _mm512_xor_si512(sum[v], _mm512_loadu_si512(from + i + 64 * v));
    }
  for (; i < bytes; i += 64) sum[0] = _mm512_xor_si512(sum[0], _mm512_loadu_si512(from + i));
  alignas(64) uint64_t words[8], total = 0;
  _mm512_store_si512(words, _mm512_xor_si512(_mm512_xor_si512(sum[0], sum[1]), _mm512_xor_si512(sum[2], sum[3])));
  for (uint64_t word : words) total ^= word;
  return total;
}

}  // namespace

const Isa kAvx512 = {3, quantise, dots, dots_f32_avx2, gate, combine, read};

}  // namespace experts

#endif
