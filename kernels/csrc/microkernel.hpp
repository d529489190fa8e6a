// The register tile that all matrix products are made of: linear layers, attention scores and outputs.
#pragma once

#include "simd.hpp"

namespace sapwood {
namespace {

// Output channels that lie side by side; a panel of k rows is [k][PANEL].
constexpr int PANEL = 16;
constexpr int PANEL_VECS = PANEL / LANES;

// Memory that will be wanted soon. While it works, the microkernel fetches one line for each of its panels,
// which lie `stride` bytes apart, and goes `step` bytes further with each step of k.
struct Ahead {
    const void *from;
    int64_t stride;
    int step;
};

// R rows of a (STRIDE floats apart) times P panels (panel_stride elements apart), depth k, into
// out[r * out_stride + 16 * panel + channel]. Each element is one chain of multiply-adds in order of k: it
// starts at zero or, with `resume`, at what out holds, so that cutting k into pieces changes nothing.
template <int R, int P, int STRIDE, class W>
void microkernel(const float *a, const W *b, int64_t panel_stride, int k, bool resume, float *out,
                 int64_t out_stride, Ahead ahead) {
    const char *soon = (const char *)ahead.from;
    constexpr int V = P * PANEL_VECS;
    Vec acc[R][V];
#pragma GCC unroll 16
    for (int r = 0; r < R; r++)
#pragma GCC unroll 16
        for (int v = 0; v < V; v++) acc[r][v] = resume ? load(out + r * out_stride + v * LANES) : zero();
    for (int i = 0; i < k; i++) {
#pragma GCC unroll 4
        for (int p = 0; p < P; p++) prefetch_far(soon + p * ahead.stride);
        soon += ahead.step;
        Vec w[V];
#pragma GCC unroll 16
        for (int v = 0; v < V; v++) w[v] = load(b + v / PANEL_VECS * panel_stride + v % PANEL_VECS * LANES);
#pragma GCC unroll 16
        for (int r = 0; r < R; r++) {
            Vec x = set1(a[r * STRIDE]);
#pragma GCC unroll 16
            for (int v = 0; v < V; v++) acc[r][v] = fma(x, w[v], acc[r][v]);
        }
        a++;
        b += PANEL;
    }
#pragma GCC unroll 16
    for (int r = 0; r < R; r++)
#pragma GCC unroll 16
        for (int v = 0; v < V; v++) store(out + r * out_stride + v * LANES, acc[r][v]);
}

template <class W>
using Micro = void (*)(const float *, const W *, int64_t, int, bool, float *, int64_t, Ahead);

// The most panels that a tile of `rows` rows has registers for.
constexpr int panels_for(int64_t rows) { return rows <= ROWS_OF_4 ? 4 : rows <= ROWS_OF_2 ? 2 : 1; }

// The kernel for a tile of that size; panels is 1, 2 or 4, and at most panels_for(rows).
template <int STRIDE, class W, int R = MAX_ROWS>
Micro<W> micro_for(int rows, int panels) {
    if (rows == R) {
        if constexpr (R <= ROWS_OF_4)
            if (panels == 4) return microkernel<R, 4, STRIDE, W>;
        if constexpr (R <= ROWS_OF_2)
            if (panels == 2) return microkernel<R, 2, STRIDE, W>;
        return microkernel<R, 1, STRIDE, W>;
    }
    if constexpr (R > 1) return micro_for<STRIDE, W, R - 1>(rows, panels);
    return nullptr;
}

// Rows split into tiles as even as possible, none above `most_rows`.
struct RowTiles {
    int64_t count, small, extra;

    constexpr RowTiles(int64_t rows, int64_t most_rows)
        : count(ceil_div(rows, most_rows)), small(rows / count), extra(rows % count) {}
    int64_t begin(int64_t tile) const { return tile * small + least(tile, extra); }
    int rows(int64_t tile) const { return (int)(small + (tile < extra)); }
};

}  // namespace
}  // namespace sapwood
