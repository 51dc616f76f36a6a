// Consecutive sublayers of the decoder of a module: norms, attention, recurrent layers, MLPs and their
// residual connections, which threads compute without leaving the region.

#pragma once

#include "attention_layer.h"
#include "kernels/norms.h"
#include "mixture.h"
#include "mlp.h"
#include "recurrent.h"
#include "structures.h"

#include <algorithm>
#include <cstdint>
#include <cstring>

// Hand out the hidden states of some tokens, where those of a layer are wanted.
static void keep_state(const SublayersCall& call, int layer, Share share) {
    float* to = call.states[layer];
    if (!to) return;
    const int64_t begin = share.begin * int64_t(call.hidden);
    memcpy(to + begin, call.x + begin, (share.end - share.begin) * int64_t(call.hidden) * 4);
}

class Sublayers {
  public:
    // memory: mixture_size() floats
    Sublayers(const SublayersCall& call, float* memory, Thread thread)
        : call(call), memory(memory), thread(thread), tokens(call.batch->num_tokens),
          hidden(call.hidden) {}

    void run() {
        const Share share = thread.share(tokens); // whose norms and sums are this thread's
        for (int i = 0; i < call.num_sublayers; i++) {
            const Sublayer& w = call.sublayers[i];
            if (call.states && w.begins >= 0) keep_state(call, w.begins, share);
            for (int64_t t = share.begin; t < share.end; t++) enter(w, t);
            thread.wait();
            float* y = w.to_side ? call.side : call.y;
            compute(w, y);
            thread.wait();
            if (w.scale != 1) scale(share, w.scale, y);
            if (w.recurrent && w.attention) add(share, call.normed, y);
            for (int64_t t = share.begin; w.output_norm && t < share.end; t++)
                norm(y + t * hidden, w.output_norm, hidden, w.output_eps, y + t * hidden);
            if (!w.to_side) add(share, y, call.x);
        }
    }

  private:
    const SublayersCall& call;
    float* const memory;
    const Thread thread;
    const int tokens;
    const int64_t hidden;

    // call.normed = the normed input of a token.
    void enter(const Sublayer& w, int64_t t) const {
        const int64_t width = w.input == HIDDEN_AND_EMBEDDINGS ? 2 * hidden : hidden;
        const float* x = (w.input == SIDE ? call.side : call.x) + t * hidden;
        float* y = call.normed + t * width;
        if (w.input == HIDDEN && w.norm) return norm(x, w.norm, hidden, w.eps, y);
        memcpy(y, x, hidden * 4);
        if (w.input == HIDDEN_AND_SIDE)
            for (int64_t i = 0; i < hidden; i++) y[i] += call.side[t * hidden + i];
        if (w.input == HIDDEN_AND_EMBEDDINGS)
            memcpy(y + hidden, call.embeddings + t * hidden, hidden * 4);
        if (w.norm) norm(y, w.norm, width, w.eps, y);
    }

    // y = what is added to call.x, but for a factor and a norm, and for attention beside a recurrent
    // layer, which goes to call.normed.
    void compute(const Sublayer& w, float* y) const {
        if (w.recurrent && w.attention) {
            recur(w, y);
            thread.wait();
            attend_beside(w);
        } else if (w.attention)
            attend(w, y);
        else if (w.recurrent)
            recur(w, y);
        else if (w.mixture)
            run_mixture(
                *w.mixture, {call.normed, y, nullptr, nullptr, tokens, thread.count}, memory,
                thread);
        else if (w.mlp)
            run_mlp(*w.mlp, call.normed, tokens, call.projected, y, thread);
        else
            product(*w.linear, {call.normed, hidden, nullptr}, tokens, y, hidden, false, thread);
    }

    void recur(const Sublayer& w, float* y) const {
        run_recurrent(
            *w.recurrent,
            {call.normed, call.projected, call.mixed, y, call.tokens, call.rows, tokens,
             call.batch->num_rows, thread.count},
            thread);
    }

    void attend(const Sublayer& w, float* y) const {
        run_attention(
            *w.attention, {call.normed, call.projected, call.mixed, y, call.rotary, call.batch},
            thread);
    }

    // Attention reads call.normed before it writes there.
    void attend_beside(const Sublayer& w) const {
        const Share share = thread.share(tokens);
        if (w.attention_input != 1) scale(share, w.attention_input, call.normed);
        thread.wait();
        attend(w, call.normed);
        if (w.attention_scale == 1) return;
        thread.wait();
        scale(share, w.attention_scale, call.normed);
    }

    void scale(Share share, float factor, float* x) const {
        scale_row(x + share.begin * hidden, factor, (share.end - share.begin) * hidden);
    }

    void add(Share share, const float* from, float* to) const {
        for (int64_t j = share.begin * hidden; j < share.end * hidden; j++) to[j] += from[j];
    }
};

// The widest input of a product; that of attention is in its scratch memory.
static int64_t widest_input(const SublayersCall& call) {
    int64_t widest = call.hidden;
    for (int i = 0; i < call.num_sublayers; i++) {
        const Sublayer& w = call.sublayers[i];
        if (w.recurrent) {
            const int64_t mixed = int64_t(w.recurrent->num_heads) * w.recurrent->value_dim;
            widest = larger(widest, larger(mixed, w.recurrent->channels));
            for (int product = 0; product < w.recurrent->num_enter; product++)
                widest = larger(widest, w.recurrent->enter[product].num_inputs);
        }
        if (w.mlp) widest = larger(widest, widest_input(*w.mlp));
        if (w.mixture) widest = larger(widest, widest_input(*w.mixture));
    }
    return widest;
}

// Whether a sublayer reads the embeddings of tokens, and whether one leaves side states.
static bool reads_embeddings(const Sublayer* sublayers, int count) {
    return std::any_of(sublayers, sublayers + count, [](const Sublayer& w) {
        return w.input == HIDDEN_AND_EMBEDDINGS;
    });
}

static bool has_side_states(const Sublayer* sublayers, int count) {
    return std::any_of(sublayers, sublayers + count, [](const Sublayer& w) { return w.to_side; });
}

// Floats that mixtures compute in.
static int64_t mixture_size(const SublayersCall& call) {
    int64_t size = 0;
    for (int i = 0; i < call.num_sublayers; i++) {
        const Mixture* w = call.sublayers[i].mixture;
        if (!w) continue;
        const int tokens = call.batch->num_tokens, threads = call.batch->num_threads;
        size = larger(size, MixtureScratch(*w, tokens, threads, nullptr).size);
    }
    return size;
}
