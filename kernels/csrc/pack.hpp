// GGUF block formats, read into rows of floats or into the panels of a packed weight.
#pragma once

#include <string.h>

#include "microkernel.hpp"

namespace sapwood {
namespace {

SAPWOOD_INLINE float half_at(const uint8_t *p) {
    half h;
    memcpy(&h, p, sizeof h);
    return to_float(h);
}

// The arithmetic below is a multiply and an add, never fused: what GGUF's own reference computes.

inline void read_f16(const uint8_t *block, int64_t weights, float *out) {
    for (int64_t i = 0; i < weights; i++) out[i] = half_at(block + 2 * i);
}

inline void read_q8_0(const uint8_t *block, int64_t weights, float *out) {
    for (int64_t done = 0; done < weights; done += 32, block += 34) {
        const float scale = half_at(block);
        const int8_t *codes = (const int8_t *)(block + 2);
        for (int i = 0; i < 32; i++) out[done + i] = scale * (float)codes[i];
    }
}

inline void read_q4_0(const uint8_t *block, int64_t weights, float *out) {
    for (int64_t done = 0; done < weights; done += 32, block += 18) {
        const float scale = half_at(block);
        const uint8_t *codes = block + 2;
        for (int i = 0; i < 16; i++) {
            out[done + i] = scale * (float)((codes[i] & 15) - 8);
            out[done + 16 + i] = scale * (float)((codes[i] >> 4) - 8);
        }
    }
}

inline void read_q4_1(const uint8_t *block, int64_t weights, float *out) {
    for (int64_t done = 0; done < weights; done += 32, block += 20) {
        const float scale = half_at(block), low = half_at(block + 2);
        const uint8_t *codes = block + 4;
        for (int i = 0; i < 16; i++) {
            out[done + i] = scale * (float)(codes[i] & 15) + low;
            out[done + 16 + i] = scale * (float)(codes[i] >> 4) + low;
        }
    }
}

SAPWOOD_INLINE int64_t bytes_of(Blocks kind, int64_t weights) {
    switch (kind) {
        case Blocks::f32: return weights * 4;
        case Blocks::f16: return weights * 2;
        case Blocks::q8_0: return weights / 32 * 34;
        case Blocks::q4_0: return weights / 32 * 18;
        case Blocks::q4_1: return weights / 32 * 20;
    }
    return 0;
}

inline void read_blocks(Blocks kind, const uint8_t *block, int64_t weights, float *out) {
    switch (kind) {
        case Blocks::f32: memcpy(out, block, (size_t)weights * sizeof(float)); return;
        case Blocks::f16: return read_f16(block, weights, out);
        case Blocks::q8_0: return read_q8_0(block, weights, out);
        case Blocks::q4_0: return read_q4_0(block, weights, out);
        case Blocks::q4_1: return read_q4_1(block, weights, out);
    }
}

void dequantise(const Dequantise &args, int threads) {
    const int64_t row = bytes_of(args.kind, args.k);
    const int useful = threads_for(args.n * args.k, threads);
    share(useful, args.n, fair_run(args.n, useful), [&](int64_t i) {
        read_blocks(args.kind, (const uint8_t *)args.blocks + i * row, args.k, args.out + i * args.k);
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
    constexpr int64_t CHUNK = 256;  // of k at a time; whole blocks of every format
    const int64_t row = bytes_of(args.kind, args.k);
    const int useful = threads_for(args.n * args.k, threads);
    const int64_t panels = ceil_div(args.n, PANEL);
    share(useful, panels, fair_run(panels, useful), [&](int64_t panel) {
        float rows[PANEL * CHUNK] = {};
        const int64_t count = least(PANEL, args.n - panel * PANEL);
        W *out = (W *)args.out + panel * args.k * PANEL;
        for (int64_t k = 0; k < args.k; k += CHUNK) {
            const int64_t size = least(CHUNK, args.k - k);
            for (int64_t c = 0; c < count; c++) {
                const uint8_t *from = (const uint8_t *)args.blocks + (panel * PANEL + c) * row;
                read_blocks(args.kind, from + bytes_of(args.kind, k), size, rows + c * CHUNK);
            }
            interleave(rows, CHUNK, size, out + k * PANEL);
        }
    });
}

void pack(const Pack &args, int threads) {
    if (args.dtype == Dtype::f16)
        pack_typed<half>(args, threads);
    else
        pack_typed<float>(args, threads);
}

}  // namespace
}  // namespace sapwood
