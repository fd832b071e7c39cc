// xxh3-128 of bytes that lie in several places, which are copied elsewhere on the way, in one call: the fast twin of
// shared_experts/park_hand.py, which it must equal bit for bit. For more than 240 bytes, without a seed.
//
// How: the bytes are a row of stripes of 64. Each adds to eight sums (64 x 64 bits by halves); after a block of 16 stripes the
// sums are scrambled; the last 64 bytes are a stripe of their own, whatever they share with the one before. A chunk is
// hashed, then copied while the core's cache has it.
#include <algorithm>
#include <cstdint>
#include <cstring>
#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace {

constexpr int32_t kAbi = 1;
constexpr uint64_t kStripe = 64, kBlock = 16, kSecretBytes = 192, kChunk = 64 << 10;
constexpr uint32_t kPrime32_1 = 0x9E3779B1u, kPrime32_2 = 0x85EBCA77u, kPrime32_3 = 0xC2B2AE3Du;
constexpr uint64_t kPrime64_1 = 0x9E3779B185EBCA87u, kPrime64_2 = 0xC2B2AE3D27D4EB4Fu,
                   kPrime64_3 = 0x165667B19E3779F9u, kPrime64_4 = 0x85EBCA77C2B2AE63u,
                   kPrime64_5 = 0x27D4EB2F165667C5u, kAvalanche = 0x165667919E3779F9u;

// The algorithm's own: another byte is another digest of everything.
alignas(64) constexpr uint8_t kSecret[kSecretBytes] = {
    0xb8, 0xfe, 0x6c, 0x39, 0x23, 0xa4, 0x4b, 0xbe, 0x7c, 0x01, 0x81, 0x2c, 0xf7, 0x21, 0xad, 0x1c, 0xde, 0xd4, 0x6d, 0xe9,
    0x83, 0x90, 0x97, 0xdb, 0x72, 0x40, 0xa4, 0xa4, 0xb7, 0xb3, 0x67, 0x1f, 0xcb, 0x79, 0xe6, 0x4e, 0xcc, 0xc0, 0xe5, 0x78,
    0x82, 0x5a, 0xd0, 0x7d, 0xcc, 0xff, 0x72, 0x21, 0xb8, 0x08, 0x46, 0x74, 0xf7, 0x43, 0x24, 0x8e, 0xe0, 0x35, 0x90, 0xe6,
    0x81, 0x3a, 0x26, 0x4c, 0x3c, 0x28, 0x52, 0xbb, 0x91, 0xc3, 0x00, 0xcb, 0x88, 0xd0, 0x65, 0x8b, 0x1b, 0x53, 0x2e, 0xa3,
    0x71, 0x64, 0x48, 0x97, 0xa2, 0x0d, 0xf9, 0x4e, 0x38, 0x19, 0xef, 0x46, 0xa9, 0xde, 0xac, 0xd8, 0xa8, 0xfa, 0x76, 0x3f,
    0xe3, 0x9c, 0x34, 0x3f, 0xf9, 0xdc, 0xbb, 0xc7, 0xc7, 0x0b, 0x4f, 0x1d, 0x8a, 0x51, 0xe0, 0x4b, 0xcd, 0xb4, 0x59, 0x31,
    0xc8, 0x9f, 0x7e, 0xc9, 0xd9, 0x78, 0x73, 0x64, 0xea, 0xc5, 0xac, 0x83, 0x34, 0xd3, 0xeb, 0xc3, 0xc5, 0x81, 0xa0, 0xff,
    0xfa, 0x13, 0x63, 0xeb, 0x17, 0x0d, 0xdd, 0x51, 0xb7, 0xf0, 0xda, 0x49, 0xd3, 0x16, 0x55, 0x26, 0x29, 0xd4, 0x68, 0x9e,
    0x2b, 0x16, 0xbe, 0x58, 0x7d, 0x47, 0xa1, 0xfc, 0x8f, 0xf8, 0xb8, 0xd1, 0x7a, 0xd0, 0x31, 0xce, 0x45, 0xcb, 0x3a, 0x8f,
    0x95, 0x16, 0x04, 0x28, 0xaf, 0xd7, 0xfb, 0xca, 0xbb, 0x4b, 0x40, 0x7e,
};

uint64_t word(const uint8_t* at) {
  uint64_t value;
  memcpy(&value, at, 8);
  return value;
}

