// The arithmetic of docs/expert-arithmetic.md as a table of functions, one table per instruction set.
// Not here: threads, records, argument checks. Invariant: every table gives the same bits; scalar.cpp is the truth.
//
// Letters: K row length, G group, g groups of a row.
#pragma once
#include <stdint.h>
#include <string.h>
#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace experts {

constexpr int kTile = 16;       // activations of one call of dots
constexpr int kMostPairs = 64;  // pairs of weight rows of one call of dots
constexpr int kChains = 8;      // chains of a dot; also the groups of one vector step
constexpr int kGateRows = 64;   // intermediate elements of one gate-up unit: whole groups of every format

// A quantised activation row, made for one pass of dots:
//   int8 q: for q8 in plain order, for q4 in blocks of 128 elements that match 64 bytes of codes, first the 64 elements
//   of the low nibbles, then those of the high ones; fp32 scale per group; int32 bias * sum(q) per group. Padded with
//   zeros to a multiple of eight groups.
struct Shape {
  int k, group, bits, groups, padded_groups;
  int scale_offset, correction_offset, bytes;  // inside the row

  static Shape of(int k, int group, int bits) {
    Shape s;
    s.k = k, s.group = group, s.bits = bits, s.groups = k / group;
    s.padded_groups = (s.groups + kChains - 1) / kChains * kChains;
    s.scale_offset = s.padded_groups * group;
    s.correction_offset = s.scale_offset + 4 * s.padded_groups;
    s.bytes = (s.correction_offset + 4 * s.padded_groups + 63) / 64 * 64;
    return s;
  }
  int bias() const { return 1 << (bits - 1); }     // what makes a code unsigned: 8 or 128
  int code_bytes() const { return k * bits / 8; }  // of a weight row
  int scale_bytes() const { return 2 * groups; }
  // Where element j (0..G-1) of a group has its q.
  int q_offset(int g, int j) const {
    if (bits == 8) return g * group + j;
    const int half = group / 2, byte = g * half + j % half;
    return byte / 64 * 128 + byte % 64 + (j < half ? 0 : 64);
  }
};

// Two weight rows a step, e.g. gate and up of the same index: row i starts at codes + i * stride rows.
struct RowPairs {
  const uint8_t *codes_a, *codes_b, *scales_a, *scales_b;
  int stride;  // in rows
  int count;   // even, at most kMostPairs
};

// Where the dots of a tile's activation m go: a[m][i * step], b[m][i * step].
struct DotsOut {
  float *a[kTile], *b[kTile];
  int step;

  DotsOut from(int m) const {  // of activation m and those after it
    DotsOut rest = *this;
    for (int i = m; i < kTile; ++i) rest.a[i - m] = a[i], rest.b[i - m] = b[i];
    return rest;
  }
};

struct Isa {
  int id;
  // Quantises groups first..first+count of a row; x points at the first group's elements.
  void (*quantise)(const Shape&, int first, int count, const float* x, uint8_t* row);
  void (*dots)(const Shape&, const RowPairs&, const uint8_t* const* activations, int tile, const DotsOut&);
  // `count` rows of K fp32 weights, `columns` vectors x, each behind the other: out[c * out_stride + i] = dot(w_i, x_c).
  void (*dots_f32)(int k, const float* w, int count, const float* x, int columns, float* out, int64_t out_stride);
  void (*gate)(int n, const float* g, const float* u, float* h);
  // out[i] = fma over rows in ascending order, from +0.
  void (*combine)(int rows, int n, const float* weights, const float* const* y, float* out);
  // XOR of all 64-bit words of `bytes` (a multiple of 64), so that every byte is read.
  uint64_t (*read)(const uint8_t* from, int64_t bytes);
};

extern const Isa kScalar;
#if defined(__x86_64__)
extern const Isa kAvx2, kAvx512;
void dots_f32_avx2(int k, const float* w, int count, const float* x, int columns, float* out, int64_t out_stride);
#endif

// IEEE defaults (nearest even, denormals kept) while it lives, whatever the caller's thread had set.
class FloatMode {
 public:
#if defined(__x86_64__)
  FloatMode() : saved_(_mm_getcsr()) { _mm_setcsr(0x1f80); }
  ~FloatMode() { _mm_setcsr(saved_); }
  FloatMode(const FloatMode&) = delete;

 private:
  unsigned saved_;
#else
  FloatMode() {}
#endif
};

inline float f32_of_bits(uint32_t bits) {
  float f;
  memcpy(&f, &bits, 4);
  return f;
}

inline uint32_t bits_of_f32(float f) {
  uint32_t bits;
  memcpy(&bits, &f, 4);
  return bits;
}

// The constants of the exponential, in the order Horner takes them.
constexpr float kLog2e = 1.44269504f, kLn2High = -0.693359375f, kLn2Low = 2.12194440e-4f;
constexpr float kExp[6] = {1.9875691500e-4f, 1.3981999507e-3f, 8.3334519073e-3f,
                           4.1665795894e-2f, 1.6666665459e-1f, 5.0000001201e-1f};
constexpr uint32_t kTinyBits = (127u - 100u) << 23;  // 2^-100
constexpr uint32_t kInfBits = 0x7f800000u;

// Scale of a group whose greatest absolute value has these bits.
struct GroupScale {
  bool usable;
  float scale, reciprocal;

  explicit GroupScale(uint32_t max_bits) : usable(max_bits >= kTinyBits && max_bits < kInfBits) {
    const float m = f32_of_bits(max_bits);
    scale = usable ? m / 127.0f : max_bits >= kInfBits ? f32_of_bits(0x7fc00000u) : 0.0f;
    reciprocal = usable ? 127.0f / m : 0.0f;
  }
  void store(const Shape& s, int g, int32_t correction, uint8_t* row) const {
    memcpy(row + s.scale_offset + 4 * g, &scale, 4);
    memcpy(row + s.correction_offset + 4 * g, &correction, 4);
  }
};

}  // namespace experts
