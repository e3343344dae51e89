// Which threads compute what: the choices that are tuned, apart from the kernels that carry them out.
#pragma once

#include "../common/row_config.h"

namespace diffkern {

// Where the positions of a channel are neighbours, a block keeps all channels of a few positions in registers.
struct ColumnConfig {
  int width;    // neighbouring packets of positions
  int lanes;    // threads that share a position
  int packets;  // channels that each of them holds

  constexpr int threads() const { return width * lanes; }
};

// Where the channels of a position are neighbours, a group of lanes of a wave keeps them.
#if defined(DIFFKERN_BENCH)
constexpr ColumnConfig kColumnConfigs[] = {{8, 32, 3},  {8, 32, 4}, {16, 16, 6}, {16, 16, 8}, {16, 32, 3},
                                           {8, 16, 6},  {32, 8, 12}, {8, 12, 8}, {16, 12, 8}, {8, 32, 12}, {8, 64, 16}};
constexpr RowConfig kRowConfigs[] = {{16, 1, 128, 1}, {16, 1, 128, 2}, {16, 1, 128, 4}, {4, 3, 128, 1}, {4, 3, 128, 2},
                                     {4, 3, 256, 1},  {4, 3, 256, 2},  {4, 3, 64, 2},   {8, 2, 128, 1}, {8, 2, 128, 2},
                                     {2, 6, 128, 1},  {4, 3, 128, 3},  {32, 4, 128, 1}};
#else
constexpr ColumnConfig kColumnConfigs[] = {{8, 32, 3}, {8, 32, 4}, {8, 32, 8}, {8, 32, 12}, {8, 64, 8}, {8, 64, 16}};
constexpr RowConfig kRowConfigs[] = {{4, 1, 128, 4}, {4, 2, 128, 2}, {4, 3, 128, 2}, {4, 4, 128, 2}, {8, 3, 128, 2},
                                     {8, 4, 128, 2}, {16, 3, 128, 2}, {16, 4, 128, 2}, {32, 3, 128, 1}, {32, 4, 128, 1}};
#endif

// Positions and lanes of a block of the kernel for everything else.
constexpr int kGeneralPositions = 32;
constexpr int kGeneralLanes = 8;

}  // namespace diffkern
