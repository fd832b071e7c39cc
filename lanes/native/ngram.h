// Which rows of an n-gram table tokens name: the fast twin of lanes/models/qwen4_exp/row_ids.py, which defines it.
//
// C ABI, no threads and no memory of its own. Whatever the tokens are, every row of a head lies in the head's range.
#pragma once
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

typedef struct {
  const int64_t* multipliers;  // [order]
  const int64_t* sizes;        // [(order - 1) * heads], each at least 1
  const int64_t* offsets;      // [(order - 1) * heads]
  int64_t eos;                 // hides itself and what is before it
  int32_t order;               // at least 2
  int32_t heads;               // of each order
} ngram_hash;

// ids [rows, (order - 1) * heads] of the last `rows` of `tokens` [order - 1 + rows].
void ngram_row_ids(const ngram_hash* hash, const int64_t* tokens, int32_t rows, int64_t* ids);

#ifdef __cplusplus
}
#endif
