// Linear layers over packed weights: here those over floats, and the embedding.
#pragma once

#include <string.h>

#include "qgemm.hpp"

namespace sapwood {
namespace {

constexpr int DEPTH = 256;                // of k that one call of the microkernel covers
constexpr int ROW_STRIDE = DEPTH + 16;    // of copied rows: keeps them out of each other's cache sets
constexpr int64_t BLOCK_BYTES = 1 << 20;  // of copied rows that should stay in the second-level cache
constexpr int64_t CALL_ROWS = 1024;       // rows taken at a time, which bounds the copy
constexpr int STREAM_AHEAD = 16 * PANEL;  // weights fetched ahead of those one row is multiplied with
constexpr int64_t CONVERT_FROM = 4;       // tiles for which it pays to make floats of halves once

inline Sink sink_of(const Linear &args) {
    return {args.out, args.out_stride, args.weight.n, args.accumulate};
}

inline const float *as_floats(const float *panels, int64_t, int, int, float *) { return panels; }

// [panels][k][16] of halves, `panel_stride` apart, as floats.
inline const float *as_floats(const half *from, int64_t panel_stride, int panels, int k, float *to) {
    for (int p = 0; p < panels; p++)
        for (int i = 0; i < k * PANEL; i += LANES)
            store(to + (int64_t)p * k * PANEL + i, load(from + p * panel_stride + i));
    return to;
}

// One row: nothing to reuse, so it reads the weights once, straight through, at the full depth.
template <class W>
void linear_one_row(const Linear &args, int threads) {
    const W *weight = (const W *)args.weight.data;
    const int64_t panels = ceil_div(args.weight.n, PANEL), panel_stride = args.weight.k * PANEL;
    constexpr int wide = panels_for(1);
    const Micro<W> micro[2] = {microkernel<1, 1, 0, W>, microkernel<1, wide, 0, W>};
    const int64_t groups = panels / wide, tasks = groups + panels % wide;
    share(threads, tasks, 1, [&](int64_t task) {
        const bool full = task < groups;
        const int64_t panel = full ? task * wide : panels - (tasks - task);
        const Ahead soon = {weight + panel * panel_stride + STREAM_AHEAD, panel_stride * (int64_t)sizeof(W),
                            PANEL * (int)sizeof(W)};
        float tile[4 * PANEL];
        micro[full](args.x, weight + panel * panel_stride, panel_stride, (int)args.weight.k, false, tile, 0,
                    soon);
        sink_of(args).emit(tile, full ? wide * PANEL : PANEL, 0, 1, panel * PANEL);
    });
}

// The shape of one call's work: tiles of rows in blocks that stay in cache, times groups of panels.
template <class W>
struct Product {
    const Linear &args;
    RowTiles tiling;
    int64_t panels, pieces, piece, tiles_in_block, blocks, groups;
    int wide;

    Product(const Linear &linear, int threads) : args(linear), tiling(linear.m, MAX_ROWS) {
        panels = ceil_div(args.weight.n, PANEL);
        pieces = ceil_div(args.weight.k, DEPTH);
        piece = ceil_div(args.weight.k, pieces);
        wide = panels_for(tiling.rows(0));
        groups = ceil_div(panels, wide);
        int64_t fit = most(1, BLOCK_BYTES / (int64_t)sizeof(float) / args.weight.k / tiling.rows(0));
        // Too few groups to share out evenly: cut the rows as well.
        int64_t want = ceil_div(4 * threads, groups);
        tiles_in_block = most(1, least(fit, ceil_div(tiling.count, want)));
        blocks = ceil_div(tiling.count, tiles_in_block);
    }

    // Where row r's part of piece p begins in the copy.
    float *row(float *copy, int64_t p, int64_t r) const { return copy + (p * args.m + r) * ROW_STRIDE; }

    void copy_row(float *copy, int64_t r) const {
        for (int64_t p = 0; p < pieces; p++) {
            int64_t begin = p * piece, size = least(piece, args.weight.k - begin);
            memcpy(row(copy, p, r), args.x + r * args.x_stride + begin, (size_t)size * sizeof(float));
        }
    }

    // While tile `part` of `parts` is multiplied with piece p, its share of what comes after this piece of
    // the panels.
    Ahead ahead(const W *b, int64_t p, int count, int64_t part, int64_t parts) const {
        const int64_t depth = least(piece, args.weight.k - p * piece), row = PANEL * (int64_t)sizeof(W);
        const int64_t distance = p + 1 < pieces ? depth : count * args.weight.k - p * piece;
        return {(const char *)b + (distance + part * depth / parts) * row, args.weight.k * row,
                (int)ceil_div(row, parts)};
    }

