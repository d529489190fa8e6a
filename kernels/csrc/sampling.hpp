// Penalties, draws and log-probabilities. Rows run in parallel; each depends on itself alone.
#pragma once

#include "elementwise.hpp"
#include "ranking.hpp"

namespace sapwood {
namespace {

constexpr int64_t SUM_BLOCK = 256;  // weights summed in float; the blocks' sums are added in double
constexpr float GREEDY_BELOW = 1e-5f;
enum SampleError { OK = 0, NOT_FINITE = 1, NOTHING_LEFT = 2 };

inline void penalise(const Change &change, const float *penalties, int64_t vocab, float *logits) {
    const float repetition = penalties[0], presence = penalties[1], frequency = penalties[2];
    for (int64_t i = 0; i < vocab; i++) {
        const int32_t count = change.output_counts[i];
        float x = logits[i];
        const float scaled = x > 0 ? x / repetition : x * repetition;
        x = change.prompt_seen[i] || count > 0 ? scaled : x;
        logits[i] = count > 0 ? x - (frequency * (float)count + presence) : x;
    }
}

inline void apply_mask(const int32_t *mask, int64_t vocab, float *logits) {
    const Vec never = set1(-__builtin_inff());
    for (int64_t i = 0; i < vocab; i += LANES) {
        const uint32_t allowed = (uint32_t)mask[i / 32] >> (i % 32);
        store_upto(logits + i, pick(mask_of(allowed), load_upto(logits + i, vocab - i), never), vocab - i);
    }
}

// The row as it is drawn from: a changed copy, if anything is to be changed.
inline const float *changed(const Sample &args, int32_t row, Scratch &memory) {
    const float *logits = args.logits + row * args.vocab;
    if (!args.changes) return logits;
    const Change &change = args.changes[row];
    if (!change.output_counts && !change.num_biases && !change.num_banned && !change.mask) return logits;
    float *copy = memory.of<float>((size_t)args.vocab);
    memcpy(copy, logits, (size_t)args.vocab * sizeof(float));
    if (change.output_counts) penalise(change, args.penalties + 3 * row, args.vocab, copy);
    for (int64_t i = 0; i < change.num_biases; i++) copy[change.bias_ids[i]] += change.biases[i];
    for (int64_t i = 0; i < change.num_banned; i++) copy[change.banned[i]] = -__builtin_inff();
    if (change.mask) apply_mask(change.mask, args.vocab, copy);
    return copy;
}

// Philox4x32-10 (Salmon et al., SC 2011): a draw in [0, 1) that is a multiple of 2 ** -53.
inline double uniform(int64_t seed, int32_t choice, int32_t position) {
    uint32_t c0 = (uint32_t)position, c1 = (uint32_t)choice, c2 = 0, c3 = 0;
    uint32_t k0 = (uint32_t)seed, k1 = (uint32_t)((uint64_t)seed >> 32);
    for (int round = 0; round < 10; round++) {
        const uint64_t p0 = (uint64_t)0xD2511F53u * c0, p1 = (uint64_t)0xCD9E8D57u * c2;
        const uint32_t next0 = (uint32_t)(p1 >> 32) ^ c1 ^ k0, next2 = (uint32_t)(p0 >> 32) ^ c3 ^ k1;
        c0 = next0;
        c1 = (uint32_t)p1;
        c2 = next2;
        c3 = (uint32_t)p0;
        k0 += 0x9E3779B9u;
        k1 += 0xBB67AE85u;
    }
    return (double)(((uint64_t)(c0 >> 5) << 26) + (c1 >> 6)) * 0x1p-53;
}

// The row's largest logit; the error if no draw is possible.
inline SampleError find_top(const float *logits, int64_t vocab, float *top) {
    Vec best = set1(-__builtin_inff());
    unsigned numbers = ~0u;
    for (int64_t i = 0; i < vocab; i += LANES) {
        Vec x = load_logits(logits + i, vocab - i);
        numbers &= bits(eq(x, x));
        best = max(best, x);
    }
    *top = hmax(best);
    const unsigned all = bits(first(LANES));
    if ((numbers & all) != all || *top == __builtin_inff()) return NOT_FINITE;
    return *top == -__builtin_inff() ? NOTHING_LEFT : OK;
}

inline int32_t first_equal(const float *logits, int64_t vocab, float top) {
    for (int64_t i = 0; i < vocab; i += LANES) {
        const unsigned hits = bits(eq(load_logits(logits + i, vocab - i), set1(top)));
        if (hits) return (int32_t)(i + __builtin_ctz(hits));
    }
    return -1;
}

// Weights e ** ((logit - top) / temperature) of a row, and the sum of each block of them.
struct Weights {
    const float *logits;
    int64_t vocab, blocks;
    float *weights;
    double *sums, total;

