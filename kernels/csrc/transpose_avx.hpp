// Transposing 8 x 8 floats, for both AVX2 and AVX-512.
#pragma once

#include <immintrin.h>

#include "table.hpp"

namespace sapwood {
namespace {

SAPWOOD_INLINE __m256 load8(const float *p) { return _mm256_loadu_ps(p); }
SAPWOOD_INLINE __m256 load8(const half *p) { return _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)p)); }
SAPWOOD_INLINE void store8(float *p, __m256 v) { _mm256_storeu_ps(p, v); }
SAPWOOD_INLINE void store8(half *p, __m256 v) {
    _mm_storeu_si128((__m128i *)p, _mm256_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
}

// to[i * stride + j] = from[j][i] for i, j < 8.
template <class From, class To>
SAPWOOD_INLINE void transpose8(const From *const from[8], To *to, int stride) {
    __m256 r[8], t[8], u[8];
#pragma GCC unroll 8
    for (int j = 0; j < 8; j++) r[j] = load8(from[j]);
#pragma GCC unroll 4
    for (int j = 0; j < 8; j += 2) {
        t[j] = _mm256_unpacklo_ps(r[j], r[j + 1]);
        t[j + 1] = _mm256_unpackhi_ps(r[j], r[j + 1]);
    }
#pragma GCC unroll 2
    for (int j = 0; j < 8; j += 4) {
        u[j] = _mm256_shuffle_ps(t[j], t[j + 2], 0x44);
        u[j + 1] = _mm256_shuffle_ps(t[j], t[j + 2], 0xee);
        u[j + 2] = _mm256_shuffle_ps(t[j + 1], t[j + 3], 0x44);
        u[j + 3] = _mm256_shuffle_ps(t[j + 1], t[j + 3], 0xee);
    }
#pragma GCC unroll 4
    for (int j = 0; j < 4; j++) {
        store8(to + (int64_t)j * stride, _mm256_permute2f128_ps(u[j], u[j + 4], 0x20));
        store8(to + (int64_t)(j + 4) * stride, _mm256_permute2f128_ps(u[j], u[j + 4], 0x31));
    }
}

}  // namespace
}  // namespace sapwood
