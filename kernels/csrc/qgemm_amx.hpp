// Many rows of codes times a quantised weight on AMX tiles: what linear_codes says, to the bit.
//
// A tile instruction multiplies rows with channels, 32 pairs of bfloat16 each, and sums in float. A code of
// 16 bits is 256 a + b, b from 0 to 255. 256 a, b and a weight's code fit the 8 significant bits of a
// bfloat16, and floats hold the sums of a group's products, whole numbers, exactly and in whatever order: of
// 4 bits those of both halves together (32 * 32768 * 15 < 2 ** 24), of 8 bits those of each half alone (the
// upper ones are multiples of 256), which one addition then rounds as the conversion from an integer would.
// Tiles of 8-bit integers are no faster, a group being half as long as they are deep, and leave integers to
// join and convert.
#pragma once

#include "qgemm.hpp"

#if SAPWOOD_TILES
namespace sapwood {
namespace {

// In assembler: the compilers' own intrinsics do not say what memory they read.
struct TileShapes {
    uint8_t palette = 1, start = 0, reserved[14] = {};
    uint16_t row_bytes[16] = {};
    uint8_t rows[16] = {};

    void set(int tile, int64_t r, int64_t bytes) {
        rows[tile] = (uint8_t)r;
        row_bytes[tile] = (uint16_t)bytes;
    }
};
SAPWOOD_INLINE void tiles_begin(const TileShapes &shapes) {
    asm volatile("ldtilecfg %0" ::"m"(shapes) : "memory");
}
// A thread that keeps its tiles is dearer to switch, and its core cannot sleep as deeply.
SAPWOOD_INLINE void tiles_end() { asm volatile("tilerelease" ::: "memory"); }
template <int T>
SAPWOOD_INLINE void tile_zero() {
    asm volatile("tilezero %%tmm%c0" ::"i"(T));
}
template <int T>
SAPWOOD_INLINE void tile_load(const void *from, int64_t stride) {
    asm volatile("tileloadd (%0,%1,1), %%tmm%c2" ::"r"(from), "r"(stride), "i"(T) : "memory");
}
template <int T>
SAPWOOD_INLINE void tile_store(float *to, int64_t stride) {
    asm volatile("tilestored %%tmm%c2, (%0,%1,1)" ::"r"(to), "r"(stride), "i"(T) : "memory");
}
template <int SUM, int A, int B>
SAPWOOD_INLINE void tile_dot() {
    asm volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(SUM), "i"(A), "i"(B));
}

// What tiles are loaded from and stored to, for one group of inputs.
template <class Q>
struct Tiles {
    static constexpr bool APART = Q::BITS == 8;       // whether the halves' products are
    static constexpr int ROWS = 12;                   // of a block: their sums fill the registers
    static constexpr int64_t ROW = Q::GROUP * 2;      // bytes of a row's codes
    static constexpr int64_t PIECE = 8;               // groups whose panels stay in the first-level cache
    static constexpr int64_t BLOCKS_BYTES = 1 << 20;  // of rows, in the second-level cache
    static constexpr int64_t SUMS = ROWS * PANEL;     // of one panel
    static constexpr int64_t MADE = TILE_PANELS * SUMS * (APART ? 2 : 1);
    struct alignas(64) Rows {
        char high[ROWS * ROW], low[ROWS * ROW];
        float scales[ROWS], sums[ROWS];
    };
    struct alignas(64) Wide {
        char codes[TILE_PANELS][Q::GROUP * PANEL * 2];  // [pairs of inputs][channels]
        float scales[TILE_PANELS][PANEL], lows[TILE_PANELS][PANEL];
    };

