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

#include "elementwise.hpp"
#include "microkernel.hpp"

namespace sapwood {
namespace {

constexpr int TILE = 64;
constexpr int TILE_STRIDE = TILE + 16;  // of rows of scores and queries: apart in the cache's sets
constexpr int CHUNK = 64;               // of head_dim that one call of the microkernel covers

// Some consecutive queries of one row and the query heads of some KV heads. Query row r is query r / group
// with head r % group of the KV head.
struct Block {
    const int32_t *slots;              // of the row, by position
    int64_t token, position, queries;  // the first query's place in qkv and in the sequence
    int64_t rows, head, heads;         // query rows for each KV head; first KV head, and how many
    int64_t window;                    // positions that a query sees, its own included; 0: all up to its own
    int64_t first_tile, end_tile;      // tiles that any query sees
    int64_t split;                     // where its partial results lie if it is cut, else -1

    int64_t tiles() const { return end_tile - first_tile; }
    int64_t group() const { return rows / queries; }
    // Query row r sees the positions of the tile from `hidden` up to `seen`.
    int64_t seen(int64_t tile, int64_t r) const {
        return least(TILE, most(0, position + r / group() + 1 - tile * TILE));
    }
    int64_t hidden(int64_t tile, int64_t r) const {
        return window ? least(TILE, most(0, oldest(r) - tile * TILE)) : 0;
    }
    // The first position and tile that query row r sees.
    int64_t oldest(int64_t r) const { return window ? most(0, position + r / group() + 1 - window) : 0; }
    int64_t begin_tile(int64_t r) const { return oldest(r) / TILE; }
    // The query rows that see anything of the tile: from first_row up to end_row.
    int64_t first_row(int64_t tile) const { return most(0, tile * TILE - position) * group(); }
    int64_t end_row(int64_t tile) const {
        return window ? least(queries, tile * TILE + TILE - 1 + window - position) * group() : rows;
    }
};

SAPWOOD_INLINE int64_t padded(int64_t d) { return ceil_div(d, PANEL) * PANEL; }
SAPWOOD_INLINE int64_t partial_floats(int64_t rows, int64_t width) {
    return ceil_div(rows * (width + 2), 16) * 16;
}

struct Partial {
    float *out, *max, *sum;  // [rows][width], [rows], [rows]

    Partial(float *memory, int64_t rows, int64_t width)
        : out(memory), max(memory + rows * width), sum(memory + rows * (width + 1)) {}
};

SAPWOOD_INLINE float exp_one(float x) {
    float lanes[LANES];
    store(lanes, exp(set1(x)));
    return lanes[0];
}

// Takes a tile's partial result into the sum of those before it; a query's first tile begins its sum.
inline void merge(const Block &block, int64_t tile, int64_t width, const Partial &from, const Partial &into) {
    const int64_t end = block.end_row(tile);
    for (int64_t r = block.first_row(tile); r < end; r++) {
        float *to = into.out + r * width;
        const float *out = from.out + r * width;
        if (tile == block.begin_tile(r)) {
            memcpy(to, out, (size_t)width * sizeof(float));
            into.max[r] = from.max[r];
            into.sum[r] = from.sum[r];
            continue;
        }
        const float top = from.max[r] > into.max[r] ? from.max[r] : into.max[r];
        const Vec before = set1(exp_one(into.max[r] - top)), now = set1(exp_one(from.max[r] - top));
        for (int64_t c = 0; c < width; c += LANES)
            store(to + c, fma(load(out + c), now, mul(load(to + c), before)));
        float lanes[LANES];
        store(lanes, fma(set1(from.sum[r]), now, mul(set1(into.sum[r]), before)));
        into.sum[r] = lanes[0];
        into.max[r] = top;
    }
}

inline void finish(const Attention &args, const Block &block, int64_t h, int64_t width,
                   const Partial &total) {
    const int64_t group = block.group();
    for (int64_t r = 0; r < block.rows; r++) {
        const int64_t head = (block.head + h) * group + r % group;
        float *out = args.out + (block.token + r / group) * args.hq * args.d + head * args.d;
        const Vec factor = set1(1.0f / total.sum[r]);
        for (int64_t c = 0; c < args.d; c += LANES)
            store_upto(out + c, mul(load(total.out + r * width + c), factor), args.d - c);
    }
}

SAPWOOD_INLINE Vec load_upto(const half *p, int64_t n) {
    if (n >= LANES) return load(p);
    half padded_copy[LANES] = {};
    memcpy(padded_copy, p, (size_t)n * sizeof(half));
    return load(padded_copy);
}

// One thread's memory for one block at a time, and the steps on a tile.
template <class T>
struct Workspace {
    const Attention &args;
    const Block &block;
    int64_t d, width, chunks;
    float *queries, *keys, *values, *scores, *scratch_partial, *state;
    T *zeros;

