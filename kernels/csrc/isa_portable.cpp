// The kernels with plain C++. No header with inline functions of external linkage may be included
// here: the linker could pick this file's copy for code that runs on any CPU.
#define SAPWOOD_ISA_PORTABLE 1
#include "kernels.hpp"

namespace sapwood {
const Table &portable_table() { return TABLE; }
}  // namespace sapwood
