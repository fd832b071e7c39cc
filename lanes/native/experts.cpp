// The C ABI of experts.h: checks every argument, then cuts a call into units for the pool.
// Not here: arithmetic (scalar.cpp, avx2.cpp, avx512.cpp) and threads (pool.cpp).
//
// Units of expert_run, in the order they are taken: gate-up units of every job (kGateRows intermediate elements each,
// quantised on the spot), then down units of every job. A down unit waits for its job's gate-up units, which were all
// taken earlier, so waiting always ends and no barrier is needed between the two halves.
#include "experts.h"

#include <algorithm>
#include <cstdlib>
#include <memory>
#include <new>
#include <system_error>
#include <vector>
#if defined(__x86_64__)
#include <cpuid.h>
#endif

#include "arithmetic.h"
#include "pool.h"

#define EXPORT extern "C" __attribute__((visibility("default")))

using namespace experts;

namespace {

constexpr int32_t kMaxSize = 1 << 17;    // of H and I
constexpr int32_t kMaxRows = 1 << 24;
constexpr int32_t kMaxJobs = 1 << 20;
constexpr int kDownRows = 128;           // hidden elements of one down unit
constexpr int kBatchPairs = 4096;        // pairs whose intermediates are held at once: bounds the scratch memory
constexpr int kRowsInline = 8;           // activations the caller quantises alone rather than waking anybody

struct Buffer {
  uint8_t* data = nullptr;
  size_t bytes = 0;
  ~Buffer() { std::free(data); }
  uint8_t* at_least(size_t wanted) {
    if (wanted > bytes) {
      std::free(data);
      bytes = 0;
      wanted = (wanted + 4095) / 4096 * 4096;
      data = static_cast<uint8_t*>(std::aligned_alloc(4096, wanted));
      if (!data) throw std::bad_alloc();
      bytes = wanted;
    }
    return data;
  }
};

int group_of(const expert_layout& l) { return l.format == 2 ? 64 : l.format == 3 ? 32 : 0; }

bool part_fits(const expert_layout& l, int64_t offset, int64_t bytes, int64_t alignment) {
  return offset >= 0 && offset % alignment == 0 && bytes <= l.record_bytes && offset <= l.record_bytes - bytes;
}

bool valid(const expert_layout* l) {
  if (!l || l->format < 1 || l->format > 3 || l->hidden < 1 || l->hidden > kMaxSize || l->intermediate < 1 ||
      l->intermediate > kMaxSize)
    return false;
  const int64_t h = l->hidden, i = l->intermediate;
  const int group = group_of(*l);
  if (!group) return part_fits(*l, l->gate_up_codes, 8 * i * h, 4) && part_fits(*l, l->down_codes, 4 * h * i, 4);
  return h % group == 0 && i % group == 0 && part_fits(*l, l->gate_up_codes, i * h, 1) &&
         part_fits(*l, l->down_codes, h * i / 2, 1) && part_fits(*l, l->gate_up_scales, 4 * i * (h / group), 2) &&
         part_fits(*l, l->down_scales, 2 * h * (i / group), 2);
}

bool valid(int32_t jobs, const uint8_t* const* records) {
  if (jobs < 0 || jobs > kMaxJobs || (jobs && !records)) return false;
  return std::all_of(records, records + jobs, [](const uint8_t* r) { return r && reinterpret_cast<uintptr_t>(r) % 4 == 0; });
}

struct Job {
  const uint8_t* record;
  int first, pairs;  // pairs are relative to the batch
  std::atomic<uint32_t> left{0};  // gate-up units not yet done

  Job(const uint8_t* record, int first, int pairs) : record(record), first(first), pairs(pairs) {}
  Job(Job&& o) noexcept : record(o.record), first(o.first), pairs(o.pairs) {}
};

struct Run {
  const Isa* isa;
  expert_layout layout;
  int group, gate_units, down_units;  // units per job
  Shape in, mid;                      // of activations [H] and intermediates [I]; unused for f32
  const float* x;
  uint8_t* x_rows;           // quantised [rows]
  const int32_t* row_index;  // of the batch's pairs
  uint8_t* mid_rows;         // quantised [pairs], or fp32 [pairs, I] for f32
  float* out;                // of the batch
  std::vector<Job> jobs;
  Wait ready;

