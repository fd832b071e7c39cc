// The CPU's share of a GPU lane's expert misses: a thread that answers a doorbell in mapped host memory.
// Not here: the arithmetic (experts.h) and the GPU's side. Any process may ring: tests use another thread.
//
// The block, one per lane, mapped by the GPU; who writes each word:
//
//   0      u64   doorbell  GPU   n = 1, 2, ...: inputs of the window's n-th layer are complete
//   64     u64   done      CPU   n: its rows are complete; after an error a number above all others (SHARE_RELEASED),
//                                so that nobody waits for ever
//   128    i32   layer     GPU   whose records
//   132    i32   rows      GPU   R of this window
//   ids    i32   [R, K]    GPU   chosen experts, ascending in a row; of one that is not the CPU's, its complement ~id
//   x      fp32  [R, H]    GPU
//   y      fp32  [P, H]    CPU   a row for every pair that is the CPU's, by (expert, row)
//
//   GPU                                     CPU (this thread)
//   layer, rows, ids, x  ->  plain stores
//   system-wide fence
//   doorbell = n                       ->   sees n (acquire): reads the inputs, computes
//                                           y -> plain stores by the pool, joined before
//   waits until done >= n             <-    done = n (release)
//   reads y; may write the next inputs
//
// One layer is in flight at a time, so nothing is written while the other side reads it. n counts from 1 in every window
// (share_arm sets both words to 0 while nothing runs), so that a captured graph can hold it as a constant. The
// GPU alone decides what is whose, since it knows what has come to its memory meanwhile.
//
// Waiting: hot for 2 ms (the pool's workers too, from a window's beginning on), then sleeps of 20 us in a window, a futex
// between two. No doorbell for `silence_ns` inside a window, a doorbell out of order, or an input out of range ends the share with an error that stays.
// A second thread looks after the first: when that one has not got on for a second more than `silence_ns`, it ends the
// share in its place, and what the first does later changes nothing.
//
// Letters: L layers, E experts, R rows, K experts per row, P = R * K pairs, H hidden.
#pragma once
#include "experts.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct expert_share expert_share;

// States, also what share_check returns.
enum {
  SHARE_IDLE = 0,
  SHARE_ARMED = 1,
  SHARE_STOPPED = 2,
  SHARE_SILENT = 10,        // no doorbell in time
  SHARE_OUT_OF_ORDER = 11,  // a doorbell that is not the next one
  SHARE_BAD_INPUT = 12,     // layer, rows or ids out of range
  SHARE_FAILED = 13,        // the kernel failed
  SHARE_STUCK = 14,         // the thread has not got on in time
};

// Positive as a number of 64 bits and in either half: the GPU's waits compare signed differences.
#define SHARE_RELEASED 0x3FFFFFFF3FFFFFFFull

typedef struct {
  int32_t layers, experts, rows, chosen;  // L, E, the most R, K; rows * chosen at most 1024
  const uint64_t* addresses;              // [L, E] where records lie in this process
  int64_t silence_ns;
  int64_t* spent;  // [rows * chosen + 1, 2] of layers with so many experts for the CPU: how many, ns from doorbell to answer;
                   // only ever added to, by the thread, in a window
  int64_t* times;  // [L, 2] of the last window, when its layer's doorbell was seen and when it was answered, CLOCK_MONOTONIC;
                   // whole, as `spent` is, when the thread is idle again
} share_config;

// Byte offsets inside a block, every part on a multiple of 64, the whole of 4096.
typedef struct {
  int64_t doorbell, done, layer, rows, ids, x, y, bytes;
} share_block;

int share_block_of(int32_t rows, int32_t chosen, int32_t hidden, share_block* block);

// The CPU's work of a layer, from ids [rows, chosen] as a block has them. Fills taken[0..n) with the distinct experts,
// ascending, offsets[0..n] and pair_rows with the rows of each (ascending), and returns n; -1 where an id is out of range
// or not ascending in its row.
int32_t expert_work(int32_t rows, int32_t chosen, const int32_t* ids, int32_t experts, int32_t* taken, int32_t* offsets,
                    int32_t* pair_rows);

// Starts the threads, the first pinned to `core` (-1: not). That one is the calling thread of `pool`, which nobody else uses meanwhile.
// The pool, and what config and block point at, must live until share_destroy has returned 0; where it returns 1, the
// thread could not be waited for, and they must live for ever.
int share_create(expert_pool* pool, const expert_layout* layout, const share_config* config, uint8_t* block,
                 int32_t core, expert_share** share);
// A window of `count` layers, L at most, begins: both words become 0. EXPERT_BAD_ARGUMENT unless idle.
int share_arm(expert_share* share, uint64_t count);
// The state now; never waits.
int32_t share_check(const expert_share* share);
// Ends the thread (after the layer it is in; not one that is STUCK, which is left behind with all it uses); a window in
// flight is released. Safe to call twice.
void share_stop(expert_share* share);
int32_t share_destroy(expert_share* share);

#ifdef __cplusplus
}
#endif
