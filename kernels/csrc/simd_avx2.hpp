// 8 lanes: AVX2, FMA and F16C.
#pragma once

#include <immintrin.h>

#include "table.hpp"

namespace sapwood {
namespace {

#define SAPWOOD_INLINE static inline __attribute__((always_inline))
#define SAPWOOD_MEMBER inline __attribute__((always_inline))

constexpr int LANES = 8;
using Vec = __m256;
using Mask = __m256;

// Register tiles: MAX_ROWS rows of 1 panel; 2 panels up to ROWS_OF_2 rows, 4 up to ROWS_OF_4.
constexpr int MAX_ROWS = 6, ROWS_OF_2 = 3, ROWS_OF_4 = 1;
// Of quantised weights: TILE_PANELS panels and up to PACKED_ROWS rows of codes as they are packed, WIDE_ROWS
// of codes that were widened before.
constexpr int TILE_PANELS = 1, PACKED_ROWS = 4, WIDE_ROWS = 6;

SAPWOOD_INLINE __m256i first_lanes(int n) {
    return _mm256_cmpgt_epi32(_mm256_set1_epi32(n), _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7));
}
SAPWOOD_INLINE Mask first(int n) { return _mm256_castsi256_ps(first_lanes(n)); }
// Lane i where bit i is set.
SAPWOOD_INLINE Mask mask_of(uint32_t bits) {
    const __m256i lanes = _mm256_setr_epi32(1, 2, 4, 8, 16, 32, 64, 128);
    return _mm256_castsi256_ps(
        _mm256_cmpeq_epi32(_mm256_and_si256(_mm256_set1_epi32((int)bits), lanes), lanes));
}

// Keeps a value in its register, and the compiler from knowing it.
SAPWOOD_INLINE void pin(Vec &v) { asm volatile("" : "+x"(v)); }
SAPWOOD_INLINE Vec zero() { return _mm256_setzero_ps(); }
SAPWOOD_INLINE Vec set1(float x) { return _mm256_set1_ps(x); }
SAPWOOD_INLINE Vec load(const float *p) { return _mm256_loadu_ps(p); }
SAPWOOD_INLINE Vec load(const half *p) { return _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)p)); }
SAPWOOD_INLINE Vec load_part(const float *p, int n) { return _mm256_maskload_ps(p, first_lanes(n)); }
SAPWOOD_INLINE void store(float *p, Vec v) { _mm256_storeu_ps(p, v); }
SAPWOOD_INLINE void store(half *p, Vec v) {
    _mm_storeu_si128((__m128i *)p, _mm256_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
}
SAPWOOD_INLINE void store_part(float *p, Vec v, int n) { _mm256_maskstore_ps(p, first_lanes(n), v); }

SAPWOOD_INLINE Vec fma(Vec a, Vec b, Vec c) { return _mm256_fmadd_ps(a, b, c); }
SAPWOOD_INLINE Vec add(Vec a, Vec b) { return _mm256_add_ps(a, b); }
SAPWOOD_INLINE Vec sub(Vec a, Vec b) { return _mm256_sub_ps(a, b); }
SAPWOOD_INLINE Vec mul(Vec a, Vec b) { return _mm256_mul_ps(a, b); }
SAPWOOD_INLINE Vec div(Vec a, Vec b) { return _mm256_div_ps(a, b); }
// Of max and min: b where either is NaN.
SAPWOOD_INLINE Vec max(Vec a, Vec b) { return _mm256_max_ps(a, b); }
SAPWOOD_INLINE Vec min(Vec a, Vec b) { return _mm256_min_ps(a, b); }

SAPWOOD_INLINE Mask gt(Vec a, Vec b) { return _mm256_cmp_ps(a, b, _CMP_GT_OQ); }
SAPWOOD_INLINE Mask ge(Vec a, Vec b) { return _mm256_cmp_ps(a, b, _CMP_GE_OQ); }
SAPWOOD_INLINE Mask eq(Vec a, Vec b) { return _mm256_cmp_ps(a, b, _CMP_EQ_OQ); }
SAPWOOD_INLINE unsigned bits(Mask m) { return (unsigned)_mm256_movemask_ps(m); }
SAPWOOD_INLINE Vec keep(Mask m, Vec v) { return _mm256_and_ps(m, v); }
SAPWOOD_INLINE Vec pick(Mask m, Vec yes, Vec no) { return _mm256_blendv_ps(no, yes, m); }

SAPWOOD_INLINE float hsum(Vec v) {
    __m128 q = _mm_add_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
    q = _mm_add_ps(q, _mm_movehl_ps(q, q));
    return _mm_cvtss_f32(_mm_add_ss(q, _mm_movehdup_ps(q)));
}
SAPWOOD_INLINE float hmax(Vec v) {
    __m128 q = _mm_max_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
    q = _mm_max_ps(q, _mm_movehl_ps(q, q));
    return _mm_cvtss_f32(_mm_max_ss(q, _mm_movehdup_ps(q)));
}

// 2 ** n, for a float whose low mantissa bits hold the integer n.
SAPWOOD_INLINE Vec power_of_two(Vec shifted) {
    __m256i n = _mm256_add_epi32(_mm256_castps_si256(shifted), _mm256_set1_epi32(127));
    return _mm256_castsi256_ps(_mm256_slli_epi32(n, 23));
}

// Integers, as many as a Vec has lanes; or twice as many of 16 bits, in pairs.
using Ints = __m256i;

SAPWOOD_INLINE void pin(Ints &a) { asm volatile("" : "+x"(a)); }
SAPWOOD_INLINE Ints izero() { return _mm256_setzero_si256(); }
SAPWOOD_INLINE Ints iload(const void *p) { return _mm256_loadu_si256((const __m256i *)p); }
SAPWOOD_INLINE void istore(void *p, Ints a) { _mm256_storeu_si256((__m256i *)p, a); }
SAPWOOD_INLINE Ints iset1(int32_t x) { return _mm256_set1_epi32(x); }
SAPWOOD_INLINE Ints iand(Ints a, Ints b) { return _mm256_and_si256(a, b); }
template <int BITS>
SAPWOOD_INLINE Ints shift_right(Ints a) {
    return _mm256_srli_epi32(a, BITS);
}
// Each lane's even, or odd, bytes as a pair.
SAPWOOD_INLINE Ints even_bytes(Ints a) { return _mm256_srai_epi16(_mm256_slli_epi16(a, 8), 8); }
SAPWOOD_INLINE Ints odd_bytes(Ints a) { return _mm256_srai_epi16(a, 8); }
// sum + a.first * b.first + a.second * b.second, lane by lane. As intrinsics, GCC 12 spills the sums.
SAPWOOD_INLINE Ints dot_pairs(Ints sum, Ints a, Ints b) {
    Ints products;
    asm("vpmaddwd %2, %3, %1\n\tvpaddd %1, %0, %0" : "+x"(sum), "=&x"(products) : "x"(a), "x"(b));
    return sum;
}
SAPWOOD_INLINE Vec to_floats(Ints a) { return _mm256_cvtepi32_ps(a); }
SAPWOOD_INLINE Ints iadd(Ints a, Ints b) { return _mm256_add_epi32(a, b); }
// Rounded to nearest, ties to even.
SAPWOOD_INLINE Ints round_ints(Vec v) { return _mm256_cvtps_epi32(v); }
// What fits in 16 bits, as LANES of them.
SAPWOOD_INLINE void store16(int16_t *p, Ints a) {
    const __m128i packed = _mm_packs_epi32(_mm256_castsi256_si128(a), _mm256_extracti128_si256(a, 1));
    _mm_storeu_si128((__m128i *)p, packed);
}
SAPWOOD_INLINE int32_t isum(Ints a) {
    __m128i q = _mm_add_epi32(_mm256_castsi256_si128(a), _mm256_extracti128_si256(a, 1));
    q = _mm_add_epi32(q, _mm_shuffle_epi32(q, 0x4e));
    return _mm_cvtsi128_si32(_mm_add_epi32(q, _mm_shuffle_epi32(q, 0xb1)));
}

SAPWOOD_INLINE float to_float(half h) { return _cvtsh_ss(h); }
SAPWOOD_INLINE half to_half(float x) { return _cvtss_sh(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
SAPWOOD_INLINE void assign(float &to, float x) { to = x; }
SAPWOOD_INLINE void assign(half &to, float x) { to = to_half(x); }
SAPWOOD_INLINE float value(float x) { return x; }
SAPWOOD_INLINE float value(half x) { return to_float(x); }

}  // namespace
}  // namespace sapwood

#include "transpose_avx.hpp"