  float* mid_f32(int pair) const { return reinterpret_cast<float*>(mid_rows) + int64_t{pair} * layout.intermediate; }
  uint8_t* mid_row(int pair) const { return mid_rows + int64_t{pair} * mid.bytes; }
};

// Zeroes the groups that fill a row up to whole vector steps.
void pad(const Shape& s, uint8_t* row) {
  for (int g = s.groups; g < s.padded_groups; ++g) {
    memset(row + s.q_offset(g, 0), 0, s.group / 2);
    memset(row + s.q_offset(g, 0) + 64, 0, s.group / 2);
    memset(row + s.scale_offset + 4 * g, 0, 4);
    memset(row + s.correction_offset + 4 * g, 0, 4);
  }
}

void quantise_row(Run& run, int row) {
  uint8_t* to = run.x_rows + int64_t{row} * run.in.bytes;
  run.isa->quantise(run.in, 0, run.in.groups, run.x + int64_t{row} * run.layout.hidden, to);
  pad(run.in, to);
}

void gate_up_q4(Run& run, const Job& job, int first, int count) {
  const expert_layout& l = run.layout;
  alignas(64) float g[kTile][kGateRows], u[kTile][kGateRows], h[kGateRows];
  const int64_t codes = run.in.code_bytes(), scales = run.in.scale_bytes();
  const uint8_t* c = job.record + l.gate_up_codes + first * codes;
  const uint8_t* s = job.record + l.gate_up_scales + first * scales;
  const RowPairs rows{c, c + l.intermediate * codes, s, s + l.intermediate * scales, 1, count};
  const DotsOut out{{g[0], g[1], g[2], g[3]}, {u[0], u[1], u[2], u[3]}, 1};
  for (int p = 0; p < job.pairs; p += kTile) {
    const int tile = std::min(kTile, job.pairs - p);
    const uint8_t* activations[kTile];
    for (int m = 0; m < tile; ++m)
      activations[m] = run.x_rows + int64_t{run.row_index[job.first + p + m]} * run.in.bytes;
    run.isa->dots(run.in, rows, activations, tile, out);
    for (int m = 0; m < tile; ++m) {
      uint8_t* to = run.mid_row(job.first + p + m);
      run.isa->gate(count, g[m], u[m], h);
      run.isa->quantise(run.mid, first / run.group, count / run.group, h, to);
      if (first + count == l.intermediate) pad(run.mid, to);
    }
  }
}

void gate_up_f32(Run& run, const Job& job, int first, int count) {
  const expert_layout& l = run.layout;
  float g[kGateRows], u[kGateRows];
  const auto* w = reinterpret_cast<const float*>(job.record + l.gate_up_codes) + int64_t{first} * l.hidden;
  for (int p = 0; p < job.pairs; ++p) {
    const float* x = run.x + int64_t{run.row_index[job.first + p]} * l.hidden;
    run.isa->dots_f32(l.hidden, w, l.hidden, count, x, g);
    run.isa->dots_f32(l.hidden, w + int64_t{l.intermediate} * l.hidden, l.hidden, count, x, u);
    run.isa->gate(count, g, u, run.mid_f32(job.first + p) + first);
  }
}

void down_q4(Run& run, const Job& job, int first, int count) {
  const expert_layout& l = run.layout;
  const int64_t codes = run.mid.code_bytes(), scales = run.mid.scale_bytes();
  const uint8_t* c = job.record + l.down_codes + first * codes;
  const uint8_t* s = job.record + l.down_scales + first * scales;
  // Rows 2i and 2i + 1 form a pair (H and the unit are even), so the codes are read as one stream.
  const RowPairs rows{c, c + codes, s, s + scales, 2, count / 2};
  for (int p = 0; p < job.pairs; p += kTile) {
    const int tile = std::min(kTile, job.pairs - p);
    const uint8_t* activations[kTile];
    DotsOut out{{}, {}, 2};
    for (int m = 0; m < tile; ++m) {
      activations[m] = run.mid_row(job.first + p + m);
      out.a[m] = run.out + int64_t{job.first + p + m} * l.hidden + first;
      out.b[m] = out.a[m] + 1;
    }
    run.isa->dots(run.mid, rows, activations, tile, out);
  }
}

void down_f32(Run& run, const Job& job, int first, int count) {
  const expert_layout& l = run.layout;
  const auto* w = reinterpret_cast<const float*>(job.record + l.down_codes) + int64_t{first} * l.intermediate;
  for (int p = 0; p < job.pairs; ++p)
    run.isa->dots_f32(l.intermediate, w, l.intermediate, count, run.mid_f32(job.first + p),
                      run.out + int64_t{job.first + p} * l.hidden + first);
}

void expert_unit(void* opaque, uint32_t unit) {
  Run& run = *static_cast<Run*>(opaque);
  const uint32_t gate_units = run.gate_units * run.jobs.size();
  if (unit < gate_units) {
    Job& job = run.jobs[unit / run.gate_units];
    const int first = unit % run.gate_units * kGateRows;
    const int count = std::min(kGateRows, run.layout.intermediate - first);
    (run.group ? gate_up_q4 : gate_up_f32)(run, job, first, count);
    if (job.left.fetch_sub(1) == 1) run.ready.wake_all(job.left);
  } else {
    Job& job = run.jobs[(unit - gate_units) / run.down_units];
    const int first = (unit - gate_units) % run.down_units * kDownRows;
    const int count = std::min(kDownRows, run.layout.hidden - first);
    run.ready.until_equal(job.left, 0);
    (run.group ? down_q4 : down_f32)(run, job, first, count);
  }
}

bool has_avx512() {
#if defined(__x86_64__)
  return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") &&
         __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vnni");
#else
  return false;
#endif
}

bool has_avx2() {
#if defined(__x86_64__)
  unsigned a, b, c, d;
  const bool f16c = __get_cpuid(1, &a, &b, &c, &d) && (c & bit_F16C);
  return f16c && __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
#else
  return false;
#endif
}

}  // namespace

