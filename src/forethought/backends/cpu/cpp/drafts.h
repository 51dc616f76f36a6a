// Drafts that grow level by level: the call of the known tokens, and then one for each level.

#pragma once

#include "kernels/attention.h"
#include "kernels/largest.h"
#include "kernels/vectors.h"
#include "module_forward.h"
#include "structures.h"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <numeric>
#include <vector>

struct Candidate {
    int32_t index;
    float logprob;
};

// The indices of the greatest values, falling; of equal ones the first.
static std::vector<int32_t> top(const float* x, int32_t size, int32_t count) {
    std::vector<int32_t> best;
    for (int32_t i = 0; i < size; i++) {
        if (int32_t(best.size()) == count && !(x[i] > x[best.back()])) continue;
        if (int32_t(best.size()) == count) best.pop_back();
        auto at = best.end();
        while (at != best.begin() && x[i] > x[*(at - 1)]) at--;
        best.insert(at, i);
    }
    return best;
}

// The most probable of `vocab` outputs; their logits are overwritten.
static std::vector<Candidate> most_probable(float* logits, int32_t vocab, int32_t count) {
    std::vector<Candidate> found;
    for (const int32_t index : top(logits, vocab, count)) found.push_back({index, logits[index]});
    const float highest = found[0].logprob, log_total = logf(exponentials(logits, vocab));
    for (Candidate& each : found) each.logprob = each.logprob - highest - log_total;
    return found;
}

// The calls of some drafts, one after the other; `call` is the next one.
class DraftLevels {
  public:
    Call call;

  protected:
    const Model& model;
    const int64_t num_rows;      // of the first call
    std::vector<int64_t> tokens; // [rows, size], which the next call reads

    // slots: [rows, num_slots], of the drafted tokens; size: those of a level and row at most.
    DraftLevels(
        const Model& model, const Call& known, const int64_t* slots, int64_t num_slots,
        int64_t size, int32_t last_position)
        : call(known), model(model), num_rows(known.num_rows), tokens(num_rows * size),
          slots(slots), num_slots(num_slots), last_position(last_position),
          rows(known.rows, known.rows + num_rows), positions(num_rows * size),
          new_slots(num_rows * size), logit_index(num_rows * size), recent(num_rows * num_slots) {
        std::iota(logit_index.begin(), logit_index.end(), 0);
        for (const Row& row : rows) {
            ends.push_back(row.prefix + row.num_recent);
            begins.push_back(call.positions[row.start + row.num_tokens - 1] + 1);
        }
        if (!model.join) return;
        outputs.resize(num_rows * size * model.hidden);
        entering.resize(outputs.size());
        (model.join->feeds_normed ? call.last_normed : call.last) = outputs.data();
        call.entering = known.entering;
    }

    // Token `at` of the next call follows token `from` of the last one.
    void follow(int64_t at, int64_t from) {
        const int64_t hidden = model.hidden;
        if (model.join)
            memcpy(entering.data() + at * hidden, outputs.data() + from * hidden, hidden * 4);
    }

    // Make the call that reads `size` tokens of each of the first `count` rows, of one level.
    // visible: [count, size, all read so far and these]; null: all of them.
    void read(int64_t count, int64_t size, const uint8_t* visible) {
        const int64_t now = num_read + size;
        for (int64_t r = 0; r < count; r++) {
            const int64_t *own = slots + r * num_slots, position = begins[r] + level;
            for (int64_t i = 0; i < size; i++) {
                const int64_t at = r * size + i;
                positions[at] = position < last_position ? position : last_position;
                new_slots[at] = own[num_read + i];
                recent[r * num_slots + num_read + i] = ends[r] + level;
            }
            Row& row = rows[r];
            row.slots = own;
            row.positions = recent.data() + r * num_slots;
            row.visible = visible ? visible + r * size * now : nullptr;
            row.start = r * size, row.num_tokens = size;
            row.prefix = ends[r], row.num_recent = now;
        }
        num_read = now, level++;
        call.token_ids = tokens.data();
        call.entering = entering.data();
        call.positions = positions.data();
        call.slots = new_slots.data();
        call.logit_index = logit_index.data();
        call.rows = rows.data();
        call.num_tokens = call.num_logits = int32_t(count * size), call.num_rows = int32_t(count);
    }

  private:
    const int64_t* slots;
    const int64_t num_slots;
    const int32_t last_position; // further ones are computed as this one
    std::vector<Row> rows;
    std::vector<int64_t> positions, new_slots, logit_index, recent;
    std::vector<int64_t> ends, begins; // known tokens; what the network takes as the next position
    std::vector<float> outputs, entering; // [rows, size, hidden]: states of the last and next call
    int64_t num_read = 0, level = 0;
};

