// Activations as integers: what rows of floats are rounded to before they meet a quantised weight.
//
// Each group of inputs, as long as the weight's groups, has a scale of its own, so that a row's codes depend
// on that row alone. 16 bits lose about as much as a float's sum does (2 ** -16 of the group's largest).
#pragma once

#include "elementwise.hpp"
#include "formats.hpp"

namespace sapwood {
namespace {

constexpr float LARGEST_CODE = 32767.0f;
constexpr float SMALLEST_GROUP = 1e-30f;  // groups below are zero: their inverse scale would overflow

// m rows: codes [m][row()], of which groups * group are used; scales and sums (of the group's codes, times
// the scale) [m][groups].
struct Codes {
    int16_t *codes;
    float *scales, *sums;
    int64_t groups, group;

    // From one row to the next: an odd number of cache lines, which keeps rows out of each other's sets.
    static int64_t row_of(int64_t k, int64_t group) {
        return (ceil_div(ceil_div(k, group) * group, 32) | 1) * 32;
    }
    int64_t row() const { return row_of(groups * group, group); }

    // Lays m rows of k inputs out in `memory`.
    static Codes in(Scratch &memory, int64_t m, int64_t k, int64_t group) {
        const int64_t groups = ceil_div(k, group), size = ceil_div(m * groups, 16) * 16;
        float *scales = memory.of<float>((size_t)(2 * size + m * row_of(k, group) / 2));
        return {(int16_t *)(scales + 2 * size), scales, scales + size, groups, group};
    }
};

// A group's inputs beyond the last, of which there may be vectors, are 0.
SAPWOOD_INLINE Vec load_or_zero(const float *p, int64_t left) {
    return left > 0 ? load_upto(p, left) : zero();
}

// Rounds row r, of k floats.
inline void quantise_row(const float *x, int64_t k, const Codes &to, int64_t r) {
    for (int64_t g = 0; g < to.groups; g++) {
        const float *from = x + g * to.group;
        const int64_t left = k - g * to.group;
        Vec top = zero(), wrong = zero();
        for (int64_t i = 0; i < to.group; i += LANES) {
            const Vec v = load_or_zero(from + i, left - i);
            top = max(top, max(v, sub(zero(), v)));
            wrong = add(wrong, sub(v, v));  // NaN if any is not finite
        }
        const float largest = hmax(top), scale = largest < SMALLEST_GROUP ? 0.0f : largest / LARGEST_CODE;
        const Vec inverse = set1(largest < SMALLEST_GROUP ? 0.0f : LARGEST_CODE / largest);
        Ints sum = izero();
        for (int64_t i = 0; i < to.group; i += LANES) {
            const Vec v = load_or_zero(from + i, left - i);
            const Ints code = round_ints(mul(v, inverse));
            store16(to.codes + r * to.row() + g * to.group + i, code);
            sum = iadd(sum, code);
        }
        const float honest = scale + hsum(wrong);
        to.scales[r * to.groups + g] = honest;
        to.sums[r * to.groups + g] = honest * (float)isum(sum);
    }
}

}  // namespace
}  // namespace sapwood
