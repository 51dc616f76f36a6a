// The mixture of experts of a module whose other parts torch computes: router, experts, and a shared
// MLP with its gate or without.

#pragma once

#include "kernels/experts.h"
#include "kernels/products.h"
#include "mlp.h"
#include "scratch.h"
#include "structures.h"

#include <cmath>
#include <cstdint>
#include <cstring>

// Memory of one call.
struct MixtureScratch {
    float *routed, *shared, *rows, *gates; // shared: [T, hidden]; rows: activations of its MLP
    int64_t size = 0;

    MixtureScratch(const Mixture& w, int64_t tokens, int threads, float* memory) {
        const auto take = [&](int64_t count) {
            float* begin = memory ? memory + size : nullptr;
            size += round_up(count);
            return begin;
        };
        routed = take(ExpertScratch(*w.experts, w.hidden, tokens, threads, nullptr).size);
        shared = take(w.shared ? tokens * w.hidden : 0);
        rows = take(w.shared ? tokens * w.shared->width : 0);
        gates = take(tokens);
    }
};

// The widest input of its products, but for those of experts.
static int64_t widest_input(const Mixture& w) {
    return w.shared ? larger(w.hidden, widest_input(*w.shared)) : w.hidden;
}

// call.y = what call.x gives; memory: MixtureScratch::size floats. Ends with a barrier.
static void run_mixture(const Mixture& w, const MixtureCall& call, float* memory, Thread thread) {
    const int tokens = call.num_tokens;
    const MixtureScratch b(w, tokens, thread.count, memory);
    const int64_t hidden = w.hidden;
    const float *x = call.x, *shared = call.shared, *gates = call.gates;
    float* y = call.y;
    const Share share = thread.share(tokens);
    memset(y + share.begin * hidden, 0, (share.end - share.begin) * hidden * 4);
    thread.wait();
    run_routed_experts(*w.experts, w.activation, hidden, tokens, x, y, b.routed, thread);
    if (!w.shared) return;
    if (!shared) {
        if (w.shared_gate) {
            product(*w.shared_gate, {x, hidden, nullptr}, tokens, b.gates, 1, false, thread);
            thread.wait();
        }
        run_mlp(*w.shared, x, tokens, b.rows, b.shared, thread);
        thread.wait();
        shared = b.shared, gates = b.gates;
    }
    for (int64_t t = share.begin; t < share.end; t++) {
        const float weight = w.shared_gate ? 1 / (1 + expf(-gates[t])) : 1;
        add_scaled(shared + t * hidden, weight, int(hidden), y + t * hidden);
    }
    thread.wait();
}