// Stripes one after another, the first of them number `in_block` of its block; returns what the next one is.
using Accumulate = uint64_t (*)(uint64_t* sums, const uint8_t* stripes, uint64_t count, uint64_t in_block);

uint64_t accumulate_baseline(uint64_t* sums, const uint8_t* stripes, uint64_t count, uint64_t in_block) {
  for (; count; --count, stripes += kStripe) {
    for (int lane = 0; lane < 8; ++lane) {
      const uint64_t value = word(stripes + 8 * lane), keyed = value ^ word(kSecret + 8 * in_block + 8 * lane);
      sums[lane ^ 1] += value;
      sums[lane] += (keyed & 0xFFFFFFFFu) * (keyed >> 32);
    }
    if (++in_block < kBlock) continue;
    in_block = 0;
    for (int lane = 0; lane < 8; ++lane) {
      const uint64_t sum = sums[lane];
      sums[lane] = (sum ^ (sum >> 47) ^ word(kSecret + kSecretBytes - kStripe + 8 * lane)) * kPrime32_1;
    }
  }
  return in_block;
}

#if defined(__x86_64__)
#define WIDE 1
__attribute__((target("avx2"))) uint64_t accumulate_avx2(uint64_t* sums, const uint8_t* stripes, uint64_t count,
                                                         uint64_t in_block) {
  using vector = __m256i;
  vector* const at = reinterpret_cast<vector*>(sums);
  const vector* const scramble = reinterpret_cast<const vector*>(kSecret + kSecretBytes - kStripe);
  const vector prime = _mm256_set1_epi64x(kPrime32_1);
  vector sum[2] = {_mm256_loadu_si256(at), _mm256_loadu_si256(at + 1)};
  for (; count; --count, stripes += kStripe) {

    const vector* const secret = reinterpret_cast<const vector*>(kSecret + 8 * in_block);
    for (int half = 0; half < 2; ++half) {
      const vector value = _mm256_loadu_si256(reinterpret_cast<const vector*>(stripes) + half);
      const vector keyed = _mm256_xor_si256(value, _mm256_loadu_si256(secret + half));
      const vector product = _mm256_mul_epu32(keyed, _mm256_srli_epi64(keyed, 32));
      const vector swapped = _mm256_shuffle_epi32(value, _MM_SHUFFLE(1, 0, 3, 2));
      sum[half] = _mm256_add_epi64(_mm256_add_epi64(sum[half], swapped), product);
    }
    if (++in_block < kBlock) continue;
    in_block = 0;
    for (int half = 0; half < 2; ++half) {
      const vector mixed = _mm256_xor_si256(_mm256_xor_si256(sum[half], _mm256_srli_epi64(sum[half], 47)),
                                            _mm256_loadu_si256(scramble + half));
      const vector low = _mm256_mul_epu32(mixed, prime);
      const vector high = _mm256_mul_epu32(_mm256_srli_epi64(mixed, 32), prime);
      sum[half] = _mm256_add_epi64(low, _mm256_slli_epi64(high, 32));
    }
  }
  _mm256_storeu_si256(at, sum[0]);
  _mm256_storeu_si256(at + 1, sum[1]);
  return in_block;
}

// Past the caches: nobody reads it here, and a line that is written whole need not be read before.
__attribute__((target("avx2"))) void copy_avx2(uint8_t* to, const uint8_t* from, uint64_t bytes) {
  const uint64_t head = std::min<uint64_t>(bytes, -reinterpret_cast<uintptr_t>(to) % sizeof(__m256i));
  memcpy(to, from, head);
  for (to += head, from += head, bytes -= head; bytes >= kStripe; to += kStripe, from += kStripe, bytes -= kStripe) {
    for (int half = 0; half < 2; ++half) {
      _mm256_stream_si256(reinterpret_cast<__m256i*>(to) + half,
                          _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from) + half));
    }
  }
  memcpy(to, from, bytes);
  _mm_sfence();  // whoever is told of these bytes finds them
}
#endif

void copy(int32_t isa, uint8_t* to, const uint8_t* from, uint64_t bytes) {
#ifdef WIDE
  if (isa == 2) return copy_avx2(to, from, bytes);
#endif
  memcpy(to, from, bytes);
}

int32_t best_isa() {
#ifdef WIDE
  if (__builtin_cpu_supports("avx2")) return 2;
#endif
  return 1;
}

Accumulate of_isa(int32_t isa) {
#ifdef WIDE
  if (isa == 2) return accumulate_avx2;
#endif
  return accumulate_baseline;
}

