// What an instruction set's translation unit offers: one table of plain functions. Only this header and
// bind.cpp cross translation units, so that no code compiled for one instruction set runs on another.
#pragma once

#include <stdint.h>

namespace sapwood {

using half = uint16_t;

enum class Dtype { f32 = 0, f16 = 1 };
enum class Blocks { f32 = 0, f16 = 1, q8_0 = 2, q4_0 = 3, q4_1 = 4 };

struct Linear {
    const float *x;
    int64_t x_stride, m;
    const void *weight;
    Dtype dtype;
    int64_t n, k;
    float *out;
    int64_t out_stride;
    bool accumulate;
};

struct Embed {
    const int32_t *ids;
    int64_t m;
    const void *weight;
    Dtype dtype;
    int64_t k;
    float *out;
};

struct Pack {
    const void *blocks;
    Blocks kind;
    int64_t n, k;
    void *out;
    Dtype dtype;
};

struct Dequantise {
    const void *blocks;
    Blocks kind;
    int64_t n, k;
    float *out;
};

struct Norm {
    const float *x;
    int64_t x_stride, m, heads, size;
    const float *weight;
    float eps;
    float *out;
    int64_t out_stride;
};

struct Gated {
    const float *gate_up;
    int64_t m, size;
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
};

struct Penalties {
    float *logits;
    const uint8_t *prompt_seen;
    const int32_t *output_counts;
    int64_t vocab;
    float repetition, presence, frequency;
};

struct Sample {
    const float *logits;
    int64_t vocab;
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

// Every function takes the number of threads it may use; none checks its arguments.
struct Table {
    void (*linear)(const Linear &, int threads);
    void (*embed)(const Embed &, int threads);
    void (*pack)(const Pack &, int threads);
    void (*dequantise)(const Dequantise &, int threads);
    void (*rms_norm)(const Norm &, int threads);
    void (*silu_mul)(const Gated &, int threads);
    void (*gelu_tanh_mul)(const Gated &, int threads);
    void (*rope_store)(const Rope &, int threads);
    void (*attend)(const Attention &, int threads);
    void (*adjust)(const Penalties &, int threads);
    void (*sample)(const Sample &, int threads);
    void (*logprobs)(const Logprobs &, int threads);
};

const Table &portable_table();
#if SAPWOOD_X86
const Table &avx2_table();
const Table &avx512_table();
#endif

}  // namespace sapwood
