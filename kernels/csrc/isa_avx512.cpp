// The kernels with AVX-512. No header with inline functions of external linkage may be included
// here: the linker could pick this file's copy for code that runs on any CPU.
#define SAPWOOD_ISA_AVX512 1
#include "kernels.hpp"

namespace sapwood {
const Table &avx512_table() { return TABLE; }
}  // namespace sapwood
