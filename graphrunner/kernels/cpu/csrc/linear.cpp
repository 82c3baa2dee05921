// The linear family at few rows: every weight byte is read once, straight from its row-major checkpoint layout.
//
// At decode sizes a projection is a walk through memory. The kernels below keep the walk sequential (a few weight rows
// side by side, the next ones prefetched) and reuse each weight vector for up to eight rows of x while it sits in a
// register, and for all rows while it sits in the first-level cache. Larger inputs go to the library's GEMM.
//
// Threads split the output columns. An output element is always accumulated in the same order, whatever the number of
// threads and whatever the other rows are: results are deterministic and, up to kMaxStreamedRows, batch-invariant.

#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <torch/library.h>

#include <cmath>

#include "scratch.h"
#include "simd.h"

namespace graphrunner {
namespace {

constexpr int64_t kMaxStreamedRows = 16;
constexpr int kBlock = 16;  // output columns of one task unit

enum class Activation : int64_t { kSilu = 0, kGeluTanh = 1 };

// A weight as the kernels see it. scale is null for float weights; otherwise row n has num_groups scales.
template <typename W>
struct Weight {
  const W* data;
  int64_t width;
  const float* scale;
  int64_t num_groups;
};

// sums[t * NR + n] = dot(x[t], w[n]) for TR rows of x and NR rows of w; NR * TR <= 16 accumulators.
template <int NR, int TR, bool kGrouped, typename W>
inline void dot_tile(const float* x, const W* w, const float* group_scale, int64_t width, int64_t num_groups,
                     float* sums) {
  Vec acc[16] = {};
  const int64_t group_width = kGrouped ? width / num_groups : width;
  for (int64_t begin = 0, group = 0; begin < width; begin += group_width, ++group) {
    const int64_t end = begin + group_width;
    int64_t k = begin;
    for (; k + kLanes <= end; k += kLanes) {
      Vec wv[NR];
#pragma GCC unroll 4
      for (int n = 0; n < NR; ++n) {
        __builtin_prefetch(w + (n + NR) * width + k, 0, 3);  // the next tile
        wv[n] = load(w + n * width + k);
        if (kGrouped) wv[n] *= group_scale[n * num_groups + group];
      }
#pragma GCC unroll 8
      for (int t = 0; t < TR; ++t) {
        const Vec xv = load(x + t * width + k);
#pragma GCC unroll 4
        for (int n = 0; n < NR; ++n) acc[t * NR + n] = multiply_add(xv, wv[n], acc[t * NR + n]);
      }
    }
    for (; k < end; ++k) {
      for (int n = 0; n < NR; ++n) {
        const float wk = widen(w[n * width + k]) * (kGrouped ? group_scale[n * num_groups + group] : 1.0f);
        for (int t = 0; t < TR; ++t) acc[t * NR + n][0] = multiply_add(x[t * width + k], wk, acc[t * NR + n][0]);
      }
    }
  }
  sum16(acc, sums);
}

// sums[t * kBlock + n] = dot(x[t], weight[row + n]) for n < NR and TR rows of x.
template <int NR, int TR, bool kGrouped, typename W>
inline void dot_rows(const float* x, const Weight<W>& weight, int64_t row, float* sums) {
  const float* scale = kGrouped ? weight.scale + row * weight.num_groups : nullptr;
  float tile[16];
  dot_tile<NR, TR, kGrouped>(x, weight.data + row * weight.width, scale, weight.width, weight.num_groups, tile);
  for (int t = 0; t < TR; ++t) {
    for (int n = 0; n < NR; ++n) sums[t * kBlock + n] = tile[t * NR + n];
  }
}

// As many weight rows side by side as the accumulators allow: four for up to four rows of x, else two.
template <int TR, bool kGrouped, typename W>
void dot_columns(const float* x, const Weight<W>& weight, int64_t first, int64_t count, float* sums) {
  constexpr int NR = TR <= 4 ? 4 : 2;
  int64_t j = 0;
  for (; j + NR <= count; j += NR) dot_rows<NR, TR, kGrouped>(x, weight, first + j, sums + j);
  for (; j < count; ++j) dot_rows<1, TR, kGrouped>(x, weight, first + j, sums + j);
}

// sums[t * kBlock + j] = x[t] . weight[first + j] for j < count <= kBlock.
template <bool kGrouped, typename W>
void dot_block_impl(const float* x, int64_t rows, const Weight<W>& weight, int64_t first, int64_t count, float* sums) {
  for (int64_t t = 0; t < rows; t += 8) {
    const float* xt = x + t * weight.width;
    float* out = sums + t * kBlock;
    switch (std::min<int64_t>(8, rows - t)) {
      case 1: dot_columns<1, kGrouped>(xt, weight, first, count, out); break;
      case 2: dot_columns<2, kGrouped>(xt, weight, first, count, out); break;
      case 3: dot_columns<3, kGrouped>(xt, weight, first, count, out); break;
      case 4: dot_columns<4, kGrouped>(xt, weight, first, count, out); break;
      case 5: dot_columns<5, kGrouped>(xt, weight, first, count, out); break;
      case 6: dot_columns<6, kGrouped>(xt, weight, first, count, out); break;
      case 7: dot_columns<7, kGrouped>(xt, weight, first, count, out); break;
      default: dot_columns<8, kGrouped>(xt, weight, first, count, out);
    }
  }
}

template <typename W>
void dot_block(const float* x, int64_t rows, const Weight<W>& weight, int64_t first, int64_t count, float* sums) {
  if (weight.num_groups > 1) {
    dot_block_impl<true>(x, rows, weight, first, count, sums);
    return;
  }
  dot_block_impl<false>(x, rows, weight, first, count, sums);
  if (weight.scale == nullptr) return;
  for (int64_t t = 0; t < rows; ++t) {
    for (int64_t j = 0; j < count; ++j) sums[t * kBlock + j] *= weight.scale[first + j];
  }
}

void normalize_row(const float* x, const float* norm_weight, float eps, int64_t width, float* out) {
  Vec squares[4] = {};
  int64_t k = 0;
  for (; k + 4 * kLanes <= width; k += 4 * kLanes) {
    for (int i = 0; i < 4; ++i) {
      const Vec v = load(x + k + i * kLanes);
      squares[i] = multiply_add(v, v, squares[i]);
    }
  }
  float total = sum((squares[0] + squares[1]) + (squares[2] + squares[3]));
  for (; k < width; ++k) total += x[k] * x[k];
  const float factor = 1.0f / std::sqrt(total / static_cast<float>(width) + eps);
  if (norm_weight == nullptr) {
    for (k = 0; k < width; ++k) out[k] = x[k] * factor;
  } else {
    for (k = 0; k < width; ++k) out[k] = x[k] * factor * norm_weight[k];
  }
}

// The rows the projection reads: x itself, or its normalised copy in this thread's scratch. Every thread normalises
// for itself: at 16 rows that costs about a microsecond, less than waiting for one thread to do it.
const float* normalized_rows(const float* x, int64_t rows, int64_t width, const float* norm_weight, float eps) {
  if (norm_weight == nullptr) return x;
  float* rows_out = scratch<Scratch::kNormalizedRows>(rows * width);
  for (int64_t t = 0; t < rows; ++t) normalize_row(x + t * width, norm_weight, eps, width, rows_out + t * width);
  return rows_out;
}

struct Inputs {
  const float* x;
  int64_t rows;
  int64_t width;
  const float* norm_weight;
  float eps;
};

// out = norm(x) @ weight.T + bias + residual.
template <typename W>
void project(const Inputs& in, const Weight<W>& weight, int64_t num_outputs, const float* bias, const float* residual,
             float* out) {
  const int64_t num_blocks = (num_outputs + kBlock - 1) / kBlock;
  at::parallel_for(0, num_blocks, 1, [&](int64_t begin, int64_t end) {
    const float* x = normalized_rows(in.x, in.rows, in.width, in.norm_weight, in.eps);
    float sums[kMaxStreamedRows * kBlock] = {};
    for (int64_t block = begin; block < end; ++block) {
      const int64_t first = block * kBlock;
      const int64_t count = std::min<int64_t>(kBlock, num_outputs - first);
      dot_block(x, in.rows, weight, first, count, sums);
      for (int64_t t = 0; t < in.rows; ++t) {
        const int64_t base = t * num_outputs + first;
        for (int64_t j = 0; j < count; ++j) {
          float value = sums[t * kBlock + j];
          if (bias != nullptr) value += bias[first + j];
          if (residual != nullptr) value += residual[base + j];
          out[base + j] = value;
        }
      }
    }
  });
}

inline Vec activate(Vec gate, Activation activation) {
  if (activation == Activation::kSilu) return gate / (1.0f + exponential(-gate));
  const Vec inner = 0.7978845608028654f * (gate + 0.044715f * gate * gate * gate);
  return 0.5f * gate * (1.0f + tangent_hyperbolic(inner));
}

// out = act(norm(x) @ gate.T) * (norm(x) @ up.T), weight = [gate; up].
template <typename W>
void project_gated(const Inputs& in, const Weight<W>& weight, int64_t num_outputs, Activation activation, float* out) {
  const int64_t num_blocks = (num_outputs + kBlock - 1) / kBlock;
  at::parallel_for(0, num_blocks, 1, [&](int64_t begin, int64_t end) {
    const float* x = normalized_rows(in.x, in.rows, in.width, in.norm_weight, in.eps);
    float gate[kMaxStreamedRows * kBlock] = {};
    float up[kMaxStreamedRows * kBlock] = {};
    for (int64_t block = begin; block < end; ++block) {
      const int64_t first = block * kBlock;
      const int64_t count = std::min<int64_t>(kBlock, num_outputs - first);
      dot_block(x, in.rows, weight, first, count, gate);
      dot_block(x, in.rows, weight, num_outputs + first, count, up);
      for (int64_t t = 0; t < in.rows; ++t) {
        float* g = gate + t * kBlock;
        for (int j = 0; j < kBlock; j += kLanes) store(g + j, activate(load(g + j), activation) * load(up + t * kBlock + j));
        for (int64_t j = 0; j < count; ++j) out[t * num_outputs + first + j] = g[j];
      }
    }
  });
}

const float* float_data(const std::optional<at::Tensor>& tensor, const char* name) {
  if (!tensor.has_value()) return nullptr;
  TORCH_CHECK(tensor->scalar_type() == at::kFloat && tensor->is_contiguous(), name, " must be contiguous float32");
  return tensor->const_data_ptr<float>();
}

void check_linear(const at::Tensor& x, const at::Tensor& weight, const std::optional<at::Tensor>& scale) {
  TORCH_CHECK(x.dim() == 2 && x.scalar_type() == at::kFloat, "x must be float32 [T, K], got ", x.scalar_type());
  TORCH_CHECK(weight.dim() == 2 && weight.size(1) == x.size(1) && weight.is_contiguous(),
              "weight must be contiguous [N, ", x.size(1), "], got ", weight.sizes());
  const bool is_int8 = weight.scalar_type() == at::kChar;
  TORCH_CHECK(is_int8 == scale.has_value(), "scale belongs to int8 weights, weight is ", weight.scalar_type());
  TORCH_CHECK(!is_int8 || (scale->size(0) == weight.size(0) && weight.size(1) % (scale->numel() / scale->size(0)) == 0),
              "scale must be [N] or [N, num_groups] with num_groups dividing K, got ", scale->sizes());
}

// Calls run(Weight<W>) with the element type of the tensor.
template <typename Run>
void with_weight(const at::Tensor& weight, const std::optional<at::Tensor>& scale, const Run& run) {
  const float* scales = float_data(scale, "scale");
  const int64_t width = weight.size(1);
  const int64_t num_groups = scale.has_value() ? scale->numel() / scale->size(0) : 1;
  if (weight.scalar_type() == at::kFloat) {
    run(Weight<float>{weight.const_data_ptr<float>(), width, scales, num_groups});
  } else if (weight.scalar_type() == at::kBFloat16) {
    run(Weight<BFloat16Bits>{static_cast<const BFloat16Bits*>(weight.const_data_ptr()), width, scales, num_groups});
  } else {
    TORCH_CHECK(weight.scalar_type() == at::kChar, "weight must be float32, bfloat16 or int8, got ",
                weight.scalar_type());
    run(Weight<int8_t>{weight.const_data_ptr<int8_t>(), width, scales, num_groups});
  }
}

at::Tensor normalized(const at::Tensor& x, const std::optional<at::Tensor>& norm_weight, double eps) {
  const float* weight = float_data(norm_weight, "norm_weight");
  if (weight == nullptr) return x;
  at::Tensor out = at::empty_like(x);
  const float* source = x.const_data_ptr<float>();
  float* target = out.mutable_data_ptr<float>();
  const int64_t width = x.size(1);
  at::parallel_for(0, x.size(0), 16, [&](int64_t begin, int64_t end) {
    for (int64_t t = begin; t < end; ++t) {
      normalize_row(source + t * width, weight, static_cast<float>(eps), width, target + t * width);
    }
  });
  return out;
}

// Many rows: widen the weight a slab of rows at a time, then multiply with the library's GEMM.
void project_with_gemm(const at::Tensor& x, const at::Tensor& weight, const std::optional<at::Tensor>& scale,
                       at::Tensor& out) {
  if (weight.scalar_type() == at::kFloat) {
    at::mm_out(out, x, weight.t());
    return;
  }
  constexpr int64_t kSlabRows = 2048;
  for (int64_t first = 0; first < weight.size(0); first += kSlabRows) {
    const int64_t count = std::min(kSlabRows, weight.size(0) - first);
    at::Tensor slab = weight.narrow(0, first, count).to(at::kFloat);
    if (scale.has_value()) {
      const int64_t num_groups = scale->numel() / scale->size(0);
      slab.view({count, num_groups, -1}).mul_(scale->narrow(0, first, count).view({count, num_groups, 1}));
    }
    at::Tensor target = out.narrow(1, first, count);
    at::mm_out(target, x, slab.t());
  }
}

at::Tensor linear(const at::Tensor& x_in, const std::optional<at::Tensor>& norm_weight, double eps,
                  const at::Tensor& weight, const std::optional<at::Tensor>& scale,
                  const std::optional<at::Tensor>& bias, const std::optional<at::Tensor>& residual_in) {
  check_linear(x_in, weight, scale);
  const std::optional<at::Tensor> residual =
      residual_in.has_value() ? std::optional<at::Tensor>(residual_in->contiguous()) : std::nullopt;
  const at::Tensor x = x_in.contiguous();
  const int64_t num_outputs = weight.size(0);
  at::Tensor out = at::empty({x.size(0), num_outputs}, x.options());
  if (x.size(0) > kMaxStreamedRows) {
    project_with_gemm(normalized(x, norm_weight, eps), weight, scale, out);
    if (bias.has_value()) out.add_(*bias);
    if (residual.has_value()) out.add_(*residual);
    return out;
  }
  const Inputs in{x.const_data_ptr<float>(), x.size(0), x.size(1), float_data(norm_weight, "norm_weight"),
                  static_cast<float>(eps)};
  const float* bias_data = float_data(bias, "bias");
  const float* residual_data = float_data(residual, "residual");
  with_weight(weight, scale,
              [&](const auto& w) { project(in, w, num_outputs, bias_data, residual_data, out.mutable_data_ptr<float>()); });
  return out;
}

at::Tensor gate_up(const at::Tensor& x_in, const std::optional<at::Tensor>& norm_weight, double eps,
                   const at::Tensor& weight, const std::optional<at::Tensor>& scale, int64_t activation) {
  check_linear(x_in, weight, scale);
  TORCH_CHECK(weight.size(0) % 2 == 0, "gate_up_weight must have an even number of rows, got ", weight.size(0));
  const at::Tensor x = x_in.contiguous();
  const int64_t num_outputs = weight.size(0) / 2;
  const auto kind = static_cast<Activation>(activation);
  at::Tensor out = at::empty({x.size(0), num_outputs}, x.options());
  float* out_data = out.mutable_data_ptr<float>();
  if (x.size(0) > kMaxStreamedRows) {
    at::Tensor both = at::empty({x.size(0), 2 * num_outputs}, x.options());
    project_with_gemm(normalized(x, norm_weight, eps), weight, scale, both);
    const float* gate = both.const_data_ptr<float>();
    at::parallel_for(0, x.size(0), 1, [&](int64_t begin, int64_t end) {
      for (int64_t t = begin; t < end; ++t) {
        const float* g = gate + t * 2 * num_outputs;
        int64_t j = 0;
        for (; j + kLanes <= num_outputs; j += kLanes) {
          store(out_data + t * num_outputs + j, activate(load(g + j), kind) * load(g + num_outputs + j));
        }
        for (; j < num_outputs; ++j) {
          out_data[t * num_outputs + j] = activate(splat(g[j]), kind)[0] * g[num_outputs + j];
        }
      }
    });
    return out;
  }
  const Inputs in{x.const_data_ptr<float>(), x.size(0), x.size(1), float_data(norm_weight, "norm_weight"),
                  static_cast<float>(eps)};
  with_weight(weight, scale, [&](const auto& w) { project_gated(in, w, num_outputs, kind, out_data); });
  return out;
}

at::Tensor rms_norm(const at::Tensor& x_in, const at::Tensor& norm_weight, double eps) {
  TORCH_CHECK(x_in.scalar_type() == at::kFloat, "x must be float32, got ", x_in.scalar_type());
  const at::Tensor x = x_in.contiguous();
  return normalized(x.view({-1, x.size(-1)}), norm_weight, eps).view(x.sizes());
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(graphrunner, m) {
  m.def(
      "cpu_linear(Tensor x, Tensor? norm_weight, float eps, Tensor weight, Tensor? scale, Tensor? bias, "
      "Tensor? residual) -> Tensor");
  m.def("cpu_gate_up(Tensor x, Tensor? norm_weight, float eps, Tensor weight, Tensor? scale, int activation) -> Tensor");
  m.def("cpu_rms_norm(Tensor x, Tensor norm_weight, float eps) -> Tensor");
}

TORCH_LIBRARY_IMPL(graphrunner, CPU, m) {
  m.impl("cpu_linear", linear);
  m.impl("cpu_gate_up", gate_up);
  m.impl("cpu_rms_norm", rms_norm);
}

}  // namespace graphrunner
