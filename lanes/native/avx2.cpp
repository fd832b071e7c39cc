// docs/expert-arithmetic.md with AVX2, FMA and F16C: desks and older servers. The fp32 records of the AVX-512 path too.
//
// One step takes eight groups of one weight row and ends in one vector whose lane c is chain c.
//
// q4: maddubs adds two products of a nibble and an int8, at most 2 * 15 * 127 = 3,810; low and high nibbles together
// are at most 7,620, and after one pairwise madd 15,240, which fits 16 bits and can be packed again (30,480 after the
// next): nothing saturates.
//
// q8: maddubs wants one side unsigned, so it takes |w| and q with the sign of w: at most 2 * 128 * 127 = 32,512 (abs
// of -128 is 128 unsigned; q is never -128). What follows is in 32 bits.
//
// Invariant: loads touch no byte behind a row's last code or scale.
#include <algorithm>

#include "arithmetic.h"

#if defined(__x86_64__)

#include <math.h>

#define TARGET __attribute__((target("avx2,fma,f16c")))
#define INLINE TARGET inline __attribute__((always_inline))

namespace experts {
namespace {

constexpr int kAhead = 2048;  // bytes of codes prefetched ahead

INLINE __m256i load(const void* at) { return _mm256_loadu_si256(static_cast<const __m256i*>(at)); }

// Adjacent 16-bit lanes added to 32 bits, of a in the low half of each 128-bit lane of the result and of b in the high
// one.
INLINE __m256i merge(__m256i a, __m256i b) {
  const __m256i ones = _mm256_set1_epi16(1);
  return _mm256_packs_epi32(_mm256_madd_epi16(a, ones), _mm256_madd_epi16(b, ones));
}

template <bool Whole>
INLINE __m256i load_codes(const uint8_t* at, int there) {
  if (Whole || there >= 32) return load(at);
  if (there >= 16) return _mm256_zextsi128_si256(_mm_loadu_si128(reinterpret_cast<const __m128i*>(at)));
  return _mm256_setzero_si256();
}

// 16-bit sums of two low and two high products of 32 code bytes, the v-th of the step.
template <bool Whole>
INLINE __m256i products(const uint8_t* codes, int left, const uint8_t* q, int v) {
  const __m256i mask = _mm256_set1_epi8(15);
  const __m256i packed = load_codes<Whole>(codes + 32 * v, left - 32 * v);
  const __m256i low = _mm256_and_si256(packed, mask), high = _mm256_and_si256(_mm256_srli_epi16(packed, 4), mask);
  const uint8_t* at = q + v / 2 * 128 + v % 2 * 32;
  return _mm256_add_epi16(_mm256_maddubs_epi16(low, load(at)), _mm256_maddubs_epi16(high, load(at + 64)));
}

// Sums of n * q of eight groups of nibbles; `left` code bytes are there.
template <int G, bool Whole>
INLINE __m256i group_sums(const uint8_t* codes, int left, const uint8_t* q) {
  const __m256i ones = _mm256_set1_epi16(1);
  if constexpr (G == 64) {
    // Vector v is group v: half of it in each 128-bit lane.
    const __m256i g01 = merge(products<Whole>(codes, left, q, 0), products<Whole>(codes, left, q, 1));
    const __m256i g23 = merge(products<Whole>(codes, left, q, 2), products<Whole>(codes, left, q, 3));
    const __m256i g0123 = _mm256_madd_epi16(merge(g01, g23), ones);
    const __m256i g45 = merge(products<Whole>(codes, left, q, 4), products<Whole>(codes, left, q, 5));
    const __m256i g67 = merge(products<Whole>(codes, left, q, 6), products<Whole>(codes, left, q, 7));
    const __m256i g4567 = _mm256_madd_epi16(merge(g45, g67), ones);
    return _mm256_add_epi32(_mm256_permute2x128_si256(g0123, g4567, 0x20),
                            _mm256_permute2x128_si256(g0123, g4567, 0x31));
  } else {
    // Vector v is group 2v in its low 128-bit lane and group 2v + 1 in its high one.
    const __m256i v01 = merge(products<Whole>(codes, left, q, 0), products<Whole>(codes, left, q, 1));
    const __m256i v23 = merge(products<Whole>(codes, left, q, 2), products<Whole>(codes, left, q, 3));
    const __m256i even_odd = _mm256_madd_epi16(merge(v01, v23), ones);
    return _mm256_permutevar8x32_epi32(even_odd, _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7));
  }
}

// Sums of w * q of group g, in eight lanes; zero where the row has no such group.
template <bool Whole>
INLINE __m256i products_q8(const uint8_t* codes, int left, const uint8_t* q, int g) {
  const __m256i ones = _mm256_set1_epi16(1);
  __m256i sum[2];
  for (int v = 0; v < 2; ++v) {
    const __m256i w = load_codes<Whole>(codes + 64 * g + 32 * v, left - 64 * g);
    const __m256i pairs = _mm256_maddubs_epi16(_mm256_abs_epi8(w), _mm256_sign_epi8(load(q + 64 * g + 32 * v), w));
    sum[v] = _mm256_madd_epi16(pairs, ones);
  }
  return _mm256_add_epi32(sum[0], sum[1]);
}

// [x0 + x2, x1 + x3, y0 + y2, y1 + y3] in each 128-bit lane.
INLINE __m256i halve(__m256i x, __m256i y) {
  return _mm256_add_epi32(_mm256_blend_epi32(x, y, 0xcc), _mm256_alignr_epi8(y, x, 8));
}

template <bool Whole>
INLINE __m256i group_sums_q8(const uint8_t* codes, int left, const uint8_t* q) {
  __m256i four[2];  // groups 0..3, groups 4..7, each in either 128-bit lane
  for (int i = 0; i < 2; ++i) {
    const __m256i g01 =
        halve(products_q8<Whole>(codes, left, q, 4 * i), products_q8<Whole>(codes, left, q, 4 * i + 1));
    const __m256i g23 =
        halve(products_q8<Whole>(codes, left, q, 4 * i + 2), products_q8<Whole>(codes, left, q, 4 * i + 3));
    four[i] = _mm256_hadd_epi32(g01, g23);
  }
  return _mm256_add_epi32(_mm256_permute2x128_si256(four[0], four[1], 0x20),
                          _mm256_permute2x128_si256(four[0], four[1], 0x31));
}

// The exact integers d of eight groups, as fp32.
template <int G, int Bits, bool Whole>
INLINE __m256 group_dots(const Shape& s, int g, const uint8_t* codes, const uint8_t* row) {
  constexpr int bytes = G * Bits / 8;  // of a group's codes
  const int left = (s.groups - g) * bytes;
  if constexpr (Bits == 8) {
    return _mm256_cvtepi32_ps(group_sums_q8<Whole>(codes + g * bytes, left, row + g * G));
  } else {
    const __m256i sums = group_sums<G, Whole>(codes + g * bytes, left, row + g * G);
    return _mm256_cvtepi32_ps(_mm256_sub_epi32(sums, load(row + s.correction_offset + 4 * g)));
  }
}

template <int G, int Bits, bool Whole>
INLINE void step(const Shape& s, int g, const uint8_t* codes, const uint8_t* scales, const uint8_t* const* activations,
                 int tile, __m256* chains) {
  alignas(16) uint8_t some[16] = {};
  if (!Whole) memcpy(some, scales + 2 * g, 2 * (s.groups - g));
  const __m256 w = _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(Whole ? scales + 2 * g : some)));
  for (int m = 0; m < tile; ++m) {
    const uint8_t* row = activations[m];
    const __m256 d = group_dots<G, Bits, Whole>(s, g, codes, row);
    const __m256 xs = _mm256_loadu_ps(reinterpret_cast<const float*>(row + s.scale_offset + 4 * g));
    chains[m] = _mm256_fmadd_ps(d, _mm256_mul_ps(w, xs), chains[m]);
  }
}

