// Which threads compute a row: the choices that are tuned, apart from the kernels that carry them out.
#pragma once

#include <cstdint>

namespace diffkern {

// A thread works on units of two packets: pairs that are half a row apart have one element in each.

constexpr int kHeadThreads = 128;  // of a block in the head kernel
constexpr int kHeadRows = 4;       // heads that a group of lanes loads at once and turns by the same angles

// Units that a thread holds in the kernel that normalises across heads, a block to a token: one as long as the
// block stays small, for many small blocks hide each other's barriers.
constexpr int kRowUnits[] = {1, 2, 4};
constexpr int kRowThreads[] = {384, 512, 1024};  // the most threads of a block for each

}  // namespace diffkern
