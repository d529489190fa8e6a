// What an instruction set's translation unit offers: one table of plain functions. Only this header and
// bind.cpp cross translation units, so that no code compiled for one instruction set runs on another.
#pragma once

#include <stdint.h>

namespace sapwood {

using half = uint16_t;

// Storage of floats.
enum class Dtype { f32 = 0, f16 = 1 };

// Storage of a packed weight (formats.hpp says how each lies in memory).
enum class Format { f32 = 0, f16 = 1, q8 = 2, q4 = 3, q8w = 4, q4w = 5 };

// n output channels of k inputs each.
struct Packed {
    const void *data;
    Format format;
    int64_t n, k;
};

struct Linear {
    const float *x;
    int64_t x_stride, m;
    Packed weight;
    float *out;
    int64_t out_stride;
    bool accumulate;
};

struct Embed {
    const int32_t *ids;
    int64_t m;
    Packed weight;
    float *out;
};

// Floats [n, k] into an f32 or f16 weight.
struct Pack {
    const float *weight;
    int64_t n, k;
    void *out;
    Format format;
};

// Codes [n, k], scales and lows [n, ceil(k / group)] into a quantised weight: a weight is scale * code + low.
struct PackCodes {
    const int8_t *codes;
    const float *scales, *lows;
    int64_t n, k;
    void *out;
    Format format;
};

struct Norm {
    const float *x;
    int64_t x_stride, m, heads, size;
    const float *weight;
    float eps;
    float *out;
    int64_t out_stride;
};

enum class Activation { silu = 0, gelu_tanh = 1 };

struct Gated {
    const float *gate_up;
    int64_t m, size;
    Activation activation;
    float *out;
};

struct Rope {
    float *qkv;
    int64_t m;
    const int32_t *positions, *slots;
    const float *table;
    int64_t hq, hkv, d, rotary;  // the first `rotary` channels of a head turn
    void *k_pool, *v_pool;
    Dtype dtype;
};

struct Attention {
    const float *qkv;
    const void *k_pool, *v_pool;
    Dtype dtype;
    const int32_t *slot_table;
    int64_t table_stride;
    const int32_t *rows, *starts, *counts;
    int64_t num_rows, hq, hkv, d;
    int64_t window;  // positions that a query sees, its own included; 0: all
    float scale;
    float *out;
    // Stretches of positions that several rows of the call have in the same slots, one after the other:
    // begin, end (multiples of 64 positions), count, then the indices into `rows` of that many rows.
    const int32_t *shared;
    int64_t shared_size;
};

// One layer's weights and pools; what a model does not have is null.
struct Layer {
    Packed qkv, out, gate_up, down;
    const float *attn_norm, *q_norm, *k_norm, *post_attn_norm, *mlp_norm, *post_mlp_norm;
    const float *qkv_bias, *out_bias, *gate_up_bias, *down_bias, *rope_table;
    int64_t rotary, window;
    void *k_pool, *v_pool;
};

struct Model {
    int64_t hidden, hq, hkv, d, inner;
    float eps, scale, embed_scale;
    Activation activation;
    Dtype kv_dtype;
    Packed embedding;
    const Layer *layers;
    int64_t num_layers;
};

// One step: m tokens of num_rows rows, as for Rope and Attention; leaves the hidden states [m, hidden].
struct Forward {
    const Model *model;
    int64_t m;
    const int32_t *ids, *positions, *slots, *slot_table;
    int64_t table_stride;
    const int32_t *rows, *starts, *counts;
    int64_t num_rows;
    const int32_t *shared;
    int64_t shared_size;
    float *hidden;
};

// What is changed of a row's logits before it is drawn from, in this order; null or 0: nothing. Python keeps
// it as a row of 64-bit integers.
struct Change {
    const uint8_t *prompt_seen;  // [vocab]; with counts: penalties
    int32_t *output_counts;      // [vocab]; the drawn token is counted
    const int32_t *bias_ids;
    const float *biases;
    int64_t num_biases;
    const int32_t *banned;
    int64_t num_banned;
    const int32_t *mask;  // bit i % 32 of word i / 32: token i is allowed
};

struct Sample {
    const float *logits;
    int64_t vocab;
    const Change *changes;   // one a row of logits, or null
    const float *penalties;  // repetition, presence, frequency of each row of logits
    const int32_t *source;
    int64_t n;
    const float *temperature;
    const int32_t *top_k;
    const float *top_p, *min_p;
    const int64_t *seeds;
    const int32_t *choices, *positions;
    int32_t *ids, *errors;
};

struct Logprobs {
    const float *logits;
    int64_t vocab;
    const int32_t *source, *ids, *top;
    int64_t n, kmax;
    float *logprob;
    int32_t *top_ids;
    float *top_values;
    double *norm;
};

enum class LimitKind { read = 0, floats = 1, pairs = 2, groups = 3 };

// `work` bytes to read from `memory`, or rounds of arithmetic.
struct Limit {
    LimitKind kind;
    const void *memory;
    int64_t work;
};

// Every function takes the number of threads it may use; none checks its arguments.
struct Table {
    void (*linear)(const Linear &, int threads);
    void (*embed)(const Embed &, int threads);
    void (*pack)(const Pack &, int threads);
    void (*pack_codes)(const PackCodes &, int threads);
    void (*rms_norm)(const Norm &, int threads);
    void (*gated_mul)(const Gated &, int threads);
    void (*rope_store)(const Rope &, int threads);
    void (*attend)(const Attention &, int threads);
    void (*forward)(const Forward &, int threads);
    void (*sample)(const Sample &, int threads);
    void (*logprobs)(const Logprobs &, int threads);
    double (*limit)(const Limit &, int threads);  // the bytes or operations done
};

const Table &portable_table();
#if SAPWOOD_X86
const Table &avx2_table();
const Table &avx512_table();
// Whether the kernels of avx512_table can use AMX tiles, and that from now on they do or do not.
bool built_with_tiles();
void use_tiles(bool yes);
#endif

}  // namespace sapwood
