// Which threads compute a row: the choices that are tuned, apart from the kernels that carry them out.
#pragma once

#include "../common/row_config.h"

namespace diffkern {

// As for the norms: several narrow rows share a block, and a wider one takes a small block with two or three
// packets a thread, which leaves registers for the modulation to be loaded ahead. The first that fits is taken.
constexpr RowConfig kModulateConfigs[] = {
    {32, 1, 128},
    {0, 2, 128},
    {0, 3, 448},
#if defined(DIFFKERN_BENCH)
    {0, 1, 256},
    {0, 4, 64},
    {32, 8, 64},
    {0, 1, 512},
#endif
};

}  // namespace diffkern
