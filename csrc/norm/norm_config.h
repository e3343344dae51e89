// Which threads compute a row: the choices that are tuned, apart from the kernels that carry them out.
#pragma once

#include "../common/row_config.h"

namespace diffkern {

// The first that fits is taken. Narrow rows share a wave. From 128 packets on (1024 half elements) a row takes a block:
// small blocks, with two or three packets a thread, kept an H100 within 2 to 4 % of copy speed, where one wave with 8 or
// 12 packets a thread, though it needs no barrier, stayed 6 to 17 % behind. Wider rows have five packets a thread: at
// 5120 half elements three and four were 4 and 1 % slower for rms_norm.
constexpr RowConfig kRowConfigs[] = {
    {8, 1, 128}, {16, 1, 128}, {32, 1, 128}, {32, 2, 128},  {32, 4, 128},
    {0, 2, 128}, {0, 3, 128},  {0, 5, 320},  {0, 8, 1024},
#if defined(DIFFKERN_BENCH)
    {8, 2, 128}, {0, 1, 256}, {0, 3, 448}, {0, 4, 512}, {0, 2, 320}, {0, 7, 96}, {0, 10, 64},
#endif
};

// Rows of a half dtype that fill a block's threads to the last packet, without a rare option or parameter, have a kernel
// of their own, of less than half the instructions.
struct FullConfig {
  int packets;  // that each thread holds
  int threads;
};
constexpr FullConfig kFullConfigs[] = {{2, 128}, {3, 128}, {4, 128}, {5, 128}};

constexpr int kColumnRows = 32;   // rows of a block in the column kernel, one per thread along x
constexpr int kColumnSplits = 16; // threads that share a row there

}  // namespace diffkern
