// Working memory that outlives a call: grown to the largest size asked for, then reused, one buffer a thread and use.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace graphrunner {

enum class Scratch { kNormalizedRows, kQueries, kPartials, kAttention };

// Returns this thread's buffer of num_floats, on a cache-line border: a vector load that straddles two lines costs twice.
// Valid until the same thread asks for the same use again. Contents are whatever was there.
template <Scratch>
inline float* scratch(int64_t num_floats) {
  constexpr size_t kLineBytes = 64;
  constexpr size_t kLineFloats = kLineBytes / sizeof(float);
  thread_local std::vector<float> storage;
  if (storage.size() < static_cast<size_t>(num_floats) + kLineFloats) storage.resize(num_floats + kLineFloats);
  const auto address = reinterpret_cast<uintptr_t>(storage.data());
  return storage.data() + ((kLineBytes - address % kLineBytes) % kLineBytes) / sizeof(float);
}

}  // namespace graphrunner
