// The layers of a decoder as one call: the kernels of one step after the other, over registered weights.
//
// What a row's activations are rounded to is written beside what computes them: a norm or a gated activation
// leaves its row in cache and the codes are made from there.
#pragma once

#include "attention.hpp"
#include "gemm.hpp"

namespace sapwood {
namespace {

// The rows of a product's input: produce(r, room) returns row r, which it may have written to `room`.
template <class Produce>
void floats_product(const Packed &weight, int64_t m, const Produce &produce, float *out, int64_t out_stride,
                    bool accumulate, int threads) {
    static thread_local Scratch memory;
    float *rows = memory.of<float>((size_t)(m * weight.k));
    const int useful = threads_for(m * weight.k * 4, threads);
    share(useful, m, fair_run(m, useful), [&](int64_t r) {
        float *room = rows + r * weight.k;
        const float *row = produce(r, room);
        if (row != room) memcpy(room, row, (size_t)weight.k * sizeof(float));
    });
    linear({rows, weight.k, m, weight, out, out_stride, accumulate}, threads);
}

template <class Q, class Produce>
void codes_product(const Packed &weight, int64_t m, const Produce &produce, float *out, int64_t out_stride,
                   bool accumulate, int threads) {
    static thread_local Scratch memory;
    const Codes codes = Codes::in(memory, m, weight.k, Q::GROUP);
    const int useful = threads_for(m * weight.k * 4, threads);
    share(useful, m, fair_run(m, useful), [&](int64_t r) {
        static thread_local Scratch row;
        quantise_row(produce(r, row.of<float>((size_t)weight.k)), weight.k, codes, r);
    });
    linear_codes<Q>(codes, m, weight, out, out_stride, accumulate,
                    threads_for(m * weight.n * weight.k / 8, threads));
}

// out [m, n] = or += the product of m produced rows with a weight.
template <class Produce>
void product(const Packed &weight, int64_t m, const Produce &produce, float *out, bool accumulate,
             int threads) {
    if (weight.format == Format::f32 || weight.format == Format::f16)
        return floats_product(weight, m, produce, out, weight.n, accumulate, threads);
    with_format(weight.format, [&](auto q) {
        codes_product<decltype(q)>(weight, m, produce, out, weight.n, accumulate, threads);
    });
}

inline void add_to(float *to, const float *from, int64_t n) {
    for (int64_t i = 0; i < n; i += LANES)
        store_upto(to + i, add(load_upto(to + i, n - i), load_upto(from + i, n - i)), n - i);
}

// One step's way through the layers. `hidden` is [m, hidden] throughout.
struct Pass {
    const Forward &args;
    const Model &model;
    int threads;
    float *hidden, *wide, *attended;  // [m, qkv width or 2 inner or hidden], [m, hq * d]

    Pass(const Forward &forward, Scratch &memory, int count)
        : args(forward), model(*forward.model), threads(count), hidden(forward.hidden) {
        const int64_t width = most(most((model.hq + 2 * model.hkv) * model.d, 2 * model.inner), model.hidden);
        wide = memory.of<float>((size_t)(args.m * (width + model.hq * model.d)));
        attended = wide + args.m * width;
    }

    template <class Body>
    void rows(int64_t work, const Body &body) const {
        const int useful = threads_for(args.m * work, threads);
        share(useful, args.m, fair_run(args.m, useful), body);
    }

    void begin() const {
        embed({args.ids, args.m, model.embedding, hidden}, threads);
        if (model.embed_scale == 1.0f) return;
        const Vec scale = set1(model.embed_scale);
        rows(model.hidden, [&](int64_t r) {
            float *row = hidden + r * model.hidden;
            for (int64_t i = 0; i < model.hidden; i += LANES)
                store_upto(row + i, mul(load_upto(row + i, model.hidden - i), scale), model.hidden - i);
        });
    }

    void attention(const Layer &layer) const {
        from_norm(layer.qkv, layer.attn_norm, wide);
        finish_qkv(layer);
        const Attention attention = {
            wide,      layer.k_pool, layer.v_pool, model.kv_dtype, args.slot_table, args.table_stride,
            args.rows, args.starts,  args.counts,  args.num_rows,  model.hq,        model.hkv,
            model.d,   layer.window, model.scale,  attended,       args.shared,     args.shared_size};
        attend(attention, threads);
        const int64_t width = model.hq * model.d;
        into_hidden(layer.out, layer.out_bias, layer.post_attn_norm,
                    [&](int64_t r, float *) { return attended + r * width; });
    }

    void mlp(const Layer &layer) const {
        from_norm(layer.gate_up, layer.mlp_norm, wide);
        const int64_t inner = model.inner;
        if (layer.gate_up_bias)
            rows(2 * inner, [&](int64_t r) { add_to(wide + r * 2 * inner, layer.gate_up_bias, 2 * inner); });
        into_hidden(layer.down, layer.down_bias, layer.post_mlp_norm, [&](int64_t r, float *room) {
            gate_one(model.activation, wide + r * 2 * inner, inner, room);
            return room;
        });
    }

private:
    void from_norm(const Packed &weight, const float *norm, float *out) const {
        product(
            weight, args.m,
            [&](int64_t r, float *room) {
                norm_one(hidden + r * model.hidden, norm, model.eps, model.hidden, room);
                return room;
            },
            out, false, threads);
    }

    // Biases, the norms of heads, rotary positions, and K and V to the pool.
    void finish_qkv(const Layer &layer) const {
        const int64_t width = (model.hq + 2 * model.hkv) * model.d;
        const Rope rope = {wide,         args.m,        args.positions, args.slots,   layer.rope_table,
                           model.hq,     model.hkv,     model.d,        layer.rotary, layer.k_pool,
                           layer.v_pool, model.kv_dtype};
        rows(width * 2, [&](int64_t r) {
            float *row = wide + r * width;
            if (layer.qkv_bias) add_to(row, layer.qkv_bias, width);
            for (int64_t head = 0; layer.q_norm && head < model.hq + model.hkv; head++) {
                float *x = row + head * model.d;
                norm_one(x, head < model.hq ? layer.q_norm : layer.k_norm, model.eps, model.d, x);
            }
            rope_store_one(rope, r);
        });
    }

    // Adds a branch's last product, its bias and a norm of its own if it has them, to the hidden states.
    template <class Produce>
    void into_hidden(const Packed &weight, const float *bias, const float *norm,
                     const Produce &produce) const {
        const int64_t size = model.hidden;
        if (!norm && !bias) return product(weight, args.m, produce, hidden, true, threads);
        static thread_local Scratch memory;
        float *branch = memory.of<float>((size_t)(args.m * size));
        product(weight, args.m, produce, branch, false, threads);
        rows(size, [&](int64_t r) {
            float *row = branch + r * size;
            if (bias) add_to(row, bias, size);
            if (norm) norm_one(row, norm, model.eps, size, row);
            add_to(hidden + r * size, row, size);
        });
    }
};

void forward(const Forward &args, int threads) {
    static thread_local Scratch memory;
    const Pass pass(args, memory, threads);
    pass.begin();
    for (int64_t i = 0; i < args.model->num_layers; i++) {
        pass.attention(args.model->layers[i]);
        pass.mlp(args.model->layers[i]);
    }
}

}  // namespace
}  // namespace sapwood
