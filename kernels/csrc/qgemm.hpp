// Linear layers over quantised weights and activations as integers.
//
// out[r][c] is, group by group in order, fma(float(dot), scale_c * scale_r, sum) and, where the format has
// lows, fma(low_c, sum_r, sum) after it; the dot products are exact. So neither rows, threads nor the way a
// call is cut can be seen in a result.
//
// A tile is some rows times TILE_PANELS panels. Its integers live in registers, for one group of inputs; its
// floats in memory, where they cost a load and a store a group. Few rows take the codes as they are packed;
// for many, codes are widened to 16 bits once and used by all tiles.
#pragma once

#include "codes.hpp"

namespace sapwood {
namespace {

constexpr int TILE_WIDTH = TILE_PANELS * PANEL;
constexpr int TILE_VECS = TILE_PANELS * PANEL_VECS;
constexpr int PACKED_TILES = 2;  // of PACKED_ROWS rows, before widening pays
constexpr int PANELS_AHEAD = 4;  // how far ahead of their use codes are fetched

// Which pair of inputs the s-th shift of a code word bares.
constexpr int pair_of(int s) { return s == 1 ? 2 : s == 2 ? 1 : s; }

// The s-th pairs of the words of 8 codes (4 bits), or of 4 codes (8 bits).
template <int BITS, int S>
SAPWOOD_INLINE Ints pairs_of(Ints words) {
    if constexpr (BITS == 8)
        return S == 0 ? even_bytes(words) : odd_bytes(words);
    else
        return iand(shift_right<4 * S>(words), iset1(0x000f000f));
}

SAPWOOD_INLINE Ints pair_at(const int16_t *codes) {
    int32_t both;
    memcpy(&both, codes, sizeof both);
    return iset1(both);
}

// Where R rows of codes are read: a pointer for every three, the others are one or two strides away, which
// x86 adds for nothing.
template <int R>
struct RowPointers {
    static constexpr int COUNT = (R + 2) / 3;
    const int16_t *base[COUNT];
    int64_t stride;

    RowPointers(const int16_t *first, int64_t stride_) : stride(stride_) {
#pragma GCC unroll 8
        for (int i = 0; i < COUNT; i++) {
            base[i] = first + 3 * i * stride;
            asm volatile("" : "+r"(base[i]));  // not a multiple of the stride, as far as the compiler knows
        }
    }
    SAPWOOD_MEMBER const int16_t *at(int r) const { return base[r / 3] + r % 3 * stride; }
    SAPWOOD_MEMBER void advance(int64_t codes) {
#pragma GCC unroll 8
        for (int i = 0; i < COUNT; i++) base[i] += codes;
    }
};

// Panels that are multiplied together; one that is not there is the last one again.
template <class Q>
struct Panels {
    const char *at[TILE_PANELS];
    int64_t k;

    Panels(const Packed &weight, int64_t panel) : k(weight.k) {
        const int64_t last = ceil_div(weight.n, PANEL) - 1;
        for (int p = 0; p < TILE_PANELS; p++)
            at[p] = (const char *)weight.data + least(panel + p, last) * Q::panel_bytes(k);
    }
    const char *codes(int p) const { return at[p] + Q::codes_at(k); }
    int64_t ahead() const { return PANELS_AHEAD * Q::panel_bytes(k); }
};

template <int R>
using Sums = Ints[R][TILE_VECS];

template <int R>
SAPWOOD_INLINE void add_pairs(const Ints (&pairs)[TILE_VECS], const RowPointers<R> &rows, int offset,
                              Sums<R> &sums) {
#pragma GCC unroll 16
    for (int r = 0; r < R; r++) {
        const Ints x = pair_at(rows.at(r) + offset);
#pragma GCC unroll 4
        for (int v = 0; v < TILE_VECS; v++) sums[r][v] = dot_pairs(sums[r][v], pairs[v], x);
    }
}

// The codes of a tile as they are packed. Each line that is read fetches the one `ahead` of it: evenly
// spread, as there are few places for lines under way.
template <class Q>
struct PackedCodes {
    static constexpr int PER_WORD = 32 / Q::BITS;  // inputs of one channel in 32 bits
    static constexpr int64_t FLOATS = (int64_t)sizeof(typename Q::Scale) * PANEL * (Q::LOWS ? 2 : 1);
    const char *at[TILE_PANELS];  // the next words
    const Panels<Q> &panels;
    int64_t ahead;

    PackedCodes(const Panels<Q> &tile, int64_t distance) : panels(tile), ahead(distance) {
        for (int p = 0; p < TILE_PANELS; p++) at[p] = panels.codes(p);
    }

    SAPWOOD_MEMBER void fetch(int64_t g) const {
#pragma GCC unroll 4
        for (int p = 0; p < TILE_PANELS; p++)
            for (int64_t line = 0; line < FLOATS; line += 64)
                prefetch_far(panels.at[p] + ahead + g * FLOATS + line);
    }

