// The arithmetic of attention: one algorithm for each (query, tile of 64 positions).
//
//   score[j]  = (chain of multiply-adds over head_dim in order) * scale
//   max       = largest score of the positions that the query sees: all up to its own, or the last `window`
//   p[j]      = e ** (score[j] - max), exactly 0 where it does not see
//   sum       = of p, lane by lane, then across lanes
//   out[c]    = chain of multiply-adds of p[j] * v[j][c], j in order, over what the query sees
//
// and partial results (max, sum, out) are merged in tile order with one formula, from the first tile that the
// query sees.
#pragma once

#include "attention_plan.hpp"
#include "elementwise.hpp"
#include "microkernel.hpp"

namespace sapwood {
namespace {

constexpr int TILE_STRIDE = TILE + 16;  // of rows of scores and queries: apart in the cache's sets
constexpr int CHUNK = 64;               // of head_dim that one call of the microkernel covers

SAPWOOD_INLINE int64_t padded(int64_t d) { return ceil_div(d, PANEL) * PANEL; }
// Floats of one query row's partial result: out, max and sum.
SAPWOOD_INLINE int64_t partial_floats(int64_t d) { return padded(d) + 2; }

struct Partial {
    float *out, *max, *sum;  // [rows][width], [rows], [rows]

    Partial(float *memory, int64_t rows, int64_t width)
        : out(memory), max(memory + rows * width), sum(memory + rows * (width + 1)) {}
};

// Takes a tile's partial result into the sum of those before it; a query's first tile begins its sum.
inline void merge(const Block &block, int64_t tile, int64_t width, const Partial &from, const Partial &into) {
    const int64_t end = block.end_row(tile);
    for (int64_t begin = block.first_row(tile); begin < end; begin += LANES) {
        const int64_t rows = least(LANES, end - begin);
        const Vec max_before = load_upto(into.max + begin, rows), max_now = load_upto(from.max + begin, rows);
        const Vec top = max(max_now, max_before);
        const Vec before = exp(sub(max_before, top)), now = exp(sub(max_now, top));
        const Vec sum =
            fma(load_upto(from.sum + begin, rows), now, mul(load_upto(into.sum + begin, rows), before));
        float befores[LANES], nows[LANES], tops[LANES], sums[LANES];
        store(befores, before);
        store(nows, now);
        store(tops, top);
        store(sums, sum);
        for (int64_t i = 0; i < rows; i++) {
            const int64_t r = begin + i;
            float *to = into.out + r * width;
            const float *out = from.out + r * width;
            const bool begins = tile == block.begin_tile(r);
            into.max[r] = begins ? from.max[r] : tops[i];
            into.sum[r] = begins ? from.sum[r] : sums[i];
            if (begins) {
                memcpy(to, out, (size_t)width * sizeof(float));
                continue;
            }
            const Vec scale_before = set1(befores[i]), scale_now = set1(nows[i]);
            for (int64_t c = 0; c < width; c += LANES)
                store(to + c, fma(load(out + c), scale_now, mul(load(to + c), scale_before)));
        }
    }
}

SAPWOOD_INLINE Vec load_upto(const half *p, int64_t n) {
    if (n >= LANES) return load(p);
    half padded_copy[LANES] = {};
    memcpy(padded_copy, p, (size_t)n * sizeof(half));
    return load(padded_copy);
}

// The rows of a matrix that lie anywhere: row j begins at base + at[j].
template <class W>
struct Rows {
    const W *base;
    const int64_t *at;
};

// R rows of weights (TILE_STRIDE floats apart) times `n` rows of values, P panels of channels from `c` on,
// into out[r * out_stride + c + channel]: chains of multiply-adds in order of j, from zero or, with `resume`,
// from what out holds. Meanwhile it fetches the same channels of the rows of `soon`.
template <int R, int P, class W>
void weighted_sum(const float *weights, Rows<W> values, Rows<W> soon, int64_t c, int64_t n, bool resume,
                  float *out, int64_t out_stride) {
    constexpr int V = P * PANEL_VECS, LINE = 64 / (int)sizeof(W);
    values.base += c;
    soon.base += c;
    out += c;
    Vec acc[R][V];
#pragma GCC unroll 16
    for (int r = 0; r < R; r++)
#pragma GCC unroll 16
        for (int v = 0; v < V; v++) acc[r][v] = resume ? load(out + r * out_stride + v * LANES) : zero();
    for (int64_t j = 0; j < n; j++) {
        const W *value = values.base + values.at[j], *later = soon.base + soon.at[j];
#pragma GCC unroll 4
        for (int i = 0; i < P * PANEL; i += LINE) prefetch_far(later + i);
        Vec w[V];
#pragma GCC unroll 16
        for (int v = 0; v < V; v++) w[v] = load(value + v * LANES);
#pragma GCC unroll 16
        for (int r = 0; r < R; r++) {
            Vec x = set1(weights[r * TILE_STRIDE + j]);
#pragma GCC unroll 16
            for (int v = 0; v < V; v++) acc[r][v] = fma(x, w[v], acc[r][v]);
        }
    }
#pragma GCC unroll 16
    for (int r = 0; r < R; r++)
#pragma GCC unroll 16
        for (int v = 0; v < V; v++) store(out + r * out_stride + v * LANES, acc[r][v]);
}

template <class W>
using WeightedSum = void (*)(const float *, Rows<W>, Rows<W>, int64_t, int64_t, bool, float *, int64_t);

// The kernel for that many rows; panels is 1, 2 or 4, and at most panels_for(rows).
template <class W, int R = MAX_ROWS>
WeightedSum<W> weighted_sum_for(int rows, int panels) {
    if (rows == R) {
        if constexpr (R <= ROWS_OF_4)
            if (panels == 4) return weighted_sum<R, 4, W>;
        if constexpr (R <= ROWS_OF_2)
            if (panels == 2) return weighted_sum<R, 2, W>;
        return weighted_sum<R, 1, W>;
    }
    if constexpr (R > 1) return weighted_sum_for<W, R - 1>(rows, panels);
    return nullptr;
}

// to[c * PANEL + j] = rows[j][c] for the d channels of 8 rows. Meanwhile it fetches those of `soon`.
template <class T, class To>
inline void transpose_keys(const T *const rows[8], Rows<T> soon, int64_t d, To *to) {
    int64_t c = 0;
    for (; c + 16 <= d; c += 16) {
        const T *from[8];
        for (int j = 0; j < 8; j++) from[j] = rows[j] + c;
        if (c * (int64_t)sizeof(T) % 64 == 0)
            for (int j = 0; j < 8; j++) prefetch_far(soon.base + soon.at[j] + c);
        transpose8x16(from, to + c * PANEL, PANEL);
    }
    for (; c < d; c++)
        for (int j = 0; j < 8; j++) assign(to[c * PANEL + j], value(rows[j][c]));
}

// One thread's memory for one block at a time, and the steps on a tile. Few query rows read K and V where
// they lie, but for the transposition that K needs; more of them share a copy of both as floats.
template <class T>
struct Workspace {
    const Attention &args;
    const Block &block;
    int64_t d, width, chunks;
    bool few;
    float *queries, *keys, *values, *scores, *partial_memory, *state;
    T *zeros;
    int64_t *places, *next_places, *value_places;  // of positions in the pools; of copied values

