// docs/expert-arithmetic.md in plain C++: the truth that the vector paths are tested against, and the path of any CPU.
#include <math.h>

#include <cmath>

#include "arithmetic.h"

namespace experts {
namespace {

float f32_of_f16(const uint8_t* at) {
  uint16_t h;
  memcpy(&h, at, 2);
  const uint32_t sign = (h & 0x8000u) << 16, exponent = (h >> 10) & 31u, mantissa = h & 0x3ffu;
  if (exponent == 31) return f32_of_bits(sign | kInfBits | (mantissa << 13));
  if (exponent) return f32_of_bits(sign | ((exponent + 112) << 23) | (mantissa << 13));
  const float subnormal = static_cast<float>(mantissa) * 0x1p-24f;  // exact
  return sign ? -subnormal : subnormal;
}

void quantise(const Shape& s, int first, int count, const float* x, uint8_t* row) {
  auto* q = reinterpret_cast<int8_t*>(row);
  for (int g = first; g < first + count; ++g, x += s.group) {
    uint32_t max_bits = 0;
    for (int j = 0; j < s.group; ++j) {
      const uint32_t bits = bits_of_f32(x[j]) & 0x7fffffffu;
      if (bits > max_bits) max_bits = bits;
    }
    const GroupScale scale(max_bits);
    int32_t sum = 0;
    for (int j = 0; j < s.group; ++j) {
      const auto v = scale.usable ? static_cast<int8_t>(lrintf(x[j] * scale.reciprocal)) : int8_t{0};
      q[s.q_offset(g, j)] = v;
      sum += v;
    }
    scale.store(s, g, s.bias() * sum, row);
  }
}

float tree(const float* a) {
  float t[4];
  for (int c = 0; c < 4; ++c) t[c] = a[c] + a[c + 4];
  const float u0 = t[0] + t[2], u1 = t[1] + t[3];
  return u0 + u1;
}

float dot(const Shape& s, const uint8_t* codes, const uint8_t* scales, const uint8_t* row) {
  const auto* q = reinterpret_cast<const int8_t*>(row);
  const auto* scale = reinterpret_cast<const float*>(row + s.scale_offset);
  const auto* correction = reinterpret_cast<const int32_t*>(row + s.correction_offset);
  const int half = s.group / 2, stride = s.group * s.bits / 8;
  float chain[kChains] = {};
  for (int g = 0; g < s.groups; ++g) {
    int32_t d = 0;
    const uint8_t* code = codes + g * stride;
    const int8_t* at = q + s.q_offset(g, 0);
    if (s.bits == 8) {
      for (int j = 0; j < s.group; ++j) d += static_cast<int8_t>(code[j]) * at[j];
    } else {
      for (int j = 0; j < half; ++j) d += (code[j] & 15) * at[j] + (code[j] >> 4) * at[j + 64];
      d -= correction[g];
    }
    const float ws = f32_of_f16(scales + 2 * g) * scale[g];
    chain[g % kChains] = std::fma(static_cast<float>(d), ws, chain[g % kChains]);
  }
  return tree(chain);
}

void dots(const Shape& s, const RowPairs& rows, const uint8_t* const* activations, int tile, const DotsOut& out) {
  for (int i = 0; i < rows.count; ++i) {
    const int64_t codes = static_cast<int64_t>(i) * rows.stride * s.code_bytes();
    const int64_t scales = static_cast<int64_t>(i) * rows.stride * s.scale_bytes();
    for (int m = 0; m < tile; ++m) {
      out.a[m][i * out.step] = dot(s, rows.codes_a + codes, rows.scales_a + scales, activations[m]);
      out.b[m][i * out.step] = dot(s, rows.codes_b + codes, rows.scales_b + scales, activations[m]);
    }
  }
}

void dots_f32(int k, const float* w, int count, const float* x, int columns, float* out, int64_t out_stride) {
  for (int c = 0; c < columns; ++c, x += k, out += out_stride)
    for (int i = 0; i < count; ++i) {
      const float* row = w + int64_t{i} * k;
      float chain[kChains] = {};
      for (int e = 0; e < k; ++e) chain[e % kChains] = std::fma(row[e], x[e], chain[e % kChains]);
      out[i] = tree(chain);
    }
}

float exp_of(float x) {
  if (x != x) return x;
  x = x < -87.0f ? -87.0f : x > 88.0f ? 88.0f : x;
  const long n = lrintf(x * kLog2e);
  float r = std::fma(static_cast<float>(n), kLn2High, x);
  r = std::fma(static_cast<float>(n), kLn2Low, r);
  float p = kExp[0];
  for (int i = 1; i < 6; ++i) p = std::fma(p, r, kExp[i]);
  p = std::fma(p, r * r, r) + 1.0f;
  return p * f32_of_bits(static_cast<uint32_t>(n + 127) << 23);
}

void gate(int n, const float* g, const float* u, float* h) {
  for (int i = 0; i < n; ++i) {
    const float sigmoid = 1.0f / (1.0f + exp_of(-g[i]));
    h[i] = (g[i] * sigmoid) * u[i];
  }
}

void combine(int rows, int n, const float* weights, const float* const* y, float* out) {
  for (int i = 0; i < n; ++i) {
    float sum = 0.0f;
    for (int r = 0; r < rows; ++r) sum = std::fma(weights[r], y[r][i], sum);
    out[i] = sum;
  }
}

uint64_t read(const uint8_t* from, int64_t bytes) {
  uint64_t sum = 0;
  for (int64_t i = 0; i < bytes; i += 8) {
    uint64_t word;
    memcpy(&word, from + i, 8);
    sum ^= word;
  }
  return sum;
}

}  // namespace

const Isa kScalar = {1, quantise, dots, dots_f32, gate, combine, read};

}  // namespace experts
