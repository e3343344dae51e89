// Which threads compute a row: the choices that are tuned, apart from the kernels that carry them out.
#pragma once

#include "../common/row_config.h"

namespace diffkern {

// Narrow rows share a wave. From 128 packets on (1024 half elements) a row takes a block: two or three
// packets a thread and many small blocks kept an H100 within 2 to 4 % of copy speed, where one wave with 8 or
// 12 packets a thread, though it needs no barrier, stayed 6 to 17 % behind. The first that fits is taken.
constexpr RowConfig kRowConfigs[] = {
    {8, 1, 128},  {16, 1, 128}, {32, 1, 128}, {32, 2, 128}, {32, 4, 128},
    {0, 2, 128},  {0, 3, 448},  {0, 8, 1024},
};

constexpr int kColumnRows = 32;   // rows of a block in the column kernel, one per thread along x
constexpr int kColumnSplits = 16; // threads that share a row there

}  // namespace diffkern
