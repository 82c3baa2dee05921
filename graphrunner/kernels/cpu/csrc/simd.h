// One native vector of floats and the few operations the kernels need.
// Written with the compiler's vector extension, so the same source serves AVX-512, AVX2, SSE and NEON.
#pragma once

#include <cstdint>
#include <cstring>

#if defined(__AVX2__)
#include <immintrin.h>
#elif defined(__ARM_NEON)
#include <arm_neon.h>
#endif

namespace graphrunner {

#if defined(__AVX512F__)
constexpr int kLanes = 16;
#elif defined(__AVX__)
constexpr int kLanes = 8;
#else
constexpr int kLanes = 4;
#endif

typedef float Vec __attribute__((vector_size(kLanes * 4)));
typedef int32_t VecInt __attribute__((vector_size(kLanes * 4)));
typedef uint32_t VecUint __attribute__((vector_size(kLanes * 4)));
typedef int8_t VecInt8 __attribute__((vector_size(kLanes)));
typedef uint16_t VecUint16 __attribute__((vector_size(kLanes * 2)));

// a * b + c, rounded once where the processor can. Left to the compiler, one instance of a template is fused and another
// is not, and a row's bits depend on how many rows there are.
inline float multiply_add(float a, float b, float c) {
#if defined(__FMA__) || defined(__ARM_FEATURE_FMA)
  return __builtin_fmaf(a, b, c);
#else
  return a * b + c;
#endif
}
inline Vec multiply_add(Vec a, Vec b, Vec c) {
#if defined(__AVX512F__)
  return (Vec)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif defined(__FMA__)
  return (Vec)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#elif defined(__ARM_FEATURE_FMA)
  return (Vec)vfmaq_f32((float32x4_t)c, (float32x4_t)a, (float32x4_t)b);
#else
  return a * b + c;
#endif
}

inline Vec splat(float value) { return Vec{} + value; }

inline Vec load(const float* p) {
  Vec v;
  std::memcpy(&v, p, sizeof(v));
  return v;
}

inline void store(float* p, Vec v) { std::memcpy(p, &v, sizeof(v)); }

// bfloat16 is the upper half of a float32; weights and caches reach the kernels as raw 16-bit words.
struct BFloat16Bits {
  uint16_t bits;
};

inline float widen(float value) { return value; }
inline float widen(int8_t value) { return static_cast<float>(value); }
inline float widen(BFloat16Bits value) {
  const uint32_t bits = static_cast<uint32_t>(value.bits) << 16;
  float result;
  std::memcpy(&result, &bits, sizeof(result));
  return result;
}

inline Vec load(const int8_t* p) {
#if defined(__AVX512F__)
  // Spelled out because the generic conversion is scalarised by GCC 12.
  return (Vec)_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))));
#elif defined(__AVX2__)
  return (Vec)_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p))));
#else
  VecInt8 v;
  std::memcpy(&v, p, sizeof(v));
  return __builtin_convertvector(__builtin_convertvector(v, VecInt), Vec);
#endif
}

inline Vec load(const BFloat16Bits* p) {
#if defined(__AVX512F__)
  const __m256i v = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
  return (Vec)_mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(v), 16));
#elif defined(__AVX2__)
  const __m128i v = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
  return (Vec)_mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(v), 16));
#else
  VecUint16 v;
  std::memcpy(&v, p, sizeof(v));
  const VecUint wide = __builtin_convertvector(v, VecUint) << 16;
  Vec result;
  std::memcpy(&result, &wide, sizeof(result));
  return result;
#endif
}

inline void narrow(float value, float* out) { *out = value; }
inline void narrow(float value, BFloat16Bits* out) {
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof(bits));
  if (value != value) {
    out->bits = 0x7FC0;  // rounding a NaN's payload could carry it into infinity
    return;
  }
  bits += 0x7FFF + ((bits >> 16) & 1);  // round to nearest even
  out->bits = static_cast<uint16_t>(bits >> 16);
}

inline float sum(Vec v) {
  float lanes[kLanes];
  store(lanes, v);
  for (int width = kLanes / 2; width > 0; width /= 2) {
    for (int i = 0; i < width; ++i) lanes[i] += lanes[i + width];
  }
  return lanes[0];
}

inline Vec maximum_of(Vec a, Vec b) { return a > b ? a : b; }

// Sums of 16 vectors at once, out[i] = sum(v[i]). On AVX-512 a tree of lane exchanges, 3 instructions a sum.
inline void sum16(const Vec* v, float* out) {
#if defined(__AVX512F__)
  __m512 pair[8], quad[4], half[2];
  for (int i = 0; i < 8; ++i) {
    const __m512 a = (__m512)v[2 * i], b = (__m512)v[2 * i + 1];
    pair[i] = _mm512_add_ps(_mm512_unpacklo_ps(a, b), _mm512_unpackhi_ps(a, b));
  }
  for (int i = 0; i < 4; ++i) {
    const __m512d a = _mm512_castps_pd(pair[2 * i]), b = _mm512_castps_pd(pair[2 * i + 1]);
    quad[i] = _mm512_add_ps(_mm512_castpd_ps(_mm512_unpacklo_pd(a, b)), _mm512_castpd_ps(_mm512_unpackhi_pd(a, b)));
  }
  // Each 128-bit lane of quad[i] now holds partial sums of vectors 4i .. 4i+3.
  for (int i = 0; i < 2; ++i) {
    const __m512 a = quad[2 * i], b = quad[2 * i + 1];
    half[i] = _mm512_add_ps(_mm512_shuffle_f32x4(a, b, 0x88), _mm512_shuffle_f32x4(a, b, 0xDD));
  }
  const __m512 whole = _mm512_add_ps(_mm512_shuffle_f32x4(half[0], half[1], 0x88),
                                     _mm512_shuffle_f32x4(half[0], half[1], 0xDD));
  _mm512_storeu_ps(out, whole);
#else
  for (int i = 0; i < 16; ++i) out[i] = sum(v[i]);
#endif
}

// The comparison is false for NaN, so a NaN stays a NaN.
inline Vec clamp(Vec x, float low, float high) {
  x = x < splat(low) ? splat(low) : x;
  return x > splat(high) ? splat(high) : x;
}

// exp, to about 2 units in the last place. Below -87.3 the result is a tiny positive number, above 88.4 it saturates.
// Source: range reduction by ln 2 in two parts and the degree-5 minimax polynomial of the Cephes library.
inline Vec exponential(Vec x) {
  x = clamp(x, -87.3f, 88.3f);
  const Vec shifter = splat(12582912.0f);  // 1.5 * 2^23: adding it rounds to an integer
  const Vec power = (x * 1.44269504088896341f + shifter) - shifter;
  Vec r = x - power * 0.693359375f;
  r = r + power * 2.12194440e-4f;
  Vec p = splat(1.9875691500e-4f);
  p = p * r + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * r * r + r + 1.0f;
  const VecInt exponent = (__builtin_convertvector(power, VecInt) + 127) << 23;
  Vec scale;
  std::memcpy(&scale, &exponent, sizeof(scale));
  return p * scale;
}

inline Vec tangent_hyperbolic(Vec x) {
  // tanh x = 1 - 2 / (exp(2x) + 1); the clamp keeps exp finite where tanh is 1 to the last bit.
  const Vec bounded = clamp(x, -15.0f, 15.0f);
  return 1.0f - 2.0f / (exponential(bounded + bounded) + 1.0f);
}

}  // namespace graphrunner