    Workspace(const Attention &attention, const Block &of) : args(attention), block(of) {
        static thread_local Scratch memory;
        d = args.d;
        width = padded(d);
        chunks = ceil_div(d, CHUNK);
        few = block.rows <= MAX_ROWS && d == width;
        const int64_t floats = block.rows * partial_floats(d);
        const int64_t sizes[] = {block.heads * chunks * block.rows * TILE_STRIDE,
                                 TILE * width,
                                 TILE * width,
                                 block.rows * TILE_STRIDE,
                                 floats,
                                 block.heads * floats,
                                 width,
                                 2 * TILE,
                                 2 * TILE,
                                 2 * TILE};
        float **const parts[] = {&queries,
                                 &keys,
                                 &values,
                                 &scores,
                                 &partial_memory,
                                 &state,
                                 (float **)&zeros,
                                 (float **)&places,
                                 (float **)&next_places,
                                 (float **)&value_places};
        int64_t total = 0;
        for (int64_t size : sizes) total += ceil_div(size, 16) * 16;
        float *at = memory.of<float>((size_t)total);
        for (int i = 0; i < 10; i++) {
            *parts[i] = at;
            at += ceil_div(sizes[i], 16) * 16;
        }
        memset(zeros, 0, (size_t)width * sizeof(T));
        for (int64_t j = 0; j < TILE; j++) value_places[j] = j * width;
    }

