// Rope, KV store and paged attention in one call, for decode rows and prefill chunks alike.
//
// Pass 1 walks the tokens: q and k are normalised and rotated, q goes to scratch (already scaled), k and v to their
// slots. Pass 2 walks work items: (request, kv head, block of queries), and for a decode row also a fixed span of keys,
// so that one long request fills all threads. Each item runs an online softmax over blocks of 64 keys.
//
// A key is loaded only if its position is visible to the item, so memory past seq_len, free pages and the dummy page
// never enter a register. Spans depend on a request's own length alone: a request's result does not depend on the
// batch around it or on the number of threads.
//
// Source: online softmax (Milakov and Gimelshein 2018); split keys with a final merge as in Flash-Decoding (Dao et al.
// 2023).

#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <torch/library.h>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <limits>
#include <vector>

#include "scratch.h"
#include "simd.h"

namespace graphrunner {
namespace {

constexpr int kKeyBlock = 64;        // keys between two updates of the running maximum
constexpr int kDecodeKeySpan = 256;  // keys of one work item of a decode row
constexpr int kQueryRows = 32;       // query rows (tokens x heads of the group) of one prefill work item
constexpr float kNegativeInfinity = -std::numeric_limits<float>::infinity();

// Everything pass 1 and pass 2 read, as plain pointers. Kv is the element type of the cache.
template <typename Kv>
struct Problem {
  Kv* k_cache;
  Kv* v_cache;
  int64_t page_size, num_kv_heads, head_dim;
  int64_t num_tokens, num_requests, num_q_heads, group;
  int64_t padded_dim;  // head_dim rounded up to whole vectors; scratch rows are zero past head_dim
  const float* qkv;
  const float *cos, *sin;
  int64_t rotary_half;
  const float *q_norm, *k_norm;
  float norm_eps;
  const int64_t *positions, *slot_mapping;
  const int32_t *query_start_loc, *seq_lens, *request_rows, *page_table;
  int64_t page_row_stride;
  float scale;
  int64_t sliding_window;
  float soft_cap;
  float* queries;  // [num_tokens, num_q_heads, padded_dim]
  float* out;      // [num_tokens, num_q_heads, head_dim]

