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

}  // namespace diffkern
