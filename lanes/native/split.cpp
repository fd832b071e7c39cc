// expert_work of share.h: what of a layer's choice is the CPU's. Pure; lanes/experts/split.py decides it.
#include <algorithm>

#include "handle.h"
#include "share.h"

EXPORT int32_t expert_work(int32_t rows, int32_t chosen, const int32_t* ids, int32_t experts, int32_t* taken,
                           int32_t* offsets, int32_t* pair_rows) {
  const int32_t pairs = rows * chosen;
  int32_t count = 0, before = -1;
  for (int32_t p = 0; p < pairs; ++p) {
    const int32_t id = ids[p] < 0 ? ~ids[p] : ids[p];
    if (id >= experts || (p % chosen && id <= before)) return -1;
    before = id;
    if (ids[p] >= 0) taken[count++] = id;
  }
  std::sort(taken, taken + count);
  count = static_cast<int32_t>(std::unique(taken, taken + count) - taken);
  offsets[0] = 0;
  int32_t pair = 0;
  for (int32_t j = 0; j < count; ++j) {
    for (int32_t p = 0; p < pairs; ++p)
      if (ids[p] == taken[j]) pair_rows[pair++] = p / chosen;
    offsets[j + 1] = pair;
  }
  return count;
}
