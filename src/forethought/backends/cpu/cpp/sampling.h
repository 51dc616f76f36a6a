// From logits to a token and its scores; in Python, as the reference: model/sampling.
//
// The distribution is that of model/sampling/distribution.py. Its weights are exponentials of the
// logits less the largest, so that the most probable token weighs 1; sums are float64, of blocks in
// float32. A row's token depends on nothing but its logits, its parameters and its uniform sample.

#pragma once

#include "kernels/largest.h"
#include "kernels/vectors.h"
#include "structures.h"

#include <algorithm>
#include <cfloat>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <functional>
#include <vector>

// Logits of a call from which on threads share its rows: fewer are sampled from sooner than threads
// wake.
constexpr int64_t MIN_SHARED_LOGITS = 1 << 12;

// Tokens of a generation after those of Sampling::past.
struct Tokens {
    const int64_t* ids;
    int64_t count;
};

// x [LANES] -> its exponentials, 0 where float32 cannot tell them from it.
static inline Vec weights_of(Vec x) { return x < -87.0f ? Vec{} : exp(x); }

class Sampler {
  public:
    // The next token of a row of logits, or NO_TOKEN.
    int64_t draw(
        const float* logits, int32_t vocab, const Sampling& by, const Tokens& recent,
        double uniform) {
        size = vocab;
        Largest best = largest(logits, vocab);
        if (!best.is_finite()) return NO_TOKEN;
        const float* x = logits;
        if (edits(by, recent)) {
            edited.assign(logits, logits + vocab);
            edit(by, recent);
            best = largest(edited.data(), vocab);
            if (!best.is_finite()) best = fall_back(logits, by);
            x = edited.data();
        }
        if (by.temperature == 0) return best.index;
        weigh(x, best.value, by.temperature);
        if (by.top_k || by.top_p < 1 || by.min_p > 0) cut(by);
        if (by.top_n_sigma > 0) cut_below(best.value - by.top_n_sigma * deviation(x, vocab), x);
        if (by.xtc_probability > 0) exclude_top(by);
        return invert_cdf(uniform);
    }

  private:
    static constexpr int BLOCK = 256; // weights that are added up in float32
    static constexpr int SHIFT = 20;  // of a weight's bits: bins of an eighth of an octave
    static constexpr int NUM_BINS = (0x3f800000 >> SHIFT) + 1;
    static constexpr float LIKELY = 0x1p-12f;

    struct Bin { // of weights that are nearly alike
        double mass;
        int32_t count;
    };

    int32_t size = 0;            // outputs
    std::vector<float> edited;   // logits, where a parameter edits them
    std::vector<float> weights;  // padded with 0 to whole blocks
    std::vector<double> blocks;  // their sums
    std::vector<int32_t> counts; // of tokens; zeros between calls
    std::vector<Bin> bins;
    std::vector<float> close; // weights of one bin

    static bool edits(const Sampling& by, const Tokens& recent) {
        const bool penalises = by.repetition != 1 || by.presence != 0 || by.frequency != 0;
        return by.num_bias || penalises || by.num_dry || by.mask ||
               recent.count < by.num_before_end;
    }

    void edit(const Sampling& by, const Tokens& recent) {
        for (int32_t i = 0; i < by.num_bias; i++)
            if (by.bias_ids[i] < size) edited[by.bias_ids[i]] += by.bias[i];
        if (by.repetition != 1)
            for_distinct(by, 0, recent, [&](int64_t token, int32_t) {
                float& x = edited[token];
                x = x > 0 ? x / by.repetition : x * by.repetition;
            });
        if (by.presence != 0 || by.frequency != 0)
            for_distinct(by, by.num_prompt, recent, [&](int64_t token, int32_t count) {
                edited[token] -= by.presence + by.frequency * float(count);
            });
        for (int32_t i = 0; i < by.num_dry; i++)
            if (by.dry_ids[i] < size) edited[by.dry_ids[i]] -= by.dry[i];
        if (recent.count < by.num_before_end)
            for (int32_t i = 0; i < by.num_held_ends; i++)
                if (by.held_ends[i] < size) edited[by.held_ends[i]] = -INFINITY;
        forbid(by);
    }

