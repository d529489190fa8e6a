// How a call of attention is cut into work that may run anywhere.
//
//   segment  tiles that some queries see in the same slots: of one row's new tokens, or of several rows' (a
//            shared stretch); a row's segments follow each other from its first position to its last
//   level    a segment comes after those that any of its rows has before it: all of one level are independent
//   block    some queries of a segment, with the query heads of one or several KV heads
//   piece    a run of a block's tiles; a block with much of a level's work is cut into several
#pragma once

#include <stdlib.h>
#include <string.h>

#include "simd.hpp"

namespace sapwood {
namespace {

constexpr int TILE = 64;
constexpr int64_t BLOCK_ROWS = 192;      // query rows of a block that share a gathered tile
constexpr int64_t ALL_HEADS_BELOW = 16;  // smaller blocks take all KV heads: a slot is read straight through
constexpr int64_t PIECES_PER_THREAD = 4;
constexpr int64_t MAX_SPLIT_FLOATS = 1 << 26;  // of partial results that a call may keep
constexpr int64_t GATHER_ROWS = 4;  // a tile costs its query rows, and about as much as so many more
constexpr int64_t SMALL_COST = 24;  // calls below it are not worth another thread's time

// A new token: its place in the call, and in its sequence.
struct Query {
    int32_t token, position;
};

inline int by_position(const void *a, const void *b) {
    return ((const Query *)a)->position - ((const Query *)b)->position;
}

struct Segment {
    const int32_t *slots;  // of a row that has them, by position
    const Query *queries;
    int64_t count, begin, end, level;  // of queries; tiles
    bool first, last;                  // of these rows' segments
};

// Query row r is query r / group with head r % group of the KV head. With a window, positions ascend.
struct Block {
    const int32_t *slots;
    const Query *list;
    int64_t queries, group;
    int64_t rows, head, heads;  // query rows for each KV head; first KV head, and how many
    int64_t window;             // positions that a query sees, its own included; 0: all up to its own
    int64_t first_tile, end_tile;
    int64_t split;  // where its partial results lie if it is cut, else -1
    bool first, last;

    int64_t tiles() const { return end_tile - first_tile; }
    int64_t position(int64_t r) const { return list[r / group].position; }
    // Query row r sees the positions of the tile from `hidden` up to `seen`.
    int64_t seen(int64_t tile, int64_t r) const {
        return least(TILE, most(0, position(r) + 1 - tile * TILE));
    }
    int64_t hidden(int64_t tile, int64_t r) const {
        return window ? least(TILE, most(0, oldest(r) - tile * TILE)) : 0;
    }
    // The first position and tile that query row r sees.
    int64_t oldest(int64_t r) const { return window ? most(0, position(r) + 1 - window) : 0; }
    int64_t begin_tile(int64_t r) const { return oldest(r) / TILE; }
    // The query rows that see anything of the tile: from first_row up to end_row.
    int64_t first_row(int64_t tile) const {
        int64_t q = 0;
        while (q < queries && list[q].position < tile * TILE) q++;
        return q * group;
    }
    int64_t end_row(int64_t tile) const {
        int64_t q = queries;
        while (window && q > 0 && list[q - 1].position - window >= tile * TILE + TILE - 1) q--;
        return q * group;
    }
    // What computing one tile for one KV head costs, in query rows.
    int64_t cost() const { return rows + GATHER_ROWS; }
};

struct Piece {
    int64_t block, begin, end;  // tiles
};

// The blocks and pieces of one level.
struct Level {
    int64_t first_block, end_block, first_piece, end_piece;
    bool split;
};

struct Plan {
    const Attention &args;
    Query *queries;  // of all rows, in order of the call; then of each shared stretch
    Segment *segments;
    Block *blocks;
    Piece *pieces;
    Level *levels;
    int64_t tokens = 0, num_segments = 0, num_levels = 0, num_blocks = 0, num_pieces = 0;
    int64_t split_floats = 0, cost = 0;

    Plan(const Attention &attention, int threads, int64_t partial_size) : args(attention) {
        static thread_local Scratch memory[5];
        int64_t shared_tokens = 0;
        for (int64_t i = 0; i < args.num_rows; i++) tokens += args.counts[i];
        for_each_stretch([&](int64_t, int64_t, int64_t n, const int32_t *members) {
            for (int64_t j = 0; j < n; j++) shared_tokens += args.counts[members[j]];
        });
        queries = memory[0].of<Query>((size_t)(tokens + shared_tokens));
        segments = memory[1].of<Segment>((size_t)(args.num_rows + args.shared_size));
        list_segments();
        blocks = memory[2].of<Block>(count_blocks());
        levels = memory[3].of<Level>((size_t)num_levels);
        size_t pieces_at_most = 0;
        for (int64_t level = 0; level < num_levels; level++) {
            levels[level].first_block = num_blocks;
            list_blocks(level);
            levels[level].end_block = num_blocks;
        }
        for (int64_t i = 0; i < num_blocks; i++) pieces_at_most += (size_t)blocks[i].tiles();
        pieces = memory[4].of<Piece>(pieces_at_most);
        for (int64_t level = 0; level < num_levels; level++)
            list_pieces(levels[level], threads, partial_size);
    }

private:
    template <class Visit>
    void for_each_stretch(Visit visit) const {
        for (const int32_t *at = args.shared, *end = at + args.shared_size; at < end; at += 3 + at[2])
            visit(at[0] / TILE, at[1] / TILE, at[2], at + 3);
    }

