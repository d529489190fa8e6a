// How packed weights lie in memory, and how they come to lie there.
//
// A weight is cut into panels of 16 output channels (zeros fill the last one).
//
//   f32, f16   [k][16 channels]
//   q8, q4     codes in groups of 32 inputs: scales in half precision, q4 with a low besides
//   q8w, q4w   wide: scales and lows in float, q8w in groups of 16: what holds every K-quant without loss
//
// A quantised panel is [groups][16] scales, [groups][16] lows if the format has them, then [groups] of codes,
// each of the three padded to 64 bytes. Codes are what the integer products take without a shuffle. Of q8,
// each 64 bytes are [16 channels][4 inputs], these in the order 0 2 1 3, so that a lane's even and odd bytes
// are the pairs (0, 1) and (2, 3). Of q4, each 64 bytes are [16 channels] words of 8 inputs; nibble s + 4 e
// of a word is input e of pair (0 2 1 3)[s]: shifting by 4 s bares one pair, and the even and odd nibbles are
// the bytes of the first and the second four inputs, in the order of q8.
#pragma once

#include <string.h>

#include "microkernel.hpp"

namespace sapwood {
namespace {

template <int BITS_, int GROUP_, class Scale_, bool LOWS_>
struct Quantised {
    static constexpr int BITS = BITS_, GROUP = GROUP_;
    static constexpr bool LOWS = LOWS_;
    using Scale = Scale_;
    static constexpr int64_t GROUP_BYTES = (int64_t)PANEL * GROUP * BITS / 8;

    static int64_t groups(int64_t k) { return ceil_div(k, GROUP); }
    static int64_t scale_bytes(int64_t k) {
        return ceil_div(groups(k) * PANEL * (int64_t)sizeof(Scale), 64) * 64;
    }
    static int64_t codes_at(int64_t k) { return scale_bytes(k) * (LOWS ? 2 : 1); }
    static int64_t panel_bytes(int64_t k) { return codes_at(k) + groups(k) * GROUP_BYTES; }

