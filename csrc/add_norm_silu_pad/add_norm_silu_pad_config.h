// Which threads compute what: the choices that are tuned, apart from the kernels that carry them out.
#pragma once

#include "../common/row_config.h"

namespace diffkern {

// Where the channels of a position are neighbours, a group of lanes of a wave keeps them.
#if defined(DIFFKERN_BENCH)
constexpr RowConfig kRowConfigs[] = {{4, 4, 128, 1},  {4, 4, 128, 2},  {8, 2, 128, 1},  {8, 2, 128, 2}, {8, 2, 256, 2},
                                     {16, 1, 128, 2}, {16, 1, 128, 4}, {16, 2, 128, 1}, {16, 2, 128, 2}, {32, 1, 128, 2},
                                     {32, 1, 128, 4}, {16, 4, 128, 1}, {32, 2, 128, 1}, {32, 2, 128, 2}, {32, 2, 256, 2}};
#else
constexpr RowConfig kRowConfigs[] = {{8, 1, 128, 4},  {8, 2, 128, 2},  {16, 2, 128, 2},
                                     {32, 2, 128, 2}, {32, 4, 128, 1}, {32, 8, 128, 1}};
#endif

// The configuration of slices of the channels, and how many a grid has at most.
constexpr int kSliceConfig = 3;
constexpr int64_t kMostSlices = 65535;

// The tile of the kernel for everything else, and the threads of a block.
constexpr int kTilePositions = 64;
constexpr int kTileChannels = 32;
constexpr int kTileThreads = 256;

}  // namespace diffkern
