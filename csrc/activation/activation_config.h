// How the packet kernel of the activations is launched: the choices that are tuned, apart from the kernel itself.
#pragma once

namespace diffkern {

struct PacketShape {
  int threads;  // of a block
  int packets;  // of a thread
};

constexpr PacketShape kPacketShapes[] = {
    {256, 2},
#if defined(DIFFKERN_BENCH)
    {128, 1},
    {128, 2},
    {128, 4},
    {256, 1},
    {256, 4},
    {512, 1},
    {512, 2},
#endif
};

constexpr int kPlainShape = 0;
constexpr int kGatedShape = 0;

}  // namespace diffkern