struct expert_pool {
  const Isa* isa;
  Pool pool;
  Buffer x_rows, mid_rows;

  expert_pool(const Isa* isa, const int32_t* cores, int32_t n) : isa(isa), pool(cores, n) {}
};

EXPORT int32_t expert_best_isa(void) { return has_avx2() ? has_avx512() ? 3 : 2 : 1; }

EXPORT const char* expert_error_text(int code) {
  switch (code) {
    case EXPERT_OK: return "no error";
    case EXPERT_BAD_ARGUMENT: return "an argument is out of bounds";
    case EXPERT_NO_MEMORY: return "out of memory";
    case EXPERT_NO_THREAD: return "a thread could not be started";
    case EXPERT_NO_ISA: return "this CPU lacks the instruction set asked for";
    default: return "unknown error code";
  }
}

EXPORT int expert_pool_create(int32_t isa, const int32_t* cores, int32_t n, expert_pool** pool) {
  if (!pool || n < 1 || n > kMaxThreads || isa < 0 || isa > 3) return EXPERT_BAD_ARGUMENT;
  *pool = nullptr;
  for (int32_t i = 0; cores && i < n; ++i)
    if (cores[i] < 0 || cores[i] >= kMaxCores) return EXPERT_BAD_ARGUMENT;
  if (isa > expert_best_isa()) return EXPERT_NO_ISA;
  const Isa* chosen = &kScalar;
#if defined(__x86_64__)
  const Isa* const all[] = {nullptr, &kScalar, &kAvx2, &kAvx512};
  chosen = all[isa ? isa : expert_best_isa()];
#endif
  try {
    *pool = new expert_pool(chosen, cores, n);
  } catch (const std::bad_alloc&) {
    return EXPERT_NO_MEMORY;
  } catch (const std::system_error&) {
    return EXPERT_NO_THREAD;
  }
  return EXPERT_OK;
}

EXPORT void expert_pool_destroy(expert_pool* pool) { delete pool; }

EXPORT int32_t expert_pool_isa(const expert_pool* pool) { return pool ? pool->isa->id : 0; }

