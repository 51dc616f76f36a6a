// One forward of a Llama-like decoder on a CPU: a batch of packed tokens in, logits out.
//
// All layers run in one parallel region of OpenMP; between phases that read each other's results
// the threads meet at a barrier. Activations are float32. Weights are float32, bf16, or integers in
// 8 and 4 bits that are dequantised in registers; keys and values are float32 or bf16.
//
// The sum of every output runs over its inputs in order, whatever the number of tokens, and a
// query's attention over the tokens that it sees in order of position, whatever the layout of the
// cache. So a token's result does not depend on the batch, to the last bit, up to BLOCK_QUERIES new
// tokens of a row; longer runs (prefills) sum the scores of a query in another order.
//
// Weights W [out, in] are packed in panels of PANEL outputs: see panels.h.

#include "attention.h"
#include "experts.h"
#include "norms.h"
#include "products.h"
#include "scratch.h"
#include "structures.h"
#include "vectors.h"

#include <cmath>
#include <cstdint>
#include <cstring>
#include <omp.h>
#include <vector>

// What one thread does in a forward. Each phase ends with a barrier unless it says otherwise.
class Forward {
  public:
    Forward(const Model& model, const Call& call, Thread thread)
        : model(model), call(call),
          b(model, call.num_tokens, call.max_length, thread.count, call.scratch),
          thread{thread.index, thread.count, b.split}, hidden(model.hidden),
          tokens(call.num_tokens), narrow(is_narrow()) {}

    void run() {
        embed();
        for (int index = 0; index < model.num_layers; index++) {
            const Layer& layer = model.layers[index];
            if (model.kv_type == F32)
                attention<float>(layer, index);
            else
                attention<uint16_t>(layer, index);
            if (narrow && index == model.num_layers - 1) keep_wanted();
            add_attention(layer);
            norm_all(layer.mlp_norm);
            if (layer.experts)
                run_experts(model, *layer.experts, tokens, b, thread);
            else
                add_mlp(layer);
        }
        write_logits();
    }

  private:
    const Model& model;
    const Call& call;
    const Scratch b;
    const Thread thread;
    const int64_t hidden;
    int tokens; // that are still computed
    const bool narrow; // only tokens with logits are, once the last layer has attended

    bool is_narrow() const {
        const bool states = call.states[model.num_layers] || call.states[model.num_layers + 1];
        return call.num_logits < call.num_tokens && !states;
    }

    // b.x = the embeddings; without a barrier: each thread norms the tokens that it has embedded.
    void embed() {
        const Share share = thread.share(tokens);
        for (int64_t t = share.begin; t < share.end; t++) {
            float* x = b.x + t * hidden;
            if (model.embedding)
                copy_weights(*model.embedding, call.token_ids[t], model.embed_scale, x);
            else
                memcpy(x, call.embedded + t * hidden, hidden * 4);
        }
    }

    // b.normed = norm of b.x
    void norm_all(const float* weight) {
        const Share share = thread.share(tokens);
        for (int64_t t = share.begin; t < share.end; t++)
            norm(b.x + t * hidden, weight, hidden, model.eps, b.normed + t * hidden);
#pragma omp barrier
    }

    // Hand out a hidden state [T, hidden], where it is wanted; without a barrier.
    void keep_state(int index, const float* x) {
        float* to = call.states[index];
        if (to && thread.index == 0) memcpy(to, x, tokens * hidden * 4);
    }

    // b.mixed = what the heads of b.x attend to
    template <class T> void attention(const Layer& layer, int index) {
        T *keys = (T*)call.keys[index], *values = (T*)call.values[index];
        norm_all(layer.input_norm);
        keep_state(index, b.x);
        product(layer.qkv, b.normed, hidden, tokens, b.qkv, b.qkv_width, false, thread);
#pragma omp barrier
        const int heads = model.num_heads + 2 * model.num_kv_heads;
        rotate_and_store(model, layer, call, b, keys, values, thread.share(tokens * heads));
#pragma omp barrier
        attend<T>(model, layer, call, b, keys, values, thread);
#pragma omp barrier
    }

    // Move the tokens with logits to the front, and go on with these.
    void keep_wanted() {
        if (thread.index == 0)
            for (int64_t r = 0; r < call.num_logits; r++) {
                const int64_t t = call.logit_index[r]; // they rise, so none is overwritten
                memmove(b.x + r * hidden, b.x + t * hidden, hidden * 4);
                memmove(
                    b.mixed + r * b.mixed_width, b.mixed + t * b.mixed_width, b.mixed_width * 4);
            }
        tokens = call.num_logits;
#pragma omp barrier
    }

