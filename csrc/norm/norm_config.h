// Which threads compute a row: the choices that are tuned, apart from the kernels that carry them out.
#pragma once

#include <cstdint>

namespace diffkern {

// How a kernel that keeps its row in registers is laid out.
struct RowConfig {
  int lanes;    // threads of one row; 0 means the whole block
  int packets;  // 16-byte packets that a thread holds
  int threads;  // threads of a block; for lanes 0 chosen at launch to fit the row

  constexpr bool fits(int64_t row_packets, int max_threads) const {
    return row_packets <= static_cast<int64_t>(lanes != 0 ? lanes : max_threads) * packets;
  }
};

// Narrow rows share a wave; up to 12 packets a thread a row stays within one group of lanes and needs no
// barrier; wider ones take a block.
constexpr RowConfig kRowConfigs[] = {
    {8, 1, 128}, {16, 1, 128}, {32, 1, 128}, {32, 2, 128}, {32, 4, 128}, {32, 6, 128}, {32, 8, 128}, {32, 12, 128}, {0, 4, 0}, {0, 8, 0},
#if defined(DIFFKERN_BENCH)  // candidates, reached through DIFFKERN_NORM_CONFIG only
    {32, 3, 128}, {0, 1, 0}, {0, 2, 0}, {0, 3, 0}, {0, 5, 0}, {32, 4, 64}, {32, 8, 64}, {32, 12, 64}, {32, 8, 32}, {32, 12, 32}, {16, 2, 128},
#endif
};

// A few rows would leave most of the GPU idle at one group of lanes each: from this many packets a row on,
// and below this many rows, a block computes a row.
constexpr int64_t kFewRows = 1024;
constexpr int64_t kFewRowsPackets = 128;

constexpr int kColumnRows = 32;   // rows of a block in the column kernel, one per thread along x
constexpr int kColumnSplits = 16; // threads that share a row there

}  // namespace diffkern
