// expert_pool_* and expert_run of experts.h: checks every argument, then cuts the call into units for the pool.
// Not here: arithmetic (scalar.cpp, avx2.cpp, avx512*.cpp), threads (pool.cpp), combine and read (rows.cpp).
//
// Units of expert_run, in two stages: gate-up units of every job, then down units of every job. A gate-up unit waits
// for the caller alone, a down unit for its job's gate-up units, which were all taken before: waiting always ends, and
// no barrier is needed between both.
//
// Intermediate elements are quantised by blocks of kGateRows. Gate-up units are blocks, where there are many. Where
// jobs are few, the rows of all jobs, end to end, are cut into kPieces equal units a thread: then whoever does the last
// rows of a block quantises it. Down's rows are cut likewise.
//
// What a thread will read comes to its cache while it waits: for the rows of x, few of which the caller quantises when
// all have begun, and for its job's last gate-up unit.
#include <algorithm>
#include <new>
#include <system_error>
#include <vector>
#if defined(__x86_64__)
#include <cpuid.h>
#endif

#include "arithmetic.h"
#include "handle.h"
#include "pool.h"

using namespace experts;

namespace {

constexpr int kDownRows = 128;     // hidden elements of one down unit, at most
static_assert(kGateRows <= kMostPairs && kDownRows <= 2 * kMostPairs, "what dots take at once");
constexpr uint32_t kPieces = 3;      // smaller ones cost more to begin than they are waited for
constexpr int kUnitsPerThread = 16;  // from so many on they need not be equal
constexpr int kBatchPairs = 4096;    // pairs whose intermediates are held at once: bounds the scratch memory
constexpr int kRowsInline = 8;       // activations the caller quantises alone, while the others fetch weights

struct Job {
  const uint8_t* record;
  int first, pairs;               // pairs are relative to the batch
  std::atomic<uint32_t> left{0};  // blocks not yet done

  Job(const uint8_t* record, int first, int pairs) : record(record), first(first), pairs(pairs) {}
  Job(Job&& o) noexcept : record(o.record), first(o.first), pairs(o.pairs) {}
};

// How the rows of all jobs, end to end, are cut into units: so many rows each of every job, or all of them equally.
struct Cuts {
  int64_t of_job, rows;
  int most, step;       // rows of a unit; what its rows are a multiple of where units are equal
  uint32_t per_job, units;  // per_job 0: equal ones

  static Cuts of(int64_t of_job, size_t jobs, int most, int step, int threads) {
    const auto per_job = static_cast<uint32_t>((of_job + most - 1) / most), many = static_cast<uint32_t>(jobs);
    Cuts c{of_job, of_job * many, most, step, per_job, many * per_job};
    if (step && threads > 1 && c.units < static_cast<uint32_t>(kUnitsPerThread * threads))
      c.per_job = 0, c.units = static_cast<uint32_t>(std::min<int64_t>(c.rows / step, int64_t{kPieces} * threads));
    return c;
  }
  int64_t at(uint32_t unit) const {
    if (per_job) return unit / per_job * of_job + unit % per_job * int64_t{most};
    return rows / step * unit / units * step;
  }
  // Where the stretch of the unit's thread ends; where units are not equal, the unit.
  int64_t until(uint32_t unit) const {
    return at(per_job ? unit + 1 : std::min(units, (unit / kPieces + 1) * kPieces));
  }
};

struct Run {
  const Isa* isa;
  expert_layout layout;
  int group;
  Cuts gates, downs;
  int blocks;                         // per job
  Shape in, mid;                      // of activations [H] and intermediates [I]; unused for f32
  const float* x;
  int x_count;
  std::atomic<uint32_t> raw{0};  // rows of x not yet quantised
  uint8_t* x_rows;               // quantised [rows]
  const int32_t* row_index;      // of the batch's pairs
  uint8_t* mid_rows;         // quantised [pairs], or fp32 [pairs, I] for f32
  float* out;                // of the batch
  float* h;                  // [pairs, I] where units are parts of blocks
  std::vector<Job> jobs;
  std::vector<std::atomic<uint32_t>> parts;  // [jobs, blocks] rows not yet done, where units are parts of blocks
  Wait ready;

