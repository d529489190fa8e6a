// What this machine can do at most: the loops that a share of its limits is measured against.
#pragma once

#include "simd.hpp"

namespace sapwood {
namespace {

constexpr int64_t FETCH_AHEAD = 16 << 10;  // bytes: prefetchers of the hardware alone stop at page borders
constexpr int CHAINS = 12;                 // independent: enough for the latency of every unit

// Multiply-adds of CHAINS vectors, nothing else.
inline void multiply_floats(int64_t rounds) {
    Vec sums[CHAINS];
#pragma GCC unroll 16
    for (int i = 0; i < CHAINS; i++) sums[i] = zero();
    Vec x = set1(0.5f);
    pin(x);
    for (int64_t round = 0; round < rounds; round++)
#pragma GCC unroll 16
        for (int i = 0; i < CHAINS; i++) {
            sums[i] = fma(sums[i], x, x);
            pin(sums[i]);
        }
}

// Dot products of pairs of 16 bits onto CHAINS vectors, nothing else.
inline void multiply_pairs(int64_t rounds) {
    Ints sums[CHAINS];
#pragma GCC unroll 16
    for (int i = 0; i < CHAINS; i++) sums[i] = izero();
    Ints x = iset1(1);
    pin(x);
    for (int64_t round = 0; round < rounds; round++)
#pragma GCC unroll 16
        for (int i = 0; i < CHAINS; i++) {
            sums[i] = dot_pairs(sums[i], x, x);
            pin(sums[i]);
        }
}

// What a group of 32 inputs costs one vector of channels of a q4 weight, without reading anything: 16 dot
// products, then a conversion, a product and two multiply-adds of floats.
inline void multiply_groups(int64_t rounds) {
    Ints sums[CHAINS];
    Ints x = iset1(1);
    Vec scale = set1(0.5f);
    pin(x);
    pin(scale);
    for (int64_t round = 0; round < rounds; round++) {
#pragma GCC unroll 16
        for (int i = 0; i < CHAINS; i++) sums[i] = izero();
        for (int step = 0; step < 16; step++)
#pragma GCC unroll 16
            for (int i = 0; i < CHAINS; i++) {
                sums[i] = dot_pairs(sums[i], x, x);
                pin(sums[i]);
            }
#pragma GCC unroll 16
        for (int i = 0; i < CHAINS; i++) {
            pin(scale);
            Vec sum = fma(scale, scale, fma(to_floats(sums[i]), mul(scale, scale), scale));
            pin(sum);
        }
    }
}

inline void read_all(const char *from, int64_t bytes) {
    Ints sums[4] = {izero(), izero(), izero(), izero()};
    for (int64_t at = 0; at + 16 * LANES <= bytes; at += 16 * LANES) {
        for (int64_t line = 0; line < 16 * LANES; line += 64) prefetch_far(from + at + FETCH_AHEAD + line);
#pragma GCC unroll 4
        for (int i = 0; i < 4; i++) sums[i] = iadd(sums[i], iload(from + at + i * 4 * LANES));
    }
#pragma GCC unroll 4
    for (int i = 0; i < 4; i++) pin(sums[i]);
}

// Each of `threads` threads does its share of `work`: bytes of memory to read, or rounds of arithmetic.
double limit(const Limit &args, int threads) {
    const int64_t tasks = 8 * threads, each = args.work / tasks / 64 * 64;
    share(threads, tasks, 1, [&](int64_t task) {
        if (args.kind == LimitKind::read) read_all((const char *)args.memory + task * each, each);
        if (args.kind == LimitKind::floats) multiply_floats(each);
        if (args.kind == LimitKind::pairs) multiply_pairs(each);
        if (args.kind == LimitKind::groups) multiply_groups(each);
    });
    const double done = (double)(each * tasks);
    switch (args.kind) {
        case LimitKind::floats: return done * CHAINS * LANES * 2;
        case LimitKind::pairs: return done * CHAINS * LANES * 4;
        case LimitKind::groups: return done * CHAINS * LANES * 64;
        default: return done;
    }
}

}  // namespace
}  // namespace sapwood