INLINE float tree(__m256 a) {
  const __m128 t = _mm_add_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
  const __m128 u = _mm_add_ps(t, _mm_movehl_ps(t, t));
  return _mm_cvtss_f32(_mm_add_ss(u, _mm_movehdup_ps(u)));
}

template <int G, int Bits, int Tile>
TARGET void dots_tile(const Shape& s, const RowPairs& rows, const uint8_t* const* activations, const DotsOut& out) {
  const int64_t code_stride = int64_t{rows.stride} * s.code_bytes(),
                scale_stride = int64_t{rows.stride} * s.scale_bytes();
  const int whole = s.groups / kChains * kChains;
  for (int i = 0; i < rows.count; ++i) {
    const uint8_t *a = rows.codes_a + i * code_stride, *b = rows.codes_b + i * code_stride;
    const uint8_t *sa = rows.scales_a + i * scale_stride, *sb = rows.scales_b + i * scale_stride;
    for (int byte = 0; byte < s.code_bytes(); byte += 64) {
      _mm_prefetch(a + byte + kAhead, _MM_HINT_T0);
      _mm_prefetch(b + byte + kAhead, _MM_HINT_T0);
    }
    __m256 chains_a[Tile], chains_b[Tile];
    for (int m = 0; m < Tile; ++m) chains_a[m] = chains_b[m] = _mm256_setzero_ps();
    int g = 0;
    for (; g < whole; g += kChains) {
      step<G, Bits, true>(s, g, a, sa, activations, Tile, chains_a);
      step<G, Bits, true>(s, g, b, sb, activations, Tile, chains_b);
    }
    if (g < s.groups) {
      step<G, Bits, false>(s, g, a, sa, activations, Tile, chains_a);
      step<G, Bits, false>(s, g, b, sb, activations, Tile, chains_b);
    }
    for (int m = 0; m < Tile; ++m) {
      out.a[m][i * out.step] = tree(chains_a[m]);
      out.b[m][i * out.step] = tree(chains_b[m]);
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
  const auto format = s.bits == 8 ? dots_format<64, 8> : s.group == 64 ? dots_format<64, 4> : dots_format<32, 4>;
  for (int m = 0; m < tile; m += 4) format(s, rows, activations + m, tile - m < 4 ? tile - m : 4, out.from(m));
}

// `Rows` rows of fp32 weights times `Columns` vectors x, at once: one fma chain alone waits for itself, and what is
// loaded serves several.
template <int Rows, int Columns>
TARGET void dots_f32_tile(int k, const float* w, const float* x, float* out, int64_t out_stride) {
  __m256 chains[Columns][Rows];
  for (int c = 0; c < Columns; ++c)
    for (int r = 0; r < Rows; ++r) chains[c][r] = _mm256_setzero_ps();
  int e = 0;
  for (; e + kChains <= k; e += kChains)
    for (int r = 0; r < Rows; ++r) {
      const __m256 weights = _mm256_loadu_ps(w + int64_t{r} * k + e);
      for (int c = 0; c < Columns; ++c)
        chains[c][r] = _mm256_fmadd_ps(weights, _mm256_loadu_ps(x + int64_t{c} * k + e), chains[c][r]);
    }
  for (int c = 0; c < Columns; ++c)
    for (int r = 0; r < Rows; ++r) {
      // Not padded with zeros: +0 added to a chain that has become -0 would change it.
      alignas(32) float lanes[kChains];
      _mm256_store_ps(lanes, chains[c][r]);
      for (int i = e; i < k; ++i)
        lanes[i - e] = __builtin_fmaf(w[int64_t{r} * k + i], x[int64_t{c} * k + i], lanes[i - e]);
      out[c * out_stride + r] = tree(_mm256_load_ps(lanes));
    }
}

TARGET void quantise(const Shape& s, int first, int count, const float* x, uint8_t* row) {
  const __m256i absolute = _mm256_set1_epi32(0x7fffffff);
  for (int g = first; g < first + count; ++g, x += s.group) {
    __m256i most = _mm256_setzero_si256();
    for (int j = 0; j < s.group; j += 8) most = _mm256_max_epu32(most, _mm256_and_si256(load(x + j), absolute));
    alignas(32) uint32_t lanes[8], max_bits = 0;
    _mm256_store_si256(reinterpret_cast<__m256i*>(lanes), most);
    for (uint32_t bits : lanes) max_bits = bits > max_bits ? bits : max_bits;
    const GroupScale scale(max_bits);
    const __m256 reciprocal = _mm256_set1_ps(scale.reciprocal);
    __m256i sum = _mm256_setzero_si256();
    for (int j = 0; j < s.group; j += 16) {
      __m256i a = _mm256_setzero_si256(), b = a;
      if (scale.usable) {
        a = _mm256_cvtps_epi32(_mm256_mul_ps(_mm256_loadu_ps(x + j), reciprocal));
        b = _mm256_cvtps_epi32(_mm256_mul_ps(_mm256_loadu_ps(x + j + 8), reciprocal));
      }
      sum = _mm256_add_epi32(sum, _mm256_add_epi32(a, b));
      const __m256i words = _mm256_permute4x64_epi64(_mm256_packs_epi32(a, b), 0xd8);
      _mm_storeu_si128(reinterpret_cast<__m128i*>(row + s.q_offset(g, j)),
                       _mm_packs_epi16(_mm256_castsi256_si128(words), _mm256_extracti128_si256(words, 1)));
    }
    alignas(32) int32_t sums[8], total = 0;
    _mm256_store_si256(reinterpret_cast<__m256i*>(sums), sum);
    for (int32_t v : sums) total += v;
    scale.store(s, g, s.bias() * total, row);
  }
}

INLINE __m256 exp_of(__m256 x) {
  // The second operand is what max and min return when either is NaN.
  x = _mm256_min_ps(_mm256_set1_ps(88.0f), _mm256_max_ps(_mm256_set1_ps(-87.0f), x));
  const __m256 n =
      _mm256_round_ps(_mm256_mul_ps(x, _mm256_set1_ps(kLog2e)), _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  __m256 r = _mm256_fmadd_ps(n, _mm256_set1_ps(kLn2High), x);
  r = _mm256_fmadd_ps(n, _mm256_set1_ps(kLn2Low), r);
  __m256 p = _mm256_set1_ps(kExp[0]);
  for (int i = 1; i < 6; ++i) p = _mm256_fmadd_ps(p, r, _mm256_set1_ps(kExp[i]));
  p = _mm256_add_ps(_mm256_fmadd_ps(p, _mm256_mul_ps(r, r), r), _mm256_set1_ps(1.0f));
  const __m256i power = _mm256_slli_epi32(_mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127)), 23);
  return _mm256_mul_ps(p, _mm256_castsi256_ps(power));
}

INLINE __m256i first_lanes(int n) {
  return _mm256_cmpgt_epi32(_mm256_set1_epi32(n), _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7));
}

