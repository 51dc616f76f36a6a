// The products that enter a layer of a module. Their outputs are beside each other in the projections
// of a token; a product reads the layer's inputs or what earlier ones gave, as those of latent
// attention (DeepSeek-AI 2024, DeepSeek-V2, section 2.1) and of low rank do.

#pragma once

#include "kernels/norms.h"
#include "kernels/products.h"
#include "scratch.h"
#include "structures.h"

#include <cstdint>

// y [T, width] = the projections of x. Ends with a barrier.
static void project(
    const Projection* parts, int count, const Input& x, int tokens, float* y, int64_t width,
    Thread thread) {
    const Share share = thread.share(tokens);
    for (int i = 0; i < count; i++) {
        const Projection& part = parts[i];
        const Input input = part.source < 0 ? x : Input{y + part.source, width, nullptr};
        product(part.weight, input, tokens, y + part.begin, width, part.adds, thread);
        thread.wait(); // the next product rounds its inputs where this one reads them
        if (!part.norm) continue;
        for (int64_t t = share.begin; t < share.end; t++) {
            float* row = y + t * width + part.begin;
            norm(row, part.norm, part.norm_size, part.eps, row);
        }
        thread.wait();
    }
}

// The widest input of these products.
static int64_t widest_input(const Projection* parts, int count) {
    int64_t widest = 0;
    for (int i = 0; i < count; i++) widest = larger(widest, parts[i].weight.num_inputs);
    return widest;
}
