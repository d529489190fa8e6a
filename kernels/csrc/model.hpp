// A decoder's weights and pools, registered once by address so that a step is one call. For bind.cpp alone.
#pragma once

#include <pybind11/pybind11.h>

#include <vector>

#include "table.hpp"

namespace sapwood {

class RegisteredModel {
  public:
    // Sizes and switches by the names of Model's fields.
    explicit RegisteredModel(const pybind11::dict &fields) : fields_(&fields) {
        model_ = {size("hidden"),
                  size("hq"),
                  size("hkv"),
                  size("d"),
                  size("inner"),
                  number("eps"),
                  number("scale"),
                  number("embed_scale"),
                  (Activation)size("activation"),
                  (Dtype)size("kv_dtype"),
                  packed("embedding"),
                  nullptr,
                  0};
        max_length_ = size("max_length");
        num_slots_ = size("num_slots");
    }

    // A layer's addresses by the names of Layer's fields, 0 for what it does not have.
    void add_layer(const pybind11::dict &fields) {
        fields_ = &fields;
        layers_.push_back({packed("qkv"),         packed("out"),          packed("gate_up"),
                           packed("down"),        at("attn_norm"),        at("q_norm"),
                           at("k_norm"),          at("post_attn_norm"),   at("mlp_norm"),
                           at("post_mlp_norm"),   at("qkv_bias"),         at("out_bias"),
                           at("gate_up_bias"),    at("down_bias"),        at("rope_table"),
                           size("rotary"),        size("window"),         (void *)at("k_pool"),
                           (void *)at("v_pool")});
        model_.layers = layers_.data();
        model_.num_layers = (int64_t)layers_.size();
    }

    const Model &model() const { return model_; }
    int64_t vocab() const { return model_.embedding.n; }
    int64_t max_length() const { return max_length_; }
    int64_t num_slots() const { return num_slots_; }

  private:
    int64_t size(const char *name) const { return (*fields_)[name].cast<int64_t>(); }
    float number(const char *name) const { return (*fields_)[name].cast<float>(); }
    const float *at(const char *name) const { return (const float *)(*fields_)[name].cast<uintptr_t>(); }
    // (address, format, n, k)
    Packed packed(const char *name) const {
        const auto parts = (*fields_)[name].cast<std::vector<int64_t>>();
        return {(const void *)parts.at(0), (Format)parts.at(1), parts.at(2), parts.at(3)};
    }

    const pybind11::dict *fields_;
    Model model_;
    std::vector<Layer> layers_;
    int64_t max_length_, num_slots_;
};

}  // namespace sapwood
