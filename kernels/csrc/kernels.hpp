// All kernels of one instruction set, in their table.
#pragma once

#include "forward.hpp"
#include "limits.hpp"
#include "sampling.hpp"

namespace sapwood {
namespace {

const Table TABLE = {linear,     embed,  pack,    pack_codes, rms_norm, gated_mul,
                     rope_store, attend, forward, sample,     logprobs, limit};

}  // namespace
}  // namespace sapwood
