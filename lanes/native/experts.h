// Expert arithmetic in place, for any process: C ABI, no torch, no Python. See docs/expert-arithmetic.md.
//
// Protocol of one call: the caller owns every buffer until the call returns; calls on one pool do not overlap
// (a second caller waits). Records are read where they lie (region or cache), never written.
//
// Letters: H hidden, I intermediate, G group, J jobs (one expert each), P pairs (one (row, expert) each).
#pragma once
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

typedef struct {
  int32_t format;        // 1 f32, 2 q4g64, 3 q4g32, 4 q8
  int32_t hidden;        // H
  int32_t intermediate;  // I
  int32_t reserved;
  int64_t gate_up_codes;  // byte offsets inside a record, as shared_experts/layout.py computes them
  int64_t down_codes;
  int64_t gate_up_scales;
  int64_t down_scales;
  int64_t record_bytes;
} expert_layout;

typedef struct expert_pool expert_pool;

// Returned by every call that can fail; expert_error_text says it in words.
enum { EXPERT_OK = 0, EXPERT_BAD_ARGUMENT = 1, EXPERT_NO_MEMORY = 2, EXPERT_NO_THREAD = 3, EXPERT_NO_ISA = 4 };

// isa: 0 best, 1 scalar, 2 avx2, 3 avx512 (VNNI). cores: n logical CPUs to pin to, or NULL to pin nothing.
// The calling thread works too (cores[0] is its own to pin), so n == 1 starts no thread. n is 1..256.
// A pool does not survive fork(): the child makes its own. Destroy only when no call is running.
int expert_pool_create(int32_t isa, const int32_t* cores, int32_t n, expert_pool** pool);
void expert_pool_destroy(expert_pool* pool);
int32_t expert_pool_isa(const expert_pool* pool);
int32_t expert_best_isa(void);
// Zeroes what the pool keeps of earlier calls' rows; returns how many bytes were not zero. NULL holds none.
int64_t expert_pool_erase(expert_pool* pool);
const char* expert_error_text(int code);

// out[p, :] = expert_j(x[row_index[p], :]) for every pair p in row_offsets[j]..row_offsets[j+1], unweighted.
// records[j] is the address of a record. x fp32 [rows, H], out fp32 [P, H], P == row_offsets[J].
int expert_run(expert_pool* pool, const expert_layout* layout, int32_t jobs, const uint8_t* const* records,
               const int32_t* row_offsets, const int32_t* row_index, int32_t rows, const float* x, float* out);

// out[r, :] = sum over k in ascending order of fma(weights[r, k], y[pair_index[r, k], :], acc), acc from +0.
// The caller orders k by ascending expert id. pair_index int32 [rows, K], weights fp32 [rows, K].
int expert_combine(expert_pool* pool, int32_t rows, int32_t k, int32_t hidden, const int32_t* pair_index, int32_t pairs,
                   const float* weights, const float* y, float* out);

// out[r, n] = dot(x[r, :], w[n, :]) of fp32 x [rows, k], w [outputs, k], out [rows, outputs] with the sums of an fp32
// expert (docs/expert-arithmetic.md): the bits of out[r, n] depend on row r and row n alone. rows is 1..16.
int expert_product(expert_pool* pool, int32_t rows, int32_t outputs, int32_t k, const float* x, const float* w,
                   float* out);

// Reads the records' codes and scales in whole 64-byte lines, in the order expert_run does, and computes nothing: the
// rate at which this pool can read memory. `sum` receives the XOR of what was read as 64-bit words.
int expert_read(expert_pool* pool, const expert_layout* layout, int32_t jobs, const uint8_t* const* records,
                uint64_t* sum);

#ifdef __cplusplus
}
#endif