    // Where input i of the group and channel c has its code: the byte, and the shift within it.
    static int64_t byte_of(int64_t i, int64_t c) {
        if (BITS == 8) return i / 4 * 64 + c * 4 + order_of_four(i % 4);
        return i / 8 * 64 + c * 4 + nibble_of(i % 8) / 2;
    }
    static int shift_of(int64_t i) { return BITS == 8 ? 0 : nibble_of(i % 8) % 2 * 4; }

private:
    static int64_t order_of_four(int64_t i) { return i == 1 ? 2 : i == 2 ? 1 : i; }
    static int64_t nibble_of(int64_t i) { return order_of_four(i / 2) + 4 * (i % 2); }
};

using Q8 = Quantised<8, 32, half, false>;
using Q4 = Quantised<4, 32, half, true>;
using Q8Wide = Quantised<8, 16, float, true>;
using Q4Wide = Quantised<4, 32, float, true>;

// Calls visit with the format's type.
template <class Visit>
void with_format(Format format, Visit visit) {
    switch (format) {
        case Format::q8: return visit(Q8());
        case Format::q4: return visit(Q4());
        case Format::q8w: return visit(Q8Wide());
        case Format::q4w: return visit(Q4Wide());
        default: return;
    }
}

// One weight's row, as floats.
template <class Q>
void read_row(const Packed &weight, int64_t row, float *out) {
    using Scale = typename Q::Scale;
    const char *panel = (const char *)weight.data + row / PANEL * Q::panel_bytes(weight.k);
    const int64_t c = row % PANEL;
    for (int64_t g = 0; g < Q::groups(weight.k); g++) {
        const float scale = value(((const Scale *)panel)[g * PANEL + c]);
        const float low =
            Q::LOWS ? value(((const Scale *)(panel + Q::scale_bytes(weight.k)))[g * PANEL + c]) : 0.0f;
        const uint8_t *codes = (const uint8_t *)panel + Q::codes_at(weight.k) + g * Q::GROUP_BYTES;
        for (int64_t i = 0; i < least(Q::GROUP, weight.k - g * Q::GROUP); i++) {
            const uint8_t byte = codes[Q::byte_of(i, c)];
            const int code = Q::BITS == 8 ? (int8_t)byte : byte >> Q::shift_of(i) & 15;
            const float product = scale * (float)code;
            out[g * Q::GROUP + i] = Q::LOWS ? product + low : product;
        }
    }
}

// 32 bits of one channel's codes, in their places.
template <class Q>
SAPWOOD_INLINE uint32_t word_of(const int8_t *codes, int64_t count) {
    uint32_t word = 0;
#pragma GCC unroll 8
    for (int64_t i = 0; i < count; i++)
        word |= (uint32_t)(uint8_t)codes[i] << (Q::byte_of(i, 0) * 8 + Q::shift_of(i));
    return word;
}

template <class Q>
void pack_panel(const PackCodes &args, int64_t panel) {
    using Scale = typename Q::Scale;
    constexpr int64_t PER_WORD = 32 / Q::BITS;
    char *out = (char *)args.out + panel * Q::panel_bytes(args.k);
    memset(out, 0, (size_t)Q::panel_bytes(args.k));
    const int64_t groups = Q::groups(args.k);
    for (int64_t c = 0; c < least(PANEL, args.n - panel * PANEL); c++) {
        const int64_t row = panel * PANEL + c;
        for (int64_t g = 0; g < groups; g++) {
            assign(((Scale *)out)[g * PANEL + c], args.scales[row * groups + g]);
            if (Q::LOWS)
                assign(((Scale *)(out + Q::scale_bytes(args.k)))[g * PANEL + c], args.lows[row * groups + g]);
            const int8_t *codes = args.codes + row * args.k + g * Q::GROUP;
            char *words = out + Q::codes_at(args.k) + g * Q::GROUP_BYTES + c * 4;
            const int64_t size = least(Q::GROUP, args.k - g * Q::GROUP);
            for (int64_t i = 0; i < size; i += PER_WORD) {
                const uint32_t word =
                    size - i < PER_WORD ? word_of<Q>(codes + i, size - i) : word_of<Q>(codes + i, PER_WORD);
                memcpy(words + i / PER_WORD * 64, &word, sizeof word);
            }
        }
    }
}

void pack_codes(const PackCodes &args, int threads) {
    const int64_t panels = ceil_div(args.n, PANEL);
    with_format(args.format, [&](auto q) {
        share(threads, panels, fair_run(panels, threads),
              [&](int64_t panel) { pack_panel<decltype(q)>(args, panel); });
    });
}

// 16 rows of `size` floats, `stride` apart, into size rows of 16 channels.
template <class W>
void interleave(const float *rows, int64_t stride, int64_t size, W *out) {
    int64_t i = 0;
    for (; i + 8 <= size; i += 8)
        for (int half_panel = 0; half_panel < PANEL; half_panel += 8) {
            const float *from[8];
            for (int c = 0; c < 8; c++) from[c] = rows + (half_panel + c) * stride + i;
            transpose8(from, out + i * PANEL + half_panel, PANEL);
        }
    for (; i < size; i++)
        for (int c = 0; c < PANEL; c++) assign(out[i * PANEL + c], rows[c * stride + i]);
}

template <class W>
void pack_typed(const Pack &args, int threads) {
    constexpr int64_t CHUNK = 256;  // of k at a time
    const int useful = threads_for(args.n * args.k, threads);
    const int64_t panels = ceil_div(args.n, PANEL);
    share(useful, panels, fair_run(panels, useful), [&](int64_t panel) {
        float rows[PANEL * CHUNK] = {};
        const int64_t count = least(PANEL, args.n - panel * PANEL);
        W *out = (W *)args.out + panel * args.k * PANEL;
        for (int64_t k = 0; k < args.k; k += CHUNK) {
            const int64_t size = least(CHUNK, args.k - k);
            for (int64_t c = 0; c < count; c++)
                memcpy(rows + c * CHUNK, args.weight + (panel * PANEL + c) * args.k + k,
                       (size_t)size * sizeof(float));
            interleave(rows, CHUNK, size, out + k * PANEL);
        }
    });
}

void pack(const Pack &args, int threads) {
    if (args.format == Format::f16)
        pack_typed<half>(args, threads);
    else
        pack_typed<float>(args, threads);
}

}  // namespace
}  // namespace sapwood
