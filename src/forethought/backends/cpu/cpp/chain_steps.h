// Decode steps: a chain of a draft network after the last known token of each row, or none, a
// forward of the target over both, and the tokens that are accepted.

#pragma once

#include "accept.h"
#include "drafts.h"
#include "kernels/attention.h"
#include "kernels/norms.h"
#include "kernels/vectors.h"
#include "module_forward.h"
#include "sampling.h"
#include "structures.h"
#include "team.h"
#include "uniform.h"

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <vector>

extern "C" void linear(
    const Linear* w, const float* x, int32_t tokens, float* y, int32_t num_threads);

// The integers of a call over rows of new tokens, one row after the other.
class RowsCall {
  public:
    Call call;

    // like: with caches, scratch memory and outputs; seen_from: as of Row.
    RowsCall(const Call& like, int64_t seen_from) : call(like), seen_from(seen_from) {}

    // Add the new tokens of a row, from a position on; with the logits of the last ones.
    void add(
        const ChainRow& row, int64_t position, const int64_t* new_tokens, int64_t count,
        int64_t num_logits) {
        Row added = {row.first_slot, row.pages, nullptr,   nullptr, nullptr, int64_t(tokens.size()),
                     count,          position,  seen_from, count,   nullptr, 0};
        for (int64_t p = position; p < position + count; p++) {
            tokens.push_back(new_tokens[p - position]);
            positions.push_back(p - seen_from);
            recent.push_back(p);
            slots.push_back(prefix_slot(added, p, call.page_size));
        }
        if (call.adapters) adapters.insert(adapters.end(), count, row.adapter);
        for (int64_t i = num_logits; i > 0; i--) wanted.push_back(int64_t(tokens.size()) - i);
        rows.push_back(added);
    }

    const Call& finish() {
        for (Row& row : rows)
            row.slots = slots.data() + row.start, row.positions = recent.data() + row.start;
        call.token_ids = tokens.data(), call.positions = positions.data();
        call.slots = slots.data(), call.logit_index = wanted.data(), call.rows = rows.data();
        call.num_tokens = int32_t(tokens.size()), call.num_logits = int32_t(wanted.size());
        call.num_rows = int32_t(rows.size());
        if (call.adapters) call.adapters = adapters.data();
        return call;
    }

  private:
    const int64_t seen_from;
    std::vector<int64_t> tokens, positions, recent, slots, wanted;
    std::vector<Row> rows;
    std::vector<const void*> adapters;
};

class ChainDecoder {
  public:
    ChainDecoder(const Model& target, const ChainSteps& steps)
        : target(target), steps(steps), network(target),
          drafts(steps.draft ? *steps.draft : target) {
        for (int32_t r = 0; r < steps.num_rows; r++) {
            const ChainRow& row = steps.rows[r];
            const std::vector<int64_t> known(row.known, row.known + row.num_known);
            going.push_back({&row, r, row.position, row.num_left, 0, row.position, known, {}, {}});
        }
    }

    // Returns the forwards that were made, or -1 if a token is outside a vocabulary.
    int32_t run() {
        *steps.draft_seconds = 0;
        for (int32_t step = 0; step < steps.num_steps; step++) {
            if (going.empty()) return step;
            for (Going& sequence : going)
                sequence.size = std::min(sequence.row->draft_len, sequence.num_left - 1);
            std::stable_sort(going.begin(), going.end(), [](const Going& a, const Going& b) {
                return a.size > b.size;
            });
            const auto began = Clock::now();
            if (going[0].size > 0 && !draft_behind(step == 0)) return -1;
            const std::chrono::duration<double> passed = Clock::now() - began;
            *steps.draft_seconds += passed.count();
            if (!verify(step)) return -1;
            if (num_waiting >= steps.max_waiting || is_interrupted()) return step + 1;
        }
        return steps.num_steps;
    }

  private:
    struct Going { // a row that has neither ended nor paused
        const ChainRow* row;
        int32_t number;
        int64_t position, num_left; // of the last known token; tokens to decode
        int64_t size;               // of its draft
        int64_t missing;            // the first position whose entry the draft network lacks
        std::vector<int64_t> known; // tokens at the last positions, with all that are missing
        std::vector<int64_t> drafted;
        std::vector<int64_t> decoded; // in all steps
    };

    const Model& target;
    const ChainSteps& steps;
    std::vector<Going> going;
    std::vector<float> entering;   // [T, hidden of the draft network]
    std::vector<Sampler> samplers; // of each thread
    Network network, drafts;       // of the target, and the one that drafts
    int32_t num_waiting = 0;       // rows that wait for the caller

    bool is_interrupted() const {
        return steps.interrupt && __atomic_load_n(steps.interrupt, __ATOMIC_RELAXED);
    }

