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

// The sum of all lanes: halves are added to each other until one is left.
template <int kWidth = kLanes>
inline float sum_of(const float* lanes) {
  if constexpr (kWidth == 1) {
    return lanes[0];
  } else {
    float half[kWidth / 2];
    for (int lane = 0; lane < kWidth / 2; ++lane) half[lane] = lanes[lane] + lanes[lane + kWidth / 2];
    return sum_of<kWidth / 2>(half);
  }
}

// Adds the n values of a chunk, less their mean as far as it is known; their squares only if they are wanted.
template <bool kSquares = true>
void accumulate(const float* values, int n, float mean, Sums* sums) {
  float plain[kLanes] = {};
  float squares[kLanes] = {};
  const auto add = [&](int i, int lane) {
    const float centred = values[i] - mean;
    plain[lane] += centred;
    if constexpr (kSquares) squares[lane] += centred * centred;
  };
  const int whole = n - n % kLanes;
  for (int i = 0; i < whole; i += kLanes) {
    for (int lane = 0; lane < kLanes; ++lane) add(i + lane, lane);
  }
  for (int i = whole; i < n; ++i) add(i, i - whole);
  sums->plain += sum_of(plain);
  if constexpr (kSquares) sums->squares += sum_of(squares);
}

}  // namespace
}  // namespace diffkern
