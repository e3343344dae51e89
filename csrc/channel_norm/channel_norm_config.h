// Which threads compute what: the choices that are tuned, apart from the kernels that carry them out.
#pragma once

#include "../common/row_config.h"

namespace diffkern {

// Where the positions of a channel are neighbours, a block keeps all channels of a few positions in registers.
struct ColumnConfig {
  int lanes;    // threads that share a position
  int packets;  // channels that each of them holds
};

constexpr int kColumnPackets = 8;  // neighbouring packets of a block, 128 bytes in a row
constexpr ColumnConfig kColumnConfigs[] = {{32, 4}, {32, 8}, {32, 12}, {64, 8}, {64, 16}};

// Where the channels of a position are neighbours, a group of lanes of a wave keeps them.
constexpr RowConfig kRowConfigs[] = {{8, 1, 128}, {16, 1, 128}, {32, 1, 128}, {32, 2, 128}, {32, 4, 128}};

// Positions and lanes of a block of the kernel for everything else.
constexpr int kGeneralPositions = 32;
constexpr int kGeneralLanes = 8;

}  // namespace diffkern