    // Draft for all rows that may have a draft, the first ones.
    bool draft_behind(bool is_first) {
        RowsCall known(*steps.known, steps.seen_from);
        int32_t count = 0;
        for (; count < int32_t(going.size()) && going[count].size > 0; count++)
            if (!is_first) add_missing(known, going[count]);
        const Call& call = is_first ? *steps.known : known.finish();
        if (!is_first && steps.states) enter(known.call, count);
        const int64_t levels = going[0].size;
        std::vector<int64_t> slots(count * levels), drafted(count * levels);
        std::vector<int32_t> num_rows(levels);
        for (int32_t r = 0; r < count; r++)
            for (int64_t i = 0; i < going[r].size; i++) {
                slots[r * levels + i] = slot_of(going[r], going[r].position + 1 + i);
                num_rows[i]++;
            }
        const Chains chains = {
            &call,          slots.data(),    num_rows.data(),   steps.ids,
            drafted.data(), int32_t(levels), steps.num_choices, steps.last_position};
        ChainLevels chain(*steps.draft, chains);
        if (draft(drafts, call, chain) < call.num_tokens) return false;
        for (int32_t r = 0; r < count; r++)
            for (int64_t i = 0; i < going[r].size; i++)
                going[r].drafted.push_back(drafted[i * count + r]);
        return true;
    }

    // The known tokens that the draft network has not read.
    void add_missing(RowsCall& known, const Going& sequence) const {
        const int64_t count = sequence.position + 1 - sequence.missing;
        std::vector<int64_t> tokens(sequence.known.end() - count, sequence.known.end());
        for (int64_t& token : tokens)
            if (token >= steps.num_known) token = 0;
        known.add(*sequence.row, sequence.missing, tokens.data(), count, 1);
    }

    // Set `entering` of a call from the states that are stored.
    void enter(Call& call, int32_t count) {
        const TargetStates& from = *steps.states;
        const int64_t width = from.num_layers * int64_t(target.hidden);
        std::vector<float> wide(call.num_tokens * width);
        float* x = wide.data();
        for (int32_t r = 0; r < count; r++)
            for (int64_t p = going[r].missing; p <= going[r].position; p++, x += width) {
                const int64_t at = slot_of(going[r], p - steps.seen_from) * width;
                for (int64_t i = 0; i < width; i++)
                    x[i] = from.type == F32 ? scalar((const float*)from.stored + at + i)
                                            : scalar((const uint16_t*)from.stored + at + i);
                if (from.norm) norm(x, from.norm, int(width), from.eps, x);
            }
        if (from.entry) {
            entering.resize(call.num_tokens * int64_t(steps.draft->hidden));
            linear(from.entry, wide.data(), call.num_tokens, entering.data(), call.num_threads);
        } else {
            entering.swap(wide);
        }
        call.entering = entering.data();
    }

    // Compute the drafts with the target, and keep what is accepted and the token after it.
    bool verify(int32_t step) {
        RowsCall rows(*steps.target, 0);
        for (Going& sequence : going) {
            const int64_t num_known = step ? 1 : sequence.row->num_known; // that are not stored
            const int64_t num_drafted = sequence.drafted.size();
            std::vector<int64_t> tokens(sequence.known.end() - num_known, sequence.known.end());
            tokens.insert(tokens.end(), sequence.drafted.begin(), sequence.drafted.end());
            rows.add(
                *sequence.row, sequence.position + 1 - num_known, tokens.data(),
                num_known + num_drafted, 1 + num_drafted);
        }
        const Call& call = rows.finish();
        if (compute(step, call) < call.num_tokens) return false;
        if (steps.states) store_states(call);
        accept_all(step, call.logits);
        return true;
    }

    // As forward().
    int32_t compute(int32_t step, const Call& call) {
        std::vector<TokenState> states;
        if (target.decoder)
            for (const Going& sequence : going) add_states(step, sequence, states);
        return network.compute(call, states.data());
    }

    // Of the known tokens that a step computes, and of the drafted ones, which a step of its own
    // would compute from the state after the token before.
    void add_states(int32_t step, const Going& sequence, std::vector<TokenState>& states) const {
        float* const* after = sequence.row->after + sequence.position - sequence.row->position;
        if (step == 0) {
            const TokenState* known = steps.known_states;
            for (int32_t r = 0; r < sequence.number; r++) known += steps.rows[r].num_known;
            states.insert(states.end(), known, known + sequence.row->num_known);
        } else {
            states.push_back({after[-1], after[0], 0});
        }
        for (size_t i = 1; i <= sequence.drafted.size(); i++)
            states.push_back({after[i - 1], after[i], 0});
    }

