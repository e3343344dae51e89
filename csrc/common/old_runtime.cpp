// Symbols that GCC's headers ask of newer runtimes than a Hub build may need (manylinux_2_28: glibc 2.28, libstdc++ of
// GCC 8), defined here so that the library finds them in itself.
#include <new>
#include <sstream>

// Weak, so that a libstdc++ that is linked statically brings its own.
#define DIFFKERN_HIDDEN __attribute__((weak, visibility("hidden")))

extern "C" {

// glibc 2.32 says here whether reference counts need no atomic instructions; they always get them.
DIFFKERN_HIDDEN char __libc_single_threaded;

// The default constructors of GCC 9's string streams, by those of the streams of any version that take a mode.
DIFFKERN_HIDDEN void _ZNSt7__cxx1119basic_ostringstreamIcSt11char_traitsIcESaIcEEC1Ev(void* place) {
  new (place) std::ostringstream(std::ios_base::out);
}

DIFFKERN_HIDDEN void _ZNSt7__cxx1118basic_stringstreamIcSt11char_traitsIcESaIcEEC1Ev(void* place) {
  new (place) std::stringstream(std::ios_base::in | std::ios_base::out);
}

// GCC 11's allocators call std::__throw_bad_array_new_length when asked for more elements than memory has bytes.
[[noreturn]] DIFFKERN_HIDDEN void _ZSt28__throw_bad_array_new_lengthv() { throw std::bad_array_new_length(); }

}  // extern "C"