    Weights(const float *row, int64_t size, float top, float temperature, Scratch &memory)
        : logits(row), vocab(size), blocks(ceil_div(size, SUM_BLOCK)) {
        sums = memory.of<double>((size_t)(blocks + blocks * SUM_BLOCK / 2));
        weights = (float *)(sums + blocks);
        const Vec shift = set1(top), factor = set1(1.0f / temperature);
        sum_blocks(
            [&](int64_t i) { return exp(mul(sub(load_logits(logits + i, vocab - i), shift), factor)); });
    }

    // Sets the weights to at(i) for every vector of them.
    template <class At>
    void sum_blocks(At at) {
        total = 0;
        for (int64_t b = 0; b < blocks; b++) {
            Vec sum = zero();
            for (int64_t i = b * SUM_BLOCK; i < least((b + 1) * SUM_BLOCK, vocab); i += LANES) {
                Vec w = at(i);
                store(weights + i, w);
                sum = add(sum, w);
            }
            sums[b] = hsum(sum);
            total += sums[b];
        }
    }

    // Sets to 0 what ranks behind `last` (if there is one) or is less than `least_weight`.
    void filter(const Ranked *last, float least_weight) {
        const float value = last ? logits[last->id] : -__builtin_inff();
        const int64_t id = last ? last->id : vocab;
        sum_blocks([&](int64_t i) {
            Vec x = load_logits(logits + i, vocab - i), w = load(weights + i);
            const int64_t ties = most(0, least(LANES, id + 1 - i));
            Vec kept = pick(gt(x, set1(value)), w, keep(first((int)ties), keep(eq(x, set1(value)), w)));
            return keep(ge(kept, set1(least_weight)), kept);
        });
    }

