// A mixture of experts in place of the MLP.
//
// Tokens are routed together, those of a call or as many as there is memory for. Their rows are
// grouped by expert, so that its weights are read once for all of its rows; a thread computes some
// outputs of some experts, of all rows of them. In the end a token adds the outputs of its experts
// from the most probable one on, whatever else is in the batch.

#pragma once

#include "../expert_store.h"
#include "../scratch.h"
#include "../structures.h"
#include "products.h"
#include "vectors.h"

#include <cmath>
#include <cstring>
#include <vector>

struct Choice { // of the experts of one token, and what their outputs are multiplied by
    int32_t* experts;
    float* weights;

    // logits [num_experts + num_shared]
    void choose(const Experts& from, const float* logits) const {
        if (from.scoring == SIGMOID) return choose_by_sigmoids(from, logits);
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
        for (int s = 0; s < from.num_shared; s++) {
            experts[from.top_k + s] = from.num_experts + s;
            weights[from.top_k + s] = 1 / (1 + expf(-logits[from.num_experts + s]));
        }
    }

  private:
    void choose_by_sigmoids(const Experts& from, const float* logits) const {
        static thread_local std::vector<float> kept; // [num_experts]: scores of the choice
        if (int(kept.size()) < from.num_experts) kept.resize(from.num_experts);
        float *scores = kept.data(), total = from.epsilon;
        for (int e = 0; e < from.num_experts; e++)
            scores[e] = sigmoid_of(logits[e]) + (from.bias ? from.bias[e] : 0);
        if (from.num_groups > from.top_groups) leave_groups(from, scores);
        for (int k = 0; k < from.top_k; k++) {
            experts[k] = best_but(scores, from.num_experts, k);
            total += weights[k] = sigmoid_of(logits[experts[k]]);
        }
        for (int k = 0; k < from.top_k; k++)
            weights[k] = (from.renormalise ? weights[k] / total : weights[k]) * from.scale;
    }

    static float sigmoid_of(float x) { return 1 / (1 + expf(-x)); }

    // Scores outside of the best groups become -INFINITY; a group has that of its best two experts.
    static void leave_groups(const Experts& from, float* scores) {
        const int size = from.num_experts / from.num_groups;
        std::vector<float> sums(from.num_groups);
        for (int g = 0; g < from.num_groups; g++) {
            float best = -INFINITY, second = -INFINITY;
            for (int e = g * size; e < (g + 1) * size; e++)
                if (scores[e] > best)
                    second = best, best = scores[e];
                else if (scores[e] > second)
                    second = scores[e];
            sums[g] = best + second;
        }
        for (int g = 0; g < from.num_groups; g++) {
            int better = 0;
            for (int other = 0; other < from.num_groups; other++)
                better += sums[other] > sums[g] || (sums[other] == sums[g] && other < g);
            for (int e = g * size; e < (g + 1) * size && better >= from.top_groups; e++)
                scores[e] = -INFINITY;
        }
    }

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

// The rows of tokens that are routed together, sorted by expert.
struct Groups {
    int32_t* begins; // [num_experts + 2]: the first row of each; the last two are the end
    int32_t* tokens; // [rows]: of each row
    int32_t* places; // [tokens, per_token]: the row of each choice