    template <int R>
    SAPWOOD_MEMBER void add_group(RowPointers<R> &rows, Sums<R> &sums) {
        constexpr int STEPS = Q::GROUP / PER_WORD, AT_ONCE = R <= 2 ? STEPS : Q::BITS / 4;
#pragma GCC unroll 1
        for (int step = 0; step < STEPS; step += AT_ONCE)
#pragma GCC unroll 8
            for (int i = 0; i < AT_ONCE; i++) add_step<R>(rows, sums);
    }

private:
    template <int R>
    SAPWOOD_MEMBER void add_step(RowPointers<R> &rows, Sums<R> &sums) {
        Ints words[TILE_VECS];
#pragma GCC unroll 4
        for (int v = 0; v < TILE_VECS; v++) words[v] = iload(at[v / PANEL_VECS] + v % PANEL_VECS * LANES * 4);
        add_words<0, R>(words, rows, sums);
        add_words<1, R>(words, rows, sums);
        if constexpr (Q::BITS == 4) {
            add_words<2, R>(words, rows, sums);
            add_words<3, R>(words, rows, sums);
        }
        rows.advance(PER_WORD);
#pragma GCC unroll 4
        for (int p = 0; p < TILE_PANELS; p++) {
            prefetch_far(at[p] + ahead);
            at[p] += PANEL * 4;
        }
    }

    template <int S, int R>
    SAPWOOD_MEMBER void add_words(const Ints (&words)[TILE_VECS], const RowPointers<R> &rows,
                                  Sums<R> &sums) const {
        Ints pairs[TILE_VECS];
#pragma GCC unroll 4
        for (int v = 0; v < TILE_VECS; v++) pairs[v] = pairs_of<Q::BITS, S>(words[v]);
        add_pairs<R>(pairs, rows, 2 * (Q::BITS == 8 ? S : pair_of(S)), sums);
    }
};

// The codes of a tile as 16-bit integers: [pair of inputs][TILE_WIDTH channels]. Each group fetches `lines`
// cache lines from `soon`.
template <class Q>
struct WideCodes {
    const int32_t *at;
    const char *soon;
    int lines;

    SAPWOOD_MEMBER void fetch(int64_t) {
        for (int i = 0; i < lines; i++, soon += 64) prefetch_far(soon);
    }

