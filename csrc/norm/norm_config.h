// Which threads compute a row: the choices that are tuned, apart from the kernels that carry them out.
#pragma once

#include "../common/row_config.h"

namespace diffkern {

// Narrow rows share a wave. From 128 packets on (1024 half elements) a row takes a block: two or three
// packets a thread and many small blocks kept an H100 within 2 to 4 % of copy speed, where one wave with 8 or
// 12 packets a thread, though it needs no barrier, stayed 6 to 17 % behind. The first that fits is taken.
#if defined(DIFFKERN_BENCH)
constexpr RowConfig kRowConfigs[] = {
    {16, 1, 128, 1}, {16, 1, 128, 2}, {16, 1, 128, 4}, {4, 4, 128, 1},  {8, 2, 128, 1},  {8, 2, 128, 2},  {16, 1, 256, 2},
    {0, 2, 128, 1},  {0, 2, 128, 2},  {0, 1, 256, 1},  {0, 1, 256, 2},  {0, 4, 64, 1},   {0, 4, 64, 2},   {32, 8, 128, 1},
    {32, 8, 64, 1},  {0, 3, 448, 1},  {0, 3, 448, 2},  {0, 2, 1024, 1}, {0, 2, 512, 2},  {0, 4, 512, 1},  {0, 5, 512, 1},
    {0, 1, 1024, 1}, {0, 8, 1024, 1},
};
#else
constexpr RowConfig kRowConfigs[] = {
    {8, 1, 128},  {16, 1, 128}, {32, 1, 128}, {32, 2, 128}, {32, 4, 128},
    {0, 2, 128},  {0, 3, 448},  {0, 8, 1024},
};
#endif

constexpr int kColumnRows = 32;   // rows of a block in the column kernel, one per thread along x
constexpr int kColumnSplits = 16; // threads that share a row there

}  // namespace diffkern