    // The product of one block of rows with `count` panels from `panel`.
    void compute(float *copy, int64_t block, int64_t panel, int count) const {
        static thread_local Scratch sums, converted;
        const int64_t begin = block * tiles_in_block, end = least(begin + tiles_in_block, tiling.count);
        const int64_t first_row = tiling.begin(begin), rows = tiling.begin(end) - first_row;
        const int64_t width = count * PANEL, panel_stride = args.weight.k * PANEL;
        float *sum = sums.of<float>((size_t)(rows * width));
        float *floats = converted.of<float>((size_t)(piece * width));
        for (int64_t p = 0; p < pieces; p++) {
            const int64_t k0 = p * piece;
            const int depth = (int)least(piece, args.weight.k - k0);
            const W *b = (const W *)args.weight.data + panel * panel_stride + k0 * PANEL;
            const bool reuse = sizeof(W) < sizeof(float) && end - begin >= CONVERT_FROM;
            const float *b32 = reuse ? as_floats(b, panel_stride, count, depth, floats) : nullptr;
            for (int64_t t = begin; t < end; t++) {
                const Ahead next = ahead(b, p, count, t - begin, end - begin);
                const float *a = row(copy, p, tiling.begin(t));
                float *out = sum + (tiling.begin(t) - first_row) * width;
                if (reuse)
                    micro_for<ROW_STRIDE, float>(tiling.rows(t), count)(a, b32, (int64_t)depth * PANEL, depth,
                                                                        p > 0, out, width, next);
                else
                    micro_for<ROW_STRIDE, W>(tiling.rows(t), count)(a, b, panel_stride, depth, p > 0, out,
                                                                    width, next);
            }
        }
        sink_of(args).emit(sum, width, first_row, rows, panel * PANEL);
    }

    void compute_group(float *copy, int64_t block, int64_t group) const {
        const int64_t panel = group * wide;
        if (panel + wide <= panels) return compute(copy, block, panel, wide);
        for (int64_t p = panel; p < panels; p++) compute(copy, block, p, 1);
    }
};

template <class W>
void linear_rows(const Linear &args, int threads) {
    static thread_local Scratch rows;
    const Product<W> product(args, threads);
    float *copy = rows.of<float>((size_t)(product.pieces * args.m * ROW_STRIDE));
    // Neighbouring groups go to one thread, so that what it fetches ahead is its own.
    const int run = (int)most(1, product.blocks * product.groups / (8 * threads));
    share(threads, args.m, fair_run(args.m, threads), [&](int64_t r) { product.copy_row(copy, r); });
    share(threads, product.blocks * product.groups, run,
          [&](int64_t task) { product.compute_group(copy, task / product.groups, task % product.groups); });
}

template <class W>
void linear_typed(const Linear &args, int threads) {
    for (int64_t done = 0; done < args.m; done += CALL_ROWS) {
        Linear part = args;
        part.m = least(CALL_ROWS, args.m - done);
        part.x += done * args.x_stride;
        part.out += done * args.out_stride;
        const int useful = threads_for(part.m * part.weight.n * part.weight.k / 8, threads);
        if (part.m == 1)
            linear_one_row<W>(part, useful);
        else
            linear_rows<W>(part, useful);
    }
}

void linear(const Linear &args, int threads) {
    if (args.weight.format == Format::f32) return linear_typed<float>(args, threads);
    if (args.weight.format == Format::f16) return linear_typed<half>(args, threads);
    with_format(args.weight.format, [&](auto q) { linear_quantised<decltype(q)>(args, threads); });
}

template <class W>
void embed_typed(const Embed &args, int threads) {
    const W *weight = (const W *)args.weight.data;
    const int useful = threads_for(args.m * args.weight.k, threads);
    share(useful, args.m, fair_run(args.m, useful), [&](int64_t i) {
        const int64_t id = args.ids[i];
        const W *from = weight + id / PANEL * args.weight.k * PANEL + id % PANEL;
        for (int64_t k = 0; k < args.weight.k; k++) args.out[i * args.weight.k + k] = value(from[k * PANEL]);
    });
}

void embed(const Embed &args, int threads) {
    if (args.weight.format == Format::f32) return embed_typed<float>(args, threads);
    if (args.weight.format == Format::f16) return embed_typed<half>(args, threads);
    with_format(args.weight.format, [&](auto q) {
        share(threads, args.m, fair_run(args.m, threads), [&](int64_t i) {
            read_row<decltype(q)>(args.weight, args.ids[i], args.out + i * args.weight.k);
        });
    });
}

}  // namespace
}  // namespace sapwood
