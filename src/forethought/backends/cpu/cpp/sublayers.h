// Consecutive sublayers of the decoder of a module: norms, attention, recurrent layers, MLPs and their
// residual connections, which threads compute without leaving the region.

#pragma once

#include "attention_layer.h"
#include "kernels/norms.h"
#include "mixture.h"
#include "mlp.h"
#include "recurrent.h"
#include "structures.h"

#include <cstdint>

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
            for (int64_t at = share.begin * hidden; at < share.end * hidden; at += hidden)
                norm(call.x + at, w.norm, int(hidden), w.eps, call.normed + at);
            thread.wait();
            compute(w);
            thread.wait();
            if (w.scale != 1) scale(share, w.scale, call.y);
            if (w.recurrent && w.attention) add(share, call.normed, call.y);
            add(share, call.y, call.x);
        }
    }

  private:
    const SublayersCall& call;
    float* const memory;
    const Thread thread;
    const int tokens;
    const int64_t hidden;

    // call.y = what is added to call.x, but for a factor, and for attention beside a recurrent
    // layer, which goes to call.normed.
    void compute(const Sublayer& w) const {
        if (w.recurrent && w.attention) {
            recur(w);
            thread.wait();
            attend_beside(w);
        } else if (w.attention)
            attend(w, call.y);
        else if (w.recurrent)
            recur(w);
        else if (w.mixture)
            run_mixture(
                *w.mixture, {call.normed, call.y, nullptr, nullptr, tokens, thread.count}, memory,
                thread);
        else
            run_mlp(*w.mlp, call.normed, tokens, call.projected, call.y, thread);
    }

    void recur(const Sublayer& w) const {
        run_recurrent(
            *w.recurrent,
            {call.normed, call.projected, call.mixed, call.y, call.tokens, call.rows, tokens,
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
        if (w.mlp) widest = larger(widest, w.mlp->inner);
        if (w.mixture) widest = larger(widest, widest_input(*w.mixture));
    }
    return widest;
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
