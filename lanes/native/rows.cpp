// expert_combine and expert_read of experts.h: the calls that compute no expert.
#include <atomic>
#include <mutex>

#include "handle.h"

using namespace experts;

namespace {

struct Combine {
  const Isa* isa;
  int32_t k, hidden, rows;
  const int32_t* pair_index;
  const float *weights, *y;
  float* out;
};

constexpr int32_t kMaxChosen = 1024;  // K
constexpr int kCombineRows = 8;       // of one unit

void combine_unit(void* opaque, uint32_t unit) {
  const Combine& c = *static_cast<const Combine*>(opaque);
  const float* y[kMaxChosen];
  const int first = static_cast<int>(unit) * kCombineRows, end = std::min(first + kCombineRows, c.rows);
  for (int r = first; r < end; ++r) {
    for (int i = 0; i < c.k; ++i) y[i] = c.y + int64_t{c.pair_index[int64_t{r} * c.k + i]} * c.hidden;
    c.isa->combine(c.k, c.hidden, c.weights + int64_t{r} * c.k, y, c.out + int64_t{r} * c.hidden);
  }
}

struct Read {
  const Isa* isa;
  const uint8_t* const* records;
  int64_t parts[4][2];  // offset, bytes
  int units;            // per record
  std::atomic<uint64_t> sum{0};
};

void read_unit(void* opaque, uint32_t unit) {
  Read& r = *static_cast<Read*>(opaque);
  const uint8_t* record = r.records[unit / r.units];
  const int64_t piece = unit % r.units;
  uint64_t sum = 0;
  for (const auto& [offset, bytes] : r.parts) {
    if (!bytes) continue;
    const int64_t lines = bytes / 64, from = lines * piece / r.units, to = lines * (piece + 1) / r.units;
    sum ^= r.isa->read(record + offset + 64 * from, 64 * (to - from));
  }
  r.sum.fetch_xor(sum, std::memory_order_relaxed);
}

}  // namespace

EXPORT int expert_combine(expert_pool* pool, int32_t rows, int32_t k, int32_t hidden, const int32_t* pair_index,
                          int32_t pairs, const float* weights, const float* y, float* out) {
  if (!pool || rows < 0 || rows > kMaxRows || k < 1 || k > kMaxChosen || hidden < 1 || hidden > kMaxSize || pairs < 0)
    return EXPERT_BAD_ARGUMENT;
  if (!rows) return EXPERT_OK;
  if (!pair_index || !weights || !y || !out) return EXPERT_BAD_ARGUMENT;
  for (int64_t i = 0; i < int64_t{rows} * k; ++i)
    if (pair_index[i] < 0 || pair_index[i] >= pairs) return EXPERT_BAD_ARGUMENT;
  Combine run{pool->isa, k, hidden, rows, pair_index, weights, y, out};
  const std::lock_guard<std::mutex> alone(pool->pool.callers);
  pool->pool.run(combine_unit, &run, (rows + kCombineRows - 1) / kCombineRows);
  return EXPERT_OK;
}

EXPORT int expert_read(expert_pool* pool, const expert_layout* layout, int32_t jobs, const uint8_t* const* records,
                       uint64_t* sum) {
  if (!pool || !valid(layout) || !valid(jobs, records) || !sum) return EXPERT_BAD_ARGUMENT;
  const int64_t h = layout->hidden, i = layout->intermediate;
  const int group = group_of(*layout);
  const int64_t codes = h * i * bits_of(*layout) / 8;  // of the down matrix
  Read run{pool->isa, records, {}, 16};
  const int64_t parts[4][2] = {{layout->gate_up_codes, 2 * codes},
                               {layout->gate_up_scales, group ? 4 * i * (h / group) : 0},
                               {layout->down_codes, codes},
                               {layout->down_scales, group ? 2 * h * (i / group) : 0}};
  memcpy(run.parts, parts, sizeof parts);
  const std::lock_guard<std::mutex> alone(pool->pool.callers);
  pool->pool.run(read_unit, &run, static_cast<uint32_t>(jobs) * run.units);
  *sum = run.sum.load();
  return EXPERT_OK;
}
