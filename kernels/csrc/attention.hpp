// Causal attention over KV slots: runs what attention_plan.hpp planned.
//
// attention_tile.hpp holds the arithmetic. Every tile's partial result is the same wherever it is computed,
// and they are always merged one by one in tile order, so neither how a call is cut nor what its rows share
// can be seen in the result.
#pragma once

#include "attention_tile.hpp"

namespace sapwood {
namespace {

// What a query head has so far, between the segments of its row: out [width], max, sum.
struct States {
    float *memory;
    int64_t heads, width;

    float *of(int64_t token, int64_t head) const { return memory + (token * heads + head) * (width + 2); }
};

// Calls visit(query row, its token, its query head) for the KV head h of the block.
template <class Visit>
void for_each_row(const Block &block, int64_t h, Visit visit) {
    for (int64_t r = 0; r < block.rows; r++)
        visit(r, block.list[r / block.group].token, (block.head + h) * block.group + r % block.group);
}

inline void resume(const States &states, const Block &block, int64_t h, const Partial &into) {
    if (block.first) return;
    for_each_row(block, h, [&](int64_t r, int64_t token, int64_t head) {
        const float *from = states.of(token, head);
        memcpy(into.out + r * states.width, from, (size_t)states.width * sizeof(float));
        into.max[r] = from[states.width];
        into.sum[r] = from[states.width + 1];
    });
}

// Leaves the result for the next segment or, after the last, in the call's output.
inline void leave(const Attention &args, const States &states, const Block &block, int64_t h,
                  const Partial &total) {
    const int64_t width = states.width;
    for_each_row(block, h, [&](int64_t r, int64_t token, int64_t head) {
        const float *from = total.out + r * width;
        if (block.last) {
            float *out = args.out + (token * args.hq + head) * args.d;
            const Vec factor = set1(1.0f / total.sum[r]);
            for (int64_t c = 0; c < args.d; c += LANES)
                store_upto(out + c, mul(load(from + c), factor), args.d - c);
        } else {
            float *to = states.of(token, head);
            memcpy(to, from, (size_t)width * sizeof(float));
            to[width] = total.max[r];
            to[width + 1] = total.sum[r];
        }
    });
}

// A piece of a block that was cut leaves its tiles' partial results in `kept`; a whole block is finished
// here.
template <class T>
void run_piece(const Attention &args, const States &states, const Block &block, const Piece &piece,
               float *kept) {
    Workspace<T> space(args, block);
    space.read_queries();
    const int64_t floats = block.rows * partial_floats(args.d);
    for (int64_t h = 0; !kept && h < block.heads; h++) resume(states, block, h, space.running(h));
    for (int64_t tile = piece.begin; tile < piece.end; tile++) {
        space.enter(tile, piece.begin, piece.end);
        for (int64_t h = 0; h < block.heads; h++) {
            const int64_t place = (tile - block.first_tile) * block.heads + h;
            const Partial partial(kept ? kept + place * floats : space.partial_memory, block.rows,
                                  space.width);
            space.compute(tile, h, tile + 1 < piece.end, partial);
            if (!kept) merge(block, tile, space.width, partial, space.running(h));
        }
    }
    for (int64_t h = 0; !kept && h < block.heads; h++) leave(args, states, block, h, space.running(h));
}

inline void merge_kept(const Attention &args, const States &states, const Block &block, float *kept) {
    static thread_local Scratch memory;
    const int64_t width = states.width, floats = block.rows * (width + 2);
    const Partial sum(memory.of<float>((size_t)floats), block.rows, width);
    for (int64_t h = 0; h < block.heads; h++) {
        resume(states, block, h, sum);
        for (int64_t i = 0; i < block.tiles(); i++)
            merge(block, block.first_tile + i, width,
                  Partial(kept + (i * block.heads + h) * floats, block.rows, width), sum);
        leave(args, states, block, h, sum);
    }
}

template <class T>
void attend_typed(const Attention &args, int threads) {
    static thread_local Scratch partials, memory;
    const Plan plan(args, threads, partial_floats(args.d));
    float *const kept = partials.of<float>((size_t)plan.split_floats);
    States states = {nullptr, args.hq, padded(args.d)};
    if (args.shared_size)
        states.memory = memory.of<float>((size_t)(plan.tokens * args.hq * (states.width + 2)));
    const int useful = plan.cost < SMALL_COST ? 1 : threads;
    for (int64_t i = 0; i < plan.num_levels; i++) {
        const Level &level = plan.levels[i];
        share(useful, level.end_piece - level.first_piece, 1, [&](int64_t j) {
            const Piece &piece = plan.pieces[level.first_piece + j];
            const Block &block = plan.blocks[piece.block];
            run_piece<T>(args, states, block, piece, block.split < 0 ? nullptr : kept + block.split);
        });
        if (!level.split) continue;
        share(useful, level.end_block - level.first_block, 1, [&](int64_t j) {
            const Block &block = plan.blocks[level.first_block + j];
            if (block.split >= 0) merge_kept(args, states, block, kept + block.split);
        });
    }
}

void attend(const Attention &args, int threads) {
    if (args.dtype == Dtype::f16)
        attend_typed<half>(args, threads);
    else
        attend_typed<float>(args, threads);
}

}  // namespace
}  // namespace sapwood
