// A forward of a module whose decoder layers are all computed here: embeddings, or in a draft module
// these joined with hidden states, the sublayers of the decoder, the final norm and logits. Between
// these, activations have the dtype of the module.

#pragma once

#include "join.h"
#include "kernels/norms.h"
#include "kernels/products.h"
#include "kernels/vectors.h"
#include "scratch.h"
#include "structures.h"
#include "sublayers.h"
#include "team.h"

#include <cstdint>
#include <cstring>
#include <vector>

extern "C" int32_t forward(const Model* model, const Call* call);

extern "C" int32_t first_unknown(const Model* model, const int64_t* tokens, int32_t count);

// Its memory is kept between forwards.
class ModuleForward {
  public:
    // model: with ModuleDecoder, unless nothing is computed.
    explicit ModuleForward(const Model& model) : model(model), memory(0) {}

    // As forward(); states: [T], of the tokens; null: there are no recurrent layers.
    int32_t compute(const Call& batch, const TokenState* states) {
        const int known = first_unknown(&model, batch.token_ids, batch.num_tokens);
        if (known < batch.num_tokens) return known;
        std::vector<int32_t> begins; // of rows, and T
        for (int r = 0; r < batch.num_rows; r++) begins.push_back(int32_t(batch.rows[r].start));
        begins.push_back(batch.num_tokens);
        const ModuleDecoder& w = *model.decoder;
        SublayersCall call = {};
        call.sublayers = w.sublayers, call.num_sublayers = w.num_sublayers;
        call.rotary = w.rotary, call.batch = &batch, call.hidden = model.hidden;
        call.states = batch.states;
        call.tokens = states, call.rows = begins.data();
        float* mixture = place(call);
        uint16_t* tiles = (uint16_t*)(mixture + round_up(mixture_size(call)));
        Team::run(batch.num_threads, [&](int index, int count, Barrier& barrier) {
            const TilesGuard guard;
            run(call, mixture, {index, count, tiles, barrier});
        });
        return batch.num_tokens;
    }

  private:
    const Model& model;
    Memory memory;

    // Set where `call` computes; returns the memory of mixtures, which that of tiles follows.
    float* place(SublayersCall& call) {
        const Call& batch = *call.batch;
        const ModuleDecoder& w = *model.decoder;
        const bool with_embeddings = reads_embeddings(w.sublayers, w.num_sublayers);
        const bool with_side = has_side_states(w.sublayers, w.num_sublayers);
        const bool is_wide = with_embeddings || model.join; // what enters, side by side
        const int64_t tokens = batch.num_tokens, states = round_up(tokens * model.hidden);
        const int64_t rows = round_up(tokens * w.width);
        const int64_t size = (3 + is_wide + with_embeddings + with_side) * states + 2 * rows +
                             round_up(mixture_size(call)) +
                             tiles_size(tokens, widest(call), batch.num_threads);
        if (size > memory.size) memory = Memory(size);
        float* next = memory.begin;
        const auto take = [&](int64_t count) {
            next += count;
            return next - count;
        };
        call.x = take(states), call.y = take(states);
        call.normed = take((1 + is_wide) * states);
        if (with_embeddings) call.embeddings = take(states);
        if (with_side) call.side = take(states);
        call.projected = take(rows), call.mixed = take(rows);
        return next;
    }

    int64_t widest(const SublayersCall& call) const {
        return larger(widest_input(call), model.join ? 2 * model.hidden : 0);
    }

    // What one thread does. Sums and norms of a token are those of one thread, without a barrier.
    void run(const SublayersCall& call, float* mixture, Thread thread) const {
        const Call& batch = *call.batch;
        const int64_t hidden = model.hidden;
        const Share share = thread.share(batch.num_tokens);
        if (model.join)
            join(call, share, thread);
        else
            embed_all(call, share);
        Sublayers(call, mixture, thread).run();
        float* x = call.x + share.begin * hidden;
        const int64_t count = (share.end - share.begin) * hidden;
        round(x, count);
        keep_state(call, model.num_layers, share);
        hand_out(batch, call.x, share, batch.last);
        for (int64_t i = 0; i < count; i += hidden)
            norm(x + i, model.final_norm, int(hidden), model.eps, x + i);
        round(x, count);
        keep_state(call, model.num_layers + 1, share);
        hand_out(batch, call.x, share, batch.last_normed);
        thread.wait();
        if (thread.index == 0)
            for (int64_t r = 0; r < batch.num_logits; r++) // they rise, so none is overwritten
                memmove(call.x + r * hidden, call.x + batch.logit_index[r] * hidden, hidden * 4);
        thread.wait();
        write_logits(batch, call.x, thread);
    }

