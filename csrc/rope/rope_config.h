// Which threads compute a row: the choices that are tuned, apart from the kernels that carry them out.
#pragma once

#include <cstdint>

namespace diffkern {

// A thread works on units of two packets: pairs that are half a row apart have one element in each.

constexpr int kHeadThreads = 128;  // of a block in the head kernel
constexpr int kHeadRows = 4;       // heads that a group of lanes loads at once and turns by the same angles
constexpr int kHeadBlocks = 4;     // of a multiprocessor, at least: what bounds the registers

// The kernel that normalises across heads gives a token a block, as small as the units of a thread let it be:
// small blocks hide each other's barriers.
constexpr int kTokenThreads = 384;  // the most threads of a block
template <int kElementBytes>
constexpr int kTokenUnits = kElementBytes == 4 ? 2 : 1;  // of a thread
// Blocks of that size on a multiprocessor, at least: what bounds the registers. The tighter bound would make the
// kernels that hold more at once spill.
template <int kElementBytes, bool kHalf>
constexpr int kTokenBlocks = kElementBytes == 4 || kHalf ? 1 : 2;

}  // namespace diffkern
