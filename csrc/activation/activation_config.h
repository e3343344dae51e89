// How the packet kernel of the activations is launched: the choices that are tuned, apart from the kernel itself.
#pragma once

namespace diffkern {

struct PacketShape {
  int threads;  // of a block
  int packets;  // of a thread
};

constexpr PacketShape kPacketShapes[] = {
    {128, 1},
    {128, 2},
#if defined(DIFFKERN_BENCH)
    {128, 4},
    {256, 1},
    {256, 2},
#endif
};

// A gated unit has two loads on their way with one packet a thread: on an H200 swiglu took 3 to 5 % less than with two
// packets in blocks of 256, geglu 1 % less to 2 % more. A plain activation has as many with two packets.
constexpr int kPlainShape = 1;
constexpr int kGatedShape = 0;

}  // namespace diffkern
