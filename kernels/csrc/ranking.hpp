// The best entries of a row of logits, in order: largest first, ties by lowest id.
#pragma once

#include <string.h>

#include "simd.hpp"

namespace sapwood {
namespace {

constexpr int64_t RANK_BLOCK = 64;  // logits whose maximum is kept

struct Ranked {
    uint32_t key;  // ascending keys are descending logits
    int32_t id;
};

// Lanes beyond the row count as -infinity.
SAPWOOD_INLINE Vec load_logits(const float *p, int64_t left) {
    if (left >= LANES) return load(p);
    return pick(first((int)left), load_part(p, (int)left), set1(-__builtin_inff()));
}

SAPWOOD_INLINE uint32_t rank_key(float logit) {
    logit += 0.0f;  // -0 and 0 are a tie
    uint32_t b;
    memcpy(&b, &logit, sizeof b);
    return b & 0x80000000u ? b : ~(b | 0x80000000u);
}

// Stable; returns the array that holds the result, `items` or `spare`.
inline Ranked *sort_ranked(Ranked *items, Ranked *spare, int64_t count) {
    if (count <= 32) {
        for (int64_t i = 1; i < count; i++) {
            const Ranked item = items[i];
            int64_t j = i;
            for (; j > 0 && items[j - 1].key > item.key; j--) items[j] = items[j - 1];
            items[j] = item;
        }
        return items;
    }
    for (int shift = 0; shift < 32; shift += 8) {
        uint32_t at[256] = {};
        for (int64_t i = 0; i < count; i++) at[(items[i].key >> shift) & 255]++;
        uint32_t sum = 0;
        for (int b = 0; b < 256; b++) {
            const uint32_t here = at[b];
            at[b] = sum;
            sum += here;
        }
        for (int64_t i = 0; i < count; i++) spare[at[(items[i].key >> shift) & 255]++] = items[i];
        Ranked *sorted = spare;
        spare = items;
        items = sorted;
    }
    return items;
}

// Ranks a row as far down as asked. Only what reaches the limit is sorted; for the k best, that is the k-th
// largest maximum of a block, as at least k logits reach it.
struct Ranking {
    const float *logits;
    int64_t vocab, blocks;
    float *maxima;
    Ranked *items, *spare;

    Ranking(const float *row, int64_t size, Scratch &memory) : logits(row), vocab(size) {
        blocks = ceil_div(vocab, RANK_BLOCK);
        items = memory.of<Ranked>((size_t)(2 * vocab + blocks));
        spare = items + vocab;
        maxima = (float *)(spare + vocab);
        for (int64_t b = 0; b < blocks; b++) {
            Vec top = set1(-__builtin_inff());
            const int64_t begin = b * RANK_BLOCK, end = least(begin + RANK_BLOCK, vocab);
            for (int64_t i = begin; i < end; i += LANES) top = max(top, load_logits(logits + i, vocab - i));
            maxima[b] = hmax(top);
        }
    }

    // The k-th largest block maximum; -infinity if there are not as many blocks.
    float cut(int64_t k) {
        if (k > blocks) return -__builtin_inff();
        for (int64_t b = 0; b < blocks; b++) items[b] = {rank_key(maxima[b]), (int32_t)b};
        return maxima[sort_ranked(items, spare, blocks)[k - 1].id];
    }

    // At least the k best (all, if there are fewer). As for `reaching`.
    const Ranked *best(int64_t k, int64_t *count) { return reaching(cut(k), count); }

    // All that are not below `lowest`, in order; count says how many. Valid until the next call.
    const Ranked *reaching(float lowest, int64_t *count) {
        int64_t found = 0;
        for (int64_t b = 0; b < blocks; b++) {
            if (!(maxima[b] >= lowest)) continue;
            const int64_t begin = b * RANK_BLOCK, end = least(begin + RANK_BLOCK, vocab);
            for (int64_t i = begin; i < end; i += LANES) {
                unsigned hits = bits(ge(load_logits(logits + i, vocab - i), set1(lowest)));
                if (end - i < LANES) hits &= bits(first((int)(end - i)));
                for (; hits; hits &= hits - 1) {
                    const int64_t id = i + __builtin_ctz(hits);
                    items[found++] = {rank_key(logits[id]), (int32_t)id};
                }
            }
        }
        *count = found;
        return sort_ranked(items, spare, found);
    }
};

}  // namespace
}  // namespace sapwood