// Each level is the most probable token after the one before.
class ChainLevels : public DraftLevels {
  public:
    ChainLevels(const Model& model, const Chains& chains)
        : DraftLevels(
              model, *chains.known, chains.slots, chains.num_levels, 1, chains.last_position),
          chains(chains) {}

    // Draft a level from the logits of `call`, and make the call that reads it; whether there is
    // one.
    bool draft(int32_t level) {
        const int64_t vocab = model.head->num_outputs;
        for (int32_t r = 0; r < chains.num_rows[level]; r++) {
            const Largest best = largest(call.logits + r * vocab, chains.num_choices);
            tokens[r] = chains.ids ? chains.ids[best.index] : best.index;
            chains.drafted[level * num_rows + r] = tokens[r];
            follow(r, r);
        }
        if (level + 1 == chains.num_levels) return false;
        read(chains.num_rows[level + 1], 1, nullptr);
        return true;
    }

  private:
    const Chains& chains;
};

// The best nodes of each level are expanded, and in the end the best of all are kept; see
// speculative/dynamic_tree.py. Of equal scores the node that was made first wins.
class TreeLevels : public DraftLevels {
  public:
    TreeLevels(const Model& model, const Trees& trees)
        : DraftLevels(
              model, *trees.known, trees.slots, int64_t(trees.width) * trees.depth, trees.width,
              trees.last_position),
          trees(trees), nodes(num_rows), beams(num_rows * trees.width) {}

    // Make the nodes of a level from the logits of `call`, and the call that reads the best; whether
    // there is one.
    bool draft(int32_t level) {
        const int32_t width = trees.width, before = level ? width : 1;
        const int64_t read_before = int64_t(level) * width, read_now = read_before + width;
        std::vector<uint8_t> now(num_rows * width * read_now);
        for (int64_t r = 0; r < num_rows; r++) {
            const int32_t first = int32_t(nodes[r].size());
            for (int32_t b = 0; b < before; b++)
                add_children(r, level ? beams[r * width + b] : -1, r * before + b);
            const std::vector<int32_t> best = best_of(nodes[r], first, width);
            for (int32_t i = 0; i < width; i++) {
                const Node& node = nodes[r][best[i]];
                const int32_t above = level ? (best[i] - first) / width : 0;
                uint8_t* sees = now.data() + (r * width + i) * read_now;
                if (level)
                    memcpy(sees, seen.data() + (r * width + above) * read_before, read_before);
                sees[read_before + i] = 1;
                tokens[r * width + i] = node.token;
                follow(r * width + i, r * before + above);
            }
            std::copy(best.begin(), best.end(), beams.begin() + r * width);
        }
        seen = now;
        if (level + 1 == trees.depth) {
            write();
            return false;
        }
        read(num_rows, width, seen.data());
        return true;
    }

  private:
    struct Node {
        int64_t token;
        int32_t parent;
        float score;
    };

    const Trees& trees;
    std::vector<std::vector<Node>> nodes; // of each row, in the order in which they were made
    std::vector<int32_t> beams;           // [rows, width]: the nodes that were read last
    std::vector<uint8_t> seen;            // [rows, width, nodes read], which these see

    // The most probable children of a node, from row `row` of the logits.
    void add_children(int64_t r, int32_t parent, int64_t row) {
        const int32_t vocab = model.head->num_outputs;
        float* logits = call.logits + row * vocab;
        const float before = parent < 0 ? 0 : nodes[r][parent].score;
        for (const Candidate& each : most_probable(logits, vocab, trees.width)) {
            const int64_t token = trees.ids ? trees.ids[each.index] : each.index;
            nodes[r].push_back({token, parent, before + each.logprob});
        }
    }

    // The best of the nodes from `first` on.
    static std::vector<int32_t> best_of(
        const std::vector<Node>& nodes, int32_t first, int32_t count) {
        std::vector<int32_t> order(nodes.size() - first);
        std::iota(order.begin(), order.end(), first);
        std::stable_sort(order.begin(), order.end(), [&](int32_t a, int32_t b) {
            return nodes[a].score > nodes[b].score;
        });
        order.resize(std::min(order.size(), size_t(count)));
        return order;
    }

    void write() const {
        int64_t* to = trees.kept;
        for (int64_t r = 0; r < num_rows; r++)
            for (const int32_t number : best_of(nodes[r], 0, trees.total)) {
                *to++ = number;
                *to++ = nodes[r][number].token;
                *to++ = nodes[r][number].parent;
            }
    }
};

// Compute the known tokens, then level by level; returns what forward() returns of the former.
template <class Levels> static int32_t draft(Network& network, const Call& known, Levels& levels) {
    for (int32_t level = 0;; level++) {
        const int32_t found = network.compute(levels.call);
        if (found < levels.call.num_tokens) return level ? 0 : found;
        if (!levels.draft(level)) return known.num_tokens;
    }
}
