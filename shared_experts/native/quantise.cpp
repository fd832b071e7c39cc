// The fast twin of quantise_q4 and quantise_q8 in shared_experts/codecs.py; that file defines the codes, this one must
// equal it bit for bit.
//
// How: the same IEEE fp32 operations in the same order, sixteen candidates at a time (quantise_range.h). The build sets
// -ffp-contract=off. The same source is compiled for three instruction sets; the caller takes one, or the widest here.
#include <cstdint>
#include <cstring>
#include <new>
#include <thread>
#include <vector>
#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace {

#define ISA baseline
#define LANES 4
#define MAX(a, b) ((a) > (b) ? (a) : (b))
#define MIN(a, b) ((a) < (b) ? (a) : (b))
#include "quantise_range.h"
#undef ISA
#undef LANES
#undef MAX
#undef MIN

#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)
#define WIDE 1
#pragma GCC push_options
#pragma GCC target("avx2")
#define ISA avx2
#define LANES 8
#define MAX(a, b) ((lanes_f)_mm256_max_ps((__m256)(a), (__m256)(b)))
#define MIN(a, b) ((lanes_f)_mm256_min_ps((__m256)(a), (__m256)(b)))
#include "quantise_range.h"
#undef ISA
#undef LANES
#undef MAX
#undef MIN
#pragma GCC pop_options

#pragma GCC push_options
#pragma GCC target("avx512f,avx512dq,avx512bw,avx512vl,prefer-vector-width=512")
#define ISA avx512
#define LANES 16
#define MAX(a, b) ((lanes_f)_mm512_maskz_max_ps(0xffff, (__m512)(a), (__m512)(b)))
#define MIN(a, b) ((lanes_f)_mm512_maskz_min_ps(0xffff, (__m512)(a), (__m512)(b)))
#include "quantise_range.h"
#undef ISA
#undef LANES
#undef MAX
#undef MIN
#pragma GCC pop_options
#endif

using range_function = int64_t (*)(const float*, int64_t, int64_t, uint8_t*, uint16_t*);
using range_function_q8 = int64_t (*)(const float*, int64_t, int64_t, int8_t*, uint16_t*);

// The functions of an instruction set by its number, or nulls where it is not there.
struct Ranges {
  range_function of_32, of_64;
  range_function_q8 q8;
};

Ranges ranges_of(int32_t isa) {
#ifdef WIDE
  __builtin_cpu_init();
  if (isa == 3 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512dq") &&
      __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl"))
    return {avx512::quantise_range<32>, avx512::quantise_range<64>, avx512::quantise_range_q8};
  if (isa == 2 && __builtin_cpu_supports("avx2"))
    return {avx2::quantise_range<32>, avx2::quantise_range<64>, avx2::quantise_range_q8};
#endif
  if (isa == 1) return {baseline::quantise_range<32>, baseline::quantise_range<64>, baseline::quantise_range_q8};
  return {nullptr, nullptr, nullptr};
}

// Runs range(first, end) over all groups with some threads: 0, 2 or 3 as the exports below say.
template <typename Range>
int32_t run(int64_t groups, int32_t threads, int64_t* bad, const Range& range) {
  const int64_t useful = groups / 256;  // fewer groups than this are not worth a thread
  if (threads > useful) threads = useful < 1 ? 1 : static_cast<int32_t>(useful);
  if (threads > 1024) threads = 1024;
  *bad = -1;
  try {
    std::vector<int64_t> found(threads, -1);
    auto work = [&](int32_t t) { found[t] = range(groups * t / threads, groups * (t + 1) / threads); };
    std::vector<std::thread> running;
    running.reserve(threads);
    int status = 0;
    try {
      for (int32_t t = 1; t < threads; ++t) running.emplace_back(work, t);
    } catch (...) {
      status = 3;
    }
    if (!status) work(0);
    for (auto& thread : running) thread.join();
    if (status) return status;
    for (int64_t index : found)
      if (index >= 0) {
        *bad = index;
        return 2;
      }
    return 0;
  } catch (const std::bad_alloc&) {
    return 3;
  }
}

}  // namespace

#define EXPORT extern "C" __attribute__((visibility("default")))

EXPORT int32_t quantise_abi(void) { return 5; }

// The widest instruction set here: 1 scalar, 2 avx2, 3 avx512.
EXPORT int32_t quantise_best_isa(void) {
  int32_t isa = 3;
  while (!ranges_of(isa).of_32) --isa;
  return isa;
}

// x fp32 [B, G] -> codes [B, G/2], scales fp16 [B]. 0 done; 1 bad argument; 2 a weight is not finite or too large, and
// *bad is the first group that has one; 3 no thread or memory. With threads == 1 no thread is started.
EXPORT int32_t quantise_q4(const float* x, int64_t groups, int32_t group, int32_t isa, int32_t threads, uint8_t* codes,
                           uint16_t* scales, int64_t* bad) {
  if (!x || !codes || !scales || !bad || groups < 0 || (group != 32 && group != 64) || threads < 1) return 1;
  const range_function range = group == 64 ? ranges_of(isa).of_64 : ranges_of(isa).of_32;
  if (!range) return 1;
  return run(groups, threads, bad,
             [=](int64_t first, int64_t end) { return range(x, first, end, codes, scales); });
}

// x fp32 [B, 64] -> codes int8 [B, 64], scales fp16 [B]; else as quantise_q4.
EXPORT int32_t quantise_q8(const float* x, int64_t groups, int32_t group, int32_t isa, int32_t threads, int8_t* codes,
                           uint16_t* scales, int64_t* bad) {
  if (!x || !codes || !scales || !bad || groups < 0 || group != 64 || threads < 1) return 1;
  const range_function_q8 range = ranges_of(isa).q8;
  if (!range) return 1;
  return run(groups, threads, bad,
             [=](int64_t first, int64_t end) { return range(x, first, end, codes, scales); });
}
