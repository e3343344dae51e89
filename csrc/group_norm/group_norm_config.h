// Which threads compute what: the choices that are tuned, apart from the kernels that carry them out.
#pragma once

namespace diffkern {

// --- where the positions of a channel are neighbours -------------------------------------------------------

constexpr int kGroupThreads = 256;

// Packets that a thread has on their way at once while it sums up, and while it normalises.
constexpr int kSumPackets = 4;
constexpr int kNormPackets = 4;

// --- where the channels of a position are --------------------------------------------------------------------

constexpr int kPixelThreads = 256;
constexpr int kMergeLanes = 32;  // threads that merge a group, at most
constexpr int kMostTile = 64;    // packets of a tile, unless the fewest groups that are whole packets have more
constexpr int kFoldedParts = 8;  // that many are left where there were too many

// How the kernels are compiled.
struct PixelKernel {
  int depth;   // packets that a thread has on their way
  int blocks;  // that a multiprocessor has registers for
};

constexpr PixelKernel kPixelKernels[] = {
    {4, 4},
#if defined(DIFFKERN_BENCH)
    {2, 4}, {3, 4}, {4, 3}, {6, 3},
#endif
};

// How the work is shared out.
struct PixelConfig {
  int threads;         // of a block
  int tile;            // packets, in a row, of a block, at most
  int sum_blocks;      // of the first pass for a sample, unless that is too little or too much for a thread
  int sum_positions;   // of a thread in the first pass, at most: its sums stay accurate, being short
  int norm_blocks;     // the same for the second pass, for all samples
  int norm_positions;
  int most_parts;      // that all blocks of the second pass merge for themselves
};

constexpr int kLeastPositions = 4;  // of a thread, if its block has that many
constexpr PixelConfig kPixelConfig{kPixelThreads, 32, 256, 16, 512, 16, 64};

// --- where blocks keep what they read -------------------------------------------------------------------------

constexpr int kResidentThreads = 512;
constexpr int kResidentBatch = 2;   // packets that a thread takes at once
constexpr int kResidentSlots = 20;  // packets of a thread in shared memory: whole batches
constexpr int kChannelLanes = 4;    // threads that merge the channels of a group
constexpr int kBlockedSum = 16;     // packets whose sum is added to the rest as one, so that it stays accurate
constexpr PixelConfig kResidentPixels{kResidentThreads, 32, 132, 1 << 30, 1, 1 << 30, 1 << 30};

}  // namespace diffkern