  int64_t key_offset(int64_t request, int64_t position, int64_t kv_head) const {
    const int64_t page = page_table[request_rows[request] * page_row_stride + position / page_size];
    return ((page * page_size + position % page_size) * num_kv_heads + kv_head) * head_dim;
  }
};

// One unit of pass 2: query_count tokens of one request, one kv head, keys [key_begin, key_end).
struct WorkItem {
  int64_t request, kv_head, first_token, query_count, first_position, key_begin, key_end;
  int64_t partial;  // row of the partial buffer, or -1 when the item sees all keys and writes the output itself
};

// Normalises and rotates one head from `in` to `out`, which may be the same memory.
template <typename Kv>
void prepare_head(const Problem<Kv>& p, const float* in, const float* norm, int64_t position, float factor, float* out) {
  float norm_factor = 1.0f;
  if (norm != nullptr) {
    float squares = 0.0f;
    for (int64_t d = 0; d < p.head_dim; ++d) squares += in[d] * in[d];
    norm_factor = 1.0f / std::sqrt(squares / static_cast<float>(p.head_dim) + p.norm_eps);
  }
  for (int64_t d = 0; d < p.head_dim; ++d) out[d] = norm == nullptr ? in[d] : in[d] * norm_factor * norm[d];
  const int64_t half = p.rotary_half;
  const float* cos = p.cos + position * half;
  const float* sin = p.sin + position * half;
  for (int64_t d = 0; d < half; ++d) {
    const float first = out[d], second = out[d + half];
    out[d] = first * cos[d] - second * sin[d];
    out[d + half] = second * cos[d] + first * sin[d];
  }
  if (factor != 1.0f) {
    for (int64_t d = 0; d < p.head_dim; ++d) out[d] *= factor;
  }
}

template <typename Kv>
void prepare_token(const Problem<Kv>& p, int64_t token) {
  const float* row = p.qkv + token * (p.num_q_heads + 2 * p.num_kv_heads) * p.head_dim;
  const int64_t position = p.rotary_half > 0 ? p.positions[token] : 0;
  for (int64_t h = 0; h < p.num_q_heads; ++h) {
    float* q = p.queries + (token * p.num_q_heads + h) * p.padded_dim;
    prepare_head(p, row + h * p.head_dim, p.q_norm, position, p.scale, q);
    for (int64_t d = p.head_dim; d < p.padded_dim; ++d) q[d] = 0.0f;
  }
  const float* keys = row + p.num_q_heads * p.head_dim;
  const float* values = keys + p.num_kv_heads * p.head_dim;
  const int64_t slot = p.slot_mapping[token] * p.num_kv_heads * p.head_dim;
  float* rotated = scratch<Scratch::kAttention>(p.head_dim);
  for (int64_t h = 0; h < p.num_kv_heads; ++h) {
    const int64_t offset = h * p.head_dim;
    prepare_head(p, keys + offset, p.k_norm, position, 1.0f, rotated);
    for (int64_t d = 0; d < p.head_dim; ++d) {
      narrow(rotated[d], p.k_cache + slot + offset + d);
      narrow(values[offset + d], p.v_cache + slot + offset + d);
    }
  }
}

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
      for (int n = 0; n < COLS; ++n) acc[t * COLS + n] += qv * k[n];
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

// out[t] += sum over j in [begin, end) of weights[t][j] * values[j], for ROWS rows and VECS vectors of each.
template <int ROWS, int VECS>
void value_tile(const float* weights, const float* const* values, int64_t begin, int64_t end, int64_t stride,
                float* out) {
  Vec acc[ROWS][VECS];
  for (int t = 0; t < ROWS; ++t) {
    for (int i = 0; i < VECS; ++i) acc[t][i] = load(out + t * stride + i * kLanes);
  }
  for (int64_t j = begin; j < end; ++j) {
    Vec v[VECS];
#pragma GCC unroll 4
    for (int i = 0; i < VECS; ++i) v[i] = load(values[j] + i * kLanes);
#pragma GCC unroll 4
    for (int t = 0; t < ROWS; ++t) {
      const float weight = weights[t * kKeyBlock + j];
#pragma GCC unroll 4
      for (int i = 0; i < VECS; ++i) acc[t][i] += weight * v[i];
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
  const float* shifted[kKeyBlock];
  int64_t d = 0;
  for (; d + 4 * kLanes <= stride; d += 4 * kLanes) {
    for (int64_t j = begin; j < end; ++j) shifted[j] = values[j] + d;
    value_tile<ROWS, 4>(weights, shifted, begin, end, stride, out + d);
  }
  for (; d < stride; d += kLanes) {
    for (int64_t j = begin; j < end; ++j) shifted[j] = values[j] + d;
    value_tile<ROWS, 1>(weights, shifted, begin, end, stride, out + d);
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

template <typename Kv>
VisibleRange visible_range(const Problem<Kv>& p, int64_t position, int64_t block_begin, int64_t block_end) {
  const int64_t first = p.sliding_window > 0 ? std::max<int64_t>(0, position - p.sliding_window + 1) : 0;
  const int64_t begin = std::clamp<int64_t>(first, block_begin, block_end) - block_begin;
  const int64_t end = std::clamp<int64_t>(position + 1, block_begin, block_end) - block_begin;
  return {begin, std::max(begin, end)};
}

// Scores, weights and values of one block of at most kKeyBlock keys.
template <typename Kv>
void attend_block(const Problem<Kv>& p, const WorkItem& item, int64_t block_begin, const float* q, float* scores,
                  float* copies, VisibleRange* visible, const State& state) {
  const int64_t block_end = std::min(block_begin + kKeyBlock, item.key_end);
  const int64_t count = block_end - block_begin;
  const float* keys[kKeyBlock];
  const float* values[kKeyBlock];
  for (int64_t j = 0; j < count; ++j) {
    const int64_t offset = p.key_offset(item.request, block_begin + j, item.kv_head);
    keys[j] = as_floats(p.k_cache + offset, p.head_dim, p.padded_dim, copies + 2 * j * p.padded_dim);
    values[j] = as_floats(p.v_cache + offset, p.head_dim, p.padded_dim, copies + (2 * j + 1) * p.padded_dim);
  }
  for (int64_t j = count; j < kKeyBlock; ++j) keys[j] = keys[count - 1];

  const int64_t rows = item.query_count * p.group;
  score_block(q, rows, keys, count, p.padded_dim, scores);
  for (int64_t t = 0; t < rows; ++t) {
    visible[t] = visible_range(p, item.first_position + t / p.group, block_begin, block_end);
    float* row = scores + t * kKeyBlock;
    if (visible[t].begin == visible[t].end) continue;
    softmax_row(row, visible[t], p.soft_cap, p.padded_dim, state.maximum + t, state.total + t,
                state.values + t * p.padded_dim);
  }
  accumulate_values(scores, rows, visible, values, p.padded_dim, state.values);
}

template <typename Kv>
void run_item(const Problem<Kv>& p, const WorkItem& item, float* partials) {
  const int64_t rows = item.query_count * p.group;
  const int64_t row_floats = p.padded_dim;
  const bool is_copied = !std::is_same_v<Kv, float> || p.head_dim != p.padded_dim;
  float* q = scratch<Scratch::kAttention>(rows * (2 * row_floats + kKeyBlock + 2) +
                                          (is_copied ? 2 * kKeyBlock * row_floats : 0) + 64);
  float* acc = q + rows * row_floats;
  float* scores = acc + rows * row_floats;
  float* copies = scores + rows * kKeyBlock;
  float* maximum = copies + (is_copied ? 2 * kKeyBlock * row_floats : 0);
  const State state{maximum, maximum + rows, acc};
  static thread_local std::vector<VisibleRange> visible;
  if (visible.size() < static_cast<size_t>(rows)) visible.resize(rows);

  for (int64_t i = 0; i < item.query_count; ++i) {
    const float* source =
        p.queries + ((item.first_token + i) * p.num_q_heads + item.kv_head * p.group) * row_floats;
    std::copy(source, source + p.group * row_floats, q + i * p.group * row_floats);
  }
  std::fill(acc, acc + rows * row_floats, 0.0f);
  std::fill(state.maximum, state.maximum + rows, kNegativeInfinity);
  std::fill(state.total, state.total + rows, 0.0f);
  for (int64_t begin = item.key_begin; begin < item.key_end; begin += kKeyBlock) {
    attend_block(p, item, begin, q, scores, copies, visible.data(), state);
  }

  for (int64_t t = 0; t < rows; ++t) {
    const float* values = acc + t * row_floats;
    if (item.partial >= 0) {
      float* out = partials + (item.partial + t) * (row_floats + 2);
      out[0] = state.maximum[t];
      out[1] = state.total[t];
      std::copy(values, values + row_floats, out + 2);
      continue;
    }
    const int64_t token = item.first_token + t / p.group;
    float* out = p.out + (token * p.num_q_heads + item.kv_head * p.group + t % p.group) * p.head_dim;
    const float inverse = 1.0f / state.total[t];
    for (int64_t d = 0; d < p.head_dim; ++d) out[d] = values[d] * inverse;
  }
}

// A decode row whose keys were split: num_spans partial results, group rows each, to be merged in span order.
struct Split {
  int64_t token, kv_head, partial, num_spans;
};

template <typename Kv>
void merge(const Problem<Kv>& p, const Split& split, const float* partials) {
  const int64_t stride = p.padded_dim + 2;
  for (int64_t g = 0; g < p.group; ++g) {
    const float* first = partials + (split.partial + g) * stride;
    float maximum = kNegativeInfinity;
    for (int64_t s = 0; s < split.num_spans; ++s) maximum = std::max(maximum, first[s * p.group * stride]);
    float* out = p.out + (split.token * p.num_q_heads + split.kv_head * p.group + g) * p.head_dim;
    std::fill(out, out + p.head_dim, 0.0f);
    float total = 0.0f;
    for (int64_t s = 0; s < split.num_spans; ++s) {
      const float* span = first + s * p.group * stride;
      const float factor = std::exp(span[0] - maximum);
      total += span[1] * factor;
      for (int64_t d = 0; d < p.head_dim; ++d) out[d] += span[2 + d] * factor;
    }
    for (int64_t d = 0; d < p.head_dim; ++d) out[d] /= total;
  }
}

struct Plan {
  std::vector<WorkItem> items;
  std::vector<Split> splits;
  int64_t num_partials = 0;

  void clear() {
    items.clear();
    splits.clear();
    num_partials = 0;
  }
};

template <typename Kv>
void plan_decode_row(const Problem<Kv>& p, int64_t request, int64_t token, Plan& plan) {
  const int64_t position = p.seq_lens[request] - 1;
  const int64_t begin = p.sliding_window > 0 ? std::max<int64_t>(0, position - p.sliding_window + 1) : 0;
  const int64_t first_span = begin / kDecodeKeySpan;
  const int64_t num_spans = position / kDecodeKeySpan - first_span + 1;
  for (int64_t kv_head = 0; kv_head < p.num_kv_heads; ++kv_head) {
    if (num_spans > 1) plan.splits.push_back({token, kv_head, plan.num_partials, num_spans});
    for (int64_t span = first_span; span < first_span + num_spans; ++span) {
      plan.items.push_back({request, kv_head, token, 1, position, std::max(begin, span * kDecodeKeySpan),
                            std::min(position + 1, (span + 1) * kDecodeKeySpan),
                            num_spans > 1 ? plan.num_partials : -1});
      if (num_spans > 1) plan.num_partials += p.group;
    }
  }
}

template <typename Kv>
void plan_chunk(const Problem<Kv>& p, int64_t request, int64_t first_token, int64_t query_len, Plan& plan) {
  const int64_t tokens_per_item = std::max<int64_t>(1, kQueryRows / p.group);
  const int64_t cached_len = p.seq_lens[request] - query_len;
  const int64_t num_items = (query_len + tokens_per_item - 1) / tokens_per_item;
  // Longest items first, so that no thread is left with one at the end.
  for (int64_t i = num_items - 1; i >= 0; --i) {
    const int64_t offset = i * tokens_per_item;
    const int64_t count = std::min(tokens_per_item, query_len - offset);
    const int64_t position = cached_len + offset;
    const int64_t begin = p.sliding_window > 0 ? std::max<int64_t>(0, position - p.sliding_window + 1) : 0;
    for (int64_t kv_head = 0; kv_head < p.num_kv_heads; ++kv_head) {
      plan.items.push_back({request, kv_head, first_token + offset, count, position, begin, position + count, -1});
    }
  }
}

template <typename Kv>
void run(const Problem<Kv>& p) {
  at::parallel_for(0, p.num_tokens, 16, [&](int64_t begin, int64_t end) {
    for (int64_t token = begin; token < end; ++token) prepare_token(p, token);
  });
  static thread_local Plan plan;  // kept for its capacity
  plan.clear();
  for (int64_t r = 0; r < p.num_requests; ++r) {
    const int64_t first = p.query_start_loc[r], query_len = p.query_start_loc[r + 1] - first;
    if (query_len == 1) plan_decode_row(p, r, first, plan);
    if (query_len > 1) plan_chunk(p, r, first, query_len, plan);
  }
  const int64_t row_floats = p.num_q_heads * p.head_dim;
  const int64_t num_real = p.query_start_loc[p.num_requests];
  std::fill(p.out + num_real * row_floats, p.out + p.num_tokens * row_floats, 0.0f);

  const Plan& work = plan;  // a thread_local named inside the lambda would be the worker's own
  float* partials = scratch<Scratch::kPartials>(work.num_partials * (p.padded_dim + 2));
  const int64_t num_items = static_cast<int64_t>(work.items.size());
  const int64_t num_workers = std::min<int64_t>(at::get_num_threads(), num_items);
  std::atomic<int64_t> next{0};
  at::parallel_for(0, num_workers, 1, [&](int64_t begin, int64_t end) {
    for (int64_t worker = begin; worker < end; ++worker) {
      for (int64_t i = next++; i < num_items; i = next++) run_item(p, work.items[i], partials);
    }
  });
  for (const Split& split : work.splits) merge(p, split, partials);
}

const float* optional_floats(const std::optional<at::Tensor>& tensor, const char* name) {
  if (!tensor.has_value()) return nullptr;
  TORCH_CHECK(tensor->scalar_type() == at::kFloat && tensor->is_contiguous(), name, " must be contiguous float32");
  return tensor->const_data_ptr<float>();
}

template <typename T>
const T* integers(const at::Tensor& tensor, const char* name) {
  TORCH_CHECK(tensor.scalar_type() == c10::CppTypeToScalarType<T>::value && tensor.is_contiguous(), name,
              " must be contiguous ", c10::CppTypeToScalarType<T>::value, ", got ", tensor.scalar_type());
  return tensor.const_data_ptr<T>();
}

at::Tensor rope_store_attention(const at::Tensor& qkv_in, const std::optional<at::Tensor>& cos,
                                const std::optional<at::Tensor>& sin, const std::optional<at::Tensor>& q_norm,
                                const std::optional<at::Tensor>& k_norm, double norm_eps, at::Tensor& k_cache,
                                at::Tensor& v_cache, const at::Tensor& positions, const at::Tensor& slot_mapping,
                                const at::Tensor& query_start_loc, const at::Tensor& seq_lens,
                                const at::Tensor& request_rows, const at::Tensor& page_table, double scale,
                                int64_t sliding_window, double soft_cap) {
  TORCH_CHECK(qkv_in.dim() == 2 && qkv_in.scalar_type() == at::kFloat, "qkv must be float32 [T, width]");
  TORCH_CHECK(k_cache.dim() == 4 && k_cache.is_contiguous() && v_cache.is_contiguous(),
              "k_cache and v_cache must be contiguous [num_pages, page_size, num_kv_heads, head_dim]");
  TORCH_CHECK(k_cache.sizes() == v_cache.sizes() && k_cache.scalar_type() == v_cache.scalar_type(),
              "k_cache and v_cache must have one shape and dtype");
  const at::Tensor qkv = qkv_in.contiguous();
  const int64_t num_kv_heads = k_cache.size(2), head_dim = k_cache.size(3);
  const int64_t num_q_heads = qkv.size(1) / head_dim - 2 * num_kv_heads;
  TORCH_CHECK(num_q_heads > 0 && num_q_heads % num_kv_heads == 0 && qkv.size(1) % head_dim == 0,
              "qkv width ", qkv.size(1), " does not fit ", num_kv_heads, " kv heads of ", head_dim);
  at::Tensor out = at::empty({qkv.size(0), num_q_heads * head_dim}, qkv.options());

  const auto solve = [&](auto* k_data, auto* v_data) {
    using Kv = std::remove_pointer_t<decltype(k_data)>;
    Problem<Kv> p{};
    p.k_cache = k_data;
    p.v_cache = v_data;
    p.page_size = k_cache.size(1);
    p.num_kv_heads = num_kv_heads;
    p.head_dim = head_dim;
    p.num_tokens = qkv.size(0);
    p.num_requests = seq_lens.size(0);
    p.num_q_heads = num_q_heads;
    p.group = num_q_heads / num_kv_heads;
    p.padded_dim = (head_dim + kLanes - 1) / kLanes * kLanes;
    p.qkv = qkv.const_data_ptr<float>();
    p.cos = optional_floats(cos, "cos");
    p.sin = optional_floats(sin, "sin");
    p.rotary_half = cos.has_value() ? cos->size(1) : 0;
    p.q_norm = optional_floats(q_norm, "q_norm_weight");
    p.k_norm = optional_floats(k_norm, "k_norm_weight");
    p.norm_eps = static_cast<float>(norm_eps);
    p.positions = integers<int64_t>(positions, "positions");
    p.slot_mapping = integers<int64_t>(slot_mapping, "slot_mapping");
    p.query_start_loc = integers<int32_t>(query_start_loc, "query_start_loc");
    p.seq_lens = integers<int32_t>(seq_lens, "seq_lens");
    p.request_rows = integers<int32_t>(request_rows, "request_rows");
    TORCH_CHECK(page_table.scalar_type() == at::kInt && page_table.dim() == 2 && page_table.stride(1) == 1,
                "page_table must be int32 [num_rows, max_pages] with contiguous rows");
    p.page_table = page_table.const_data_ptr<int32_t>();
    p.page_row_stride = page_table.stride(0);
    p.scale = static_cast<float>(scale);
    p.sliding_window = sliding_window;
    p.soft_cap = static_cast<float>(soft_cap);
    p.queries = scratch<Scratch::kQueries>(p.num_tokens * num_q_heads * p.padded_dim);
    p.out = out.mutable_data_ptr<float>();
    run(p);
  };
  if (k_cache.scalar_type() == at::kFloat) {
    solve(k_cache.mutable_data_ptr<float>(), v_cache.mutable_data_ptr<float>());
  } else {
    TORCH_CHECK(k_cache.scalar_type() == at::kBFloat16, "cache must be float32 or bfloat16, got ", k_cache.scalar_type());
    solve(static_cast<BFloat16Bits*>(k_cache.mutable_data_ptr()), static_cast<BFloat16Bits*>(v_cache.mutable_data_ptr()));
  }
  return out;
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(graphrunner, m) {
  m.def(
      "cpu_rope_store_attention(Tensor qkv, Tensor? cos, Tensor? sin, Tensor? q_norm_weight, Tensor? k_norm_weight, "
      "float norm_eps, Tensor(a!) k_cache, Tensor(b!) v_cache, Tensor positions, Tensor slot_mapping, "
      "Tensor query_start_loc, Tensor seq_lens, Tensor request_rows, Tensor page_table, float scale, "
      "int sliding_window, float soft_cap) -> Tensor");
}

TORCH_LIBRARY_IMPL(graphrunner, CPU, m) { m.impl("cpu_rope_store_attention", rope_store_attention); }

}  // namespace graphrunner