    // Call edit(token, count) for the distinct tokens of past[from:] and the recent ones.
    template <class Edit>
    void for_distinct(const Sampling& by, int64_t from, const Tokens& recent, const Edit& edit) {
        counts.resize(std::max<size_t>(counts.size(), size));
        const auto for_all = [&](const auto& use) {
            for (int64_t i = from; i < by.num_past; i++) use(by.past[i]);
            for (int64_t i = 0; i < recent.count; i++) use(recent.ids[i]);
        };
        const auto is_output = [&](int64_t token) { return token >= 0 && token < size; };
        for_all([&](int64_t token) { counts[is_output(token) ? token : 0] += is_output(token); });
        for_all([&](int64_t token) {
            if (!is_output(token) || !counts[token]) return;
            edit(token, counts[token]);
            counts[token] = 0;
        });
    }

    // What the constraint does not allow.
    void forbid(const Sampling& by) {
        if (!by.mask) return;
        for (int32_t i = 0; i < size; i++)
            if (!(by.mask[i / 8] >> i % 8 & 1)) edited[i] = -INFINITY;
    }

    // The raw logits where everything was forbidden, or edits have overflowed.
    Largest fall_back(const float* logits, const Sampling& by) {
        for (int32_t i = 0; i < size; i++) edited[i] = std::max(logits[i], -FLT_MAX);
        forbid(by);
        return largest(edited.data(), size);
    }

    void weigh(const float* x, float highest, float temperature) {
        const int32_t num_blocks = (size + BLOCK - 1) / BLOCK;
        weights.resize(num_blocks * BLOCK), blocks.resize(num_blocks);
        const float divisor = std::max(temperature, FLT_MIN);
        int32_t i = 0;
        for (; i + LANES <= size; i += LANES)
            store(&weights[i], weights_of((load(x + i) - highest) / divisor));
        if (i < size) {
            const Vec rest = weights_of((load_first(x + i, size - i) - highest) / divisor);
            for (int lane = 0; i < size; i++, lane++) weights[i] = rest[lane];
        }
        std::fill(weights.begin() + size, weights.end(), 0.0f);
        add_up();
    }

    void add_up() {
        for (size_t block = 0; block < blocks.size(); block++) {
            Vec total = {};
            for (int i = 0; i < BLOCK; i += LANES) total += load(&weights[block * BLOCK + i]);
            blocks[block] = sum(total);
        }
    }

    double total() const {
        double mass = 0;
        for (const double block : blocks) mass += block;
        return mass;
    }

    // Set the weights of the tokens that top-k, top-p and min-p cut to 0.
    void cut(const Sampling& by) {
        Kept kept = {by.min_p, size};
        if (by.top_k || by.top_p < 1) {
            const int32_t most = by.top_k ? std::min(by.top_k, size) : size;
            const double mass = by.top_p < 1 ? by.top_p * total() : INFINITY;
            const Kept first = find_kept(most, mass, by.min_p);
            if (first.least >= kept.least) kept = first;
        }
        for (size_t i = 0; i < weights.size(); i += LANES) {
            const Vec w = load(&weights[i]);
            store(&weights[i], w < kept.least ? Vec{} : w);
        }
        drop_equals(kept);
        add_up();
    }

    // A prefix of the tokens in falling order of weight, the lower id first among equals.
    struct Kept {
        float least;       // weight of the last one
        int32_t num_equal; // tokens of this weight among them
    };

    // The shortest prefix with `most` tokens or `mass`; all, if none of weights from `least` on has.
    Kept find_kept(int32_t most, double mass, float least) {
        for (const float floor : {LIKELY, FLT_MIN}) {
            sort_into_bins(floor);
            int32_t count = 0;
            double sum = 0;
            for (int bin = NUM_BINS - 1; bin >= 0; bin--) {
                if (count + bins[bin].count >= most || sum + bins[bin].mass >= mass)
                    return find_in_bin(bin, most - count, mass - sum);
                count += bins[bin].count, sum += bins[bin].mass;
            }
            if (least >= floor) break;
        }
        return {0, size};
    }

