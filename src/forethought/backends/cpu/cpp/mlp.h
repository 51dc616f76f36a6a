// The MLP of a module whose other parts torch computes.

#pragma once

#include "kernels/products.h"
#include "kernels/vectors.h"
#include "structures.h"

#include <cstdint>

// x [i] = act(x [i]), times `factors` unless it is null.
static inline void
activate_all(float* x, const float* factors, int activation, int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; i += LANES) {
        const int count = end - i < LANES ? int(end - i) : LANES;
        const bool whole = count == LANES;
        Vec y = activate(whole ? load(x + i) : load_first(x + i, count), activation);
        if (factors) y *= whole ? load(factors + i) : load_first(factors + i, count);
        memcpy(x + i, &y, count * 4);
    }
}

// What one thread does; see mlp() in forward.cpp.
static void
run_mlp(const Mlp& w, const float* x, int tokens, float* inner, float* y, Thread thread) {
    float* factors = w.is_gated ? inner + int64_t(tokens) * w.inner : nullptr;
    const Input input{x, w.hidden, nullptr};
    if (x) {
        if (w.is_gated) {
            product(w.gate, input, tokens, inner, w.inner, false, thread);
            thread.wait(); // the next product rounds its inputs where this one reads them
        }
        product(w.up, input, tokens, factors ? factors : inner, w.inner, false, thread);
        thread.wait();
    }
    const int64_t size = int64_t(tokens) * w.inner;
    const int64_t begin = size * thread.index / thread.count / PANEL * PANEL;
    const int64_t last = size * (thread.index + 1) / thread.count / PANEL * PANEL;
    const int64_t end = thread.index + 1 == thread.count ? size : last;
    activate_all(inner, factors, w.activation, begin, end);
    if (!y) return;
    thread.wait();
    product(w.down, {inner, w.inner, nullptr}, tokens, y, w.hidden, false, thread);
}