    // chosen [tokens, per_token]
    Groups(const int32_t* chosen, int num_rows, int per_token, int num_experts, int32_t* memory)
        : begins(memory), tokens(begins + num_experts + 2), places(tokens + num_rows) {
        memset(begins, 0, (num_experts + 2) * sizeof *begins);
        for (int i = 0; i < num_rows; i++) begins[chosen[i] + 2]++;
        for (int e = 0; e < num_experts; e++) begins[e + 2] += begins[e + 1];
        for (int i = 0; i < num_rows; i++) { // begins[e + 1] grows from the begin of e to its end
            places[i] = begins[chosen[i] + 1]++;
            tokens[places[i]] = i / per_token;
        }
    }
};

// to [size] += from * weight
static inline void add_scaled(const float* from, float weight, int size, float* to) {
    int i = 0;
    for (; i + LANES <= size; i += LANES) store(to + i, load(to + i) + load(from + i) * weight);
    for (; i < size; i++) to[i] += from[i] * weight;
}

// What a thread computes of some rows of an expert.
struct ExpertPart {
    int expert, begin, num_rows;
    int64_t activated; // floats before their activations
    Share panels;
};

// What one thread does for the experts of some tokens, which are routed together.
class RoutedTokens {
  public:
    // normed, x: [T, hidden]
    RoutedTokens(
        const Experts& experts, int activation, int64_t hidden, const ExpertScratch& b,
        int num_tokens, const float* normed, float* x, Thread thread)
        : experts(experts), b(b), hidden(hidden), activation(activation),
          num_experts(experts.num_experts + experts.num_shared), num_tokens(num_tokens),
          normed(normed), x(x), thread(thread),
          alone{0, 1, (uint16_t*)(b.tiles + thread.index * b.tiles_size), thread.barrier} {}

    // x += the experts of `normed`
    void run() const {
        route();
        run_chosen();
    }

    // The same, of those that b.chosen and b.weights have.
    void run_chosen() const {
        const Groups groups(
            b.chosen, int(num_tokens * b.per_token), int(b.per_token), num_experts,
            b.groups + thread.index * b.groups_size);
        if (experts.store) fetch(groups, *(ExpertStore*)experts.store);
        const auto inner = [&](int e) { return num_panels(experts.down[e].num_inputs); };
        for_parts(groups, experts.gate_up, inner, [&](auto& part) { activate(groups, part); });
        thread.wait();
        const auto outputs = [&](int) { return num_panels(int(hidden)); };
        for_parts(groups, experts.down, outputs, [&](auto& part) { project(part); });
        thread.wait();
        add(groups);
        thread.wait();
    }

  private:
    const Experts& experts;
    const ExpertScratch& b;
    const int64_t hidden;
    const int activation, num_experts, num_tokens;
    const float* normed;
    float* x;
    const Thread thread, alone; // alone: what this thread computes without the others

    // b.chosen, b.weights
    void route() const {
        const int64_t width = experts.router->num_outputs;
        product(
            *experts.router, {normed, hidden, nullptr}, num_tokens, b.logits, width, false, thread);
        thread.wait();
        const Share share = thread.share(num_tokens);
        for (int64_t t = share.begin; t < share.end; t++) {
            const Choice choice{b.chosen + t * b.per_token, b.weights + t * b.per_token};
            choice.choose(experts, b.logits + t * width);
        }
        thread.wait();
    }

    // Have the experts in memory that the groups have, and those read meanwhile that the next layer
    // would choose by the input of this one.
    void fetch(const Groups& groups, ExpertStore& store) const {
        const int begin = experts.first_stored, number = experts.num_experts;
        if (thread.index == 0)
            store.hold(begin, begin + number, [&](int e) {
                return groups.begins[e] < groups.begins[e + 1];
            });
        thread.wait();
        store.load(thread.index, thread.count);
        if (experts.next_router && num_tokens <= MAX_EXPECTING) {
            product(
                *experts.next_router, {normed, hidden, nullptr}, num_tokens, b.logits,
                experts.next_router->num_outputs, false, thread);
            thread.wait();
            if (thread.index == 0) store.expect(expected());
        }
        thread.wait();
    }
    static constexpr int MAX_EXPECTING = 16; // more tokens choose most experts in any case

    // The experts in the store that the tokens would choose by the next layer's logits.
    std::vector<int> expected() const {
        std::vector<int> chosen;
        std::vector<int32_t> of_token(b.per_token);
        std::vector<float> weights(b.per_token);
        for (int t = 0; t < num_tokens; t++) {
            const Choice choice{of_token.data(), weights.data()};
            choice.choose(experts, b.logits + t * experts.next_router->num_outputs);
            for (int k = 0; k < experts.top_k; k++)
                chosen.push_back(experts.next_stored + of_token[k]);
        }
        return chosen;
    }

