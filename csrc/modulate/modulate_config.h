// Which threads compute a row: the choices that are tuned, apart from the kernels that carry them out.
#pragma once

#include "../common/row_config.h"

namespace diffkern {

// The first that fits is taken. As for the norms several narrow rows share a block. While few rows leave a GPU waiting
// for memory rather than short of it, one packet a thread has the shortest way from the load to the store: on an H200
// up to 1 % less for 5376 rows of 2048 half elements, 3 % less for 4608 of 3072. Many rows take two or three packets a
// thread in small blocks, which leave registers for the modulation to be loaded ahead: 3 % less for 16128 of 2048.
constexpr RowConfig kModulateConfigs[] = {
    {32, 1, 128},
    {0, 1, 512},
    {0, 2, 128},
    {0, 3, 448},
};

constexpr int kFewRowsConfig = 1;
constexpr int64_t kFewPackets = 10000 * 256;  // of all rows together: 40 MB of each operand

}  // namespace diffkern
