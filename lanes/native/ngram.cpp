#include "ngram.h"

#define EXPORT extern "C" __attribute__((visibility("default")))

// Products and sums wrap around and remainders are never negative, as numpy's are.
EXPORT void ngram_row_ids(const ngram_hash* hash, const int64_t* tokens, int32_t rows, int64_t* ids) {
  const ngram_hash& h = *hash;
  for (int32_t row = 0; row < rows; ++row) {
    const int64_t* at = tokens + h.order - 1 + row;
    uint64_t mixed = uint64_t(at[0]) * uint64_t(h.multipliers[0]);
    bool passed = false;
    for (int32_t back = 1; back < h.order; ++back) {
      passed = passed || at[-back] == h.eos;
      mixed ^= uint64_t(passed ? h.eos : at[-back]) * uint64_t(h.multipliers[back]);
      for (int32_t head = (back - 1) * h.heads; head < back * h.heads; ++head) {
        int64_t place = int64_t(mixed) % h.sizes[head];
        if (place < 0) place += h.sizes[head];
        *ids++ = int64_t(uint64_t(place) + uint64_t(h.offsets[head]));
      }
    }
  }
}