    // work(part) for all parts of this thread: of each expert num_items(expert) panels, or pairs. The
    // panels of all experts follow each other, and each thread has as much of them as the others.
    template <class Items, class Work>
    void for_parts(
        const Groups& groups, const Linear* linears, Items&& num_items, Work&& work) const {
        int64_t total = 0, before = 0;
        for_groups(groups, [&](const ExpertPart& part) {
            total += cost(linears[part.expert], part.num_rows) * num_items(part.expert);
        });
        for_groups(groups, [&](ExpertPart part) {
            const int64_t unit = cost(linears[part.expert], part.num_rows);
            const int items = num_items(part.expert);
            const auto bound = [&](int index) { // the first panel of a thread
                const int64_t rest = total * index - before * thread.count;
                const int64_t panel = (rest + unit * thread.count - 1) / (unit * thread.count);
                return rest <= 0 ? 0 : panel < items ? int(panel) : items;
            };
            part.panels = {bound(thread.index), bound(thread.index + 1)};
            if (part.panels.begin < part.panels.end) work(part);
            before += unit * items;
        });
    }

    // The time of a panel, which is read once: as long as some rows are multiplied by it.
    static int64_t cost(const Linear& w, int num_rows) {
        return int64_t(num_rows + READ_ROWS) * w.num_inputs;
    }
    static constexpr int READ_ROWS = 4;

    // work(part) for all rows of all experts, at most b.max_rows at a time.
    template <class Work> void for_groups(const Groups& groups, Work&& work) const {
        int64_t activated = 0;
        for (int e = 0; e < num_experts; e++) {
            const int64_t width = b.activated_width(experts.down[e].num_inputs);
            for (int begin = groups.begins[e], end = groups.begins[e + 1]; begin < end;) {
                const int num_rows = end - begin < b.max_rows ? end - begin : int(b.max_rows);
                work(ExpertPart{e, begin, num_rows, activated, {}});
                begin += num_rows, activated += num_rows * width;
            }
        }
    }

    // b.activated = the activations of some rows
    void activate(const Groups& groups, const ExpertPart& part) const {
        const Linear& w = experts.gate_up[part.expert];
        const Input rows = gather(w, groups.tokens + part.begin, part.num_rows);
        const ReadyInput input(w, rows, part.num_rows, alone);
        Factors factors(w, input);
        const Activated y = activated(part);
        for (int panel = part.panels.begin; panel < part.panels.end; panel++)
            if (experts.has_no_gates)
                activated_product_with_panel(w, factors, panel, 0, part.num_rows, y, activation);
            else
                gated_product_with_pair(w, factors, panel, 0, part.num_rows, y, activation);
        if (part.panels.end == num_panels(experts.down[part.expert].num_inputs))
            y.pad(0, part.num_rows);
    }

    // b.outputs = the outputs of the expert
    void project(const ExpertPart& part) const {
        const Linear& w = experts.down[part.expert];
        const ReadyInput input(w, activated(part).input(), part.num_rows, alone);
        Factors factors(w, input);
        float* y = b.outputs + part.begin * b.outputs_width;
        if (part.num_rows == 1) return project_row(w, factors, part.panels, y);
        for (int panel = part.panels.begin, count; panel < part.panels.end; panel += count) {
            count = factors.panels(part.panels.end - panel);
            product_with_panels(
                w, factors, panel, count, 0, part.num_rows, y, b.outputs_width, false);
        }
    }

    // The same of one row, whose sums are computed in their place. Panels of bf16 are read one after
    // the other: memory is what takes the time.
    void project_row(const Linear& w, Factors& factors, Share panels, float* y) const {
        const bool is_read = TileInput::takes(w);
        for (int panel = panels.begin, count; panel < panels.end; panel += count) {
            count = is_read ? 1 : factors.panels(panels.end - panel);
            float* sums = y + panel * PANEL;
            factors.hold(panel, count);
            factors.multiply(panel, count, 0, 1, sums);
            if (w.type == I8 || w.bias) scale_outputs(w, panel * PANEL, sums, 1, count * PANEL);
        }
    }