    // Accept tokens of all rows, whose logits are one after the other; those that go on stay.
    void accept_all(int32_t step, const float* logits) {
        std::vector<const float*> begins;
        for (const Going& sequence : going) {
            begins.push_back(logits);
            logits += (1 + sequence.drafted.size()) * target.head->num_outputs;
        }
        const int64_t num_logits = logits - begins[0];
        const int num_threads = num_logits < MIN_SHARED_LOGITS ? 1 : steps.target->num_threads;
        samplers.resize(std::max<size_t>(samplers.size(), num_threads));
        std::vector<RowState> row_states(going.size());
        Team::run(num_threads, [&](int index, int count, Barrier&) {
            for (size_t r = index; r < going.size(); r += count)
                row_states[r] = accept(step, going[r], begins[r], samplers[index]);
        });
        size_t num_going = 0;
        for (size_t r = 0; r < going.size(); r++)
            if (row_states[r] == GOES_ON && num_going++ != r)
                going[num_going - 1] = std::move(going[r]);
        going.resize(num_going);
        num_waiting += std::count(row_states.begin(), row_states.end(), PAUSES);
        if (steps.ended_rows_wait)
            num_waiting += std::count(row_states.begin(), row_states.end(), ENDS);
    }

    void store_states(const Call& call) const {
        if (steps.states->type == F32)
            store_states_as<float>(call);
        else
            store_states_as<uint16_t>(call);
    }

    template <class T> void store_states_as(const Call& call) const {
        const TargetStates& to = *steps.states;
        for (int64_t t = 0; t < call.num_tokens; t++)
            for (int64_t layer = 0; layer < to.num_layers; layer++) {
                const float* x = call.states[to.layers[layer]] + t * target.hidden;
                T* y = (T*)to.stored + (call.slots[t] * to.num_layers + layer) * target.hidden;
                int64_t i = 0;
                for (; i + LANES <= target.hidden; i += LANES) store(y + i, load(x + i));
                for (; i < target.hidden; i++) put(y + i, x[i]);
            }
    }

    enum RowState : uint8_t { GOES_ON, ENDS, PAUSES };

    // Write what a step gives a row from the logits of its tokens.
    RowState accept(int32_t step, Going& sequence, const float* logits, Sampler& sampler) {
        const int64_t at = step * int64_t(steps.num_rows) + sequence.number;
        int64_t *drafted = steps.tokens + at * 2 * steps.width, *tokens = drafted + steps.width;
        double* scores = steps.scores + at * steps.width * steps.scores_width;
        const size_t num_decoded = sequence.decoded.size();
        const auto draw = [&](int32_t index) {
            sequence.decoded.resize(num_decoded);
            sequence.decoded.insert(sequence.decoded.end(), tokens, tokens + index);
            const float* x = logits + index * int64_t(target.head->num_outputs);
            return token_after(sequence, x, sampler, scores + index * steps.scores_width);
        };
        const auto [count, has_ended] =
            ::accept(sequence.drafted, *sequence.row, sequence.num_left, tokens, draw);
        sequence.decoded.resize(num_decoded);
        sequence.decoded.insert(sequence.decoded.end(), tokens, tokens + count);
        const int64_t num_drafted = sequence.drafted.size();
        std::copy(sequence.drafted.begin(), sequence.drafted.end(), drafted);
        steps.counts[2 * at] = int32_t(num_drafted), steps.counts[2 * at + 1] = count;
        sequence.missing =
            sequence.position + (steps.stores_drafted ? std::min<int64_t>(count, num_drafted) : 1);
        sequence.position += count, sequence.num_left -= count;
        sequence.known.assign(tokens, tokens + count);
        sequence.drafted.clear();
        return has_ended ? ENDS : pauses(*sequence.row, tokens, count) ? PAUSES : GOES_ON;
    }

    static bool pauses(const ChainRow& row, const int64_t* tokens, int32_t count) {
        return std::any_of(tokens, tokens + count, [&](int64_t token) {
            return std::binary_search(row.pauses, row.pauses + row.num_pauses, token);
        });
    }

    // The token after those that a row has decoded, of which the scores are written.
    int64_t token_after(
        const Going& sequence, const float* logits, Sampler& sampler, double* scores) {
        const int32_t vocab = target.head->num_outputs;
        const ChainRow& row = *sequence.row;
        if (!row.sampling) {
            const Largest best = largest(logits, vocab);
            return best.is_finite() ? best.index : NO_TOKEN;
        }
        const int64_t count = sequence.decoded.size();
        const double uniform = uniform_at(row.seed, row.sample, row.position + 1 + count);
        const Tokens recent = {sequence.decoded.data(), count};
        const int64_t token = sampler.draw(logits, vocab, *row.sampling, recent, uniform);
        if (token != NO_TOKEN) score(logits, vocab, *row.sampling, token, scores);
        return token;
    }

    int64_t slot_of(const Going& sequence, int64_t position) const {
        Row row = {};
        row.first_slot = sequence.row->first_slot, row.pages = sequence.row->pages;
        return prefix_slot(row, position, steps.target->page_size);
    }
};
