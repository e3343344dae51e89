// The sums over a row that a norm is made of, on the CPU. Included by sources that are compiled once per
// instruction set, hence the internal linkage.
#pragma once

namespace diffkern {
namespace {

constexpr int kLanes = 32;  // partial sums side by side: for vector units, and for accuracy

// The sum of a row's values and that of their squares.
struct Sums {
  double plain = 0.0;
  double squares = 0.0;
};

// Adds one chunk to the sums; `values` has room for a multiple of kLanes.
void accumulate(float* values, int n, Sums* sums) {
  while (n % kLanes != 0) values[n++] = 0.0f;
  float plain[kLanes] = {};
  float squares[kLanes] = {};
  for (int i = 0; i < n; i += kLanes) {
    for (int lane = 0; lane < kLanes; ++lane) {
      plain[lane] += values[i + lane];
      squares[lane] += values[i + lane] * values[i + lane];
    }
  }
  for (int width = kLanes / 2; width > 0; width /= 2) {
    for (int lane = 0; lane < width; ++lane) {
      plain[lane] += plain[lane + width];
      squares[lane] += squares[lane + width];
    }
  }
  sums->plain += plain[0];
  sums->squares += squares[0];
}

}  // namespace
}  // namespace diffkern