    // x += the outputs of each token's experts
    void add(const Groups& groups) const {
        const int panels = num_panels(int(hidden));
        const Share share = thread.share(num_tokens * panels);
        for (int item = share.begin; item < share.end; item++) {
            const int64_t t = item / panels, first = item % panels * PANEL;
            const int64_t size = hidden - first < PANEL ? hidden - first : PANEL;
            for (int k = 0; k < b.per_token; k++) {
                const int64_t choice = t * b.per_token + k;
                add_scaled(
                    b.outputs + groups.places[choice] * b.outputs_width + first, b.weights[choice],
                    int(size), x + t * hidden + first);
            }
        }
    }

    // The inputs of rows, one after the other.
    Input gather(const Linear& w, const int32_t* tokens, int num_rows) const {
        if (num_rows == 1) return {normed + tokens[0] * hidden, hidden, nullptr};
        const bool tiles = TileInput::takes(w);
        const TileLayout layout(num_rows, hidden);
        float* to = b.inputs + thread.index * b.inputs_size;
        for (int64_t i = 0; i < num_rows; i++)
            if (tiles)
                round_row(
                    normed + tokens[i] * hidden, int(hidden), layout.per_tile,
                    alone.tiles + layout.at(i));
            else
                memcpy(to + i * hidden, normed + tokens[i] * hidden, hidden * 4);
        return {to, hidden, tiles ? alone.tiles : nullptr};
    }

    Activated activated(const ExpertPart& part) const {
        const Linear& next = experts.down[part.expert];
        return Activated(b.activated + part.activated, part.num_rows, next.num_inputs, next);
    }
};

// The choice of experts alone; see RouteCall.
static void run_router(const Experts& experts, const RouteCall& call, Thread thread) {
    const int64_t width = experts.router->num_outputs, top_k = experts.top_k;
    const Input x{call.x, experts.router->num_inputs, nullptr};
    product(*experts.router, x, call.num_tokens, call.logits, width, false, thread);
    thread.wait();
    const Share share = thread.share(call.num_tokens);
    for (int64_t t = share.begin; t < share.end; t++)
        Choice{call.chosen + t * top_k, call.weights + t * top_k}.choose(
            experts, call.logits + t * width);
}

// x [T, hidden] += the experts of `normed`; memory: ExpertScratch::size floats.
static void run_routed_experts(
    const Experts& experts, int activation, int64_t hidden, int tokens, const float* normed,
    float* x, float* memory, Thread thread) {
    if (!tokens) return;
    const ExpertScratch buffers(experts, hidden, tokens, thread.count, memory);
    const int parts = int((tokens + buffers.num_tokens - 1) / buffers.num_tokens);
    for (int part = 0; part < parts; part++) { // of nearly as many tokens
        const int64_t begin = int64_t(tokens) * part / parts,
                      end = int64_t(tokens) * (part + 1) / parts;
        RoutedTokens(
            experts, activation, hidden, buffers, int(end - begin), normed + begin * hidden,
            x + begin * hidden, thread)
            .run();
    }
}

// b.x += the experts of b.normed
static void run_experts(
    const Model& model, const Experts& experts, int tokens, const Scratch& b, Thread thread) {
    run_routed_experts(
        experts, model.activation, model.hidden, tokens, b.normed, b.x, b.routed, thread);
}

// y [T, hidden] += the experts of x that the caller has chosen; see ExpertsCall.
static void run_chosen_experts(
    const Experts& experts, const ExpertsCall& call, int64_t hidden, Thread thread) {
    const ExpertScratch buffers(experts, hidden, call.num_tokens, thread.count, call.scratch);
    for (int64_t begin = 0; begin < call.num_tokens; begin += buffers.num_tokens) {
        const int64_t left = call.num_tokens - begin,
                      count = left < buffers.num_tokens ? left : buffers.num_tokens,
                      first = begin * buffers.per_token, size = count * buffers.per_token * 4;
        if (thread.index == 0) {
            memcpy(buffers.chosen, call.chosen + first, size);
            memcpy(buffers.weights, call.weights + first, size);
        }
        thread.wait();
        RoutedTokens(
            experts, call.activation, hidden, buffers, int(count), call.x + begin * hidden,
            call.y + begin * hidden, thread)
            .run_chosen();
    }
}
