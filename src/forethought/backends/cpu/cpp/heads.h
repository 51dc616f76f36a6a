// Heads of residual blocks x + silu(W x + b) and a projection, beside each other.

#pragma once

#include "kernels/products.h"
#include "kernels/vectors.h"
#include "structures.h"

#include <cstdint>

// x [i] = from [i] + silu(y [i])
static inline void add_silu(const float* from, const float* y, Share share, float* x) {
    int64_t i = share.begin;
    for (; i + LANES <= share.end; i += LANES)
        store(x + i, load(from + i) + activate(load(y + i), SILU));
    for (; i < share.end; i++) x[i] = from[i] + activate(broadcast(y[i]), SILU)[0];
}

// What one thread does for all heads, each of which reads `states` [T, width].
//
// linears: of each head those of its blocks, then its projection. x, y: free memory [T, width].
// logits: [num_heads, T, outputs].
static void run_heads(
    const Linear* linears, int num_heads, int num_blocks, const float* states, int tokens, float* x,
    float* y, float* logits, Thread thread) {
    const int width = linears[0].num_inputs, outputs = linears[num_blocks].num_outputs;
    for (int head = 0; head < num_heads; head++, linears += num_blocks + 1) {
        const float* from = states;
        for (int block = 0; block < num_blocks; block++) {
            product(linears[block], {from, width, nullptr}, tokens, y, width, false, thread);
            thread.wait();
            add_silu(from, y, thread.share(tokens * width), x);
            thread.wait();
            from = x;
        }
        float* own = logits + int64_t(head) * tokens * outputs;
        product(linears[num_blocks], {from, width, nullptr}, tokens, own, outputs, false, thread);
        thread.wait(); // the next product writes its inputs where this one reads them
    }
}