EXPORT int expert_run(expert_pool* pool, const expert_layout* layout, int32_t jobs, const uint8_t* const* records,
                      const int32_t* row_offsets, const int32_t* row_index, int32_t rows, const float* x, float* out) {
  if (!pool || !valid(layout) || !valid(jobs, records) || rows < 0 || rows > kMaxRows || !row_offsets || row_offsets[0])
    return EXPERT_BAD_ARGUMENT;
  for (int32_t j = 0; j < jobs; ++j)
    if (row_offsets[j + 1] < row_offsets[j] || row_offsets[j + 1] > kMaxRows) return EXPERT_BAD_ARGUMENT;
  const int32_t pairs = row_offsets[jobs];
  if (!pairs) return EXPERT_OK;
  if (!row_index || !x || !out) return EXPERT_BAD_ARGUMENT;
  for (int32_t p = 0; p < pairs; ++p)
    if (row_index[p] < 0 || row_index[p] >= rows) return EXPERT_BAD_ARGUMENT;

  const std::lock_guard<std::mutex> alone(pool->pool.callers);
  try {
    Run run{};
    run.isa = pool->isa, run.layout = *layout, run.group = group_of(*layout), run.x = x;
    run.gate_units = (layout->intermediate + kGateRows - 1) / kGateRows;
    run.down_units = (layout->hidden + kDownRows - 1) / kDownRows;
    const size_t held = std::min(pairs, kBatchPairs);
    if (run.group) {
      run.in = Shape::of(layout->hidden, run.group), run.mid = Shape::of(layout->intermediate, run.group);
      run.x_rows = pool->x_rows.at_least(size_t(rows) * run.in.bytes);
      run.mid_rows = pool->mid_rows.at_least(held * run.mid.bytes);
      const auto unit = [](void* run, uint32_t row) { quantise_row(*static_cast<Run*>(run), static_cast<int>(row)); };
      if (rows <= kRowsInline) {
        const FloatMode mode;
        for (int32_t r = 0; r < rows; ++r) quantise_row(run, r);
      } else {
        pool->pool.run(unit, &run, rows);
      }
    } else {
      run.mid_rows = pool->mid_rows.at_least(held * layout->intermediate * sizeof(float));
    }
    for (int32_t done = 0, j = 0; done < pairs;) {
      run.jobs.clear();
      int batch = 0;
      for (; j < jobs && batch < kBatchPairs; ) {
        const int start = std::max(done + batch, row_offsets[j]);
        const int take = std::min(row_offsets[j + 1] - start, kBatchPairs - batch);
        if (take) run.jobs.emplace_back(records[j], batch, take);
        batch += take;
        if (start + take == row_offsets[j + 1]) ++j;
      }
      for (Job& job : run.jobs) job.left.store(run.gate_units, std::memory_order_relaxed);
      run.row_index = row_index + done;
      run.out = out + int64_t{done} * layout->hidden;
      pool->pool.run(expert_unit, &run, run.jobs.size() * (run.gate_units + run.down_units));
      done += batch;
    }
  } catch (const std::bad_alloc&) {
    return EXPERT_NO_MEMORY;
  }
  return EXPERT_OK;
}

namespace {

struct Combine {
  const Isa* isa;
  int32_t k, hidden, rows;
  const int32_t* pair_index;
  const float *weights, *y;
  float* out;
};

constexpr int32_t kMaxChosen = 1024;      // K
constexpr int kCombineRows = 8;           // of one unit

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
  Read run{pool->isa, records, {}, 16};
  if (group) {
    const int64_t parts[4][2] = {{layout->gate_up_codes, i * h}, {layout->gate_up_scales, 4 * i * (h / group)},
                                 {layout->down_codes, i * h / 2}, {layout->down_scales, 2 * h * (i / group)}};
    memcpy(run.parts, parts, sizeof parts);
  } else {
    const int64_t parts[4][2] = {{layout->gate_up_codes, 8 * i * h}, {layout->down_codes, 4 * i * h}, {0, 0}, {0, 0}};
    memcpy(run.parts, parts, sizeof parts);
  }
  const std::lock_guard<std::mutex> alone(pool->pool.callers);
  pool->pool.run(read_unit, &run, static_cast<uint32_t>(jobs) * run.units);
  *sum = run.sum.load();
  return EXPERT_OK;
}