    // b.x += the product of `from`, normed if `weight` is given; `place` is free memory
    void add_product(
        const Linear& w, const float* from, int64_t width, const float* weight, float* place) {
        if (!weight) {
            product(w, from, width, tokens, b.x, hidden, true, thread);
        } else {
            product(w, from, width, tokens, place, hidden, false, thread);
#pragma omp barrier
            const Share share = thread.share(tokens);
            for (int64_t t = share.begin; t < share.end; t++) {
                float *x = b.x + t * hidden, *y = place + t * hidden;
                norm(y, weight, hidden, model.eps, y);
                for (int i = 0; i < hidden; i++) x[i] += y[i];
            }
        }
#pragma omp barrier
    }

    void add_attention(const Layer& layer) {
        add_product(layer.out, b.mixed, b.mixed_width, layer.attention_norm, b.wide);
    }

    void add_mlp(const Layer& layer) {
        const int inner = intermediate_size(layer);
        gated_product(
            layer.gate_up, b.normed, hidden, tokens, b.wide, inner, model.activation, thread);
#pragma omp barrier
        add_product(layer.down, b.wide, inner, layer.output_norm, b.mixed);
    }

    void write_logits() {
        keep_state(model.num_layers, b.x);
        norm_all(model.final_norm);
        keep_state(model.num_layers + 1, b.normed);
        const float* last = b.normed;
        if (call.num_logits < tokens) {
            if (thread.index == 0)
                for (int64_t r = 0; r < call.num_logits; r++)
                    memcpy(
                        b.x + r * hidden, b.normed + call.logit_index[r] * hidden, hidden * 4);
            last = b.x;
#pragma omp barrier
        }
        const int64_t vocab = model.head->num_outputs;
        product(*model.head, last, hidden, call.num_logits, call.logits, vocab, false, thread);
        if (model.logit_cap <= 0) return;
#pragma omp barrier
        const Share share = thread.share(call.num_logits);
        for (int64_t i = share.begin * vocab; i < share.end * vocab; i++)
            call.logits[i] = model.logit_cap * tanhf(call.logits[i] / model.logit_cap);
    }
};

extern "C" {

// Floats of scratch memory that a call may use.
int64_t scratch_size(const Model* model, int32_t tokens, int32_t max_length, int32_t threads) {
    return Scratch(*model, tokens, max_length, threads, nullptr).size;
}

// Bytes of each structure, which the caller compares with those of its own.
void structure_sizes(int32_t* sizes) {
    const int32_t found[] = {sizeof(Linear), sizeof(Experts), sizeof(Layer),
                             sizeof(Model),  sizeof(Row),     sizeof(Call)};
    memcpy(sizes, found, sizeof found);
}

// Whether products with bf16 run on AMX.
int32_t uses_amx() { return SplitInput::is_possible(); }

// Float32 [count, in]: the embeddings of tokens, of which none is outside the vocabulary.
void embed(const Linear* w, const int64_t* tokens, int32_t count, float* y) {
    for (int64_t t = 0; t < count; t++) copy_weights(*w, tokens[t], 1, y + t * w->num_inputs);
}

// The first of `count` tokens that is outside the vocabulary, or `count`.
int32_t first_unknown(const Linear* w, const int64_t* tokens, int32_t count) {
    for (int32_t t = 0; t < count; t++)
        if (tokens[t] < 0 || tokens[t] >= w->num_outputs) return t;
    return count;
}

// Returns how many tokens are before the first that is outside the vocabulary: if there is one,
// nothing is computed.
int32_t forward(const Model* model, const Call* call) {
    if (model->embedding) {
        const int known = first_unknown(model->embedding, call->token_ids, call->num_tokens);
        if (known < call->num_tokens) return known;
    }
#pragma omp parallel num_threads(call->num_threads)
    {
        const TilesGuard guard;
        Forward(*model, *call, {omp_get_thread_num(), omp_get_num_threads(), nullptr}).run();
    }
    return call->num_tokens;
}

void linear(const Linear* w, const float* x, int32_t tokens, float* y, int32_t num_threads) {
    std::vector<float> memory(split_size(tokens, w->num_inputs, num_threads) + PANEL);
    float* split = memory.data() + (64 - uintptr_t(memory.data()) % 64) / 4; // aligned to 64 bytes
#pragma omp parallel num_threads(num_threads)
    {
        const TilesGuard guard;
        product(
            *w, x, w->num_inputs, tokens, y, w->num_outputs, false,
            {omp_get_thread_num(), omp_get_num_threads(), split});
    }
}
}