    // The first id, in order, at which the cumulative weight exceeds `share` of the total.
    int32_t at_share(double share) const {
        const double target = share * total;
        double sum = 0;
        int64_t b = 0;
        for (; b + 1 < blocks && !(sum + sums[b] > target); b++) sum += sums[b];
        // Rounding may let the target lie behind the last weight: step back to a block that has any.
        while (b > 0 && !(sums[b] > 0)) b--;
        int64_t found = b * SUM_BLOCK;
        for (int64_t i = found; i < least((b + 1) * SUM_BLOCK, vocab); i++) {
            if (!(weights[i] > 0)) continue;
            found = i;
            sum += weights[i];
            if (sum > target) break;
        }
        return (int32_t)found;
    }
};

// A logit such that those that reach it, which should not be many more than needed, have `share` of the
// weight.
inline float nucleus_floor(const Weights &weights, const Ranking &ranking, float top, float temperature,
                           double share) {
    for (float depth = 1.0f; depth < 88.0f; depth *= 1.4f) {
        const float floor = top - depth * temperature;
        const Vec lowest = set1(floor);
        double mass = 0;
        for (int64_t b = 0; b < ranking.blocks; b++) {
            if (!(ranking.maxima[b] >= floor)) continue;
            Vec sum = zero();
            for (int64_t i = b * RANK_BLOCK; i < least((b + 1) * RANK_BLOCK, weights.vocab); i += LANES)
                sum = add(sum, keep(ge(load_logits(weights.logits + i, weights.vocab - i), lowest),
                                    load(weights.weights + i)));
            mass += hsum(sum);
        }
        if (mass >= share * weights.total) return floor;
    }
    return -__builtin_inff();
}

// The last entry, in order of rank, that top_k and top_p keep.
inline const Ranked *last_kept(const Sample &args, int64_t i, float top, const Weights &weights,
                               Ranking &ranking) {
    const bool by_k = args.top_k[i] > 0 && args.top_k[i] < args.vocab;
    int64_t count = args.top_k[i];
    if (by_k && args.top_p[i] >= 1.0f) return ranking.best(count, &count) + args.top_k[i] - 1;
    double total = weights.total;
    const Ranked *ranked;
    if (by_k) {
        ranked = ranking.best(count, &count);
        count = args.top_k[i];
        total = 0;
        for (int64_t j = 0; j < count; j++) total += weights.weights[ranked[j].id];
    } else {
        ranked = ranking.reaching(nucleus_floor(weights, ranking, top, args.temperature[i], args.top_p[i]),
                                  &count);
    }
    double sum = 0;
    int64_t last = 0;
    for (; last + 1 < count; last++) {
        sum += weights.weights[ranked[last].id];
        if (!(sum < (double)args.top_p[i] * total)) break;
    }
    return ranked + last;
}

inline SampleError sample_one(const Sample &args, int64_t i) {
    static thread_local Scratch changed_memory, weight_memory, rank_memory;
    const float *logits = changed(args, args.source[i], changed_memory);
    float top;
    const SampleError error = find_top(logits, args.vocab, &top);
    if (error != OK) return error;
    if (args.temperature[i] < GREEDY_BELOW || args.top_k[i] == 1) {
        args.ids[i] = first_equal(logits, args.vocab, top);
        return OK;
    }
    Weights weights(logits, args.vocab, top, args.temperature[i], weight_memory);
    const bool ranks = (args.top_k[i] > 0 && args.top_k[i] < args.vocab) || args.top_p[i] < 1.0f;
    if (ranks) {
        Ranking ranking(logits, args.vocab, rank_memory);
        weights.filter(last_kept(args, i, top, weights, ranking), args.min_p[i]);
    } else if (args.min_p[i] > 0) {
        weights.filter(nullptr, args.min_p[i]);
    }
    args.ids[i] = weights.at_share(uniform(args.seeds[i], args.choices[i], args.positions[i]));
    return OK;
}

void sample(const Sample &args, int threads) {
    share(threads, args.n, 1, [&](int64_t i) { args.errors[i] = sample_one(args, i); });
    // A row's first draw becomes its next token; its other draws saw the counts without it.
    for (int64_t i = 0; args.changes && i < args.n; i++) {
        const Change &change = args.changes[args.source[i]];
        const bool next = i == 0 || args.source[i] != args.source[i - 1];
        if (next && change.output_counts && args.errors[i] == OK) change.output_counts[args.ids[i]]++;
    }
}

inline void logprobs_one(const Logprobs &args, int64_t i) {
    static thread_local Scratch weight_memory, rank_memory;
    const float *logits = args.logits + args.source[i] * args.vocab;
    int32_t *ids = args.top_ids + i * args.kmax;
    float *values = args.top_values + i * args.kmax;
    for (int64_t j = 0; j < args.kmax; j++) {
        ids[j] = -1;
        values[j] = -__builtin_inff();
    }
    float top;
    if (find_top(logits, args.vocab, &top) != OK) {
        args.logprob[i] = __builtin_nanf("");
        args.norm[i] = __builtin_nan("");
        return;
    }
    const Weights weights(logits, args.vocab, top, 1.0f, weight_memory);
    const double norm = (double)top + __builtin_log(weights.total);
    args.norm[i] = norm;
    args.logprob[i] = (float)((double)logits[args.ids[i]] - norm);
    if (args.top[i] == 0) return;
    Ranking ranking(logits, args.vocab, rank_memory);
    int64_t count;
    const Ranked *best = ranking.best(args.top[i], &count);
    for (int64_t j = 0; j < least(count, args.top[i]); j++) {
        ids[j] = best[j].id;
        values[j] = (float)((double)logits[best[j].id] - norm);
    }
}

void logprobs(const Logprobs &args, int threads) {
    share(threads, args.n, 1, [&](int64_t i) { logprobs_one(args, i); });
}

}  // namespace
}  // namespace sapwood
