// Which threads compute what: the choices that are tuned, apart from the kernels that carry them out.
#pragma once

namespace diffkern {

constexpr int kGroupThreads = 256;

// Packets that a thread has on their way at once while it sums up, and while it normalises.
constexpr int kSumPackets = 4;
constexpr int kNormPackets = 4;

// With channels side by side a block takes so many packets of them, in whole groups: 512 bytes in a row.
constexpr int kTilePackets = 32;
constexpr int kTileGroups = 32;  // at most
constexpr int kNormRounds = 4;   // times kNormPackets positions of a thread there

// The kernel that reads its input once: threads of a block, blocks of a multiprocessor, and bytes of a tile.
struct ResidentConfig {
  int threads;
  int blocks;
  int tile_bytes;
};

#if defined(DIFFKERN_BENCH)
constexpr ResidentConfig kResidentConfigs[] = {{256, 2, 16384}, {512, 1, 16384}, {512, 1, 32768}, {256, 2, 8192},
                                               {512, 2, 16384}, {1024, 1, 32768}};
#endif
constexpr ResidentConfig kResidentPlanes{256, 2, 16384};
constexpr ResidentConfig kResidentPixels{512, 1, 16384};

}  // namespace diffkern
