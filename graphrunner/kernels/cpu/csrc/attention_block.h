// The arithmetic of one block of keys: scores, online softmax, weighted values. No paging, no masks beyond ranges.
// Rows are queries (a token's heads of one group, token by token); a scores row has room for kKeyBlock keys.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>

#include "simd.h"

namespace graphrunner {
namespace {

constexpr int kKeyBlock = 64;  // keys between two updates of the running maximum
constexpr float kNegativeInfinity = -std::numeric_limits<float>::infinity();

// Where a cache row can be read as whole float vectors it is read in place; otherwise it is copied, widened and padded.
inline const float* as_floats(const float* row, int64_t head_dim, int64_t padded_dim, float* copy) {
  if (head_dim == padded_dim) return row;
  for (int64_t d = 0; d < padded_dim; ++d) copy[d] = d < head_dim ? row[d] : 0.0f;
  return copy;
}
inline const float* as_floats(const BFloat16Bits* row, int64_t head_dim, int64_t padded_dim, float* copy) {
  int64_t d = 0;
  for (; d + kLanes <= head_dim; d += kLanes) store(copy + d, load(row + d));
  for (; d < padded_dim; ++d) copy[d] = d < head_dim ? widen(row[d]) : 0.0f;
  return copy;
}

// scores[t * kKeyBlock + n] = q[t] . keys[n] for ROWS queries and COLS keys, ROWS * COLS <= 16.
template <int ROWS, int COLS>
void score_tile(const float* q, const float* const* keys, int64_t padded_dim, float* scores) {
  Vec acc[16] = {};
  for (int64_t d = 0; d < padded_dim; d += kLanes) {
    Vec k[COLS];
#pragma GCC unroll 16
    for (int n = 0; n < COLS; ++n) k[n] = load(keys[n] + d);
#pragma GCC unroll 4
    for (int t = 0; t < ROWS; ++t) {
      const Vec qv = load(q + t * padded_dim + d);
#pragma GCC unroll 16
      for (int n = 0; n < COLS; ++n) acc[t * COLS + n] = multiply_add(qv, k[n], acc[t * COLS + n]);
    }
  }
  float tile[16];
  sum16(acc, tile);
  for (int t = 0; t < ROWS; ++t) {
    for (int n = 0; n < COLS; ++n) scores[t * kKeyBlock + n] = tile[t * COLS + n];
  }
}

// keys holds whole tiles: past the last key it repeats that key, and the surplus scores are never read.
void score_block(const float* q, int64_t rows, const float* const* keys, int64_t count, int64_t padded_dim,
                 float* scores) {
  int64_t t = 0;
  for (; t + 4 <= rows; t += 4) {
    for (int64_t n = 0; n < count; n += 4) {
      score_tile<4, 4>(q + t * padded_dim, keys + n, padded_dim, scores + t * kKeyBlock + n);
    }
  }
  const float* rest = q + t * padded_dim;
  float* out = scores + t * kKeyBlock;
  if (rows - t == 3) {
    for (int64_t n = 0; n < count; n += 4) score_tile<3, 4>(rest, keys + n, padded_dim, out + n);
  } else if (rows - t == 2) {
    for (int64_t n = 0; n < count; n += 8) score_tile<2, 8>(rest, keys + n, padded_dim, out + n);
  } else if (rows - t == 1) {
    for (int64_t n = 0; n < count; n += 16) score_tile<1, 16>(rest, keys + n, padded_dim, out + n);
  }
}

// out[t] += sum over j in [begin, end) of weights[t][j] * values[j], for ROWS rows and VECS vectors from `first` on.
template <int ROWS, int VECS>
void value_tile(const float* weights, const float* const* values, int64_t first, int64_t begin, int64_t end,
                int64_t stride, float* out) {
  Vec acc[ROWS][VECS];
  for (int t = 0; t < ROWS; ++t) {
    for (int i = 0; i < VECS; ++i) acc[t][i] = load(out + t * stride + i * kLanes);
  }
  for (int64_t j = begin; j < end; ++j) {
    Vec v[VECS];
#pragma GCC unroll 4
    for (int i = 0; i < VECS; ++i) v[i] = load(values[j] + first + i * kLanes);
#pragma GCC unroll 4
    for (int t = 0; t < ROWS; ++t) {
      const Vec weight = splat(weights[t * kKeyBlock + j]);
#pragma GCC unroll 4
      for (int i = 0; i < VECS; ++i) acc[t][i] = multiply_add(weight, v[i], acc[t][i]);
    }
  }
  for (int t = 0; t < ROWS; ++t) {
    for (int i = 0; i < VECS; ++i) store(out + t * stride + i * kLanes, acc[t][i]);
  }
}

template <int ROWS>
void value_rows(const float* weights, const float* const* values, int64_t begin, int64_t end, int64_t stride,
                float* out) {
  if (begin >= end) return;
  for (int64_t d = 0; d < stride; d += 4 * kLanes) {
    switch (std::min<int64_t>(4, (stride - d) / kLanes)) {
      case 4: value_tile<ROWS, 4>(weights, values, d, begin, end, stride, out + d); break;
      case 3: value_tile<ROWS, 3>(weights, values, d, begin, end, stride, out + d); break;
      case 2: value_tile<ROWS, 2>(weights, values, d, begin, end, stride, out + d); break;
      default: value_tile<ROWS, 1>(weights, values, d, begin, end, stride, out + d);
    }
  }
}

// The visible keys of each query row of a block, as offsets [begin, end) into it. Rows of a token share one range.
struct VisibleRange {
  int64_t begin, end;
};

// The online-softmax state of a work item: per row the running maximum, the sum of weights and the weighted values.
struct State {
  float *maximum, *total, *values;
};

// Turns the scores of one row into weights, in place, and folds them into the row's state.
void softmax_row(float* scores, VisibleRange visible, float soft_cap, int64_t padded_dim, float* maximum, float* total,
                 float* values) {
  if (soft_cap > 0.0f) {
    for (int j = 0; j < kKeyBlock; j += kLanes) {
      store(scores + j, soft_cap * tangent_hyperbolic(load(scores + j) / soft_cap));
    }
  }
  for (int64_t j = 0; j < visible.begin; ++j) scores[j] = kNegativeInfinity;
  for (int64_t j = visible.end; j < kKeyBlock; ++j) scores[j] = kNegativeInfinity;
  Vec largest = load(scores);
  for (int j = kLanes; j < kKeyBlock; j += kLanes) largest = maximum_of(load(scores + j), largest);
  float block_maximum = *maximum;
  for (int i = 0; i < kLanes; ++i) block_maximum = std::max(block_maximum, largest[i]);

  Vec sums = {};
  for (int j = 0; j < kKeyBlock; j += kLanes) {
    const Vec score = load(scores + j);
    const Vec weight = score == splat(kNegativeInfinity) ? Vec{} : exponential(score - block_maximum);
    store(scores + j, weight);
    sums += weight;
  }
  const float decay = *maximum == kNegativeInfinity ? 0.0f : std::exp(*maximum - block_maximum);
  if (decay != 1.0f) {
    for (int64_t d = 0; d < padded_dim; d += kLanes) store(values + d, load(values + d) * decay);
  }
  *total = *total * decay + sum(sums);
  *maximum = block_maximum;
}

// Adds weights @ values to the state. Rows are taken four at a time over the keys all four see; what only some of them
// see is added row by row, so that a hidden value is never multiplied, not even by zero.
void accumulate_values(const float* weights, int64_t rows, const VisibleRange* visible, const float* const* values,
                       int64_t padded_dim, float* out) {
  for (int64_t t = 0; t < rows; t += 4) {
    const int64_t count = std::min<int64_t>(4, rows - t);
    int64_t begin = visible[t].begin, end = visible[t].end;
    for (int64_t i = 1; i < count; ++i) {
      begin = std::max(begin, visible[t + i].begin);
      end = std::min(end, visible[t + i].end);
    }
    const float* w = weights + t * kKeyBlock;
    float* o = out + t * padded_dim;
    switch (count) {
      case 4: value_rows<4>(w, values, begin, end, padded_dim, o); break;
      case 3: value_rows<3>(w, values, begin, end, padded_dim, o); break;
      case 2: value_rows<2>(w, values, begin, end, padded_dim, o); break;
      default: value_rows<1>(w, values, begin, end, padded_dim, o);
    }
    for (int64_t i = 0; i < count; ++i) {
      const VisibleRange own = visible[t + i];
      const float* wi = w + i * kKeyBlock;
      float* oi = o + i * padded_dim;
      if (begin >= end) {
        value_rows<1>(wi, values, own.begin, own.end, padded_dim, oi);
        continue;
      }
      value_rows<1>(wi, values, own.begin, begin, padded_dim, oi);
      value_rows<1>(wi, values, end, own.end, padded_dim, oi);
    }
  }
}

}  // namespace
}  // namespace graphrunner
