// The greedy token of each row of logits, as torch.argmax gives it: the first of equals, a NaN before any number.

#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <torch/library.h>

#include <limits>
#include <vector>

#include "simd.h"

namespace graphrunner {
namespace {

constexpr int64_t kSpan = 4096;  // columns of one work item

// The largest value of [begin, end), NaN if there is one.
float largest(const float* row, int64_t begin, int64_t end) {
  Vec best[4];
  for (Vec& v : best) v = splat(-std::numeric_limits<float>::infinity());
  VecInt is_nan = {};
  int64_t i = begin;
  for (; i + 4 * kLanes <= end; i += 4 * kLanes) {
    for (int j = 0; j < 4; ++j) {
      const Vec v = load(row + i + j * kLanes);
      is_nan |= v != v;
      best[j] = maximum_of(v, best[j]);
    }
  }
  float result = -std::numeric_limits<float>::infinity();
  bool has_nan = false;
  for (int lane = 0; lane < kLanes; ++lane) {
    has_nan |= is_nan[lane] != 0;
    for (const Vec& v : best) result = std::max(result, v[lane]);
  }
  for (; i < end; ++i) {
    has_nan |= row[i] != row[i];
    result = row[i] > result ? row[i] : result;
  }
  return has_nan ? std::numeric_limits<float>::quiet_NaN() : result;
}

int64_t first_index(const float* row, int64_t begin, int64_t end, float value) {
  for (int64_t i = begin; i < end; ++i) {
    if (row[i] == value || (value != value && row[i] != row[i])) return i;
  }
  return begin;
}

at::Tensor argmax(const at::Tensor& logits_in) {
  TORCH_CHECK(logits_in.dim() == 2 && logits_in.scalar_type() == at::kFloat && logits_in.size(1) > 0,
              "logits must be float32 [T, V], got ", logits_in.sizes());
  const at::Tensor logits = logits_in.contiguous();
  const int64_t num_rows = logits.size(0), width = logits.size(1);
  const int64_t num_spans = (width + kSpan - 1) / kSpan;
  at::Tensor out = at::empty({num_rows}, logits.options().dtype(at::kLong));
  const float* data = logits.const_data_ptr<float>();
  static thread_local std::vector<float> storage;  // kept for its capacity
  storage.resize(num_rows * num_spans);
  float* maxima = storage.data();
  at::parallel_for(0, num_rows * num_spans, 4, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      const int64_t first = i % num_spans * kSpan;
      maxima[i] = largest(data + i / num_spans * width, first, std::min(first + kSpan, width));
    }
  });
  int64_t* tokens = out.mutable_data_ptr<int64_t>();
  for (int64_t t = 0; t < num_rows; ++t) {
    const float* of_row = maxima + t * num_spans;
    int64_t best = 0;
    for (int64_t s = 0; s < num_spans && of_row[best] == of_row[best]; ++s) {
      if (of_row[s] > of_row[best] || of_row[s] != of_row[s]) best = s;
    }
    tokens[t] = first_index(data + t * width, best * kSpan, std::min((best + 1) * kSpan, width), of_row[best]);
  }
  return out;
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(graphrunner, m) { m.def("cpu_argmax(Tensor logits) -> Tensor"); }

TORCH_LIBRARY_IMPL(graphrunner, CPU, m) { m.impl("cpu_argmax", argmax); }

}  // namespace graphrunner
