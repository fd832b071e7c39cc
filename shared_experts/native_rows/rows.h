// C ABI of the n-gram row reader: rows of one table by id, through a bounded cache, read ahead by a pool of threads.
//
//   ids ──rows_prefetch──▶ queue ──▶ depth threads: pread of one page each ──▶ cache of rows
//   ids ──rows_get──────▶ what is missing goes to the front of the queue; waits; copies the rows out
//
// Not here: which rows a token needs, what a row's bytes mean, how the file is opened (its owner decides O_DIRECT).
//
// Invariant: rows_get returns success only when every row it copied came whole from its place in the file.
// One thread asks at a time; others wait for it. Threads do not survive fork(): a child must open its own reader.
#pragma once
#include <stdint.h>

#define ROWS_API extern "C" __attribute__((visibility("default")))

// As pread(2): bytes read, 0 at the end of the file, or a negative errno.
typedef int64_t (*rows_source)(int32_t fd, void* buffer, uint64_t bytes, uint64_t offset);

struct rows_table {
  int32_t fd;             // stays the caller's, open until rows_close has returned
  int32_t depth;          // threads, so reads in flight
  uint64_t rows;
  uint64_t offset;        // of the first page, a multiple of 4096
  uint64_t row_bytes;
  uint64_t rows_per_page;
  uint64_t page_bytes;    // a multiple of 4096; every read asks for whole pages into memory aligned to 4096
  uint64_t cache_bytes;   // rows and their bookkeeping; at least 4 * depth rows are kept whatever this says
  rows_source source;     // null: pread
};

struct rows_counters {
  uint64_t asked;         // rows that rows_get and rows_take were asked for
  uint64_t hits;          // of these, in memory because they had been asked for before
  uint64_t ahead;         // of these, in memory because they were prefetched; the rest was waited for
  uint64_t prefetched;    // reads begun by rows_prefetch
  uint64_t dropped;       // ids that rows_prefetch passed over because too many rows were ahead
  uint64_t reads;         // pages read
  uint64_t read_bytes;
  uint64_t wait_ns;       // that they slept
  uint64_t capacity_rows;
  uint64_t cached_rows;
  uint64_t in_flight;     // reads begun or queued and not finished
};

struct rows_fault {
  int64_t id;
  uint64_t offset;        // in the file, of the page that failed
  int64_t got;            // bytes of the page that were there
  int32_t error;          // errno; 0: the file ends too early
  int32_t reserved;
};

// What rows_take writes where, said once for many calls; the arrays stay the caller's.
struct rows_taking {
  void* const* reader;    // where the reader stands; null there: closed
  const int64_t* ids;
  float* out;
  int32_t kind;           // of the rows' numbers
  int32_t reserved;
};

enum { ROWS_BF16 = 0, ROWS_F16 = 1, ROWS_F32 = 2 };
enum {
  ROWS_OK = 0, ROWS_BAD_ARGUMENT = 1, ROWS_NO_MEMORY = 2, ROWS_NO_THREADS = 3, ROWS_FAULT = 4, ROWS_ABSENT = 5
};

ROWS_API int32_t rows_abi();
ROWS_API int32_t rows_open(const rows_table* table, void** reader);
ROWS_API void rows_close(void* reader);  // finishes the reads that have begun, drops the rest
// Begins to read what is not there yet; never waits for a read. At most half of the cache is ahead of rows_get.
ROWS_API int32_t rows_prefetch(void* reader, const int64_t* ids, int64_t count);
// out [count, row_bytes], in the order of ids. With ROWS_FAULT `fault` is filled; a later call reads again.
ROWS_API int32_t rows_get(void* reader, const int64_t* ids, int64_t count, uint8_t* out, rows_fault* fault);
// rows_get of the first `count` ids, as fp32 numbers. Without `wait` at once or not at all: ROWS_ABSENT, and nothing has
// changed, where a row is not in memory, somebody else asks, the reader is closed or another process's. So it may be
// called by who must not sleep, and beside rows_close by who makes sure that `*reader` was set to null before that began.
ROWS_API int32_t rows_take(const rows_taking* taking, int64_t count, int32_t wait);
ROWS_API void rows_forget(void* reader);  // what was prefetched is no longer expected: unread ids leave the queue
ROWS_API void rows_count(void* reader, rows_counters* counters);

// Reads `count` blocks of `bytes` at `offsets` with `depth` threads, each read's time into took_ns; 0 or an errno. It
// shares nothing with a reader: what the device gives at best, to compare with.
ROWS_API int32_t rows_read_pages(int32_t fd, const uint64_t* offsets, int64_t count, uint64_t bytes, int32_t depth,
                                 uint64_t* took_ns);