    Partial running(int64_t h) const {
        return Partial(state + h * block.rows * partial_floats(d), block.rows, width);
    }

    float *query(int64_t h, int64_t chunk, int64_t r) const {
        return queries + ((h * chunks + chunk) * block.rows + r) * TILE_STRIDE;
    }

    void read_queries() const {
        const int64_t group = block.group, row_width = (args.hq + 2 * args.hkv) * d;
        for (int64_t h = 0; h < block.heads; h++)
            for (int64_t r = 0; r < block.rows; r++) {
                const int64_t head = (block.head + h) * group + r % group;
                const float *q = args.qkv + block.list[r / group].token * row_width + head * d;
                for (int64_t c = 0; c < chunks; c++)
                    memcpy(query(h, c, r), q + c * CHUNK,
                           (size_t)least(CHUNK, d - c * CHUNK) * sizeof(float));
            }
    }

    // Positions of the tile that any query of the block sees.
    int64_t present(int64_t tile) const { return block.seen(tile, block.rows - 1); }

    void locate(int64_t tile, int64_t *to) const {
        const int64_t last = present(tile) - 1, stride = args.hkv * d;
        const int32_t *slots = block.slots + tile * TILE;
        for (int64_t j = 0; j <= last; j++) to[j] = slots[j] * stride;
        for (int64_t j = last + 1; j < TILE; j++) to[j] = to[last];
    }

    // Goes to a tile of those up to `end`: finds its positions' places, and those of the next to be fetched.
    void enter(int64_t tile, int64_t begin, int64_t end) {
        if (tile == begin) locate(tile, next_places);
        int64_t *const found = next_places;
        next_places = places;
        places = found;
        if (tile + 1 < end) locate(tile + 1, next_places);
    }

    // The partial result of the tile for one KV head.
    void compute(int64_t tile, int64_t h, bool more, const Partial &partial) const {
        const int64_t here = (block.head + h) * d;
        const T *k = (const T *)args.k_pool, *v = (const T *)args.v_pool;
        // What comes after it: the next head of the tile, or the first of the next tile.
        const bool same = h + 1 < block.heads || !more;
        const int64_t next = (block.head + (h + 1) % block.heads) * d;
        const int64_t *const next_at = same ? places : next_places;
        const Rows<T> soon_k = {k + next, next_at}, values_there = {v + here, places};
        const Rows<T> soon_v = {v + next, next_at};
        if (few) {
            read_keys(tile, {k + here, places}, soon_k, (T *)keys);
            rows_of<T>(tile, h, (const T *)keys, values_there, soon_v, partial);
        } else {
            read_keys(tile, {k + here, places}, soon_k, keys);
            copy_values(tile, values_there, soon_v);
            const Rows<float> copied = {values, value_places};
            rows_of<float>(tile, h, keys, copied, copied, partial);
        }
    }

    // K, transposed to panels of 16 positions, [d][16] each.
    template <class To>
    void read_keys(int64_t tile, Rows<T> from, Rows<T> soon, To *to) const {
        const int64_t count = present(tile);
        for (int64_t t = 0; t < ceil_div(count, PANEL) * PANEL; t += 8) {
            const T *rows[8];
            for (int j = 0; j < 8; j++) rows[j] = t + j < count ? from.base + from.at[t + j] : zeros;
            transpose_keys(rows, {soon.base, soon.at + t}, d, to + t / PANEL * d * PANEL + t % PANEL);
        }
    }

    void copy_values(int64_t tile, Rows<T> from, Rows<T> soon) const {
        const int64_t count = present(tile);
        for (int64_t j = 0; j < count; j++) {
            const T *row = from.base + from.at[j];
            const T *later = soon.base + soon.at[j];
            for (int64_t c = 0; c < d; c += 64 / (int64_t)sizeof(T)) prefetch_far(later + c);
            for (int64_t c = 0; c < width; c += LANES)
                store(values + j * width + c, load_upto(row + c, most(0, d - c)));
        }
    }

    template <class W>
    void rows_of(int64_t tile, int64_t h, const W *k, Rows<W> v, Rows<W> soon, const Partial &partial) const {
        const int64_t begin = block.first_row(tile), rows = block.end_row(tile) - begin;
        const RowTiles tiling(rows, MAX_ROWS);
        for (int64_t t = 0; t < tiling.count; t++) {
            const int64_t r = begin + tiling.begin(t);
            const int count = tiling.rows(t);
            score(tile, h, r, count, k);
            for (int64_t i = r; i < r + count; i++)
                soften(block.hidden(tile, i), block.seen(tile, i), i, partial);
            weigh(tile, r, count, v, soon, partial);
        }
    }

