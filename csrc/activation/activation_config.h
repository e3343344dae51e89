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

// A plain activation lets each thread read two packets before it computes the first. A gated one reads a second operand
// as well: on an H200 geglu and swiglu took as long as with one of 128 threads x 1 packet, or up to 5 % less.
constexpr int kPlainShape = 1;
constexpr int kGatedShape = 0;

}  // namespace diffkern
