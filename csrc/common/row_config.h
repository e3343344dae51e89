// How many threads compute a row, for the kernels that keep their row in registers.
#pragma once

#include <cstdint>

namespace diffkern {

struct RowConfig {
  int lanes;    // threads of one row; 0 means the whole block
  int packets;  // 16-byte packets that a thread holds
  int threads;  // threads of a block; for lanes 0 the most there may be, the row decides
  int rows = 1; // rows that a thread has on their way at once

  constexpr bool fits(int64_t row_packets) const {
    return row_packets <= static_cast<int64_t>(lanes != 0 ? lanes : threads) * packets;
  }
};

}  // namespace diffkern
