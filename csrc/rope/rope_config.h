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

// Of the kernel that takes all heads of a token, a block to a few tokens.
struct TokenShape {
  int packets;  // of a row that a thread holds, of q and as many of k
  int threads;  // of a block, at most
  int blocks;   // of that size on a multiprocessor, at least: what bounds the registers
  int tokens;   // of a block, one after the other, at most: what does not change from token to token is kept
  bool ahead;   // loads the next token while it computes one
  bool keeps;   // keeps the weights in registers from token to token
};

// A call takes the first shape of its kind that holds its rows.
enum TokenKind {
  kNarrowSharedTokens,
  kSharedTokens,
  kWideSharedTokens,
  kHalfSharedTokens,
  kOwnTokens,
  kManyOwnTokens,
  kWideOwnTokens,
  kFloatTokens,
  kPerHeadNormTokens,
  kWideAloneTokens,
  kLayerAloneTokens
};
constexpr TokenShape kTokenShapes[] = {
    {4, 64, 9, 2, false, false},    // heads that have the same angles: read for one packet, they serve all of a thread
    {5, 128, 5, 1, false, false},   // the same for rows longer than 2048
    {4, 384, 1, 8, false, false},   // the same for rows longer than 5120
    {5, 128, 4, 4, false, false},   // heads that have the same angles, half against half
    {2, 128, 6, 8, false, true},    // heads that differ in their angles
    {2, 128, 7, 4, false, false},   // the same where tokens are many
    {2, 384, 1, 8, false, true},    // the same for long rows
    {4, 384, 1, 8, false, false},   // float32
    {3, 128, 6, 2, false, true},    // heads that are normalised alone and have the same angles
    {4, 384, 1, 8, false, true},    // the same for long rows
    {3, 128, 5, 4, false, true},    // heads with a layer norm each and the same angles
#if defined(DIFFKERN_BENCH)
    // alone
    {3, 128, 4, 2, false, true},
    {3, 128, 5, 2, false, true},
    {3, 128, 6, 2, false, false},
    {2, 192, 4, 2, false, true},
    {2, 192, 5, 2, false, false},
    {4, 96, 6, 2, false, true},
    {6, 64, 8, 2, false, true},
    {1, 384, 3, 2, false, true},
    {3, 128, 4, 4, true, true},
    {2, 192, 3, 4, true, true},
    // own
    {2, 128, 6, 4, false, false},
    {2, 128, 5, 4, false, true},
    {2, 128, 5, 8, true, true},
    {1, 256, 4, 8, false, true},
    {1, 256, 3, 8, true, true},
    {4, 64, 8, 8, false, false},
    {2, 128, 8, 8, false, false},
    {4, 128, 5, 4, false, false},
    {4, 128, 4, 4, false, false},
    // shared
    {5, 128, 6, 2, false, false},
    {4, 160, 4, 2, false, false},
    {3, 224, 3, 2, false, false},
    {3, 64, 10, 2, false, false},
    {2, 128, 7, 2, false, false},
    {8, 64, 7, 2, false, false},
    {2, 128, 8, 2, false, true},
#endif
};

#if defined(DIFFKERN_BENCH)
// Which calls a shape is tried for: alone, own, shared, shared and half against half.
constexpr char kTokenUses[] = "ssshooo.aa.aaaaaaaaaaooooooooosssssss";
#endif

template <int kShape, bool kHalf>
constexpr int kTokenUnits = kTokenShapes[kShape].packets / (kHalf ? 2 : 1);

constexpr int kMinTokenBlocks = 650;  // before a block gets a second token
constexpr int kManyTokens = 10000;    // from which on more blocks at once beat weights in registers
constexpr int kMaxTokens = 8;

}  // namespace diffkern
