// A recurrent layer of a module whose other parts torch computes: the gated delta rule, Mamba-2,
// Mamba, or a short convolution, for all tokens of a batch.
//
// The products are of all tokens together. Sequences, channels and heads are shared by the threads,
// and each computes the tokens of its part in order: those of a prompt from the state that they
// leave in its memory, and a decode or a node of a draft from the state after its parent, which is
// the caller's. So a token is computed alike in any batch.

#pragma once

#include "kernels/norms.h"
#include "kernels/products.h"
#include "kernels/recurrences.h"
#include "structures.h"

#include <cmath>
#include <cstdint>

class RecurrentLayer {
  public:
    RecurrentLayer(const Recurrent& w, const RecurrentCall& call, Thread thread)
        : w(w), call(call), thread(thread),
          mixed_width(w.kind == SHORT_CONVOLUTION ? w.channels : w.num_heads * w.value_dim) {}

    void run() {
        if (call.stage != AFTER_LATE) begin();
        if (call.stage == BEFORE_LATE) return;
        if (call.x) project(w.num_enter - w.num_late, w.num_enter);
        if (w.kind == SELECTIVE_SCAN) step_widths();
        if (w.kind != SHORT_CONVOLUTION) {
            prepare();
            recur();
            gate();
        }
        if (!call.y) return;
        const Input mixed{call.mixed, mixed_width, nullptr};
        product(*w.out, mixed, call.num_tokens, call.y, w.hidden, false, thread);
    }

  private:
    const Recurrent& w;
    const RecurrentCall& call;
    const Thread thread;
    const int64_t mixed_width;

    // Products and the convolution.
    void begin() {
        if (call.x) project(0, w.num_enter - w.num_late);
        if (w.scale) scale();
        share_parts((w.channels + LANES - 1) / LANES, [&](int begin, int end, int part) {
            convolve(w, call, begin, end, part * LANES);
        });
        thread.wait();
    }

    void project(int begin, int end) {
        float* y = call.projected;
        for (int i = 0; i < begin; i++) y += w.enter[i].num_outputs;
        for (int i = begin; i < end; y += w.enter[i++].num_outputs) {
            Input input{call.x, w.hidden, nullptr};
            if (w.sources[i] >= 0) input = {call.projected + w.sources[i], w.width, nullptr};
            product(w.enter[i], input, call.num_tokens, y, w.width, false, thread);
            thread.wait(); // the next product rounds its inputs where this one reads them
        }
    }

    void scale() {
        const Share share = thread.share(call.num_tokens);
        for (int64_t t = share.begin; t < share.end; t++)
            for (int i = 0; i < w.width; i++) call.projected[t * w.width + i] *= w.scale[i];
        thread.wait();
    }

    // work(begin, end, part) of the parts of all sequences, those of this thread.
    template <class Work> void share_parts(int num_parts, Work&& work) {
        const Share share = thread.share(call.num_rows * num_parts);
        for (int item = share.begin; item < share.end; item++) {
            const int row = item / num_parts;
            work(call.rows[row], call.rows[row + 1], item % num_parts);
        }
    }

    // Norms of the late product's outputs, and the step widths of all values from the first of them.
    void step_widths() {
        const int late = w.steps[0] - w.step_inputs - 2 * w.key_dim;
        const Share share = thread.share(call.num_tokens);
        for (int64_t t = share.begin; t < share.end; t++) {
            const float* weight = w.late_norm;
            float* x = call.projected + t * w.width + late;
            for (int size : {w.step_inputs, w.key_dim, w.key_dim}) {
                norm(x, weight, size, w.norm_eps, x);
                x += size, weight += size;
            }
        }
        thread.wait();
        share_parts((w.value_dim + LANES - 1) / LANES, [&](int begin, int end, int part) {
            multiply_steps(w, call, begin, end, part * LANES, late);
        });
        thread.wait();
    }

