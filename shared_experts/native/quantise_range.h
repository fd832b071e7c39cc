// The inner functions of quantise.cpp, compiled once per instruction set: included with ISA naming the namespace, LANES
// the width of a vector, and MAX(a, b) = a > b ? a : b and MIN(a, b) = a < b ? a : b on vectors.
//
// Lanes are clips of one sign, tried side by side; element after element is broadcast to them. The chains of the
// definition are vectors, so its tree is fifteen vector adds and nothing is summed across lanes. Rounding to nearest
// even is an add and a subtract of 1.5 * 2^23, exact for magnitudes below 2^22; here they stay below 40.
//
// Letters: G group, B groups.
namespace ISA {

constexpr int kLanes = LANES, kClips = 16, kChains = 16;
constexpr int32_t kLargestBits = 0x477fe000;  // 65504
typedef float lanes_f __attribute__((vector_size(kLanes * 4)));
typedef int32_t lanes_i __attribute__((vector_size(kLanes * 4)));

// The two forms below read the same for a float and for a vector of lanes.
#define ROUNDED(x) (((x) + 12582912.0f) - 12582912.0f)

// fp32 to fp16 bits and back for positive finite lanes, round to nearest even; |x| < 65520.
#define HALF_FROM_FLOAT(half, x)                                                                            \
  {                                                                                                         \
    lanes_i bits_ = (lanes_i)(x);                                                                           \
    const lanes_i small_ = (lanes_i)((x) + 0.5f) - 0x3f000000; /* the adder rounds to multiples of 2^-24 */ \
    const lanes_i normal_ = (bits_ + 0xfff + (bits_ >> 13 & 1) - 0x38000000) >> 13;                         \
    half = bits_ < 0x38800000 ? small_ : normal_;                                                           \
  }
#define FLOAT_FROM_HALF(x, half)                                                               \
  {                                                                                            \
    const lanes_f small_ = __builtin_convertvector(half, lanes_f) * 5.9604644775390625e-8f;    \
    const lanes_i bits_ = half < 0x400 ? (lanes_i)small_ : (half << 13) + 0x38000000;          \
    x = (lanes_f)bits_;                                                                        \
  }

// Groups first..end-1; the index of the first with a weight that is not finite or too large, or -1.
template <int kGroup>
static int64_t quantise_range(const float* x, int64_t first, int64_t end, uint8_t* codes, uint16_t* scales) {
  constexpr int kSteps = kGroup / kChains, kBlocks = kClips / kLanes;
  const lanes_f low = lanes_f{} - 8.0f, high = lanes_f{} + 7.0f;
  lanes_f clips[kBlocks];
  for (int k = 0; k < kClips; ++k) clips[k / kLanes][k % kLanes] = static_cast<float>(42 + 2 * k) / 512.0f;

  for (int64_t b = first; b < end; ++b) {
    const float* v = x + b * kGroup;
    float chain_of_zero[kChains], peak;
    int32_t peak_bits = 0;
    for (int i = 0; i < kGroup; ++i) {
      int32_t bits;
      std::memcpy(&bits, v + i, sizeof bits);
      bits &= 0x7fffffff;
      peak_bits = bits > peak_bits ? bits : peak_bits;
    }
    if (peak_bits > kLargestBits) return b;  // a NaN's bits are greater than any number's
    std::memcpy(&peak, &peak_bits, sizeof peak);
    for (int j = 0; j < kChains; ++j) {
      chain_of_zero[j] = v[j] * v[j];
      for (int i = 1; i < kSteps; ++i) chain_of_zero[j] = chain_of_zero[j] + v[i * kChains + j] * v[i * kChains + j];
    }
    for (int width = kChains / 2; width; width /= 2)
      for (int j = 0; j < width; ++j) chain_of_zero[j] = chain_of_zero[j] + chain_of_zero[j + width];

    float best_error = chain_of_zero[0], best = 0.0f;
    uint16_t best_half = 0;
    for (int sign = 0; sign < 2; ++sign)
      for (int block = 0; block < kBlocks; ++block) {
        lanes_i half;
        lanes_f s;
        HALF_FROM_FLOAT(half, clips[block] * peak)
        FLOAT_FROM_HALF(s, half)
        if (sign) s = -s;
        const lanes_f r = 1.0f / s;
        lanes_f chain[kChains];
        for (int j = 0; j < kChains; ++j)
          for (int i = 0; i < kSteps; ++i) {
            const float element = v[i * kChains + j];
            lanes_f q = ROUNDED(r * element);
            q = MAX(q, low);
            q = MIN(q, high);
            const lanes_f e = element - q * s;
            chain[j] = i ? chain[j] + e * e : e * e;
          }
        for (int width = kChains / 2; width; width /= 2)
          for (int j = 0; j < width; ++j) chain[j] = chain[j] + chain[j + width];
        for (int k = 0; k < kLanes; ++k)  // a zero scale's error is no number and never less
          if (chain[0][k] < best_error) {
            best_error = chain[0][k], best = s[k];
            best_half = static_cast<uint16_t>(half[k] | sign << 15);
          }
      }

    scales[b] = best_half;
    uint8_t* to = codes + b * (kGroup / 2);
    const float r = best_half ? 1.0f / best : 0.0f;  // a zero scale gives code 8 throughout
    for (int j = 0; j < kGroup / 2; ++j) {
      float a = ROUNDED(v[j] * r), c = ROUNDED(v[j + kGroup / 2] * r);
      a = a > -8.0f ? a : -8.0f, c = c > -8.0f ? c : -8.0f;
      a = a < 7.0f ? a : 7.0f, c = c < 7.0f ? c : 7.0f;
      to[j] = static_cast<uint8_t>((static_cast<int32_t>(a) + 8) | (static_cast<int32_t>(c) + 8) << 4);
    }
  }
  return -1;
}

// The 8-bit code, of groups of 64. A quotient is at most 127.5, so rounding is exact here too.
static int64_t quantise_range_q8(const float* x, int64_t first, int64_t end, int8_t* codes, uint16_t* scales) {
  constexpr int kGroup = 64;
  for (int64_t b = first; b < end; ++b) {
    const float* v = x + b * kGroup;
    int32_t peak_bits = 0;
    for (int i = 0; i < kGroup; ++i) {
      int32_t bits;
      std::memcpy(&bits, v + i, sizeof bits);
      bits &= 0x7fffffff;
      peak_bits = bits > peak_bits ? bits : peak_bits;
    }
    if (peak_bits > kLargestBits) return b;
    float peak;
    std::memcpy(&peak, &peak_bits, sizeof peak);
    lanes_i half;
    lanes_f s;
    HALF_FROM_FLOAT(half, lanes_f{} + peak / 127.0f)
    FLOAT_FROM_HALF(s, half)
    if (s[0] * 127.5f < peak) {
      half += 1;
      FLOAT_FROM_HALF(s, half)
    }
    scales[b] = static_cast<uint16_t>(half[0]);
    const float scale = half[0] ? s[0] : 1.0f;
    int8_t* to = codes + b * kGroup;
    for (int i = 0; i < kGroup; ++i) {
      float q = ROUNDED(v[i] / scale);
      q = q > -127.0f ? q : -127.0f;
      q = q < 127.0f ? q : 127.0f;
      to[i] = static_cast<int8_t>(static_cast<int32_t>(q));
    }
  }
  return -1;
}

#undef ROUNDED
#undef HALF_FROM_FLOAT
#undef FLOAT_FROM_HALF

}  // namespace ISA