    // Blocks of rows lie [pieces][blocks][groups of the piece], the order in which they are read.
    static int64_t place(int64_t g, int64_t groups, int64_t block, int64_t blocks) {
        const int64_t begin = g / PIECE * PIECE;
        return begin * blocks + block * least(PIECE, groups - begin) + g - begin;
    }
};

SAPWOOD_INLINE Ints float_bits(Ints a) { return _mm512_castps_si512(to_floats(a)); }
// The upper halves of the lanes of a and b, as pairs.
SAPWOOD_INLINE Ints upper_halves(Ints a, Ints b) {
    return _mm512_or_si512(shift_right<16>(a), iand(b, iset1((int)0xffff0000)));
}

// Of pairs of codes, the bits that `mask` has in the upper half of a lane: 65536 times them, as bfloat16.
SAPWOOD_INLINE Ints part_of_codes(Ints pairs, int mask) {
    const Ints first = iand(_mm512_slli_epi32(pairs, 16), iset1(mask));
    return upper_halves(float_bits(first), float_bits(iand(pairs, iset1(mask))));
}

// A block of rows of codes from `row`; those from m on are zeros.
template <class Q>
void tile_rows(const Codes &x, int64_t row, int64_t m, int64_t block, int64_t blocks,
               typename Tiles<Q>::Rows *out) {
    static_assert(Q::GROUP == 32, "a group is as deep as a tile");
    for (int64_t g = 0; g < x.groups; g++) {
        typename Tiles<Q>::Rows &to = out[Tiles<Q>::place(g, x.groups, block, blocks)];
        for (int64_t r = 0; r < Tiles<Q>::ROWS; r++) {
            const bool there = row + r < m;
            const int64_t from = row + r;
            const Ints pairs = there ? iload(x.codes + from * x.row() + g * Q::GROUP) : izero();
            istore(to.high + r * Tiles<Q>::ROW, part_of_codes(pairs, (int)0xff000000));
            istore(to.low + r * Tiles<Q>::ROW, part_of_codes(pairs, 0x00ff0000));
            to.scales[r] = there ? x.scales[from * x.groups + g] : 0.0f;
            to.sums[r] = there ? x.sums[from * x.groups + g] : 0.0f;
        }
    }
}

// Codes of a weight as bfloat16, divided by the 65536 that the rows have too much.
constexpr float DOWN = 1.0f / 65536.0f;

// 0 to 15, twice: a lookup sees one bit above the nibble, which then changes nothing.
SAPWOOD_INLINE Ints nibble_table() {
    const Ints lanes = _mm512_setr_epi32(0, 2, 4, 6, 8, 10, 12, 14, 0, 2, 4, 6, 8, 10, 12, 14);
    const auto scaled = [](Ints a) { return _mm512_castps_si512(mul(to_floats(a), set1(DOWN))); };
    return upper_halves(scaled(lanes), scaled(iadd(lanes, iset1(1))));
}

template <int BYTE>
SAPWOOD_INLINE Ints scaled_byte(Ints words) {
    const Ints code = _mm512_srai_epi32(_mm512_slli_epi32(words, 24 - 8 * BYTE), 24);
    return _mm512_castps_si512(mul(to_floats(code), set1(DOWN)));
}

// A group's codes of one panel: [pairs of inputs][channels].
template <class Q>
SAPWOOD_INLINE void widen_codes(const char *words_at, Ints table, char *to) {
    for (int step = 0; step < Q::GROUP * Q::BITS / 32; step++, words_at += 64) {
        const Ints words = iload(words_at);
        if constexpr (Q::BITS == 4) {
            istore(to, _mm512_permutexvar_epi16(words, table));
            istore(to + 64 * pair_of(1), _mm512_permutexvar_epi16(shift_right<4>(words), table));
            istore(to + 64 * pair_of(2), _mm512_permutexvar_epi16(shift_right<8>(words), table));
            istore(to + 64 * pair_of(3), _mm512_permutexvar_epi16(shift_right<12>(words), table));
        } else {
            istore(to, upper_halves(scaled_byte<0>(words), scaled_byte<2>(words)));
            istore(to + 64, upper_halves(scaled_byte<1>(words), scaled_byte<3>(words)));
        }
        to += 64 * 16 / Q::BITS;
    }
}

template <class Q>
void widen_panels(const Panels<Q> &panels, int64_t begin, int64_t end, typename Tiles<Q>::Wide *to) {
    using Scale = typename Q::Scale;
    const Ints table = nibble_table();
    for (int64_t g = begin; g < end; g++, to++)
        for (int p = 0; p < TILE_PANELS; p++) {
            const char *panel = panels.at[p];
            widen_codes<Q>(panels.codes(p) + g * Q::GROUP_BYTES, table, to->codes[p]);
            store(to->scales[p], load((const Scale *)panel + g * PANEL));
            if constexpr (Q::LOWS)
                store(to->lows[p], load((const Scale *)(panel + Q::scale_bytes(panels.k)) + g * PANEL));
        }
}

// Tiles 0 and 1: the halves of the rows' codes; 2 and 3: the panels; 4 to 7: products.
// Takes the products with panel P that were made before, and begins to make those of the next group.
template <class Q, int P>
SAPWOOD_INLINE void turn_panel(const typename Tiles<Q>::Wide &wide, float *made) {
    constexpr bool APART = Tiles<Q>::APART;
    constexpr int HIGH = 4 + (APART ? 2 * P : P), LOW = HIGH + APART;
    made += P * Tiles<Q>::MADE / TILE_PANELS;
    tile_load<2 + P>(wide.codes[P], 64);
    tile_store<HIGH>(made, PANEL * 4);
    tile_zero<HIGH>();
    tile_dot<HIGH, 0, 2 + P>();
    if constexpr (APART) {
        tile_store<LOW>(made + Tiles<Q>::SUMS, PANEL * 4);
        tile_zero<LOW>();
    }
    tile_dot<LOW, 1, 2 + P>();
}

template <class Q>
SAPWOOD_INLINE void turn(const typename Tiles<Q>::Rows &rows, const typename Tiles<Q>::Wide &wide,
                         float *made) {
    static_assert(TILE_PANELS == 2, "as many tiles are there");
    tile_load<0>(rows.high, Tiles<Q>::ROW);
    tile_load<1>(rows.low, Tiles<Q>::ROW);
    turn_panel<Q, 0>(wide, made);
    turn_panel<Q, 1>(wide, made);
}

// Adds one group's products to the sums of a block.
template <class Q>
SAPWOOD_INLINE void add_products(const float *made, const typename Tiles<Q>::Rows &rows,
                                 const typename Tiles<Q>::Wide &wide,
                                 Vec (&acc)[Tiles<Q>::ROWS][TILE_PANELS]) {
    constexpr int64_t SUMS = Tiles<Q>::SUMS;
    Vec scales[TILE_PANELS], lows[TILE_PANELS];
#pragma GCC unroll 2
    for (int p = 0; p < TILE_PANELS; p++) {
        scales[p] = load(wide.scales[p]);
        if constexpr (Q::LOWS) lows[p] = load(wide.lows[p]);
    }
#pragma GCC unroll 16
    for (int r = 0; r < Tiles<Q>::ROWS; r++) {
        const Vec scale = set1(rows.scales[r]), sum = set1(rows.sums[r]);
#pragma GCC unroll 2
        for (int p = 0; p < TILE_PANELS; p++) {
            const float *at = made + p * Tiles<Q>::MADE / TILE_PANELS + r * PANEL;
            Vec product = load(at);
            if constexpr (Tiles<Q>::APART) product = add(product, load(at + SUMS));
            acc[r][p] = fma(product, mul(scales[p], scale), acc[r][p]);
            if constexpr (Q::LOWS) acc[r][p] = fma(lows[p], sum, acc[r][p]);
        }
    }
}

// Blocks of rows times TILE_PANELS panels, a piece of the groups at a time: the panels, widened, stay in the
// first-level cache, and the sums of a block in registers. Tiles work two groups ahead of the vectors that
// scale what they made, so that neither waits for the other.
template <class Q>
class TileProduct {
    using Rows = typename Tiles<Q>::Rows;
    using Wide = typename Tiles<Q>::Wide;
    static constexpr int64_t PIECE = Tiles<Q>::PIECE, MADE = Tiles<Q>::MADE;
    static constexpr int64_t BLOCK = Tiles<Q>::ROWS * TILE_WIDTH;

