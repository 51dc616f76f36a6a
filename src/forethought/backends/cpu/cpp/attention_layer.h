// The attention of a module whose other parts torch computes, for all tokens of a batch: products,
// keys and values to their slots, softmax attention over the pages, gates, the output product.
//
// Entries, attention and scratch memory are those of a forward of one layer; see Model. What is
// particular: products that read the outputs of others (projections.h); where queries, keys, values and
// gates are among them; values narrower than keys; and cosines and sines that are the module's, of the
// tokens of a batch.

#pragma once

#include "kernels/attention.h"
#include "kernels/products.h"
#include "projections.h"
#include "structures.h"

#include <cmath>
#include <cstdint>
#include <cstring>

class AttentionLayer {
  public:
    AttentionLayer(const ModuleAttention& w, const ModuleAttentionCall& call, Thread thread)
        : w(w), call(call), batch(*call.batch), model(*w.model), layer(*model.layers),
          b(model, batch.num_tokens, batch.max_length, thread.count, batch.scratch),
          thread{thread.index, thread.count, b.tiles, thread.barrier} {
        layer.rotary = call.rotary;
        b.mixed = call.mixed;
    }

    void run() {
        const int tokens = batch.num_tokens;
        if (thread.index == 0) find_common(batch, b);
        const Input x{call.x, w.num_inputs, nullptr};
        if (call.x) project(w.enter, w.num_enter, x, tokens, call.projected, w.width, thread);
        if (batch.kv_type == F32)
            attend<float>();
        else if (batch.kv_type == BF16)
            attend<uint16_t>();
        else
            attend<int8_t>();
        if (w.gates) gate();
        if (w.value_dim < model.head_dim) narrow();
        if (!call.y) return;
        const Input mixed{b.mixed, b.mixed_width, nullptr};
        product(*w.out, mixed, tokens, call.y, w.num_outputs, false, thread);
    }

  private:
    const ModuleAttention& w;
    const ModuleAttentionCall& call;
    const Call& batch;
    const Model& model;
    Layer layer;
    Scratch b;
    const Thread thread;

    template <class T> void attend() {
        T *keys = (T*)batch.keys[w.index], *values = (T*)batch.values[w.index];
        const int per_token = model.num_heads + 2 * model.num_kv_heads;
        const Share items = thread.share(batch.num_tokens * per_token);
        for (int item = items.begin; item < items.end; item++)
            place(item / per_token, item % per_token);
        rotate_and_store(model, layer, batch, b, keys, values, items);
        thread.wait();
        Attention<T>(model, layer, batch, b, keys, values, thread).attend();
        thread.wait();
    }

    // A head of queries, keys or values, to where rotate_and_store() reads it.
    void place(int64_t t, int head) const {
        const int num_queries = model.num_heads, num_keys = model.num_kv_heads,
                  dim = model.head_dim;
        const bool is_value = head >= num_queries + num_keys;
        const float scale = head >= num_queries && !is_value ? w.key_scale : 1;
        const int width = is_value ? w.value_dim : dim;
        const int split = w.tails && w.split < width ? w.split : width;
        const float* from = call.projected + t * w.width;
        float* to = b.qkv + t * b.qkv_width + int64_t(head) * dim;
        for (int i = 0; i < split; i++) to[i] = from[w.at[head] + i] * scale;
        for (int i = split; i < width; i++) to[i] = from[w.tails[head] + i - split] * scale;
        for (int i = width; i < dim; i++) to[i] = 0;
    }

    // The outputs of heads times the sigmoids of their gates.
    void gate() const {
        const Share items = thread.share(batch.num_tokens * model.num_heads);
        for (int item = items.begin; item < items.end; item++) {
            const int64_t t = item / model.num_heads, head = item % model.num_heads;
            const float* gates = call.projected + t * w.width + w.gates[head];
            float* y = b.mixed + t * b.mixed_width + head * model.head_dim;
            for (int i = 0; i < model.head_dim; i += LANES) {
                const Lanes lanes = lanes_of(model.head_dim - i);
                lanes.store(y + i, lanes.load(y + i) / (1.0f + exp(-lanes.load(gates + i))));
            }
        }
        thread.wait();
    }

    // The outputs of heads beside each other, without those of the zeros that follow values.
    void narrow() const {
        const Share share = thread.share(batch.num_tokens);
        for (int64_t t = share.begin; t < share.end; t++) {
            float* y = b.mixed + t * b.mixed_width;
            for (int head = 1; head < model.num_heads; head++)
                memmove(y + head * w.value_dim, y + head * model.head_dim, w.value_dim * 4);
        }
        thread.wait();
    }
};

static void run_attention(
    const ModuleAttention& w, const ModuleAttentionCall& call, Thread thread) {
    AttentionLayer(w, call, thread).run();
}
