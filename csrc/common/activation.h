// The activations, by the names that the ops give them.
#pragma once

#include <cstdint>
#include <cstring>

namespace diffkern {

enum class Activation : int32_t { kNone, kGelu, kGeluTanh, kSilu, kQuickGelu };

constexpr float kQuickGeluSlope = 1.702f;

// kNone for a name that is none of them.
inline Activation activation_named(const char* name) {
  if (std::strcmp(name, "gelu") == 0) return Activation::kGelu;
  if (std::strcmp(name, "gelu_tanh") == 0) return Activation::kGeluTanh;
  if (std::strcmp(name, "silu") == 0) return Activation::kSilu;
  if (std::strcmp(name, "quick_gelu") == 0) return Activation::kQuickGelu;
  return Activation::kNone;
}

}  // namespace diffkern
