// Dots of up to sixteen activations at once with AVX-512 VNNI: prompts.
//
// The sixteen lie side by side, lane m being activation m, so that no sum ever crosses lanes: four codes of a weight
// row are broadcast, one dpbusd multiplies them with the same four elements of every activation, and after a group the
// lane holds that group's integer. What a dot of one activation spends on reductions is paid here once a block, as a
// transposition.
//
//   block of 16 groups:   quads  [element / 4][activation][4] int8      scales, corrections  [group][activation]
//   four weight rows:     codes unpacked to unsigned bytes, in element order
//   chains                [row][chain][activation], over all blocks
//
// Invariant: the integers and the order of the fma's are those of every other path; no code byte behind a row is read.
#include "avx512.h"

#if defined(__x86_64__)

namespace experts {
namespace {

constexpr int kBlock = 16;                // groups worked on at once: their activations stay in the first cache level
constexpr int kSide = 4;                  // weight rows that share a load of activations
constexpr int kMaxRows = 2 * kMostPairs;  // weight rows of one call

struct alignas(64) Block {
  int8_t quads[kBlock * 16][16][4];
  float scales[kBlock][16];
  int32_t corrections[kBlock][16];
};

// Rows become columns: lane m of v[i] is what lane i of v[m] was.
INLINE void transpose(__m512i* v) {
  __m512i t[16];
  for (int i = 0; i < 16; i += 2) {
    t[i] = _mm512_unpacklo_epi32(v[i], v[i + 1]);
    t[i + 1] = _mm512_unpackhi_epi32(v[i], v[i + 1]);
  }
  for (int i = 0; i < 16; i += 4) {
    v[i] = _mm512_unpacklo_epi64(t[i], t[i + 2]);
    v[i + 1] = _mm512_unpackhi_epi64(t[i], t[i + 2]);
    v[i + 2] = _mm512_unpacklo_epi64(t[i + 1], t[i + 3]);
    v[i + 3] = _mm512_unpackhi_epi64(t[i + 1], t[i + 3]);
  }
  // v[4r + c] now holds, in 128-bit lane l, element 4l + c of rows 4r..4r+3.
  for (int c = 0; c < 4; ++c) {
    const __m512i low01 = _mm512_shuffle_i32x4(v[c], v[4 + c], 0x88);
    const __m512i high01 = _mm512_shuffle_i32x4(v[c], v[4 + c], 0xdd);
    const __m512i low23 = _mm512_shuffle_i32x4(v[8 + c], v[12 + c], 0x88);
    const __m512i high23 = _mm512_shuffle_i32x4(v[8 + c], v[12 + c], 0xdd);
    t[c] = _mm512_shuffle_i32x4(low01, low23, 0x88);
    t[8 + c] = _mm512_shuffle_i32x4(low01, low23, 0xdd);
    t[4 + c] = _mm512_shuffle_i32x4(high01, high23, 0x88);
    t[12 + c] = _mm512_shuffle_i32x4(high01, high23, 0xdd);
  }
  for (int i = 0; i < 16; ++i) v[i] = t[i];
}

// Groups first..first+count of sixteen rows, side by side.
template <int G, int Bits>
TARGET void load_block(const Shape& s, const uint8_t* const* rows, int first, int count, Block& block) {
  const int padded = (count + kChains - 1) / kChains * kChains;  // rows are padded to that
  __m512i v[16];
  for (int byte = 0; byte < padded * G; byte += 64) {
    for (int m = 0; m < 16; ++m) v[m] = _mm512_loadu_si512(rows[m] + first * G + byte);
    transpose(v);
    for (int i = 0; i < 16; ++i) {
      int element = byte + 4 * i;
      if (Bits == 4) {  // q lies as Shape::q_offset says: back to element order
        const int code = element / 128 * 64 + element % 64, high = element / 64 % 2;
        element = code / (G / 2) * G + code % (G / 2) + high * (G / 2);
      }
      _mm512_store_si512(block.quads[element / 4], v[i]);
    }
  }
  const auto there = static_cast<__mmask16>((1u << padded) - 1);
  for (int m = 0; m < 16; ++m) v[m] = _mm512_maskz_loadu_epi32(there, rows[m] + s.scale_offset + 4 * first);
  transpose(v);
  for (int i = 0; i < padded; ++i) _mm512_store_si512(block.scales[i], v[i]);
  for (int m = 0; m < 16; ++m) v[m] = _mm512_maskz_loadu_epi32(there, rows[m] + s.correction_offset + 4 * first);
  transpose(v);
  for (int i = 0; i < padded; ++i) _mm512_store_si512(block.corrections[i], v[i]);
}

// `bytes` codes (a multiple of 16) as unsigned bytes in element order.
template <int G, int Bits>
INLINE void unpack(const uint8_t* codes, int bytes, uint8_t* to) {
  const __m512i mask = _mm512_set1_epi8(15);
  const __m512i first =
      G == 64 ? _mm512_setr_epi64(0, 1, 2, 3, 8, 9, 10, 11) : _mm512_setr_epi64(0, 1, 8, 9, 2, 3, 10, 11);
  const __m512i second =
      G == 64 ? _mm512_setr_epi64(4, 5, 6, 7, 12, 13, 14, 15) : _mm512_setr_epi64(4, 5, 12, 13, 6, 7, 14, 15);
  for (int v = 0; 64 * v < bytes; ++v) {
    const __m512i packed = load_vector<false>(codes, bytes, v);
    if (Bits == 8) {
      _mm512_store_si512(to + 64 * v, _mm512_xor_si512(packed, _mm512_set1_epi8(-128)));
    } else {
      const __m512i low = _mm512_and_si512(packed, mask), high = _mm512_and_si512(_mm512_srli_epi16(packed, 4), mask);
      _mm512_store_si512(to + 128 * v, _mm512_permutex2var_epi64(low, first, high));
      _mm512_store_si512(to + 128 * v + 64, _mm512_permutex2var_epi64(low, second, high));
    }
  }
}

INLINE __m512i four_codes(const uint8_t* at) {
  int32_t codes;
  memcpy(&codes, at, 4);
  return _mm512_set1_epi32(codes);
}

// The tree of one weight row's chains, to element `at` of every activation's results.
TARGET void store_tree(const __m512* a, float* const* results, int tile, int64_t at) {
  const __m512 u0 = _mm512_add_ps(_mm512_add_ps(a[0], a[4]), _mm512_add_ps(a[2], a[6]));
  const __m512 u1 = _mm512_add_ps(_mm512_add_ps(a[1], a[5]), _mm512_add_ps(a[3], a[7]));
  alignas(64) float dots[16];
  _mm512_store_ps(dots, _mm512_add_ps(u0, u1));
  for (int m = 0; m < tile; ++m) results[m][at] = dots[m];
}

template <int G, int Bits>
TARGET void dots_format(const Shape& s, const RowPairs& rows, const uint8_t* const* activations, int tile,
                        const DotsOut& out) {
  constexpr int bytes = G * Bits / 8;  // of a group's codes
  const int64_t code_stride = int64_t{rows.stride} * s.code_bytes(),
                scale_stride = int64_t{rows.stride} * s.scale_bytes();
  const uint8_t* all[16];
  for (int m = 0; m < 16; ++m) all[m] = activations[m < tile ? m : 0];  // the empty places' results are dropped
  Block block;
  alignas(64) uint8_t unsigned_codes[kSide][kBlock * G];
  __m512 chains[kMaxRows][kChains];  // rows a, b, a, b, ...
  for (int r = 0; r < 2 * rows.count; ++r)
    for (int c = 0; c < kChains; ++c) chains[r][c] = _mm512_setzero_ps();

  for (int first = 0; first < s.groups; first += kBlock) {
    const int count = s.groups - first < kBlock ? s.groups - first : kBlock;
    load_block<G, Bits>(s, all, first, count, block);
    for (int r = 0; r < 2 * rows.count; r += kSide) {
      const uint8_t* scales[kSide];
      for (int i = 0; i < kSide; ++i) {
        const int row = (r + i) / 2;
        const uint8_t* codes = (i % 2 ? rows.codes_b : rows.codes_a) + row * code_stride + first * bytes;
        scales[i] = (i % 2 ? rows.scales_b : rows.scales_a) + row * scale_stride + 2 * first;
        for (int byte = 0; byte < count * bytes; byte += 64)
          _mm_prefetch(codes + 2 * code_stride + byte, _MM_HINT_T0);  // of the next four
        unpack<G, Bits>(codes, count * bytes, unsigned_codes[i]);
      }
      for (int g = 0; g < count; ++g) {
        __m512i sums[kSide][2] = {};  // eight sums, so that none waits for its last dpbusd
        for (int q = 0; q < G / 4; q += 2)
          for (int half = 0; half < 2; ++half) {
            const __m512i side = _mm512_load_si512(block.quads[g * (G / 4) + q + half]);
            for (int i = 0; i < kSide; ++i)
              sums[i][half] =
                  _mm512_dpbusd_epi32(sums[i][half], four_codes(unsigned_codes[i] + g * G + 4 * (q + half)), side);
          }
        const __m512i correction = _mm512_load_si512(block.corrections[g]);
        const __m512 xs = _mm512_load_ps(block.scales[g]);
        for (int i = 0; i < kSide; ++i) {
          const __m512i d = _mm512_sub_epi32(_mm512_add_epi32(sums[i][0], sums[i][1]), correction);
          uint16_t half_bits;
          memcpy(&half_bits, scales[i] + 2 * g, 2);
          const __m512 w = _mm512_broadcastss_ps(_mm_cvtph_ps(_mm_cvtsi32_si128(half_bits)));
          __m512& chain = chains[r + i][(first + g) % kChains];
          chain = _mm512_fmadd_ps(_mm512_cvtepi32_ps(d), _mm512_mul_ps(w, xs), chain);
        }
      }
    }
  }
  for (int i = 0; i < rows.count; ++i) {
    store_tree(chains[2 * i], out.a, tile, int64_t{i} * out.step);
    store_tree(chains[2 * i + 1], out.b, tile, int64_t{i} * out.step);
  }
}

}  // namespace

void dots_wide_avx512(const Shape& s, const RowPairs& rows, const uint8_t* const* activations, int tile,
                      const DotsOut& out) {
  const auto format = s.bits == 8 ? dots_format<64, 8> : s.group == 64 ? dots_format<64, 4> : dots_format<32, 4>;
  format(s, rows, activations, tile, out);
}

}  // namespace experts

#endif
