// Beam search with a recurrent head, level by level; see speculative/heads/redrafter.py.

#pragma once

#include "drafts.h"
#include "heads.h"
#include "kernels/products.h"
#include "kernels/vectors.h"
#include "structures.h"

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <vector>

class BeamLevels {
  public:
    const int32_t max_rows; // of a product
    const int64_t widest;   // inputs of one

    BeamLevels(const Model& model, const Beams& search)
        : max_rows(search.num_roots * search.width),
          widest(std::max(2 * model.hidden, search.head[0].num_inputs)), model(model),
          search(search), hidden(model.hidden), exit(search.head[0].num_inputs),
          vocab(search.head[search.num_blocks].num_outputs),
          tokens(search.roots, search.roots + search.num_roots), scores(search.num_roots),
          states(int64_t(max_rows) * hidden), next(states.size()), joined(2 * states.size()),
          entered(int64_t(max_rows) * exit), x(entered.size()), y(entered.size()),
          logits(int64_t(max_rows) * vocab) {}

    // What one thread does for the states and logits behind the last token of each beam.
    void predict(Thread thread) {
        const int32_t rows = search.num_roots * kept;
        const Share own = thread.share(rows);
        for (int64_t r = own.begin; r < own.end; r++) {
            float* in = &joined[r * 2 * hidden];
            embed_token(model, tokens[r], in);
            memcpy(in + hidden, &states[r * hidden], hidden * 4);
        }
        thread.wait();
        if (search.recur)
            product(
                *search.recur, {joined.data(), 2 * hidden, nullptr}, rows, next.data(), hidden,
                false, thread);
        thread.wait();
        for (int64_t r = own.begin; r < own.end; r++) {
            float *in = &joined[r * 2 * hidden], *state = &next[r * hidden];
            for (int64_t k = 0; k < hidden; k++)
                state[k] =
                    search.recur ? activate(broadcast(state[k]), SILU)[0] : in[k] + in[hidden + k];
            memcpy(in, search.contexts + r / kept * hidden, hidden * 4);
            memcpy(in + hidden, state, hidden * 4);
        }
        thread.wait();
        if (search.enter)
            product(
                *search.enter, {joined.data(), 2 * hidden, nullptr}, rows, entered.data(), exit,
                false, thread);
        thread.wait();
        run_heads(
            search.head, 1, search.num_blocks, search.enter ? entered.data() : joined.data(), rows,
            x.data(), y.data(), logits.data(), thread);
    }

    // Keep the best continuations of the beams; whether one is probable enough to go on.
    bool extend(int32_t level) {
        const int32_t before = kept;
        kept = int32_t(std::min(int64_t(search.width), int64_t(before) * vocab));
        std::vector<float> best;
        tokens.resize(search.num_roots * kept);
        for (int32_t root = 0; root < search.num_roots; root++) {
            const std::vector<Longer> found = continuations(root, before);
            const int64_t to = (int64_t(level) * search.num_roots + root) * search.width;
            for (int32_t i = 0; i < kept; i++) {
                const int64_t row = int64_t(root) * kept + i;
                const int32_t output = found[i].token;
                tokens[row] = search.tokens[to + i] = search.ids ? search.ids[output] : output;
                search.parents[to + i] = found[i].beam;
                search.scores[to + i] = found[i].score;
                best.push_back(found[i].score);
                const int64_t from = int64_t(root) * before + found[i].beam;
                memcpy(&states[row * hidden], &next[from * hidden], hidden * 4);
            }
        }
        scores = best;
        return std::any_of(
            scores.begin(), scores.end(), [&](float score) { return score >= search.min_logprob; });
    }

  private:
    struct Longer {
        float score;
        int32_t beam, token;
    };

    const Model& model;
    const Beams& search;
    const int64_t hidden, exit;
    const int32_t vocab;
    int32_t kept = 1;                 // beams behind each root
    std::vector<int64_t> tokens;      // [roots, kept], the last of each
    std::vector<float> scores;        // [roots, kept]
    std::vector<float> states, next;  // [rows, hidden], before and behind that token
    std::vector<float> joined;        // [rows, 2, hidden]
    std::vector<float> entered, x, y; // [rows, exit]
    std::vector<float> logits;        // [rows, vocab]

    // Of the beams behind a root, the most probable first; of equal ones the first.
    std::vector<Longer> continuations(int32_t root, int32_t before) {
        std::vector<Longer> found;
        for (int32_t beam = 0; beam < before; beam++) {
            const int64_t row = int64_t(root) * before + beam;
            for (const Candidate& each : most_probable(&logits[row * vocab], vocab, search.width))
                found.push_back({scores[row] + each.logprob, beam, each.index});
        }
        std::stable_sort(found.begin(), found.end(), [](const Longer& a, const Longer& b) {
            return a.score > b.score;
        });
        return found;
    }
};
