// The kernels with AVX2, FMA and F16C. No header with inline functions of external linkage may be included
// here: the linker could pick this file's copy for code that runs on any CPU.
#define SAPWOOD_ISA_AVX2 1
#include "kernels.hpp"

namespace sapwood {
const Table &avx2_table() { return TABLE; }
}  // namespace sapwood