    Workspace(const Attention &attention, const Block &of) : args(attention), block(of) {
        static thread_local Scratch memory;
        d = args.d;
        width = padded(d);
        chunks = ceil_div(d, CHUNK);
        const int64_t sizes[] = {block.heads * chunks * block.rows * TILE_STRIDE,
                                 TILE * width,
                                 TILE * width,
                                 block.rows * TILE_STRIDE,
                                 partial_floats(block.rows, width),
                                 block.heads * partial_floats(block.rows, width),
                                 width};
        float **const parts[] = {&queries, &keys, &values, &scores, &scratch_partial, &state};
        int64_t total = 0;
        for (int64_t size : sizes) total += ceil_div(size, 16) * 16;
        float *at = memory.of<float>((size_t)total);
        for (int i = 0; i < 6; i++) {
            *parts[i] = at;
            at += ceil_div(sizes[i], 16) * 16;
        }
        zeros = (T *)at;
        memset(zeros, 0, (size_t)width * sizeof(T));
    }

    Partial running(int64_t h) const {
        return Partial(state + h * partial_floats(block.rows, width), block.rows, width);
    }

    float *query(int64_t h, int64_t chunk, int64_t r) const {
        return queries + ((h * chunks + chunk) * block.rows + r) * TILE_STRIDE;
    }

    void read_queries() const {
        const int64_t group = block.group(), row_width = (args.hq + 2 * args.hkv) * d;
        for (int64_t h = 0; h < block.heads; h++)
            for (int64_t r = 0; r < block.rows; r++) {
                const int64_t head = (block.head + h) * group + r % group;
                const float *q = args.qkv + (block.token + r / group) * row_width + head * d;
                for (int64_t c = 0; c < chunks; c++)
                    memcpy(query(h, c, r), q + c * CHUNK,
                           (size_t)least(CHUNK, d - c * CHUNK) * sizeof(float));
            }
    }

    // Positions of the tile that any query of the block sees.
    int64_t present(int64_t tile) const { return block.seen(tile, block.rows - 1); }

    int64_t offset(int64_t position, int64_t h) const {
        return ((int64_t)block.slots[position] * args.hkv + block.head + h) * d;
    }

    // Reads the tile's K, transposed to panels of 16 positions, [d][16] each, and its V, as panels of 16
    // channels, [64][16] each. Fetches what is gathered after it, up to tile `end`.
    void gather(int64_t tile, int64_t h, int64_t end) const {
        const T *k = (const T *)args.k_pool, *v = (const T *)args.v_pool;
        const int64_t count = present(tile), first = tile * TILE;
        const bool same_tile = h + 1 < block.heads;
        const int64_t next = same_tile ? tile : tile + 1, next_head = same_tile ? h + 1 : 0;
        const int64_t next_count = next < end ? present(next) : 0;
        for (int64_t t = 0; t < ceil_div(count, PANEL) * PANEL; t += 8) {
            const T *rows[8];
            for (int j = 0; j < 8; j++) rows[j] = t + j < count ? k + offset(first + t + j, h) : zeros;
            transpose_keys(rows, keys + t / PANEL * d * PANEL + t % PANEL);
            for (int64_t j = t; j < least(t + 8, count); j++) read_value(v + offset(first + j, h), j);
            for (int64_t j = t; j < least(t + 8, next_count); j++) {
                const int64_t at = offset(next * TILE + j, next_head);
                for (int64_t c = 0; c < d; c += 64 / (int64_t)sizeof(T)) {
                    prefetch_far(k + at + c);
                    prefetch_far(v + at + c);
                }
            }
        }
    }