TARGET void gate(int n, const float* g, const float* u, float* h) {
  const __m256 one = _mm256_set1_ps(1.0f);
  for (int i = 0; i < n; i += 8) {
    const __m256i there = first_lanes(n - i);
    const __m256 gi = _mm256_maskload_ps(g + i, there), ui = _mm256_maskload_ps(u + i, there);
    const __m256 sigmoid = _mm256_div_ps(one, _mm256_add_ps(one, exp_of(_mm256_xor_ps(gi, _mm256_set1_ps(-0.0f)))));
    _mm256_maskstore_ps(h + i, there, _mm256_mul_ps(_mm256_mul_ps(gi, sigmoid), ui));
  }
}

TARGET void combine(int rows, int n, const float* weights, const float* const* y, float* out) {
  for (int i = 0; i < n; i += 8) {
    const __m256i there = first_lanes(n - i);
    __m256 sum = _mm256_setzero_ps();
    for (int r = 0; r < rows; ++r)
      sum = _mm256_fmadd_ps(_mm256_set1_ps(weights[r]), _mm256_maskload_ps(y[r] + i, there), sum);
    _mm256_maskstore_ps(out + i, there, sum);
  }
}

TARGET uint64_t read(const uint8_t* from, int64_t bytes) {
  __m256i sum[4] = {};
  int64_t i = 0;
  for (; i + 128 <= bytes; i += 128) {
    _mm_prefetch(from + i + kAhead, _MM_HINT_T0);
    _mm_prefetch(from + i + 64 + kAhead, _MM_HINT_T0);
    for (int v = 0; v < 4; ++v) sum[v] = _mm256_xor_si256(sum[v], load(from + i + 32 * v));
  }
  for (; i < bytes; i += 32) sum[0] = _mm256_xor_si256(sum[0], load(from + i));
  alignas(32) uint64_t words[4];
  _mm256_store_si256(reinterpret_cast<__m256i*>(words),
                     _mm256_xor_si256(_mm256_xor_si256(sum[0], sum[1]), _mm256_xor_si256(sum[2], sum[3])));
  return words[0] ^ words[1] ^ words[2] ^ words[3];
}

}  // namespace

template <int Columns>
TARGET void dots_f32_columns(int k, const float* w, int count, const float* x, float* out, int64_t out_stride) {
  constexpr int kRows = Columns < 4 ? 4 : 2;  // as many chains as there are registers for
  int i = 0;
  for (; i + kRows <= count; i += kRows) dots_f32_tile<kRows, Columns>(k, w + int64_t{i} * k, x, out + i, out_stride);
  for (; i < count; ++i) dots_f32_tile<1, Columns>(k, w + int64_t{i} * k, x, out + i, out_stride);
}

TARGET void dots_f32_avx2(int k, const float* w, int count, const float* x, int columns, float* out,
                          int64_t out_stride) {
  constexpr decltype(&dots_f32_columns<1>) kBy[] = {dots_f32_columns<1>, dots_f32_columns<2>, dots_f32_columns<3>,
                                                    dots_f32_columns<4>};
  for (int c = 0; c < columns; c += 4)
    kBy[std::min(columns - c, 4) - 1](k, w, count, x + int64_t{c} * k, out + c * out_stride, out_stride);
}

const Isa kAvx2 = {2, quantise, dots, dots_f32_avx2, gate, combine, read};

}  // namespace experts

#endif