  float* mid_f32(int pair) const { return reinterpret_cast<float*>(mid_rows) + int64_t{pair} * layout.intermediate; }
  uint8_t* mid_row(int pair) const { return mid_rows + int64_t{pair} * mid.bytes; }
};

// Zeroes the groups that fill a row up to whole vector steps.
void pad(const Shape& s, uint8_t* row) {
  for (int g = s.groups; g < s.padded_groups; ++g) {
    memset(row + s.q_offset(g, 0), 0, s.group / 2);
    memset(row + s.q_offset(g, s.group / 2), 0, s.group / 2);
    memset(row + s.scale_offset + 4 * g, 0, 4);
    memset(row + s.correction_offset + 4 * g, 0, 4);
  }
}

void quantise_row(Run& run, int row) {
  uint8_t* to = run.x_rows + int64_t{row} * run.in.bytes;
  run.isa->quantise(run.in, 0, run.in.groups, run.x + int64_t{row} * run.layout.hidden, to);
  pad(run.in, to);
}

void quantise_block(Run& run, int pair, int first, int count, const float* h) {
  uint8_t* to = run.mid_row(pair);
  run.isa->quantise(run.mid, first / run.group, count / run.group, h, to);
  if (first + count == run.layout.intermediate) pad(run.mid, to);
}

void gate_up_quantised(Run& run, const Job& job, int first, int count) {
  const expert_layout& l = run.layout;
  alignas(64) float g[kTile][kGateRows], u[kTile][kGateRows], h[kGateRows];
  const int64_t codes = run.in.code_bytes(), scales = run.in.scale_bytes();
  const uint8_t* c = job.record + l.gate_up_codes + first * codes;
  const uint8_t* s = job.record + l.gate_up_scales + first * scales;
  const RowPairs rows{c, c + l.intermediate * codes, s, s + l.intermediate * scales, 1, count};
  DotsOut out{{}, {}, 1};
  for (int m = 0; m < kTile; ++m) out.a[m] = g[m], out.b[m] = u[m];
  for (int p = 0; p < job.pairs; p += kTile) {
    const int tile = std::min(kTile, job.pairs - p);
    const uint8_t* activations[kTile];
    for (int m = 0; m < tile; ++m)
      activations[m] = run.x_rows + int64_t{run.row_index[job.first + p + m]} * run.in.bytes;
    run.isa->dots(run.in, rows, activations, tile, out);
    for (int m = 0; m < tile; ++m) {
      const int pair = job.first + p + m;
      run.isa->gate(count, g[m], u[m], run.h ? run.h + int64_t{pair} * l.intermediate + first : h);
      if (!run.h) quantise_block(run, pair, first, count, h);
    }
  }
}

void gate_up_f32(Run& run, const Job& job, int first, int count) {
  const expert_layout& l = run.layout;
  float g[kGateRows], u[kGateRows];
  const auto* w = reinterpret_cast<const float*>(job.record + l.gate_up_codes) + int64_t{first} * l.hidden;
  for (int p = 0; p < job.pairs; ++p) {
    const float* x = run.x + int64_t{run.row_index[job.first + p]} * l.hidden;
    run.isa->dots_f32(l.hidden, w, count, x, 1, g, 0);
    run.isa->dots_f32(l.hidden, w + int64_t{l.intermediate} * l.hidden, count, x, 1, u, 0);
    run.isa->gate(count, g, u, run.mid_f32(job.first + p) + first);
  }
}

void down_quantised(Run& run, const Job& job, int first, int count) {
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
    run.isa->dots_f32(l.intermediate, w, count, run.mid_f32(job.first + p), 1,
                      run.out + int64_t{job.first + p} * l.hidden + first, 0);
}

void fetch(const uint8_t* at, int64_t bytes) {
  for (int64_t i = 0; i < bytes; i += 64) __builtin_prefetch(at + i, 0, 2);
}

// Until `word` is zero. What follows in the unit's stretch comes meanwhile, a row or a few at a time.
void await(Run& run, const std::atomic<uint32_t>& word, const Cuts& cuts, uint32_t unit, int64_t row) {
  const expert_layout& l = run.layout;
  const bool gates = &cuts == &run.gates;
  const Shape& s = gates ? run.in : run.mid;
  const int64_t end = run.group ? cuts.until(unit) : row;
  const int64_t codes = s.code_bytes(), scales = s.scale_bytes();
  while (row < end && word.load(std::memory_order_relaxed)) {
    const uint8_t* record = run.jobs[row / cuts.of_job].record;
    const int64_t first = row % cuts.of_job, left = std::min(end - row, cuts.of_job - first);
    const int64_t count = std::min<int64_t>(cuts.step, left);
    const uint8_t* c = record + (gates ? l.gate_up_codes : l.down_codes) + first * codes;
    const uint8_t* w = record + (gates ? l.gate_up_scales : l.down_scales) + first * scales;
    fetch(c, count * codes), fetch(w, count * scales);
    if (gates) fetch(c + l.intermediate * codes, count * codes), fetch(w + l.intermediate * scales, count * scales);
    row += count;
  }
  run.ready.until_equal(word, 0);
}

// Rows first..first + count - 1 of a job, all in one block.
void gate_up(Run& run, int index, int first, int count) {
  Job& job = run.jobs[index];
  (run.group ? gate_up_quantised : gate_up_f32)(run, job, first, count);
  if (run.h) {
    const int block = first / kGateRows, begin = block * kGateRows;
    const auto done = static_cast<uint32_t>(count);
    if (run.parts[index * run.blocks + block].fetch_sub(done) > done) return;
    for (int p = job.first; p < job.first + job.pairs; ++p)
      quantise_block(run, p, begin, std::min(kGateRows, run.layout.intermediate - begin),
                     run.h + int64_t{p} * run.layout.intermediate + begin);
  }
  if (job.left.fetch_sub(1) == 1) run.ready.wake_all(job.left);
}

void expert_unit(void* opaque, uint32_t unit) {
  Run& run = *static_cast<Run*>(opaque);
  const bool gates = unit < run.gates.units;
  const Cuts& cuts = gates ? run.gates : run.downs;
  if (!gates) unit -= run.gates.units;
  for (int64_t row = cuts.at(unit), end = cuts.at(unit + 1); row < end;) {
    const int index = static_cast<int>(row / cuts.of_job), first = static_cast<int>(row % cuts.of_job);
    // Of gate-up no further than its block, of down than the job and what is computed at once.
    const int most = gates ? (first / kGateRows + 1) * kGateRows : first + kDownRows;
    const int until = std::min(static_cast<int>(cuts.of_job), most);
    const int count = static_cast<int>(std::min<int64_t>(end - row, until - first));
    const std::atomic<uint32_t>& needed = gates ? run.raw : run.jobs[index].left;
    if (needed.load(std::memory_order_acquire)) await(run, needed, cuts, unit, row);
    if (gates)
      gate_up(run, index, first, count);
    else
      (run.group ? down_quantised : down_f32)(run, run.jobs[index], first, count);
    row += count;
  }
}

// The rows of x, by the caller alone.
void quantise_rows(void* opaque) {
  Run& run = *static_cast<Run*>(opaque);
  if (!run.raw.load(std::memory_order_relaxed)) return;
  for (int r = 0; r < run.x_count; ++r) quantise_row(run, r);
  run.raw.store(0);
  run.ready.wake_all(run.raw);
}

bool has_avx512() {
#if defined(__x86_64__)
  return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
         __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq") &&
         __builtin_cpu_supports("avx512vnni");
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

EXPORT int32_t expert_best_isa(void) { return has_avx2() ? has_avx512() ? 3 : 2 : 1; }

EXPORT const char* expert_error_text(int code) {
  switch (code) {
    case EXPERT_OK:
      return "no error";
    case EXPERT_BAD_ARGUMENT:
      return "an argument is out of bounds";
    case EXPERT_NO_MEMORY:
      return "out of memory";
    case EXPERT_NO_THREAD:
      return "a thread could not be started";
    case EXPERT_NO_ISA:
      return "this CPU lacks the instruction set asked for";
    default:
      return "unknown error code";
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

EXPORT int64_t expert_pool_erase(expert_pool* pool) {
  if (!pool) return 0;
  const std::lock_guard<std::mutex> alone(pool->pool.callers);
  return pool->x_rows.erase() + pool->mid_rows.erase() + pool->h_rows.erase();
}

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
    run.isa = pool->isa, run.layout = *layout, run.group = group_of(*layout), run.x = x, run.x_count = rows;
    const int threads = pool->pool.threads();
    run.blocks = (layout->intermediate + kGateRows - 1) / kGateRows;
    const size_t held = std::min(pairs, kBatchPairs);
    if (run.group) {
      const int bits = bits_of(*layout);
      run.in = Shape::of(layout->hidden, run.group, bits), run.mid = Shape::of(layout->intermediate, run.group, bits);
      run.x_rows = pool->x_rows.at_least(size_t(rows) * run.in.bytes);
      run.mid_rows = pool->mid_rows.at_least(held * run.mid.bytes);
      const auto unit = [](void* run, uint32_t row) { quantise_row(*static_cast<Run*>(run), static_cast<int>(row)); };
      if (rows > kRowsInline)
        pool->pool.run(unit, &run, rows);
      else  // when all have begun
        run.raw.store(rows, std::memory_order_relaxed);
    } else {
      run.mid_rows = pool->mid_rows.at_least(held * layout->intermediate * sizeof(float));
    }
    for (int32_t done = 0, j = 0; done < pairs;) {
      run.jobs.clear();
      int batch = 0;
      for (; j < jobs && batch < kBatchPairs;) {
        const int start = std::max(done + batch, row_offsets[j]);
        const int take = std::min(row_offsets[j + 1] - start, kBatchPairs - batch);
        if (take) run.jobs.emplace_back(records[j], batch, take);
        batch += take;
        if (start + take == row_offsets[j + 1]) ++j;
      }
      // f32 has sizes of any kind, so its blocks stay whole.
      const int step = run.group ? 2 : 0;
      run.gates = Cuts::of(layout->intermediate, run.jobs.size(), kGateRows, step, threads);
      run.downs = Cuts::of(layout->hidden, run.jobs.size(), kDownRows, 2 * step, threads);
      for (Job& job : run.jobs) job.left.store(run.blocks, std::memory_order_relaxed);
      const bool parts = !run.gates.per_job;
      const size_t h_bytes = held * layout->intermediate * sizeof(float);
      run.h = parts ? reinterpret_cast<float*>(pool->h_rows.at_least(h_bytes)) : nullptr;
      if (parts) run.parts = std::vector<std::atomic<uint32_t>>(run.jobs.size() * run.blocks);
      for (size_t i = 0; parts && i < run.parts.size(); ++i) {
        const int first = static_cast<int>(i % run.blocks) * kGateRows;
        run.parts[i].store(std::min(kGateRows, layout->intermediate - first), std::memory_order_relaxed);
      }
      run.row_index = row_index + done;
      run.out = out + int64_t{done} * layout->hidden;
      pool->pool.run(expert_unit, &run, run.gates.units + run.downs.units, run.gates.units, quantise_rows);
      done += batch;
    }
  } catch (const std::bad_alloc&) {
    return EXPERT_NO_MEMORY;
  }
  return EXPERT_OK;
}
