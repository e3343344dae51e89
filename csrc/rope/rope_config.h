// Which threads compute a row: the choices that are tuned, apart from the kernels that carry them out.
#pragma once

namespace diffkern {

// Of the kernel that turns heads alone.
struct HeadShape {
  int packets;  // that a thread loads at once, of heads with the same angles
  int threads;  // of a block
  int blocks;   // of a multiprocessor, at least: what bounds the registers
};

constexpr HeadShape kHeadShapes[] = {
    {8, 128, 4},
#if defined(DIFFKERN_BENCH)
    {4, 128, 6},
    {4, 128, 8},
    {6, 128, 5},
    {8, 64, 8},
    {8, 128, 5},
    {8, 256, 2},
    {12, 128, 4},
    {12, 64, 8},
    {16, 128, 3},
#endif
};

// A group of lanes takes heads of two streams: of q and of k, or first and then further ones of one tensor.
constexpr int kStreams = 2;

template <int kShape, bool kHalf>
constexpr int kStreamRows = kHeadShapes[kShape].packets / (kStreams * (kHalf ? 2 : 1));

// Of the kernel that normalises all heads of a token together, a block to a few tokens.
struct TokenShape {
  int packets;  // of a row that a thread holds, of q and as many of k
  int threads;  // of a block, at most
  int blocks;   // of that size on a multiprocessor, at least: what bounds the registers
  bool ahead;   // loads the next token while it computes one
  bool keeps;   // keeps the weights in registers from token to token
};

// The first is for heads that have the same angles, which are then read for one packet and serve all of a thread.
// The second is for heads that differ, the third for float32.
constexpr TokenShape kTokenShapes[] = {
    {4, 384, 1, false, false},
    {2, 384, 1, false, true},
    {4, 384, 1, false, false},
#if defined(DIFFKERN_BENCH)
    {1, 256, 4, false, true},
    {1, 640, 1, false, true},
    {1, 256, 5, false, false},
    {2, 128, 5, false, true},
    {2, 128, 6, false, false},
    {2, 128, 7, false, false},
    {2, 128, 5, true, false},
    {2, 128, 4, true, true},
    {2, 320, 2, false, true},
    {2, 320, 3, false, false},
    {3, 224, 3, false, false},
    {3, 224, 4, false, false},
    {4, 160, 4, false, false},
    {4, 160, 5, false, false},
    {5, 128, 4, false, false},
    {5, 128, 5, false, false},
    {8, 96, 5, false, false},
    {4, 64, 8, false, false},
    {4, 64, 12, false, false},
    {4, 160, 3, true, false},
#endif
};

template <int kElementBytes, bool kShared>
constexpr int kTokenShape = kElementBytes == 4 ? 2 : kShared ? 0 : 1;

template <int kShape, bool kHalf>
constexpr int kTokenUnits = kTokenShapes[kShape].packets / (kHalf ? 2 : 1);

constexpr int kMinTokenBlocks = 4096;  // before a block gets a second token
constexpr int kMaxTokens = 8;  // of a block, one after the other: what does not change from token to token is kept

}  // namespace diffkern