    // call.x = the embeddings of a share of the tokens.
    void embed_all(const SublayersCall& call, Share share) const {
        const int64_t hidden = model.hidden;
        for (int64_t t = share.begin; t < share.end; t++)
            embed(call.batch->token_ids[t], call.x + t * hidden);
        if (!call.embeddings) return;
        const int64_t begin = share.begin * hidden, count = (share.end - share.begin) * hidden;
        memcpy(call.embeddings + begin, call.x + begin, count * 4);
    }

    // call.x = the projections of embeddings and states, which are in call.normed meanwhile.
    void join(const SublayersCall& call, Share share, Thread thread) const {
        const int64_t width = 2 * model.hidden;
        for (int64_t t = share.begin; t < share.end; t++)
            join_token(model, *call.batch, t, call.normed + t * width);
        thread.wait();
        const Input both{call.normed, width, nullptr};
        product(
            *model.join->project, both, call.batch->num_tokens, call.x, model.hidden, false,
            thread);
        thread.wait();
    }

    // to [R, hidden] = states x [T, hidden] of those tokens of a share that have logits; or null.
    void hand_out(const Call& batch, const float* x, Share share, float* to) const {
        const int64_t hidden = model.hidden;
        for (int64_t r = 0; to && r < batch.num_logits; r++) {
            const int64_t t = batch.logit_index[r];
            if (share.begin <= t && t < share.end)
                memcpy(to + r * hidden, x + t * hidden, hidden * 4);
        }
    }

    void embed(int64_t token, float* x) const {
        const ModuleDecoder& w = *model.decoder;
        embed_token(model, token, x);
        round(x, model.hidden);
        if (w.embedding_factor == 1) return;
        for (int64_t i = 0; i < model.hidden; i++) x[i] *= w.embedding_factor;
        round(x, model.hidden);
    }

    // From x [R, hidden].
    void write_logits(const Call& batch, const float* x, Thread thread) const {
        if (!batch.logits || !batch.num_logits) return;
        const ModuleDecoder& w = *model.decoder;
        const int64_t vocab = model.head->num_outputs;
        const Input states{x, model.hidden, nullptr};
        product(*model.head, states, batch.num_logits, batch.logits, vocab, false, thread);
        if (w.type == F32 && w.logits_factor == 1 && w.logits_divisor == 1) return;
        thread.wait();
        const Share share = thread.share(batch.num_logits);
        float* logits = batch.logits + share.begin * vocab;
        const int64_t count = (share.end - share.begin) * vocab;
        round(logits, count);
        if (w.logits_factor != 1) {
            for (int64_t i = 0; i < count; i++) logits[i] *= w.logits_factor;
            round(logits, count);
        }
        if (w.logits_divisor == 1) return;
        for (int64_t i = 0; i < count; i++) logits[i] /= w.logits_divisor;
        round(logits, count);
    }

    // To the dtype of the module.
    void round(float* x, int64_t count) const {
        if (model.decoder->type == F32) return;
        for (int64_t i = 0; i < count; i++) {
            uint16_t rounded;
            put(&rounded, x[i]);
            x[i] = scalar(&rounded);
        }
    }
};

// Forwards of a model or a module.
class Network {
  public:
    explicit Network(const Model& model) : model(model), module(model) {}

    // As forward(); states: as of ModuleForward.
    int32_t compute(const Call& call, const TokenState* states = nullptr) {
        return model.decoder ? module.compute(call, states) : forward(&model, &call);
    }

  private:
    const Model& model;
    ModuleForward module;
};