    const Rows *rows_;
    const Panels<Q> &panels_;
    int64_t groups_, blocks_;
    float *sums_;  // [blocks][ROWS][TILE_WIDTH]
    Wide *wide_;   // [2][PIECE]
    float *made_;  // [2][MADE]

    // Where the tiles are.
    struct Front {
        const Rows *rows;
        const Wide *wide;
        int64_t left, block, piece;
    };

public:
    TileProduct(const Rows *rows, const Panels<Q> &panels, int64_t groups, int64_t blocks, Scratch &memory)
        : rows_(rows), panels_(panels), groups_(groups), blocks_(blocks) {
        char *at =
            memory.of<char>(2 * PIECE * sizeof(Wide) + (size_t)(2 * MADE + blocks * BLOCK) * sizeof(float));
        wide_ = (Wide *)at;
        made_ = (float *)(at + 2 * PIECE * sizeof(Wide));
        sums_ = made_ + 2 * MADE;
    }

    const float *sums(int64_t block) const { return sums_ + block * BLOCK; }

    // Calls done(block) when its sums are, and soon(block) a little before.
    template <class Soon, class Done>
    void run(const Soon &soon, const Done &done) const {
        shape_tiles();
        Front front = {rows_, wide_, 0, 0, 0};
        begin_piece(front);
        float *made = made_, *before = made_ + MADE;
        const auto go_on = [&]() __attribute__((always_inline)) {
            turn<Q>(*front.rows++, *front.wide++, made);
            float *const next = before;
            before = made, made = next;
            if (--front.left == 0) next_block(front);
        };
        go_on();
        go_on();
        const Rows *rows = rows_;
        for (int64_t piece = 0; piece * PIECE < groups_; piece++)
            for (int64_t block = 0; block < blocks_; block++) {
                const Wide *wide = wide_of(piece);
                Vec acc[Tiles<Q>::ROWS][TILE_PANELS];
                const bool last = (piece + 1) * PIECE >= groups_;
                if (last) soon(block);
                load_sums(acc, sums(block), piece == 0);
                for (int64_t left = size(piece); left > 0; left--, rows++, wide++) {
                    go_on();
                    const float *from = made;
                    asm("" : "+r"(from), "+r"(rows), "+r"(wide));  // else it keeps a pointer for each row
                    add_products<Q>(from, *rows, *wide, acc);
                }
                store_sums(acc, sums_ + block * BLOCK);
                if (last) done(block);
            }
        tiles_end();
    }

private:
    static void shape_tiles() {
        TileShapes shapes;
        for (int tile = 0; tile < 8; tile++)
            if (tile == 2 || tile == 3)
                shapes.set(tile, Q::GROUP / 2, PANEL * 4);
            else
                shapes.set(tile, Tiles<Q>::ROWS, tile < 2 ? Tiles<Q>::ROW : PANEL * 4);
        tiles_begin(shapes);
    }