    // Weights from `floor` on; a bin that ends below it may lack some and is not looked at.
    void sort_into_bins(float floor) {
        bins.assign(NUM_BINS, {0, 0});
        for (size_t i = 0; i < weights.size(); i += LANES) {
            if (largest(load(&weights[i])) < floor) continue;
            for (size_t lane = i; lane < i + LANES; lane++) {
                if (weights[lane] < floor) continue;
                Bin& bin = bins[bin_of(weights[lane])];
                bin.mass += weights[lane], bin.count++;
            }
        }
    }

    static int32_t bin_of(float weight) {
        int32_t bits;
        memcpy(&bits, &weight, 4);
        return std::min(bits >> SHIFT, NUM_BINS - 1);
    }

    // The last one of a prefix that ends in a bin, after `most` tokens of it or `mass`.
    Kept find_in_bin(int32_t bin, int32_t most, double mass) {
        close.clear();
        for (int32_t i = 0; i < size; i++)
            if (weights[i] >= FLT_MIN && bin_of(weights[i]) == bin) close.push_back(weights[i]);
        std::sort(close.begin(), close.end(), std::greater<float>());
        int32_t count = 0, num_equal = 0;
        double sum = 0;
        for (const float weight : close) {
            num_equal = count && weight == close[count - 1] ? num_equal + 1 : 1;
            sum += weight, count++;
            if (count == most || sum >= mass) break;
        }
        return {close[count - 1], num_equal};
    }

    // Of the tokens that weigh as the last one that is kept, only the first ones are.
    void drop_equals(const Kept& kept) {
        int32_t num_equal = 0;
        if (kept.num_equal == size) return;
        for (int32_t i = 0; i < size; i++)
            if (weights[i] == kept.least && ++num_equal > kept.num_equal) weights[i] = 0;
    }

    // The standard deviation of the logits that are not -inf.
    static double deviation(const float* x, int32_t vocab) {
        double sum = 0, squares = 0;
        int32_t count = 0;
        for (int32_t i = 0; i < vocab; i++)
            if (std::isfinite(x[i])) sum += x[i], count++;
        const double mean = sum / count;
        for (int32_t i = 0; i < vocab; i++)
            if (std::isfinite(x[i])) squares += (x[i] - mean) * (x[i] - mean);
        return std::sqrt(squares / count);
    }

    void cut_below(double least, const float* x) {
        for (int32_t i = 0; i < size; i++)
            if (x[i] < least) weights[i] = 0;
        add_up();
    }

    // XTC: mix the distribution with the one in which of the tokens with the share xtc_threshold or
    // more only the last is left.
    void exclude_top(const Sampling& by) {
        const double mass = total(), least_weight = by.xtc_threshold * mass;
        const auto is_top = [&](int32_t i) { return weights[i] > 0 && weights[i] >= least_weight; };
        int32_t last = -1;
        for (int32_t i = 0; i < size; i++)
            if (is_top(i) && (last < 0 || weights[i] <= weights[last])) last = i;
        double rest = 0;
        for (int32_t i = 0; i < size; i++)
            if (i == last || !is_top(i)) rest += weights[i];
        const double whole = 1 - double(by.xtc_probability);
        const double share = whole + by.xtc_probability * mass / rest;
        for (int32_t i = 0; i < size; i++)
            weights[i] = float(weights[i] * (i != last && is_top(i) ? whole : share));
        add_up();
    }

    // The first token up to which there is more than the share `uniform` of all weight.
    int64_t invert_cdf(double uniform) const {
        const double mass = uniform * total();
        double before = 0;
        size_t block = 0;
        for (; block + 1 < blocks.size() && before + blocks[block] <= mass; block++)
            before += blocks[block];
        int64_t last = NO_TOKEN; // sums of floats may fall short of the block's own
        for (size_t i = block * BLOCK; i < (block + 1) * BLOCK; i++) {
            if (weights[i] == 0) continue;
            before += weights[i], last = int64_t(i);
            if (before > mass) break;
        }
        return last;
    }
};

// ---- scores: of the model's own logits -------------------------------------------------------------

