// 8 lanes of plain C++: a multiply and an add where the others fuse them, one scalar at a time otherwise.
// Compilers turn the loops into whatever the target has.
#pragma once

#include <string.h>

#include "table.hpp"

namespace sapwood {
namespace {

#define SAPWOOD_INLINE static inline __attribute__((always_inline))
#define SAPWOOD_MEMBER inline __attribute__((always_inline))

constexpr int LANES = 8;
struct Vec {
    float lane[LANES];
};
using Mask = uint32_t;

// Register tiles: MAX_ROWS rows of 1 panel; 2 panels up to ROWS_OF_2 rows, 4 up to ROWS_OF_4.
constexpr int MAX_ROWS = 2, ROWS_OF_2 = 1, ROWS_OF_4 = 0;
// Of quantised weights: TILE_PANELS panels and up to PACKED_ROWS rows of codes as they are packed, WIDE_ROWS
// of codes that were widened before.
constexpr int TILE_PANELS = 1, PACKED_ROWS = 1, WIDE_ROWS = 2;

SAPWOOD_INLINE uint32_t to_bits(float x) {
    uint32_t b;
    memcpy(&b, &x, 4);
    return b;
}
SAPWOOD_INLINE float from_bits(uint32_t b) {
    float x;
    memcpy(&x, &b, 4);
    return x;
}

// Without branches, so that it vectorises: the half's bits, read as a float, are the value times 2 ** -112.
SAPWOOD_INLINE float to_float(half h) {
    const uint32_t magnitude = (uint32_t)(h & 0x7fff) << 13,
                   special = (h & 0x7c00) == 0x7c00 ? 0x7f800000 : 0;
    return from_bits(to_bits(from_bits(magnitude) * 0x1p112f) | special | (uint32_t)(h & 0x8000) << 16);
}
// Rounds to nearest, ties to even.
SAPWOOD_INLINE half to_half(float x) {
    uint32_t b = to_bits(x), sign = (b >> 16) & 0x8000, magnitude = b & 0x7fffffff;
    if (magnitude > 0x7f800000) return (half)(sign | 0x7e00 | ((magnitude >> 13) & 0x3ff));
    if (magnitude >= 0x477ff000) return (half)(sign | 0x7c00);
    if (magnitude < 0x38800000) {
        // Adding 0.5 leaves the half's subnormal bits, rounded by the hardware, at the end of the mantissa.
        return (half)(sign | (to_bits(from_bits(magnitude) + 0.5f) - 0x3f000000));
    }
    return (half)(sign | ((magnitude - 0x38000000 + 0xfff + ((magnitude >> 13) & 1)) >> 13));
}

#define SAPWOOD_LANES(expression)                             \
    Vec r;                                                    \
    for (int i = 0; i < LANES; i++) r.lane[i] = (expression); \
    return r
#define SAPWOOD_MASK(condition)                                  \
    Mask r = 0;                                                  \
    for (int i = 0; i < LANES; i++) r |= (Mask)(condition) << i; \
    return r

SAPWOOD_INLINE Mask first(int n) { return n >= LANES ? 0xffu : (1u << n) - 1; }
// Lane i where bit i is set.
SAPWOOD_INLINE Mask mask_of(uint32_t bits) { return bits & 0xffu; }

// Keeps a value in its register, and the compiler from knowing it.
SAPWOOD_INLINE void pin(Vec &v) { asm volatile("" : "+m"(v)); }
SAPWOOD_INLINE Vec zero() { SAPWOOD_LANES(0.0f); }
SAPWOOD_INLINE Vec set1(float x) { SAPWOOD_LANES(x); }
SAPWOOD_INLINE Vec load(const float *p) { SAPWOOD_LANES(p[i]); }
SAPWOOD_INLINE Vec load(const half *p) { SAPWOOD_LANES(to_float(p[i])); }
SAPWOOD_INLINE Vec load_part(const float *p, int n) { SAPWOOD_LANES(i < n ? p[i] : 0.0f); }
SAPWOOD_INLINE void store(float *p, Vec v) { memcpy(p, v.lane, sizeof v.lane); }
SAPWOOD_INLINE void store(half *p, Vec v) {
    for (int i = 0; i < LANES; i++) p[i] = to_half(v.lane[i]);
}
SAPWOOD_INLINE void store_part(float *p, Vec v, int n) {
    for (int i = 0; i < n && i < LANES; i++) p[i] = v.lane[i];
}

SAPWOOD_INLINE Vec fma(Vec a, Vec b, Vec c) { SAPWOOD_LANES(a.lane[i] * b.lane[i] + c.lane[i]); }
SAPWOOD_INLINE Vec add(Vec a, Vec b) { SAPWOOD_LANES(a.lane[i] + b.lane[i]); }
SAPWOOD_INLINE Vec sub(Vec a, Vec b) { SAPWOOD_LANES(a.lane[i] - b.lane[i]); }
SAPWOOD_INLINE Vec mul(Vec a, Vec b) { SAPWOOD_LANES(a.lane[i] * b.lane[i]); }
SAPWOOD_INLINE Vec div(Vec a, Vec b) { SAPWOOD_LANES(a.lane[i] / b.lane[i]); }
// Of max and min: b where either is NaN.
SAPWOOD_INLINE Vec max(Vec a, Vec b) { SAPWOOD_LANES(a.lane[i] > b.lane[i] ? a.lane[i] : b.lane[i]); }
SAPWOOD_INLINE Vec min(Vec a, Vec b) { SAPWOOD_LANES(a.lane[i] < b.lane[i] ? a.lane[i] : b.lane[i]); }

SAPWOOD_INLINE Mask gt(Vec a, Vec b) { SAPWOOD_MASK(a.lane[i] > b.lane[i]); }
SAPWOOD_INLINE Mask ge(Vec a, Vec b) { SAPWOOD_MASK(a.lane[i] >= b.lane[i]); }
SAPWOOD_INLINE Mask eq(Vec a, Vec b) { SAPWOOD_MASK(a.lane[i] == b.lane[i]); }
SAPWOOD_INLINE unsigned bits(Mask m) { return m; }
SAPWOOD_INLINE Vec keep(Mask m, Vec v) { SAPWOOD_LANES((m >> i) & 1 ? v.lane[i] : 0.0f); }
SAPWOOD_INLINE Vec pick(Mask m, Vec yes, Vec no) { SAPWOOD_LANES((m >> i) & 1 ? yes.lane[i] : no.lane[i]); }

SAPWOOD_INLINE float hsum(Vec v) {
    const float *x = v.lane;
    return ((x[0] + x[4]) + (x[2] + x[6])) + ((x[1] + x[5]) + (x[3] + x[7]));
}
SAPWOOD_INLINE float hmax(Vec v) {
    float r = v.lane[0];
    for (int i = 1; i < LANES; i++) r = v.lane[i] > r ? v.lane[i] : r;
    return r;
}

// 2 ** n, for a float whose low mantissa bits hold the integer n.
SAPWOOD_INLINE Vec power_of_two(Vec shifted) {
    SAPWOOD_LANES(from_bits((to_bits(shifted.lane[i]) + 127) << 23));
}

// Integers, as many as a Vec has lanes; or twice as many of 16 bits, in pairs.
struct Ints {
    int32_t lane[LANES];
};
#define SAPWOOD_INTS(expression)                              \
    Ints r;                                                   \
    for (int i = 0; i < LANES; i++) r.lane[i] = (expression); \
    return r

SAPWOOD_INLINE void pin(Ints &a) { asm volatile("" : "+m"(a)); }
SAPWOOD_INLINE Ints izero() { SAPWOOD_INTS(0); }
SAPWOOD_INLINE Ints iload(const void *p) {
    Ints r;
    memcpy(r.lane, p, sizeof r.lane);
    return r;
}
SAPWOOD_INLINE void istore(void *p, Ints a) { memcpy(p, a.lane, sizeof a.lane); }
SAPWOOD_INLINE Ints iset1(int32_t x) { SAPWOOD_INTS(x); }
SAPWOOD_INLINE Ints iand(Ints a, Ints b) { SAPWOOD_INTS(a.lane[i] & b.lane[i]); }
template <int BITS>
SAPWOOD_INLINE Ints shift_right(Ints a) {
    SAPWOOD_INTS((int32_t)((uint32_t)a.lane[i] >> BITS));
}
SAPWOOD_INLINE int32_t as_pair(int32_t low, int32_t high) {
    return (int32_t)((uint32_t)(low & 0xffff) | (uint32_t)high << 16);
}
// Each lane's even, or odd, bytes as a pair.
SAPWOOD_INLINE Ints even_bytes(Ints a) {
    SAPWOOD_INTS(as_pair((int8_t)a.lane[i], (int8_t)(a.lane[i] >> 16)));
}
SAPWOOD_INLINE Ints odd_bytes(Ints a) {
    SAPWOOD_INTS(as_pair((int8_t)(a.lane[i] >> 8), (int8_t)(a.lane[i] >> 24)));
}
// sum + a.first * b.first + a.second * b.second, lane by lane.
SAPWOOD_INLINE Ints dot_pairs(Ints sum, Ints a, Ints b) {
    SAPWOOD_INTS(sum.lane[i] + (int16_t)a.lane[i] * (int16_t)b.lane[i] +
                 (a.lane[i] >> 16) * (b.lane[i] >> 16));
}
SAPWOOD_INLINE Vec to_floats(Ints a) { SAPWOOD_LANES((float)a.lane[i]); }
SAPWOOD_INLINE Ints iadd(Ints a, Ints b) { SAPWOOD_INTS(a.lane[i] + b.lane[i]); }
// Rounded to nearest, ties to even; for what fits in 22 bits.
SAPWOOD_INLINE Ints round_ints(Vec v) { SAPWOOD_INTS((int32_t)(v.lane[i] + 12582912.0f - 12582912.0f)); }
// What fits in 16 bits, as LANES of them.
SAPWOOD_INLINE void store16(int16_t *p, Ints a) {
    for (int i = 0; i < LANES; i++) p[i] = (int16_t)a.lane[i];
}
SAPWOOD_INLINE int32_t isum(Ints a) {
    int32_t sum = 0;
    for (int i = 0; i < LANES; i++) sum += a.lane[i];
    return sum;
}

#undef SAPWOOD_INTS
#undef SAPWOOD_LANES
#undef SAPWOOD_MASK

SAPWOOD_INLINE void assign(float &to, float x) { to = x; }
SAPWOOD_INLINE void assign(half &to, float x) { to = to_half(x); }
SAPWOOD_INLINE float value(float x) { return x; }
SAPWOOD_INLINE float value(half x) { return to_float(x); }

// to[i * stride + j] = from[j][i] for i, j < 8.
template <class To>
SAPWOOD_INLINE void transpose8(const float *const from[8], To *to, int stride) {
    for (int i = 0; i < 8; i++)
        for (int j = 0; j < 8; j++) assign(to[(int64_t)i * stride + j], from[j][i]);
}

// to[i * stride + j] = from[j][i] for i < 16, j < 8.
template <class From, class To>
SAPWOOD_INLINE void transpose8x16(const From *const from[8], To *to, int stride) {
    for (int i = 0; i < 16; i++)
        for (int j = 0; j < 8; j++) assign(to[(int64_t)i * stride + j], value(from[j][i]));
}

}  // namespace
}  // namespace sapwood
