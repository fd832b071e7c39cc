// expert_split of share.h: which missing experts of a layer the CPU takes. Pure; lanes/experts/split.py is its twin.
#include <algorithm>

#include "handle.h"
#include "share.h"

EXPORT int32_t expert_split(int32_t rows, int32_t chosen, const int32_t* ids, int32_t experts, const uint8_t* resident,
                            const int32_t* cpu_of_misses, int32_t* taken, int32_t* offsets, int32_t* pair_rows,
                            int32_t* slots) {
  const int32_t pairs = rows * chosen;
  for (int32_t p = 0; p < pairs; ++p) {
    if (ids[p] < 0 || ids[p] >= experts || (p % chosen && ids[p] <= ids[p - 1])) return -1;
    slots[p] = -1;
  }
  int32_t count = 0;
  for (int32_t p = 0; p < pairs; ++p)
    if (!resident[ids[p]]) taken[count++] = ids[p];
  std::sort(taken, taken + count);
  count = static_cast<int32_t>(std::unique(taken, taken + count) - taken);
  const int32_t ours = std::clamp(cpu_of_misses[count], 0, count);
  offsets[0] = 0;
  int32_t slot = 0;
  for (int32_t j = 0; j < ours; ++j) {
    for (int32_t r = 0; r < rows; ++r) {
      const int32_t* row = ids + r * chosen;
      const int32_t* at = std::lower_bound(row, row + chosen, taken[j]);
      if (at == row + chosen || *at != taken[j]) continue;
      slots[at - ids] = slot;
      pair_rows[slot++] = r;
    }
    offsets[j + 1] = slot;
  }
  return ours;
}
