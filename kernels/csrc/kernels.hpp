// All kernels of one instruction set, in their table.
#pragma once

#include "attention.hpp"
#include "elementwise.hpp"
#include "gemm.hpp"
#include "pack.hpp"
#include "sampling.hpp"

namespace sapwood {
namespace {

const Table TABLE = {linear,        embed,      pack,   dequantise, rms_norm, silu_mul,
                     gelu_tanh_mul, rope_store, attend, adjust,     sample,   logprobs};

}  // namespace
}  // namespace sapwood
