// Norms, the gated activation, and rotary positions with the write to the KV pool.
#pragma once

#include <string.h>

#include "simd.hpp"

namespace sapwood {
namespace {

SAPWOOD_INLINE Vec load_upto(const float *p, int64_t n) {
    return n >= LANES ? load(p) : load_part(p, (int)n);
}
SAPWOOD_INLINE void store_upto(float *p, Vec v, int64_t n) {
    if (n >= LANES)
        store(p, v);
    else
        store_part(p, v, (int)n);
}

inline void norm_one(const float *x, const float *weight, float eps, int64_t size, float *out) {
    Vec squares = zero();
    for (int64_t i = 0; i < size; i += LANES) {
        Vec v = load_upto(x + i, size - i);
        squares = fma(v, v, squares);
    }
    const Vec factor = set1(1.0f / __builtin_sqrtf(hsum(squares) / (float)size + eps));
    for (int64_t i = 0; i < size; i += LANES) {
        Vec v = mul(load_upto(x + i, size - i), factor);
        store_upto(out + i, mul(v, load_upto(weight + i, size - i)), size - i);
    }
}

void rms_norm(const Norm &args, int threads) {
    const int64_t each = args.heads, total = args.m * each;
    const int useful = threads_for(total * args.size, threads);
    share(useful, total, fair_run(total, useful), [&](int64_t i) {
        const int64_t row = i / each, offset = i % each * args.size;
        norm_one(args.x + row * args.x_stride + offset, args.weight, args.eps, args.size,
                 args.out + row * args.out_stride + offset);
    });
}

// x / (1 + e ** -y)
SAPWOOD_INLINE Vec times_sigmoid(Vec x, Vec minus_y) { return div(x, add(set1(1.0f), exp(minus_y))); }

SAPWOOD_INLINE Vec silu(Vec x) { return times_sigmoid(x, sub(zero(), x)); }

// x (1 + tanh(y / 2)) / 2 is x sigmoid(y), which does not cancel where tanh is near -1; y is
// 2 sqrt(2 / pi) (x + 0.044715 x ** 3).
SAPWOOD_INLINE Vec gelu_tanh(Vec x) {
    const Vec linear = set1(-1.5957691216057308f), cubic = set1(-0.07135481627f);
    return times_sigmoid(x, mul(x, fma(mul(x, x), cubic, linear)));
}

// A row of gates, then as many ups, into activation(gate) * up.
inline void gate_one(Activation activation, const float *gate, int64_t size, float *out) {
    for (int64_t i = 0; i < size; i += LANES) {
        const Vec g = load_upto(gate + i, size - i), up = load_upto(gate + size + i, size - i);
        store_upto(out + i, mul(activation == Activation::silu ? silu(g) : gelu_tanh(g), up), size - i);
    }
}

void gated_mul(const Gated &args, int threads) {
    const int useful = threads_for(args.m * args.size * 4, threads);
    share(useful, args.m, fair_run(args.m, useful), [&](int64_t row) {
        gate_one(args.activation, args.gate_up + row * 2 * args.size, args.size, args.out + row * args.size);
    });
}

// A multiply, a multiply and an add, unfused: the same bits as Hugging Face's formula.
inline void rotate(float *x, const float *cosines, const float *sines, int64_t half_size) {
    for (int64_t i = 0; i < half_size; i += LANES) {
        const int64_t left = half_size - i;
        Vec low = load_upto(x + i, left), high = load_upto(x + half_size + i, left);
        Vec c = load_upto(cosines + i, left), s = load_upto(sines + i, left);
        store_upto(x + i, sub(mul(low, c), mul(high, s)), left);
        store_upto(x + half_size + i, add(mul(high, c), mul(low, s)), left);
    }
}

inline void copy_to_pool(const float *from, int64_t n, float *to) {
    memcpy(to, from, (size_t)n * sizeof(float));
}
inline void copy_to_pool(const float *from, int64_t n, half *to) {
    int64_t i = 0;
    for (; i + LANES <= n; i += LANES) store(to + i, load(from + i));
    for (; i < n; i++) to[i] = to_half(from[i]);
}

// Turns q and k of token i and stores its K and V.
inline void rope_store_one(const Rope &args, int64_t i) {
    const int64_t width = (args.hq + 2 * args.hkv) * args.d, kv = args.hkv * args.d;
    float *row = args.qkv + i * width;
    const float *cosines = args.table + args.positions[i] * args.rotary;
    for (int64_t head = 0; head < args.hq + args.hkv; head++)
        rotate(row + head * args.d, cosines, cosines + args.rotary / 2, args.rotary / 2);
    const float *k = row + args.hq * args.d;
    const int64_t slot = args.slots[i] * kv;
    if (args.dtype == Dtype::f16) {
        copy_to_pool(k, kv, (half *)args.k_pool + slot);
        copy_to_pool(k + kv, kv, (half *)args.v_pool + slot);
    } else {
        copy_to_pool(k, kv, (float *)args.k_pool + slot);
        copy_to_pool(k + kv, kv, (float *)args.v_pool + slot);
    }
}

void rope_store(const Rope &args, int threads) {
    const int useful = threads_for(args.m * (args.hq + 2 * args.hkv) * args.d * 2, threads);
    share(useful, args.m, fair_run(args.m, useful), [&](int64_t i) { rope_store_one(args, i); });
}

}  // namespace
}  // namespace sapwood