    // Where a row's next segment begins.
    struct Progress {
        Query *queries;
        int64_t tile, level;
    };

    void list_segments() {
        static thread_local Scratch memory;
        Progress *rows = memory.of<Progress>((size_t)args.num_rows);
        int32_t token = 0;
        for (int64_t i = 0; i < args.num_rows; i++) {
            rows[i] = {queries + token, 0, 0};
            for (int32_t j = 0; j < args.counts[i]; j++, token++)
                queries[token] = {token, args.starts[i] + j};
        }
        Query *list = queries + token;
        for_each_stretch([&](int64_t begin, int64_t end, int64_t n, const int32_t *members) {
            int64_t count = 0, level = 0, reader = members[0];
            for (int64_t j = 0; j < n; j++) {
                const int64_t i = members[j];
                if (rows[i].tile < begin) add_own(i, begin, rows[i]);
                level = most(level, rows[i].level);
                memcpy(list + count, rows[i].queries, (size_t)args.counts[i] * sizeof(Query));
                count += args.counts[i];
                if (args.counts[i]) reader = i;
            }
            // A tile is computed for a run of query rows: with a window, of those that see any of it.
            if (args.window) qsort(list, (size_t)count, sizeof(Query), by_position);
            if (count) add(slots(reader), list, count, begin, end, level, begin == 0, false);
            list += count;
            for (int64_t j = 0; j < n; j++) rows[members[j]].tile = end, rows[members[j]].level = level + 1;
        });
        for (int64_t i = 0; i < args.num_rows; i++)
            if (args.counts[i]) add_own(i, ceil_div(args.starts[i] + args.counts[i], TILE), rows[i]);
    }

    const int32_t *slots(int64_t i) const { return args.slot_table + args.rows[i] * args.table_stride; }

    void add_own(int64_t i, int64_t end, Progress &at) {
        const bool last = end * TILE >= args.starts[i] + args.counts[i];
        if (args.counts[i])
            add(slots(i), at.queries, args.counts[i], at.tile, end, at.level, at.tile == 0, last);
        at.tile = end;
        at.level++;
    }

    void add(const int32_t *slots, const Query *list, int64_t count, int64_t begin, int64_t end,
             int64_t level, bool first, bool last) {
        segments[num_segments++] = {slots, list, count, begin, end, level, first, last};
        num_levels = most(num_levels, level + 1);
    }

    int64_t group() const { return args.hq / args.hkv; }
    int64_t queries_of_block() const { return most(1, BLOCK_ROWS / group()); }

    size_t count_blocks() const {
        int64_t count = 0;
        for (int64_t i = 0; i < num_segments; i++) count += ceil_div(segments[i].count, queries_of_block());
        return (size_t)(count * args.hkv);
    }

    void list_blocks(int64_t level) {
        for (int64_t i = 0; i < num_segments; i++) {
            const Segment &segment = segments[i];
            if (segment.level != level) continue;
            for (int64_t done = 0; done < segment.count; done += queries_of_block())
                add_blocks(segment, done, least(queries_of_block(), segment.count - done));
        }
    }

    void add_blocks(const Segment &segment, int64_t done, int64_t count) {
        Block block;
        block.slots = segment.slots;
        block.list = segment.queries + done;
        block.queries = count;
        block.group = group();
        block.rows = count * block.group;
        block.heads = block.rows < ALL_HEADS_BELOW ? args.hkv : 1;
        block.window = args.window;
        block.first_tile = most(segment.begin, block.begin_tile(0));
        block.end_tile = segment.end;
        if (segment.last) block.end_tile = block.list[count - 1].position / TILE + 1;
        block.split = -1;
        block.first = segment.first;
        block.last = segment.last;
        if (block.first_tile >= block.end_tile) return;  // a window hides all of it
        for (block.head = 0; block.head < args.hkv; block.head += block.heads) blocks[num_blocks++] = block;
    }

    void list_pieces(Level &level, int threads, int64_t partial_size) {
        int64_t level_cost = 0, floats = 0;
        for (int64_t i = level.first_block; i < level.end_block; i++)
            level_cost += blocks[i].tiles() * blocks[i].heads * blocks[i].cost();
        const int64_t share = threads > 1 ? ceil_div(level_cost, PIECES_PER_THREAD * threads) : level_cost;
        level.first_piece = num_pieces;
        for (int64_t i = level.first_block; i < level.end_block; i++) {
            Block &block = blocks[i];
            const int64_t tiles = block.tiles(), size = tiles * block.heads * block.rows * partial_size;
            int64_t cuts = ceil_div(tiles, most(1, ceil_div(share, block.heads * block.cost())));
            if (cuts > 1 && floats + size <= MAX_SPLIT_FLOATS) {
                block.split = floats;
                floats += size;
            } else {
                cuts = 1;
            }
            const int64_t step = ceil_div(tiles, cuts);
            for (int64_t begin = block.first_tile; begin < block.end_tile; begin += step)
                pieces[num_pieces++] = {i, begin, least(begin + step, block.end_tile)};
        }
        level.end_piece = num_pieces;
        level.split = floats > 0;
        split_floats = most(split_floats, floats);
        cost += level_cost;
    }
};

}  // namespace
}  // namespace sapwood
