// What stands behind an expert_pool, and the argument checks that every call shares.
// Not here: the calls. Invariant: whatever passes these checks cannot make a call read outside a record.
#pragma once
#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <new>

#include "arithmetic.h"
#include "experts.h"
#include "pool.h"

#define EXPORT extern "C" __attribute__((visibility("default")))

namespace experts {

constexpr int32_t kMaxSize = 1 << 17;  // of H and I
constexpr int32_t kMaxRows = 1 << 24;
constexpr int32_t kMaxJobs = 1 << 20;
constexpr int32_t kMaxFewRows = 16;

struct Buffer {
  uint8_t* data = nullptr;
  size_t bytes = 0;
  ~Buffer() { std::free(data); }
  int64_t erase() {  // returns how many bytes were not zero
    if (!data) return 0;
    const int64_t held = std::count_if(data, data + bytes, [](uint8_t byte) { return byte != 0; });
    explicit_bzero(data, bytes);
    return held;
  }
  uint8_t* at_least(size_t wanted) {
    if (wanted > bytes) {
      erase();
      std::free(data);
      data = nullptr, bytes = 0;
      wanted = (wanted + 4095) / 4096 * 4096;
      data = static_cast<uint8_t*>(std::aligned_alloc(4096, wanted));
      if (!data) throw std::bad_alloc();
      bytes = wanted;
    }
    return data;
  }
};

inline int group_of(const expert_layout& l) { return l.format == 1 ? 0 : l.format == 3 ? 32 : 64; }
inline int bits_of(const expert_layout& l) { return l.format == 1 ? 32 : l.format == 4 ? 8 : 4; }

inline bool part_fits(const expert_layout& l, int64_t offset, int64_t bytes, int64_t alignment) {
  return offset >= 0 && offset % alignment == 0 && bytes <= l.record_bytes && offset <= l.record_bytes - bytes;
}

inline bool valid(const expert_layout* l) {
  if (!l || l->format < 1 || l->format > 4 || l->hidden < 1 || l->hidden > kMaxSize || l->intermediate < 1 ||
      l->intermediate > kMaxSize)
    return false;
  const int64_t h = l->hidden, i = l->intermediate;
  const int group = group_of(*l);
  const int64_t codes = h * i * bits_of(*l) / 8;  // of the down matrix
  if (!group) return part_fits(*l, l->gate_up_codes, 2 * codes, 4) && part_fits(*l, l->down_codes, codes, 4);
  return h % group == 0 && i % group == 0 && part_fits(*l, l->gate_up_codes, 2 * codes, 1) &&
         part_fits(*l, l->down_codes, codes, 1) && part_fits(*l, l->gate_up_scales, 4 * i * (h / group), 2) &&
         part_fits(*l, l->down_scales, 2 * h * (i / group), 2);
}

inline bool valid(int32_t jobs, const uint8_t* const* records) {
  if (jobs < 0 || jobs > kMaxJobs || (jobs && !records)) return false;
  return std::all_of(records, records + jobs,
                     [](const uint8_t* r) { return r && reinterpret_cast<uintptr_t>(r) % 4 == 0; });
}

}  // namespace experts

struct expert_pool {
  const experts::Isa* isa;
  experts::Pool pool;
  experts::Buffer x_rows, mid_rows, h_rows;

  expert_pool(const experts::Isa* isa, const int32_t* cores, int32_t n) : isa(isa), pool(cores, n) {}
};
