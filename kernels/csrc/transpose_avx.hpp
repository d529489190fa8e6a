// Transposing 8 x 8 floats, for both AVX2 and AVX-512.
#pragma once

#include <immintrin.h>

#include "table.hpp"

namespace sapwood {
namespace {

// Four values from each of two places, as one vector: halves of the register are filled by loads, which
// leaves the port that shuffles free for the transposition itself.
SAPWOOD_INLINE __m256 load_pair(const float *low, const float *high) {
    return _mm256_insertf128_ps(_mm256_castps128_ps256(_mm_loadu_ps(low)), _mm_loadu_ps(high), 1);
}
SAPWOOD_INLINE void store8(float *p, __m256 v) { _mm256_storeu_ps(p, v); }
SAPWOOD_INLINE void store8(half *p, __m256 v) {
    _mm_storeu_si128((__m128i *)p, _mm256_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
}

// to[i * stride + j] = from[j][i] for i, j < 8.
template <class To>
SAPWOOD_INLINE void transpose8(const float *const from[8], To *to, int stride) {
#pragma GCC unroll 2
    for (int i = 0; i < 8; i += 4) {
        __m256 a = load_pair(from[0] + i, from[4] + i), b = load_pair(from[1] + i, from[5] + i);
        __m256 c = load_pair(from[2] + i, from[6] + i), d = load_pair(from[3] + i, from[7] + i);
        __m256 ab = _mm256_unpacklo_ps(a, b), cd = _mm256_unpacklo_ps(c, d);
        store8(to + (int64_t)i * stride, _mm256_shuffle_ps(ab, cd, 0x44));
        store8(to + (int64_t)(i + 1) * stride, _mm256_shuffle_ps(ab, cd, 0xee));
        ab = _mm256_unpackhi_ps(a, b), cd = _mm256_unpackhi_ps(c, d);
        store8(to + (int64_t)(i + 2) * stride, _mm256_shuffle_ps(ab, cd, 0x44));
        store8(to + (int64_t)(i + 3) * stride, _mm256_shuffle_ps(ab, cd, 0xee));
    }
}

// to[i * stride + j] = from[j][i] for i < 16, j < 8.
template <class To>
SAPWOOD_INLINE void transpose8x16(const float *const from[8], To *to, int stride) {
    const float *later[8];
    for (int j = 0; j < 8; j++) later[j] = from[j] + 8;
    transpose8(from, to, stride);
    transpose8(later, to + 8 * (int64_t)stride, stride);
}
SAPWOOD_INLINE void store8(half *p, __m128i halves) { _mm_storeu_si128((__m128i *)p, halves); }
SAPWOOD_INLINE void store8(float *p, __m128i halves) { _mm256_storeu_ps(p, _mm256_cvtph_ps(halves)); }
// Halves are transposed as they are, and converted afterwards if at all.
template <class To>
SAPWOOD_INLINE void transpose8x16(const half *const from[8], To *to, int stride) {
    __m256i a[8], b[8];
#pragma GCC unroll 8
    for (int j = 0; j < 8; j++) a[j] = _mm256_loadu_si256((const __m256i *)from[j]);
#pragma GCC unroll 4
    for (int j = 0; j < 4; j++) {
        b[2 * j] = _mm256_unpacklo_epi16(a[j], a[j + 4]);
        b[2 * j + 1] = _mm256_unpackhi_epi16(a[j], a[j + 4]);
    }
#pragma GCC unroll 4
    for (int j = 0; j < 4; j++) {
        a[2 * j] = _mm256_unpacklo_epi16(b[j], b[j + 4]);
        a[2 * j + 1] = _mm256_unpackhi_epi16(b[j], b[j + 4]);
    }
#pragma GCC unroll 4
    for (int j = 0; j < 4; j++) {
        const __m256i even = _mm256_unpacklo_epi16(a[j], a[j + 4]);
        const __m256i odd = _mm256_unpackhi_epi16(a[j], a[j + 4]);
        To *at = to + 2 * j * (int64_t)stride;
        store8(at, _mm256_castsi256_si128(even));
        store8(at + stride, _mm256_castsi256_si128(odd));
        store8(at + 8 * (int64_t)stride, _mm256_extracti128_si256(even, 1));
        store8(at + 9 * (int64_t)stride, _mm256_extracti128_si256(odd, 1));
    }
}

}  // namespace
}  // namespace sapwood
