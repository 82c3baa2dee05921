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
#include <vector>

#include "attention_block.h"
#include "scratch.h"
#include "simd.h"

namespace graphrunner {
namespace {

constexpr int kDecodeKeySpan = 256;  // keys of one work item of a decode row
constexpr int kQueryRows = 32;       // query rows (tokens x heads of the group) of one prefill work item

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
};

// One unit of pass 2: query_count tokens of one request, one kv head, keys [key_begin, key_end).
struct WorkItem {
  int64_t request, kv_head, first_token, query_count, first_position, key_begin, key_end;
  int64_t partial;  // row of the partial buffer, or -1 when the item sees all keys and writes the output itself
};

// Normalises, rotates and scales one head from `in` to `out`.
template <typename Kv>
void prepare_head(const Problem<Kv>& p, const float* __restrict__ in, const float* __restrict__ norm, int64_t position,
                  float factor, float* __restrict__ out) {
  const int64_t head_dim = p.head_dim, half = p.rotary_half;
  if (norm != nullptr) {
    float squares = 0.0f;
    for (int64_t d = 0; d < head_dim; ++d) squares += in[d] * in[d];
    factor /= std::sqrt(squares / static_cast<float>(head_dim) + p.norm_eps);
    // The rotation is linear: one factor before it serves for the norm and for the scale of the scores.
    for (int64_t d = 0; d < head_dim; ++d) out[d] = in[d] * factor * norm[d];
  } else {
    for (int64_t d = 0; d < head_dim; ++d) out[d] = in[d] * factor;
  }
  const float* __restrict__ cos = p.cos + position * half;
  const float* __restrict__ sin = p.sin + position * half;
  float* __restrict__ upper = out + half;
  for (int64_t d = 0; d < half; ++d) {
    const float first = out[d], second = upper[d];
    out[d] = first * cos[d] - second * sin[d];
    upper[d] = second * cos[d] + first * sin[d];
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
  const int32_t* pages = p.page_table + p.request_rows[item.request] * p.page_row_stride;
  const int64_t slot_width = p.num_kv_heads * p.head_dim;
  int64_t page = block_begin / p.page_size, in_page = block_begin % p.page_size;
  for (int64_t j = 0; j < count; ++j) {
    const int64_t offset = (pages[page] * p.page_size + in_page) * slot_width + item.kv_head * p.head_dim;
    if (++in_page == p.page_size) {
      in_page = 0;
      ++page;
    }
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
