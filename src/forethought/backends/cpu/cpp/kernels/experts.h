// A mixture of experts in place of the MLP.

#pragma once

#include "../scratch.h"
#include "../structures.h"
#include "products.h"

#include <cmath>
#include <cstring>

struct Choice { // of the experts of one token
    int experts[MAX_TOP_K];
    float weights[MAX_TOP_K];

    // logits [num_experts]
    Choice(const Experts& from, const float* logits) {
        float highest = -INFINITY, total = 0, chosen_total = 0;
        for (int e = 0; e < from.num_experts; e++)
            highest = logits[e] > highest ? logits[e] : highest;
        for (int e = 0; e < from.num_experts; e++) total += expf(logits[e] - highest);
        for (int k = 0; k < from.top_k; k++) {
            experts[k] = best_but(logits, from.num_experts, k);
            weights[k] = expf(logits[experts[k]] - highest) / total;
            chosen_total += weights[k];
        }
        if (from.renormalise)
            for (int k = 0; k < from.top_k; k++) weights[k] /= chosen_total;
    }

  private:
    int best_but(const float* logits, int number, int taken) const { // but those taken before
        int best = -1;
        for (int e = 0; e < number; e++) {
            bool is_taken = false;
            for (int i = 0; i < taken; i++) is_taken |= experts[i] == e;
            if (!is_taken && (best < 0 || logits[e] > logits[best])) best = e;
        }
        return best;
    }
};

// x [hidden] += weight * (activated W^T), the outputs of one thread.
static void add_expert(
    const Linear& down, const Input& activated, float weight, float* x, Thread thread) {
    const Share share = thread.share(num_panels(down.num_outputs));
    alignas(64) float tile[PANEL];
    const ReadyInput input(down, activated, 1, thread);
    Factors factors(down, input);
    for (int panel = share.begin; panel < share.end; panel++) {
        const int first = panel * PANEL;
        factors.hold(panel, 1);
        factors.multiply(panel, 1, 0, 1, tile);
        if (down.type == I8 || down.bias) scale_outputs(down, first, tile, 1, PANEL);
        for (int i = 0; i < PANEL && first + i < down.num_outputs; i++)
            x[first + i] += tile[i] * weight;
    }
}

// b.x += the experts of b.normed: those of one token after the other, outputs shared by the threads.
static void run_experts(
    const Model& model, const Experts& experts, int tokens, const Scratch& b, Thread thread) {
    const int hidden = model.hidden, inner = experts.down[0].num_inputs;
    const Input input{b.normed, hidden, nullptr};
    product(*experts.router, input, tokens, b.wide, b.wide_width, false, thread);
    thread.wait();
    for (int t = 0; t < tokens; t++) {
        float* logits = b.wide + t * b.wide_width;
        float* activated = logits + round_up(experts.num_experts); // of one expert at a time
        const Choice choice(experts, logits);
        for (int k = 0; k < experts.top_k; k++) {
            const int chosen = choice.experts[k];
            const Activated y(activated, 1, inner, experts.down[chosen]);
            gated_product(
                experts.gate_up[chosen], {b.normed + int64_t(t) * hidden, hidden, nullptr}, 1, y,
                inner, model.activation, thread);
            thread.wait();
            add_expert(
                experts.down[chosen], y.input(), choice.weights[k], b.x + int64_t(t) * hidden,
                thread);
            thread.wait();
        }
    }
}