    int64_t size(int64_t piece) const { return least(PIECE, groups_ - piece * PIECE); }
    Wide *wide_of(int64_t piece) const { return wide_ + piece % 2 * PIECE; }

    void begin_piece(Front &front) const {
        const int64_t begin = front.piece * PIECE;
        widen_panels(panels_, begin, begin + size(front.piece), wide_of(front.piece));
        front.block = 0;
        begin_block(front);
    }
    void begin_block(Front &front) const {
        front.left = size(front.piece);
        front.wide = wide_of(front.piece);
    }
    __attribute__((noinline)) void next_block(Front &front) const {
        if (++front.block < blocks_) return begin_block(front);
        if (++front.piece * PIECE < groups_) return begin_piece(front);
        front = {rows_, wide_, 3, 0, front.piece};  // anything, to have the last products taken
    }

    static SAPWOOD_MEMBER void load_sums(Vec (&acc)[Tiles<Q>::ROWS][TILE_PANELS], const float *sums,
                                         bool none) {
#pragma GCC unroll 16
        for (int r = 0; r < Tiles<Q>::ROWS; r++)
#pragma GCC unroll 2
            for (int p = 0; p < TILE_PANELS; p++)
                acc[r][p] = none ? zero() : load(sums + r * TILE_WIDTH + p * PANEL);
    }
    static SAPWOOD_MEMBER void store_sums(const Vec (&acc)[Tiles<Q>::ROWS][TILE_PANELS], float *sums) {
#pragma GCC unroll 16
        for (int r = 0; r < Tiles<Q>::ROWS; r++)
#pragma GCC unroll 2
            for (int p = 0; p < TILE_PANELS; p++) store(sums + r * TILE_WIDTH + p * PANEL, acc[r][p]);
    }
};

// The rows from `row` to `end`, in tasks of a column of panels and some of the blocks.
template <class Q>
void multiply_tiles(const Codes &x, int64_t row, int64_t end, const Packed &weight, const Sink &sink,
                    int threads) {
    using Rows = typename Tiles<Q>::Rows;
    constexpr int64_t ROWS = Tiles<Q>::ROWS;
    static thread_local Scratch memory;
    const int64_t blocks = ceil_div(end - row, ROWS), columns = ceil_div(weight.n, TILE_WIDTH);
    // One more: of a single group, the tiles, two ahead, read one that is not there.
    Rows *rows = memory.of<Rows>((size_t)(blocks * x.groups + 1));
    // Too few columns to share out evenly: cut the rows as well.
    const int64_t part = ceil_div(blocks, least(blocks, ceil_div(4 * threads, columns)));
    const int64_t tasks = columns * ceil_div(blocks, part);
    share(threads, blocks, 1, [&](int64_t b) {
        const int64_t begin = b / part * part;
        tile_rows<Q>(x, row + b * ROWS, end, b - begin, least(part, blocks - begin), rows + begin * x.groups);
    });
    share(threads, tasks, fair_run(tasks, threads), [&](int64_t task) {
        static thread_local Scratch local;
        const int64_t begin = task / columns * part, channel = task % columns * TILE_WIDTH;
        const Panels<Q> panels(weight, task % columns * TILE_PANELS);
        const TileProduct<Q> product(rows + begin * x.groups, panels, x.groups, least(part, blocks - begin),
                                     local);
        const auto first = [&](int64_t block) { return row + (begin + block) * ROWS; };
        const auto count = [&](int64_t block) { return least(ROWS, end - first(block)); };
        const auto soon = [&](int64_t block) {
            const float *to = sink.out + first(block) * sink.stride + channel;
            for (int64_t r = 0; r < count(block); r++, to += sink.stride)
                for (int c = 0; c < TILE_WIDTH; c += LANES) prefetch_far(to + c);
        };
        product.run(soon, [&](int64_t block) {
            sink.emit(product.sums(block), TILE_WIDTH, first(block), count(block), channel);
        });
    });
}

template <class Q>
void linear_tiles(const Codes &x, int64_t m, const Packed &weight, const Sink &sink, int threads) {
    const int64_t bytes = x.groups * (int64_t)sizeof(typename Tiles<Q>::Rows);
    const int64_t rows = most(4, Tiles<Q>::BLOCKS_BYTES / bytes) * Tiles<Q>::ROWS;
    for (int64_t row = 0; row < m; row += rows)
        multiply_tiles<Q>(x, row, least(row + rows, m), weight, sink, threads);
}

}  // namespace
}  // namespace sapwood
#endif
