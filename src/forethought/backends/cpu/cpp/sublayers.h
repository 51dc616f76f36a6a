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
            if (w.scale != 1) scale(share, w.scale);
            for (int64_t j = share.begin * hidden; j < share.end * hidden; j++)
                call.x[j] += call.y[j];
        }
    }

  private:
    const SublayersCall& call;
    float* const memory;
    const Thread thread;
    const int tokens;
    const int64_t hidden;

    // call.y = what is added to call.x, but for a factor
    void compute(const Sublayer& w) const {
        if (w.attention)
            run_attention(
                *w.attention,
                {call.normed, call.projected, call.mixed, call.y, call.rotary, call.batch}, thread);
        else if (w.recurrent)
            run_recurrent(
                *w.recurrent,
                {call.normed, call.projected, call.mixed, call.y, call.tokens, call.rows, tokens,
                 call.batch->num_rows, thread.count},
                thread);
        else if (w.mixture)
            run_mixture(
                *w.mixture, {call.normed, call.y, nullptr, nullptr, tokens, thread.count}, memory,
                thread);
        else
            run_mlp(*w.mlp, call.normed, tokens, call.projected, call.y, thread);
    }

    // Not in one loop with the sum, which would round once.
    __attribute__((noinline)) void scale(Share share, float factor) const {
        for (int64_t j = share.begin * hidden; j < share.end * hidden; j++) call.y[j] *= factor;
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