    template <int R>
    SAPWOOD_MEMBER void add_group(RowPointers<R> &rows, Sums<R> &sums) {
#pragma GCC unroll 1
        for (int i = 0; i < Q::GROUP / 2; i += 2) {
#pragma GCC unroll 2
            for (int j = 0; j < 2; j++) {
                Ints pairs[TILE_VECS];
#pragma GCC unroll 4
                for (int v = 0; v < TILE_VECS; v++) pairs[v] = iload(at + (j * TILE_VECS + v) * LANES);
                add_pairs<R>(pairs, rows, 2 * j, sums);
            }
            at += 2 * TILE_WIDTH;
            rows.advance(4);
        }
    }
};

// R rows from `row`, groups begin to end, onto sum[r][TILE_WIDTH].
template <class Q, int R, class Source>
SAPWOOD_INLINE void quantised_tile(const Codes &x, int64_t row, const Panels<Q> &panels, int64_t begin,
                                   int64_t end, Source source, float *sum) {
    using Scale = typename Q::Scale;
    RowPointers<R> rows(x.codes + row * x.row() + begin * Q::GROUP, x.row());
    const int64_t groups = x.groups, lows_at = Q::scale_bytes(panels.k);
    const float *row_scales = x.scales + row * groups, *row_sums = x.sums + row * groups;
    const char *panel_at[TILE_PANELS];
    for (int p = 0; p < TILE_PANELS; p++) panel_at[p] = panels.at[p];
    for (int64_t g = begin; g < end; g++) {
        asm volatile("" ::: "memory");  // sums of floats stay in memory: the registers are for the integers
        source.fetch(g);
        Sums<R> sums;
#pragma GCC unroll 16
        for (int r = 0; r < R; r++)
#pragma GCC unroll 4
            for (int v = 0; v < TILE_VECS; v++) sums[r][v] = izero();
        source.template add_group<R>(rows, sums);
#pragma GCC unroll 4
        for (int v = 0; v < TILE_VECS; v++) {
            const char *panel = panel_at[v / PANEL_VECS];
            const int64_t channel = g * PANEL + v % PANEL_VECS * LANES;
            const Vec scale = load((const Scale *)panel + channel);
            Vec low;
            if constexpr (Q::LOWS) low = load((const Scale *)(panel + lows_at) + channel);
#pragma GCC unroll 16
            for (int r = 0; r < R; r++) {
                float *to = sum + r * TILE_WIDTH + v * LANES;
                Vec acc = fma(to_floats(sums[r][v]), mul(scale, set1(row_scales[r * groups + g])), load(to));
                if constexpr (Q::LOWS) acc = fma(low, set1(row_sums[r * groups + g]), acc);
                store(to, acc);
            }
        }
    }
}

// All groups. The first tile of a panel fetches what comes after it; to the others `ahead` is 0.
template <class Q, int R>
void packed_tile(const Codes &x, int64_t row, const Panels<Q> &panels, float *sum, int64_t ahead) {
    quantised_tile<Q, R>(x, row, panels, 0, x.groups, PackedCodes<Q>(panels, ahead), sum);
}

template <class Q, int R>
void wide_tile(const Codes &x, int64_t row, const Panels<Q> &panels, int64_t begin, int64_t end,
               const int32_t *wide, float *sum, const char *soon, int lines) {
    quantised_tile<Q, R>(x, row, panels, begin, end, WideCodes<Q>{wide, soon, lines}, sum);
}

template <class Q, int R = PACKED_ROWS>
auto packed_tile_of(int64_t rows) -> decltype(&packed_tile<Q, R>) {
    if constexpr (R > 1)
        if (rows < R) return packed_tile_of<Q, R - 1>(rows);
    return packed_tile<Q, R>;
}

// The smallest tile of any number of rows above MOST_PACKED.
constexpr int64_t MOST_PACKED = PACKED_TILES * PACKED_ROWS;
constexpr int64_t LEAST_WIDE_ROWS =
    least(RowTiles(MOST_PACKED + 1, WIDE_ROWS).small,
          RowTiles(RowTiles(MOST_PACKED + 1, WIDE_ROWS).count *WIDE_ROWS + 1, WIDE_ROWS).small);

template <class Q, int R = WIDE_ROWS>
auto wide_tile_of(int64_t rows) -> decltype(&wide_tile<Q, R>) {
    if constexpr (R > LEAST_WIDE_ROWS)
        if (rows < R) return wide_tile_of<Q, R - 1>(rows);
    return wide_tile<Q, R>;
}

// The codes of groups begin to end as 16-bit integers, as WideCodes has them.
template <class Q>
void widen(const Panels<Q> &panels, int64_t begin, int64_t end, int32_t *out) {
    constexpr int PER_WORD = 32 / Q::BITS;
    for (int p = 0; p < TILE_PANELS; p++) {
        const char *words = panels.codes(p) + begin * Q::GROUP_BYTES;
        for (int64_t step = 0; step < (end - begin) * Q::GROUP / PER_WORD; step++)
            for (int v = 0; v < PANEL_VECS; v++, words += LANES * 4) {
                const Ints word = iload(words);
                int32_t *to = out + step * PER_WORD / 2 * TILE_WIDTH + p * PANEL + v * LANES;
                istore(to, pairs_of<Q::BITS, 0>(word));
                istore(to + (Q::BITS == 8 ? 1 : 2) * TILE_WIDTH, pairs_of<Q::BITS, 1>(word));
                if constexpr (Q::BITS == 4) {
                    istore(to + TILE_WIDTH, pairs_of<4, 2>(word));
                    istore(to + 3 * TILE_WIDTH, pairs_of<4, 3>(word));
                }
            }
    }
}

struct Sink {
    float *out;
    int64_t stride, n;
    bool accumulate;

    // Writes sums [rows][width] to their place; channels beyond n are not written.
    void emit(const float *sum, int64_t width, int64_t row, int64_t rows, int64_t channel) const {
        for (int64_t r = 0; r < rows; r++)
            for (int64_t c = 0; c < least(width, n - channel); c += LANES) {
                float *to = out + (row + r) * stride + channel + c;
                const int64_t left = n - channel - c;
                const Vec v = load(sum + r * width + c);
                store_upto(to, accumulate ? add(load_upto(to, left), v) : v, left);
            }
    }
};

template <class Q>
void linear_packed(const Codes &x, int64_t m, const Packed &weight, const Sink &sink, int threads) {
    const RowTiles tiles(m, PACKED_ROWS);
    const int64_t columns = ceil_div(weight.n, TILE_WIDTH);
    share(threads, columns, fair_run(columns, threads), [&](int64_t column) {
        const Panels<Q> panels(weight, column * TILE_PANELS);
        for (int64_t t = 0; t < tiles.count; t++) {
            float sum[PACKED_ROWS * TILE_WIDTH] = {};
            packed_tile_of<Q>(tiles.rows(t))(x, tiles.begin(t), panels, sum, t == 0 ? panels.ahead() : 0);
            sink.emit(sum, TILE_WIDTH, tiles.begin(t), tiles.rows(t), column * TILE_WIDTH);
        }
    });
}

// Many rows: tiles in blocks that stay in cache, times columns of panels that are widened once a block.
template <class Q>
struct WideProduct {
    static constexpr int64_t WIDE_BYTES = 18 << 10;    // of widened codes, in the first-level cache
    static constexpr int64_t BLOCK_BYTES = 256 << 10;  // of rows' codes, in the second-level cache
    const Codes &x;
    const Packed &weight;
    const Sink &sink;
    RowTiles tiles;
    int64_t tiles_in_block, blocks, columns, piece;