    template <class W>
    void score(int64_t tile, int64_t h, int64_t r, int count, const W *k) const {
        const int64_t panels = ceil_div(present(tile), PANEL);
        const int wide = panels_for(count);
        const Micro<W> many = micro_for<TILE_STRIDE, W>(count, wide),
                       one = micro_for<TILE_STRIDE, W>(count, 1);
        for (int64_t c = 0; c < chunks; c++) {
            const int depth = (int)least(CHUNK, d - c * CHUNK);
            for (int64_t panel = 0; panel < panels;) {
                const bool fits = panel + wide <= panels;
                (fits ? many : one)(query(h, c, r), k + (panel * d + c * CHUNK) * PANEL, d * PANEL, depth,
                                    c > 0, scores + r * TILE_STRIDE + panel * PANEL, TILE_STRIDE, {k, 0, 0});
                panel += fits ? wide : 1;
            }
        }
    }

    // Turns row r's scores into p, of which the query sees those from `begin` up to n.
    void soften(int64_t begin, int64_t n, int64_t r, const Partial &partial) const {
        float *row = scores + r * TILE_STRIDE;
        const Vec scale = set1(args.scale), lowest = set1(-__builtin_inff());
        const int64_t from = begin / LANES * LANES;
        Vec top = lowest, sum = zero();
        for (int64_t j = from; j < n; j += LANES) {
            Vec s = mul(load(row + j), scale);
            store(row + j, s);
            s = pick(first((int)(n - j)), s, lowest);
            if (j < begin) s = pick(first((int)(begin - j)), lowest, s);
            top = max(top, s);
        }
        partial.max[r] = hmax(top);
        top = set1(partial.max[r]);
        for (int64_t j = from; j < n; j += LANES) {
            Vec p = keep(first((int)(n - j)), exp(sub(load(row + j), top)));
            if (j < begin) p = pick(first((int)(begin - j)), zero(), p);
            store(row + j, p);
            sum = add(sum, p);
        }
        partial.sum[r] = hsum(sum);
    }

    // The weighted values. What only some of the rows see, each adds alone: a product with 0 would not do,
    // since it turns -0 into 0 and a hidden token's infinity into NaN. Later rows see later positions.
    template <class W>
    void weigh(int64_t tile, int64_t r, int count, Rows<W> v, Rows<W> soon, const Partial &partial) const {
        const auto add_values = [&](int64_t row, int rows, int64_t begin, int64_t end, bool resume) {
            sum_values(row, rows, begin, end, resume, v, soon, partial);
        };
        const int64_t last = r + count - 1;
        const int64_t begin = block.hidden(tile, last), shared = block.seen(tile, r);
        if (begin >= shared) {
            for (int64_t i = r; i <= last; i++)
                add_values(i, 1, block.hidden(tile, i), block.seen(tile, i), false);
            return;
        }
        const bool resume = block.hidden(tile, r) < begin;
        for (int64_t i = r; resume && i <= last; i++) add_values(i, 1, block.hidden(tile, i), begin, false);
        add_values(r, count, begin, shared, resume);
        for (int64_t i = r + 1; i <= last; i++)
            if (block.seen(tile, i) > shared) add_values(i, 1, shared, block.seen(tile, i), true);
    }

    // Of the positions from `begin` up to `end`; an empty stretch gives 0.
    template <class W>
    void sum_values(int64_t r, int count, int64_t begin, int64_t end, bool resume, Rows<W> v, Rows<W> soon,
                    const Partial &partial) const {
        v.at += begin;
        soon.at += begin;
        const int wide = panels_for(count);
        const WeightedSum<W> many = weighted_sum_for<W>(count, wide), one = weighted_sum_for<W>(count, 1);
        for (int64_t c = 0; c < width;) {
            const bool fits = c + wide * PANEL <= width;
            (fits ? many : one)(scores + r * TILE_STRIDE + begin, v, soon, c, end - begin, resume,
                                partial.out + r * width, width);
            c += (fits ? wide : 1) * PANEL;
        }
    }
};

}  // namespace
}  // namespace sapwood