struct Hash {
  Accumulate accumulate;
  uint64_t left;  // stripes that are not the last one
  uint64_t in_block = 0, held = 0;
  alignas(64) uint64_t sums[8] = {kPrime32_3, kPrime64_1, kPrime64_2, kPrime64_3,
                                  kPrime64_4, kPrime32_2, kPrime64_5, kPrime32_1};
  uint8_t part[kStripe];  // of a stripe that goes on in the next place

  Hash(Accumulate accumulate, uint64_t total) : accumulate(accumulate), left((total - 1) / kStripe) {}

  void stripes(const uint8_t* at, uint64_t count) {
    left -= count;
    in_block = accumulate(sums, at, count, in_block);
  }

  void update(const uint8_t* at, uint64_t bytes) {
    if (held) {
      const uint64_t more = std::min(bytes, kStripe - held);
      memcpy(part + held, at, more);
      held += more;
      at += more;
      bytes -= more;
      if (held < kStripe || !left) return;
      stripes(part, 1);
      held = 0;
    }
    const uint64_t whole = std::min(bytes / kStripe, left);
    stripes(at, whole);
    held = bytes - kStripe * whole;
    memcpy(part, at + kStripe * whole, held);
  }

  static uint64_t merged(const uint64_t* sums, const uint8_t* secret, uint64_t value) {
    for (int pair = 0; pair < 4; ++pair) {
      const unsigned __int128 product = static_cast<unsigned __int128>(sums[2 * pair] ^ word(secret + 16 * pair)) *
                                        (sums[2 * pair + 1] ^ word(secret + 16 * pair + 8));
      value += static_cast<uint64_t>(product) ^ static_cast<uint64_t>(product >> 64);
    }
    value ^= value >> 37;
    value *= kAvalanche;
    return value ^ (value >> 32);
  }

  void end(const uint8_t* last, uint64_t total, uint8_t* digest) {
    const uint8_t* const secret = kSecret + kSecretBytes - kStripe - 7;
    for (int lane = 0; lane < 8; ++lane) {
      const uint64_t value = word(last + 8 * lane), keyed = value ^ word(secret + 8 * lane);
      sums[lane ^ 1] += value;
      sums[lane] += (keyed & 0xFFFFFFFFu) * (keyed >> 32);
    }
    const uint64_t halves[2] = {merged(sums, kSecret + kSecretBytes - kStripe - 11, ~(total * kPrime64_2)),
                                merged(sums, kSecret + 11, total * kPrime64_1)};
    for (int byte = 0; byte < 16; ++byte) digest[byte] = static_cast<uint8_t>(halves[byte / 8] >> (56 - byte % 8 * 8));
  }
};

}  // namespace

#define EXPORT extern "C" __attribute__((visibility("default")))

EXPORT int32_t digest_abi() { return kAbi; }

EXPORT int32_t digest_best_isa() { return best_isa(); }

// The digest of sizes[i] bytes at from[i], in order; copied to to[i] where that is not null. 0, or 1 for arguments that
// nobody should give, or 2 where *stop was found to be set: `digest` is not written then.
EXPORT int32_t digest_places(const uint8_t* const* from, const uint64_t* sizes, uint8_t* const* to, int64_t count,
                             int32_t isa, const int32_t* stop, uint8_t* digest) {
  uint64_t total = 0;
  for (int64_t i = 0; i < count; ++i) total += sizes[i];
  if (count < 1 || total <= 240 || isa < 1 || isa > best_isa()) return 1;
  Hash hash(of_isa(isa), total);
  uint8_t last[kStripe];
  uint64_t before = total;  // bytes that are not hashed yet
  for (int64_t i = 0; i < count; ++i) {
    for (uint64_t at = 0; at < sizes[i]; at += kChunk) {
      if (stop && __atomic_load_n(stop, __ATOMIC_RELAXED)) return 2;
      const uint64_t bytes = std::min(kChunk, sizes[i] - at);
      const uint8_t* const source = from[i] + at;
      hash.update(source, bytes);
      if (to && to[i]) copy(isa, to[i] + at, source, bytes);
      before -= bytes;
      if (before < kStripe) {  // what of this chunk is among the last 64 bytes
        const uint64_t end = kStripe - before, begin = end > bytes ? end - bytes : 0;
        memcpy(last + begin, source + bytes - (end - begin), end - begin);
      }
    }
  }
  hash.end(last, total, digest);
  return 0;
}