    WideProduct(const Codes &codes, int64_t m, const Packed &packed, const Sink &to, int threads)
        : x(codes), weight(packed), sink(to), tiles(m, WIDE_ROWS) {
        columns = ceil_div(weight.n, TILE_WIDTH);
        const int64_t fit = most(1, BLOCK_BYTES / (x.row() * (int64_t)sizeof(int16_t) * WIDE_ROWS));
        // Too few columns to share out evenly: cut the rows as well.
        const int64_t want = ceil_div(4 * threads, columns);
        tiles_in_block = most(1, least(fit, ceil_div(tiles.count, want)));
        blocks = ceil_div(tiles.count, tiles_in_block);
        const int64_t pieces = ceil_div(x.groups * Q::GROUP * TILE_WIDTH * 2, WIDE_BYTES);
        piece = ceil_div(x.groups, pieces);
    }

    void compute(int64_t block, int64_t column) const {
        static thread_local Scratch sums, widened;
        const int64_t from = block * tiles_in_block, to = least(from + tiles_in_block, tiles.count);
        const int64_t first_row = tiles.begin(from), rows = tiles.begin(to) - first_row;
        const Panels<Q> panels(weight, column * TILE_PANELS);
        float *sum = sums.of<float>((size_t)(rows * TILE_WIDTH));
        memset(sum, 0, (size_t)(rows * TILE_WIDTH) * sizeof(float));
        int32_t *wide = widened.of<int32_t>((size_t)(piece * Q::GROUP / 2 * TILE_WIDTH));
        const char *soon = panels.at[0] + panels.ahead();
        const int lines = (int)ceil_div(TILE_PANELS * Q::panel_bytes(weight.k), x.groups * (to - from) * 64);
        for (int64_t g = 0; g < x.groups; g += piece) {
            const int64_t end = least(g + piece, x.groups);
            widen(panels, g, end, wide);
            for (int64_t t = from; t < to; t++, soon += lines * 64 * (end - g))
                wide_tile_of<Q>(tiles.rows(t))(x, tiles.begin(t), panels, g, end, wide,
                                               sum + (tiles.begin(t) - first_row) * TILE_WIDTH, soon, lines);
        }
        sink.emit(sum, TILE_WIDTH, first_row, rows, column * TILE_WIDTH);
    }
};

#if SAPWOOD_TILES
bool tiles_wanted = false;
// From so many rows on, and with groups as deep as a tile, qgemm_amx.hpp makes a whole step faster; alone it
// wins from 24 rows, but measured in a step that did not show.
constexpr int64_t TILES_FROM = 64;
template <class Q>
void linear_tiles(const Codes &x, int64_t m, const Packed &weight, const Sink &sink, int threads);
#endif

// out [m, n] = or += the product of m rows of codes with a quantised weight.
template <class Q>
void linear_codes(const Codes &x, int64_t m, const Packed &weight, float *out, int64_t out_stride,
                  bool accumulate, int threads) {
    if (m < 1) return;
    const Sink sink = {out, out_stride, weight.n, accumulate};
#if SAPWOOD_TILES
    if constexpr (Q::GROUP == 32)
        if (tiles_wanted && m >= TILES_FROM) return linear_tiles<Q>(x, m, weight, sink, threads);
#endif
    if (m <= MOST_PACKED) return linear_packed<Q>(x, m, weight, sink, threads);
    const WideProduct<Q> product(x, m, weight, sink, threads);
    const int64_t tasks = product.blocks * product.columns;
    // Neighbouring columns go to one thread, so that what it fetches ahead is its own.
    share(threads, tasks, most(1, tasks / (8 * threads)),
          [&](int64_t task) { product.compute(task / product.columns, task % product.columns); });
}

template <class Q>
void linear_quantised(const Linear &args, int threads) {
    static thread_local Scratch memory;
    const Codes x = Codes::in(memory, args.m, args.weight.k, Q::GROUP);
    const int useful = threads_for(args.m * args.weight.n * args.weight.k / 8, threads);
    share(useful, args.m, fair_run(args.m, useful),
          [&](int64_t r) { quantise_row(args.x + r * args.x_stride, args.weight.k, x, r); });
    linear_codes<Q>(x, args.m, args.weight, args.out, args.out_stride, args.accumulate, useful);
}

}  // namespace
}  // namespace sapwood
