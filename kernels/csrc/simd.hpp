// The vector type of the including translation unit, and what is built from its primitives.
#pragma once

#if defined(SAPWOOD_ISA_AVX512)
#include "simd_avx512.hpp"
#elif defined(SAPWOOD_ISA_AVX2)
#include "simd_avx2.hpp"
#else
#include "simd_portable.hpp"
#endif

#include <stdio.h>
#include <stdlib.h>

#include "pool.hpp"

namespace sapwood {
namespace {

// For what is needed only a tile later: past the first-level cache.
SAPWOOD_INLINE void prefetch_far(const void *p) { __builtin_prefetch(p, 0, 2); }

SAPWOOD_INLINE constexpr int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }
SAPWOOD_INLINE constexpr int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }
SAPWOOD_INLINE int64_t most(int64_t a, int64_t b) { return a > b ? a : b; }

// e ** x to about 2 units in the last place; 0 below the smallest normal result, NaN for NaN, and e ** 88
// above 88. Cephes' polynomial after x = n ln 2 + r.
SAPWOOD_INLINE Vec exp(Vec x) {
    const Vec lowest = set1(-87.33654f), magic = set1(12582912.0f);
    Vec y = min(set1(88.0f), max(lowest, x));
    Vec shifted = fma(y, set1(1.44269504088896341f), magic);
    Vec n = sub(shifted, magic);
    Vec r = fma(n, set1(-0.693359375f), y);
    r = fma(n, set1(2.12194440e-4f), r);
    Vec p = set1(1.9875691500e-4f);
    p = fma(p, r, set1(1.3981999507e-3f));
    p = fma(p, r, set1(8.3334519073e-3f));
    p = fma(p, r, set1(4.1665795894e-2f));
    p = fma(p, r, set1(1.6666665459e-1f));
    p = fma(p, r, set1(5.0000001201e-1f));
    p = add(fma(p, mul(r, r), r), set1(1.0f));
    return pick(gt(lowest, x), zero(), mul(p, power_of_two(shifted)));
}

// Scratch memory that only grows, one a thread and use; aligned to cache lines.
struct Scratch {
    void *memory = nullptr;
    size_t size = 0;

    template <class T>
    T *of(size_t count) {
        size_t bytes = (count * sizeof(T) + 127) / 64 * 64;
        if (bytes > size) {
            free(memory);
            memory = aligned_alloc(64, bytes);
            if (!memory) {
                fprintf(stderr, "sapwood kernels: out of memory for %zu bytes of scratch\n", bytes);
                abort();
            }
            size = bytes;
        }
        return (T *)memory;
    }
    ~Scratch() { free(memory); }
};

// Threads worth waking for so many elementary operations.
SAPWOOD_INLINE int threads_for(int64_t operations, int threads) { return operations < 32768 ? 1 : threads; }

}  // namespace
}  // namespace sapwood
