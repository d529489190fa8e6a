// A decoder's weights and pools, registered once by address so that a step is one call. For bind.cpp alone.
#pragma once

#include <pybind11/pybind11.h>

#include <vector>

#include "table.hpp"

namespace sapwood {

class RegisteredModel {
public:
    // Sizes and switches by the names of Model's fields.
    explicit RegisteredModel(const pybind11::dict &fields) {
        model_ = {size(fields, "hidden"),
                  size(fields, "hq"),
                  size(fields, "hkv"),
                  size(fields, "d"),
                  size(fields, "inner"),
                  number(fields, "eps"),
                  number(fields, "scale"),
                  number(fields, "embed_scale"),
                  (Activation)size(fields, "activation"),
                  (Dtype)size(fields, "kv_dtype"),
                  packed(fields, "embedding"),
                  nullptr,
                  0};
        max_length_ = size(fields, "max_length");
        num_slots_ = size(fields, "num_slots");
    }

    // A layer's addresses by the names of Layer's fields, 0 for what it does not have.
    void add_layer(const pybind11::dict &fields) {
        layers_.push_back({packed(fields, "qkv"), packed(fields, "out"), packed(fields, "gate_up"),
                           packed(fields, "down"), at(fields, "attn_norm"), at(fields, "q_norm"),
                           at(fields, "k_norm"), at(fields, "post_attn_norm"), at(fields, "mlp_norm"),
                           at(fields, "post_mlp_norm"), at(fields, "qkv_bias"), at(fields, "out_bias"),
                           at(fields, "gate_up_bias"), at(fields, "down_bias"), at(fields, "rope_table"),
                           size(fields, "rotary"), size(fields, "window"), (void *)at(fields, "k_pool"),
                           (void *)at(fields, "v_pool")});
        model_.layers = layers_.data();
        model_.num_layers = (int64_t)layers_.size();
    }

    const Model &model() const { return model_; }
    int64_t vocab() const { return model_.embedding.n; }
    int64_t max_length() const { return max_length_; }
    int64_t num_slots() const { return num_slots_; }

private:
    static int64_t size(const pybind11::dict &fields, const char *name) {
        return fields[name].cast<int64_t>();
    }
    static float number(const pybind11::dict &fields, const char *name) { return fields[name].cast<float>(); }
    static const float *at(const pybind11::dict &fields, const char *name) {
        return (const float *)fields[name].cast<uintptr_t>();
    }
    // (address, format, n, k)
    static Packed packed(const pybind11::dict &fields, const char *name) {
        const auto parts = fields[name].cast<std::vector<int64_t>>();
        return {(const void *)parts.at(0), (Format)parts.at(1), parts.at(2), parts.at(3)};
    }

    Model model_;
    std::vector<Layer> layers_;
    int64_t max_length_, num_slots_;
};

}  // namespace sapwood