struct Shifted { // logits less the largest
    float highest;
    double mass = 0, weighted = 0,
           sum_all = 0; // of exponentials, of their products with them, of all

    Shifted(const float* x, int32_t vocab, bool wants_means)
        : highest(largest(x, vocab).value), wants_means(wants_means) {
        int32_t begin = 0;
        for (; begin + BLOCK <= vocab; begin += BLOCK) add(x + begin, BLOCK / LANES);
        const int32_t rest = vocab - begin;
        add(x + begin, rest / LANES);
        for (int32_t i = vocab - rest % LANES; i < vocab; i++) {
            const float shifted = x[i] - highest, weight = weights_of(broadcast(shifted))[0];
            mass += weight, weighted += weight == 0 ? 0 : weight * shifted, sum_all += shifted;
        }
    }

  private:
    static constexpr int BLOCK = 256;

    const bool wants_means;

    void add(const float* x, int count) {
        Vec weights = {}, products = {}, values = {};
        for (int i = 0; i < count; i++) {
            const Vec shifted = load(x + i * LANES) - highest, weight = weights_of(shifted);
            weights += weight;
            if (!wants_means) continue;
            values += shifted;
            products += weight == 0.0f ? Vec{} : weight * shifted; // 0 * -inf would be NaN
        }
        mass += sum(weights), weighted += sum(products), sum_all += sum(values);
    }
};

// The ids of the `count` largest logits, falling; of equal ones the first.
static std::vector<int32_t> largest_ids(const float* x, int32_t vocab, int32_t count) {
    const auto precedes = [x](int32_t a, int32_t b) {
        return x[a] > x[b] || (x[a] == x[b] && a < b);
    };
    std::vector<int32_t> best; // a heap, with the last one of them first
    for (int32_t i = 0; i < vocab; i++) {
        if (int32_t(best.size()) < count) {
            best.push_back(i);
            std::push_heap(best.begin(), best.end(), precedes);
        } else if (count && precedes(i, best.front())) {
            std::pop_heap(best.begin(), best.end(), precedes);
            best.back() = i;
            std::push_heap(best.begin(), best.end(), precedes);
        }
    }
    std::sort_heap(best.begin(), best.end(), precedes);
    return best;
}

// Write 2 + 2 k scores: log-probability and rank of a token, log-probabilities of the k most probable
// ones, and their ids.
static void score_logprob(const float* x, int32_t vocab, int64_t token, int32_t k, double* scores) {
    const Shifted shifted(x, vocab, false);
    const double log_mass = log(shifted.mass);
    const auto logprob = [&](int64_t id) { return double(x[id] - shifted.highest) - log_mass; };
    int32_t num_above = 0;
    for (int32_t i = 0; i < vocab; i++) num_above += x[i] > x[token];
    scores[0] = logprob(token), scores[1] = 1 + num_above;
    double* next = scores + 2;
    for (const int32_t id : largest_ids(x, vocab, k)) *next = logprob(id), next[k] = id, next++;
}

// Write the four fields of TokenConfidence, over the k most probable tokens.
static void score_confidence(
    const float* x, int32_t vocab, int64_t token, int32_t k, double* scores) {
    const Shifted shifted(x, vocab, true);
    const double log_mass = log(shifted.mass);
    double sum = 0;
    int32_t count = 0;
    for (const int32_t id : largest_ids(x, vocab, k))
        if (std::isfinite(x[id])) sum += x[id] - shifted.highest, count++;
    scores[0] = log_mass - sum / count;
    scores[1] = double(x[token] - shifted.highest) - log_mass;
    scores[2] = log_mass - shifted.weighted / shifted.mass;
    scores[3] = log_mass - log(double(vocab)) - shifted.sum_all / vocab;
}

// Write the scores that a row asks for, one after the other.
static void score(
    const float* x, int32_t vocab, const Sampling& by, int64_t token, double* scores) {
    const int32_t k = std::min(by.num_logprobs, vocab);
    if (k >= 0) score_logprob(x, vocab, token, k, scores), scores += 2 + 2 * k;
    if (by.confidence_k)
        score_confidence(x, vocab, token, std::min(by.confidence_k, vocab), scores);
}