    // Normalise queries and keys; step widths, decays and what is learned from the projections.
    void prepare() {
        const int ratio = w.num_heads / w.num_groups;
        const Share share = thread.share(call.num_tokens * w.num_groups);
        for (int64_t item = share.begin; item < share.end; item++) {
            const int64_t t = item / w.num_groups, group = item % w.num_groups;
            float* row = call.projected + t * w.width;
            for (int head = group * ratio; head < (group + 1) * ratio; head++)
                prepare_head(row, head);
            if (w.kind != DELTA_RULE) continue;
            normalise(row + w.at[group * w.key_dim], 1.0f / sqrtf(float(w.key_dim)));
            normalise(row + w.at[(w.num_groups + group) * w.key_dim], 1.0f);
        }
        thread.wait();
    }

    void prepare_head(float* row, int head) const {
        float* steps = row + w.steps[head];
        const float* biases = w.biases + int64_t(head) * w.num_steps;
        if (w.kind == SELECTIVE_SCAN) return; // by the threads that read them
        for (int i = 0; i < w.num_steps; i++) {
            float& step = steps[i];
            step = softplus(step + biases[i]);
            if (w.kind == DELTA_RULE)
                step = expf(w.decays[head] * step);
            else
                step = step < w.min_step ? w.min_step : step > w.max_step ? w.max_step : step;
        }
        if (w.kind != DELTA_RULE) return;
        float& beta = row[w.betas[head]];
        beta = w.beta_factor / (1.0f + expf(-beta));
    }

    // x [key_dim] = x / |x| * factor
    void normalise(float* x, float factor) const {
        Vec squares = {};
        for (int i = 0; i < w.key_dim; i += LANES) {
            const Vec part = lanes_of(w.key_dim - i).load(x + i);
            squares += part * part;
        }
        factor /= sqrtf(sum(squares) + 1e-6f);
        for (int i = 0; i < w.key_dim; i += LANES) {
            const Lanes lanes = lanes_of(w.key_dim - i);
            lanes.store(x + i, lanes.load(x + i) * factor);
        }
    }

    void recur() {
        if (w.kind == DELTA_RULE) {
            share_parts(w.num_heads, [&](int begin, int end, int head) {
                delta_rule(w, call, begin, end, head);
            });
        } else {
            const int blocks = (w.value_dim + STATE_ROWS - 1) / STATE_ROWS;
            share_parts(w.num_heads * blocks, [&](int begin, int end, int part) {
                const int first = part % blocks * STATE_ROWS, left = w.value_dim - first;
                (w.kind == STATE_SPACE ? state_space<false>
                                       : state_space<true>)(w, call, begin, end, part / blocks,
                                                            first,
                                                            left < STATE_ROWS ? left : STATE_ROWS);
            });
        }
        thread.wait();
    }

    // Norm and gates of what the heads have computed.
    void gate() {
        const Share share = thread.share(call.num_tokens);
        for (int64_t t = share.begin; t < share.end; t++) {
            float* y = call.mixed + t * mixed_width;
            const float* row = call.projected + t * w.width;
            if (!w.norm_first) apply_gates(row, y);
            for (int i = 0; w.norm && i < mixed_width; i += w.norm_size)
                norm(y + i, w.norm + i, w.norm_size, w.norm_eps, y + i);
            if (w.norm_first) apply_gates(row, y);
        }
        thread.wait();
    }

    void apply_gates(const float* row, float* y) const {
        for (int head = 0; head < w.num_heads; head++, y += w.value_dim) {
            const float* gates = row + w.gates[head];
            for (int i = 0; i < w.value_dim; i += LANES) {
                const Lanes lanes = lanes_of(w.value_dim - i);
                const Vec x = lanes.load(gates + i);
                lanes.store(y + i, lanes.load(y + i) * (w.has_sigmoids ? sigmoid(x) : silu(x)));
            }
        }
    }
};

static void run_recurrent(const Recurrent& w, const RecurrentCall& call, Thread thread) {
    RecurrentLayer(w, call, thread).run();
}
