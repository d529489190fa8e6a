// Causal attention over KV slots: the work of one call, cut into pieces that may run anywhere.
//
//   block   some queries of one row, with the query heads of one or several KV heads
//   piece   a run of a block's tiles; a block is cut into several when there are few blocks for the threads
//
// attention_tile.hpp holds the arithmetic. Every tile's partial result is the same wherever it is computed,
// and they are always merged one by one in tile order, so how a call is cut cannot be seen in the result.
#pragma once


#include "attention_tile.hpp"

namespace sapwood {
namespace {

constexpr int64_t BLOCK_ROWS = 96;       // query rows of a block that share a gathered tile
constexpr int64_t ALL_HEADS_BELOW = 16;  // smaller blocks take all KV heads: a slot is read straight through
constexpr int64_t PIECES_PER_THREAD = 4;
constexpr int64_t MAX_SPLIT_FLOATS = 1 << 26;  // of partial results that a call may keep

struct Piece {
    int64_t block, begin, end;  // tiles
};

struct Plan {
    Block *blocks;
    Piece *pieces;
    int64_t num_blocks, num_pieces, split_floats, units;
};

// Calls visit(block) for every block of the call, in order.
template <class Visit>
void for_each_block(const Attention &args, Visit visit) {
    const int64_t group = args.hq / args.hkv, most_queries = most(1, BLOCK_ROWS / group);
    int64_t token = 0;
    for (int64_t i = 0; i < args.num_rows; i++) {
        const int64_t count = args.counts[i];
        for (int64_t done = 0; done < count; done += most_queries) {
            Block block;
            block.slots = args.slot_table + args.rows[i] * args.table_stride;
            block.token = token + done;
            block.position = args.starts[i] + done;
            block.queries = least(most_queries, count - done);
            block.rows = block.queries * group;
            block.heads = block.rows < ALL_HEADS_BELOW ? args.hkv : 1;
            block.window = args.window;
            block.first_tile = block.begin_tile(0);
            block.end_tile = ceil_div(block.position + block.queries, TILE);
            block.split = -1;
            for (block.head = 0; block.head < args.hkv; block.head += block.heads) visit(block);
        }
        token += count;
    }
}

inline Plan make_plan(const Attention &args, int threads) {
    static thread_local Scratch blocks, pieces;
    Plan plan = {nullptr, nullptr, 0, 0, 0, 0};
    int64_t tiles = 0;
    for_each_block(args, [&](const Block &block) {
        plan.num_blocks++;
        tiles += block.tiles();
        plan.units += block.tiles() * block.heads;
    });
    const int64_t want = PIECES_PER_THREAD * threads;
    const bool few = threads > 1 && plan.num_blocks < want;
    const int64_t length = few ? most(1, ceil_div(tiles, want)) : INT64_MAX;
    plan.blocks = blocks.of<Block>((size_t)plan.num_blocks);
    plan.pieces = pieces.of<Piece>((size_t)(plan.num_blocks + (few ? tiles : 0)));
    int64_t at = 0;
    for_each_block(args, [&](Block block) {
        const int64_t floats = block.tiles() * block.heads * partial_floats(block.rows, padded(args.d));
        const bool split = block.tiles() > length && plan.split_floats + floats <= MAX_SPLIT_FLOATS;
        if (split) {
            block.split = plan.split_floats;
            plan.split_floats += floats;
        }
        const int64_t end = block.end_tile, step = split ? length : block.tiles();
        for (int64_t begin = block.first_tile; begin < end; begin += step)
            plan.pieces[plan.num_pieces++] = {at, begin, least(begin + step, end)};
        plan.blocks[at++] = block;
    });
    return plan;
}

// A piece of a block that was cut leaves its tiles' partial results in `kept`; a whole block is finished
// here.
template <class T>
void run_piece(const Attention &args, const Block &block, int64_t begin, int64_t end, float *kept) {
    Workspace<T> space(args, block);
    space.read_queries();
    const int64_t floats = partial_floats(block.rows, space.width);
    for (int64_t tile = begin; tile < end; tile++)
        for (int64_t h = 0; h < block.heads; h++) {
            space.gather(tile, h, end);
            const int64_t place = (tile - block.first_tile) * block.heads + h;
            float *memory = kept ? kept + place * floats : space.scratch_partial;
            Partial partial(memory, block.rows, space.width);
            space.compute(tile, h, partial);
            if (!kept) merge(block, tile, space.width, partial, space.running(h));
        }
    if (!kept)
        for (int64_t h = 0; h < block.heads; h++) finish(args, block, h, space.width, space.running(h));
}

inline void merge_kept(const Attention &args, const Block &block, float *kept) {
    const int64_t width = padded(args.d), floats = partial_floats(block.rows, width);
    for (int64_t h = 0; h < block.heads; h++) {
        Partial sum(kept + h * floats, block.rows, width);
        for (int64_t i = 1; i < block.tiles(); i++)
            merge(block, block.first_tile + i, width,
                  Partial(kept + (i * block.heads + h) * floats, block.rows, width), sum);
        finish(args, block, h, width, sum);
    }
}

template <class T>
void attend_typed(const Attention &args, int threads) {
    static thread_local Scratch partials;
    const Plan plan = make_plan(args, threads);
    float *kept = partials.of<float>((size_t)plan.split_floats);
    const int useful = plan.units < 4 ? 1 : threads;
    share(useful, plan.num_pieces, 1, [&](int64_t i) {
        const Piece &piece = plan.pieces[i];
        const Block &block = plan.blocks[piece.block];
        run_piece<T>(args, block, piece.begin, piece.end, block.split < 0 ? nullptr : kept + block.split);
    });
    if (plan.split_floats == 0) return;
    share(useful, plan.num_blocks, 1, [&](int64_t i) {
        if (plan.blocks[i].split >= 0) merge_kept(args, plan.blocks[i], kept + plan.blocks[i].split);
    });
}

void attend(const Attention &args, int threads) {
    if (args.dtype == Dtype::f16)
        attend_typed<half>(args, threads);
    else
        attend_typed<float>(args, threads);
}

}  // namespace
}  // namespace sapwood
