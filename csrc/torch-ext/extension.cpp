// Makes the library importable as a Python extension, as the Hub's builder wants it; it also generates the
// header. diffkern's own build loads the library without Python and leaves this file out.
#include "registration.h"

REGISTER_EXTENSION(TORCH_EXTENSION_NAME)
