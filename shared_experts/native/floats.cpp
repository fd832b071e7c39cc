// The fast twins of the float conversions in shared_experts/codecs.py; that file defines them, these must equal it bit
// for bit. No threads and no memory of their own: the caller runs them beside each other on pieces it owns.
#include <cstdint>
#include <cstring>

#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)
#define CLONES __attribute__((target_clones("default", "avx2")))
#else
#define CLONES
#endif
#define EXPORT extern "C" __attribute__((visibility("default")))

namespace {

uint32_t bits_of(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, sizeof bits);
  return bits;
}

struct E4m3 {
  float value[256];  // the two codes that are no numbers: zero, refused before they are used
  E4m3() {
    for (int code = 0; code < 256; ++code) {
      const int magnitude = code & 0x7f, exponent = magnitude >> 3, fraction = magnitude & 7;
      float x = static_cast<float>(exponent ? 8 + fraction : fraction);
      for (int e = exponent ? exponent : 1; e < 10; ++e) x *= 0.5f;
      for (int e = 10; e < exponent; ++e) x *= 2.0f;
      if (magnitude == 0x7f) x = 0.0f;
      value[code] = code & 0x80 ? -x : x;
    }
  }
};
const E4m3 kE4m3;

}  // namespace

// codes [N] of E4M3 -> fp32: value times the scale of its block. The run starts at element `start` of a matrix of
// `columns` columns, whose scales are a row-major grid over blocks of block_rows x block_columns. Returns the first
// element of the run that is no number, or -1.
EXPORT int64_t floats_from_e4m3(const uint8_t* codes, int64_t start, int64_t count, int64_t columns, int64_t block_rows,
                                int64_t block_columns, const float* scales, float* out) {
  const int64_t grid_columns = (columns + block_columns - 1) / block_columns;
  for (int64_t i = 0; i < count;) {
    const int64_t row = (start + i) / columns, column = (start + i) % columns;
    int64_t run = columns - column, left = block_columns - column % block_columns;
    if (run > left) run = left;
    if (run > count - i) run = count - i;
    const float scale = scales[row / block_rows * grid_columns + column / block_columns];
    uint8_t bad = 0;
    for (int64_t k = 0; k < run; ++k) bad |= (codes[i + k] & 0x7f) == 0x7f;
    if (bad)
      for (int64_t k = 0;; ++k)
        if ((codes[i + k] & 0x7f) == 0x7f) return i + k;
    for (int64_t k = 0; k < run; ++k) out[i + k] = kE4m3.value[codes[i + k]] * scale;
    i += run;
  }
  return -1;
}

// bf16 bits [N] -> fp32, or only looked at where `out` is null. Returns the first that is not finite, or -1.
EXPORT CLONES int64_t floats_from_bf16(const uint16_t* bits, int64_t count, float* out) {
  uint16_t bad = 0;
  if (out) {
    for (int64_t i = 0; i < count; ++i) {
      const uint32_t wide = static_cast<uint32_t>(bits[i]) << 16;
      std::memcpy(out + i, &wide, sizeof wide);
    }
  }
  for (int64_t i = 0; i < count; ++i) bad |= (bits[i] & 0x7f80) == 0x7f80;
  if (!bad) return -1;
  for (int64_t i = 0;; ++i)
    if ((bits[i] & 0x7f80) == 0x7f80) return i;
}

// fp32 [N] -> bf16 bits, to nearest even. Returns the first that is not finite or rounds to infinity, or -1.
EXPORT CLONES int64_t bf16_from_floats(const float* x, int64_t count, uint16_t* bits) {
  uint32_t bad = 0;
  for (int64_t i = 0; i < count; ++i) {
    const uint32_t b = bits_of(x[i]);
    bad |= (b & 0x7fffffffu) >= 0x7f7f8000u;
    bits[i] = static_cast<uint16_t>((b + 0x7fffu + (b >> 16 & 1u)) >> 16);
  }
  if (!bad) return -1;
  for (int64_t i = 0;; ++i)
    if ((bits_of(x[i]) & 0x7fffffffu) >= 0x7f7f8000u) return i;
}