    void transpose_keys(const T *const rows[8], float *to) const {
        int64_t c = 0;
        for (; c + 8 <= d; c += 8) {
            const T *from[8];
            for (int j = 0; j < 8; j++) from[j] = rows[j] + c;
            transpose8(from, to + c * PANEL, PANEL);
        }
        for (; c < d; c++)
            for (int j = 0; j < 8; j++) to[c * PANEL + j] = value(rows[j][c]);
    }

    void read_value(const T *from, int64_t j) const {
        for (int64_t c = 0; c < width; c += LANES)
            store(values + (c / PANEL * TILE + j) * PANEL + c % PANEL, load_upto(from + c, most(0, d - c)));
    }

    void compute(int64_t tile, int64_t h, const Partial &partial) const {
        const int64_t begin = block.first_row(tile), rows = block.end_row(tile) - begin;
        const Tiling tiling(rows);
        for (int64_t t = 0; t < tiling.tiles; t++) {
            const int64_t r = begin + tiling.begin(t);
            const int count = tiling.rows(t);
            score(tile, h, r, count);
            for (int64_t i = r; i < r + count; i++)
                soften(block.hidden(tile, i), block.seen(tile, i), i, partial);
            weigh(tile, r, count, partial);
        }
    }

    // Unscaled scores of `count` query rows from r; of what a row does not see they are meaningless.
    void score(int64_t tile, int64_t h, int64_t r, int count) const {
        const int64_t panels = ceil_div(present(tile), PANEL);
        for (int64_t c = 0; c < chunks; c++) {
            const int depth = (int)least(CHUNK, d - c * CHUNK);
            for_panels(count, panels, [&](Micro<float> micro, int64_t panel) {
                micro(query(h, c, r), keys + (panel * d + c * CHUNK) * PANEL, d * PANEL, depth, c > 0,
                      scores + r * TILE_STRIDE + panel * PANEL, TILE_STRIDE, {keys, 0, 0});
            });
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
    void weigh(int64_t tile, int64_t r, int count, const Partial &partial) const {
        const int64_t last = r + count - 1;
        const int64_t begin = block.hidden(tile, last), shared = block.seen(tile, r);
        if (begin >= shared) {
            for (int64_t i = r; i <= last; i++)
                add_values(i, 1, block.hidden(tile, i), block.seen(tile, i), false, partial);
            return;
        }
        const bool resume = block.hidden(tile, r) < begin;
        for (int64_t i = r; resume && i <= last; i++)
            add_values(i, 1, block.hidden(tile, i), begin, false, partial);
        add_values(r, count, begin, shared, resume, partial);
        for (int64_t i = r + 1; i <= last; i++)
            if (block.seen(tile, i) > shared) add_values(i, 1, shared, block.seen(tile, i), true, partial);
    }

    // Of the positions from `begin` up to `end`; an empty stretch gives 0.
    void add_values(int64_t r, int count, int64_t begin, int64_t end, bool resume,
                    const Partial &partial) const {
        for_panels(count, width / PANEL, [&](Micro<float> micro, int64_t panel) {
            micro(scores + r * TILE_STRIDE + begin, values + (panel * TILE + begin) * PANEL, TILE * PANEL,
                  (int)(end - begin), resume, partial.out + r * width + panel * PANEL, width, {values, 0, 0});
        });
    }

    template <class Call>
    static void for_panels(int rows, int64_t panels, Call call) {
        const int wide = panels_for(rows);
        const Micro<float> micro = micro_for<TILE_STRIDE, float>(rows, wide);
        const Micro<float> one = micro_for<TILE_STRIDE, float>(rows, 1);
        int64_t panel = 0;
        for (; panel + wide <= panels; panel += wide) call(micro, panel);
        for (; panel < panels; panel++) call(one, panel);
    }
};

}  // namespace
}  // namespace sapwood
