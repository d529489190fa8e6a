// 16 lanes: AVX-512 F, BW, VL, DQ and VNNI.
#pragma once

#include <immintrin.h>

#include "table.hpp"

// Whether this compiler can assemble AMX: those that can have this header; Clang must be told to, besides.
#if defined(__AMX_TILE__) || (__has_include(<amxtileintrin.h>) && !defined(__clang__))
#define SAPWOOD_TILES 1
#endif

namespace sapwood {
namespace {

#define SAPWOOD_INLINE static inline __attribute__((always_inline))
#define SAPWOOD_MEMBER inline __attribute__((always_inline))

constexpr int LANES = 16;
using Vec = __m512;
using Mask = __mmask16;

// Register tiles: MAX_ROWS rows of 1 panel; 2 panels up to ROWS_OF_2 rows, 4 up to ROWS_OF_4.
constexpr int MAX_ROWS = 14, ROWS_OF_2 = 14, ROWS_OF_4 = 6;
// Of quantised weights: TILE_PANELS panels and up to PACKED_ROWS rows of codes as they are packed, WIDE_ROWS
// of codes that were widened before.
constexpr int TILE_PANELS = 2, PACKED_ROWS = 12, WIDE_ROWS = 12;

SAPWOOD_INLINE Mask first(int n) { return (Mask)(n >= 16 ? 0xffffu : (1u << n) - 1); }
// Lane i where bit i is set.
SAPWOOD_INLINE Mask mask_of(uint32_t bits) { return (Mask)bits; }

// Keeps a value in its register, and the compiler from knowing it.
SAPWOOD_INLINE void pin(Vec &v) { asm volatile("" : "+v"(v)); }
SAPWOOD_INLINE Vec zero() { return _mm512_setzero_ps(); }
SAPWOOD_INLINE Vec set1(float x) { return _mm512_set1_ps(x); }
SAPWOOD_INLINE Vec load(const float *p) { return _mm512_loadu_ps(p); }
SAPWOOD_INLINE Vec load(const half *p) { return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)p)); }
SAPWOOD_INLINE Vec load_part(const float *p, int n) { return _mm512_maskz_loadu_ps(first(n), p); }
SAPWOOD_INLINE void store(float *p, Vec v) { _mm512_storeu_ps(p, v); }
SAPWOOD_INLINE void store(half *p, Vec v) {
    _mm256_storeu_si256((__m256i *)p, _mm512_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
}
SAPWOOD_INLINE void store_part(float *p, Vec v, int n) { _mm512_mask_storeu_ps(p, first(n), v); }

SAPWOOD_INLINE Vec fma(Vec a, Vec b, Vec c) { return _mm512_fmadd_ps(a, b, c); }
SAPWOOD_INLINE Vec add(Vec a, Vec b) { return _mm512_add_ps(a, b); }
SAPWOOD_INLINE Vec sub(Vec a, Vec b) { return _mm512_sub_ps(a, b); }
SAPWOOD_INLINE Vec mul(Vec a, Vec b) { return _mm512_mul_ps(a, b); }
SAPWOOD_INLINE Vec div(Vec a, Vec b) { return _mm512_div_ps(a, b); }
// Of max and min: b where either is NaN.
SAPWOOD_INLINE Vec max(Vec a, Vec b) { return _mm512_max_ps(a, b); }
SAPWOOD_INLINE Vec min(Vec a, Vec b) { return _mm512_min_ps(a, b); }

SAPWOOD_INLINE Mask gt(Vec a, Vec b) { return _mm512_cmp_ps_mask(a, b, _CMP_GT_OQ); }
SAPWOOD_INLINE Mask ge(Vec a, Vec b) { return _mm512_cmp_ps_mask(a, b, _CMP_GE_OQ); }
SAPWOOD_INLINE Mask eq(Vec a, Vec b) { return _mm512_cmp_ps_mask(a, b, _CMP_EQ_OQ); }
SAPWOOD_INLINE unsigned bits(Mask m) { return m; }
SAPWOOD_INLINE Vec keep(Mask m, Vec v) { return _mm512_maskz_mov_ps(m, v); }
SAPWOOD_INLINE Vec pick(Mask m, Vec yes, Vec no) { return _mm512_mask_blend_ps(m, no, yes); }

SAPWOOD_INLINE float hsum(Vec v) {
    __m256 h = _mm256_add_ps(_mm512_castps512_ps256(v), _mm512_extractf32x8_ps(v, 1));
    __m128 q = _mm_add_ps(_mm256_castps256_ps128(h), _mm256_extractf128_ps(h, 1));
    q = _mm_add_ps(q, _mm_movehl_ps(q, q));
    return _mm_cvtss_f32(_mm_add_ss(q, _mm_movehdup_ps(q)));
}
SAPWOOD_INLINE float hmax(Vec v) {
    __m256 h = _mm256_max_ps(_mm512_castps512_ps256(v), _mm512_extractf32x8_ps(v, 1));
    __m128 q = _mm_max_ps(_mm256_castps256_ps128(h), _mm256_extractf128_ps(h, 1));
    q = _mm_max_ps(q, _mm_movehl_ps(q, q));
    return _mm_cvtss_f32(_mm_max_ss(q, _mm_movehdup_ps(q)));
}

// 2 ** n, for a float whose low mantissa bits hold the integer n.
SAPWOOD_INLINE Vec power_of_two(Vec shifted) {
    __m512i n = _mm512_add_epi32(_mm512_castps_si512(shifted), _mm512_set1_epi32(127));
    return _mm512_castsi512_ps(_mm512_slli_epi32(n, 23));
}

// Integers, as many as a Vec has lanes; or twice as many of 16 bits, in pairs.
using Ints = __m512i;

SAPWOOD_INLINE void pin(Ints &a) { asm volatile("" : "+v"(a)); }
SAPWOOD_INLINE Ints izero() { return _mm512_setzero_si512(); }
SAPWOOD_INLINE Ints iload(const void *p) { return _mm512_loadu_si512(p); }
SAPWOOD_INLINE void istore(void *p, Ints a) { _mm512_storeu_si512(p, a); }
SAPWOOD_INLINE Ints iset1(int32_t x) { return _mm512_set1_epi32(x); }
SAPWOOD_INLINE Ints iand(Ints a, Ints b) { return _mm512_and_si512(a, b); }
template <int BITS>
SAPWOOD_INLINE Ints shift_right(Ints a) {
    return _mm512_srli_epi32(a, BITS);
}
// Each lane's even, or odd, bytes as a pair.
SAPWOOD_INLINE Ints even_bytes(Ints a) { return _mm512_srai_epi16(_mm512_slli_epi16(a, 8), 8); }
SAPWOOD_INLINE Ints odd_bytes(Ints a) { return _mm512_srai_epi16(a, 8); }
// sum + a.first * b.first + a.second * b.second, lane by lane. As the intrinsic, GCC 12 spills the sums.
SAPWOOD_INLINE Ints dot_pairs(Ints sum, Ints a, Ints b) {
    asm("vpdpwssd %2, %1, %0" : "+v"(sum) : "v"(a), "v"(b));
    return sum;
}
SAPWOOD_INLINE Vec to_floats(Ints a) { return _mm512_cvtepi32_ps(a); }
SAPWOOD_INLINE Ints iadd(Ints a, Ints b) { return _mm512_add_epi32(a, b); }
// Rounded to nearest, ties to even.
SAPWOOD_INLINE Ints round_ints(Vec v) { return _mm512_cvtps_epi32(v); }
// What fits in 16 bits, as LANES of them.
SAPWOOD_INLINE void store16(int16_t *p, Ints a) {
    _mm256_storeu_si256((__m256i *)p, _mm512_cvtepi32_epi16(a));
}
SAPWOOD_INLINE int32_t isum(Ints a) { return _mm512_reduce_add_epi32(a); }

SAPWOOD_INLINE float to_float(half h) { return _cvtsh_ss(h); }
SAPWOOD_INLINE half to_half(float x) { return _cvtss_sh(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
SAPWOOD_INLINE void assign(float &to, float x) { to = x; }
SAPWOOD_INLINE void assign(half &to, float x) { to = to_half(x); }
SAPWOOD_INLINE float value(float x) { return x; }
SAPWOOD_INLINE float value(half x) { return to_float(x); }

}  // namespace
}  // namespace sapwood

#include "transpose_avx.hpp"
