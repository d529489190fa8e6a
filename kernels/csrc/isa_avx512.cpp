// The kernels with AVX-512, and with AMX tiles where they are wanted. No header with inline functions of
// external linkage may be included here: the linker could pick this file's copy for code that runs on any
// CPU.
#define SAPWOOD_ISA_AVX512 1
#include "kernels.hpp"
#include "qgemm_amx.hpp"

namespace sapwood {
const Table &avx512_table() { return TABLE; }
#if SAPWOOD_TILES
bool built_with_tiles() { return true; }
void use_tiles(bool yes) { tiles_wanted = yes; }
#else
bool built_with_tiles() { return false; }
void use_tiles(bool) {}
#endif
}  // namespace sapwood
