// Attention of a few queries over chunks of the tokens that they see.

#pragma once

#include "../scratch.h"
#include "../structures.h"
#include "entries.h"
#include "panels.h"
#include "sight.h"
#include "softmax.h"
#include "vectors.h"

#include <cmath>
#include <cstring>
#include <type_traits>

// Queries that share the keys and values which they read, in registers; at most MAX_QUERIES.
constexpr int MAX_QUERIES = 4;
constexpr int TOKENS_AHEAD = 16; // whose keys and values are fetched in advance
constexpr int MIX_TOKENS = 32;   // whose values are mixed at a time: they stay in the L1 cache

// Keys whose products with `queries` queries have registers, and vectors of a value whose sums have:
// as many as hide how long an addition takes.
static constexpr int sums_at_once(int queries) {
    const int all = LANES == 16 ? 16 : 8;
    return queries == 1 ? all : queries == 4 ? all / 4 : all / 2;
}

// Fetch `size` elements, into the L2 cache: it waits for more lines at a time than the L1 cache does.
template <class T> static inline void fetch(const T* from, int size) {
    for (int d = 0; d < size; d += 64 / int(sizeof(T))) __builtin_prefetch(from + d, 0, 2);
}

// out [N] = the products of N queries with LANES keys. Those of one key are summed alike in all lanes.
template <class T, int N>
static inline void dots(
    const float* const* q, const T* keys, const int64_t* offsets, int dim, Vec* out) {
    constexpr int KEYS = sums_at_once(N) < LANES ? sums_at_once(N) : LANES;
    Vec parts[N][LANES];
    for (int j = 0; j < LANES; j += KEYS) {
        for (int k = 0; k < KEYS; k++) fetch(keys + offsets[j + k + TOKENS_AHEAD], dim);
        Vec total[N][KEYS] = {};
        for (int d = 0; d + LANES <= dim; d += LANES)
            for (int k = 0; k < KEYS; k++) {
                const Vec key = load(keys + offsets[j + k] + d);
                for (int n = 0; n < N; n++) total[n][k] += load(q[n] + d) * key;
            }
        for (int n = 0; n < N; n++)
            for (int k = 0; k < KEYS; k++) parts[n][j + k] = total[n][k];
    }
    const int whole = dim / LANES * LANES;
    for (int j = 0; j < LANES && whole < dim; j++) {
        const Vec key = load_first(keys + offsets[j] + whole, dim - whole);
        for (int n = 0; n < N; n++) parts[n][j] += load_first(q[n] + whole, dim - whole) * key;
    }
    for (int n = 0; n < N; n++) out[n] = sums(parts[n]);
}

// scores [N][count] of N queries for the keys at some offsets; the LANES - 1 behind the last are
// read, and their scores written, too.
template <class T, int N>
static void score_keys(
    const float* const* q, const T* keys, const int64_t* offsets, int count, int dim, float scale,
    float cap, float* const* scores) {
    Vec found[N];
    for (int p = 0; p < count; p += LANES) {
        dots<T, N>(q, keys, offsets + p, dim, found);
        if constexpr (sizeof(T) == 1) {
            const Vec scales = scales_of(keys, offsets + p, dim);
            for (int n = 0; n < N; n++) found[n] *= scales;
        }
        for (int n = 0; n < N; n++) store(scores[n] + p, found[n] * scale);
    }
    for (int n = 0; n < N && cap > 0; n++)
        for (int p = 0; p < count; p++) scores[n][p] = cap * tanhf(scores[n][p] / cap);
}

// weights [N][count] *= the scales of the values at some offsets.
template <int N>
static void scale_weights(
    float* const* weights, const int8_t* values, const int64_t* offsets, int count, int dim) {
    for (int p = 0; p < count; p++) {
        const float scale = scale_of(values + offsets[p], dim);
        for (int n = 0; n < N; n++) weights[n][p] *= scale;
    }
}

// out [N][V * LANES] += the values at some offsets, each times its weight [N][count].
template <class T, int N, int V>
static inline void mix_vectors(
    const float* const* weights, const T* values, const int64_t* offsets, int begin, int end,
    float* const* out, int d) {
    Vec acc[N][V];
    for (int n = 0; n < N; n++)
        for (int v = 0; v < V; v++) acc[n][v] = load(out[n] + d + v * LANES);
    for (int p = begin; p < end; p++) {
        fetch(values + offsets[p + TOKENS_AHEAD] + d, V * LANES);
        for (int v = 0; v < V; v++) {
            const Vec value = load(values + offsets[p] + d + v * LANES);
            for (int n = 0; n < N; n++) acc[n][v] += value * weights[n][p];
        }
    }
    for (int n = 0; n < N; n++)
        for (int v = 0; v < V; v++) store(out[n] + d + v * LANES, acc[n][v]);
}

// The same of all dimensions from `d` on, V vectors at a time, then fewer.
template <class T, int N, int V = sums_at_once(N)>
static void mix_values(
    const float* const* weights, const T* values, const int64_t* offsets, int begin, int end,
    int dim, float* const* out, int d = 0) {
    for (; d + V * LANES <= dim; d += V * LANES)
        mix_vectors<T, N, V>(weights, values, offsets, begin, end, out, d);
    if constexpr (V > 1) {
        mix_values<T, N, V / 2>(weights, values, offsets, begin, end, dim, out, d);
    } else {
        for (int p = begin; p < end && d < dim; p++)
            for (int n = 0; n < N; n++)
                for (int i = d; i < dim; i++)
                    out[n][i] += scalar(values + offsets[p] + i) * weights[n][p];
    }
}

// What a query attends to in some chunks: sums [dim] of values times exponentials of scores, the
// total of these, 0 where it sees none, and the highest score, which was taken from each before.
struct Part {
    float *sums, *total, *highest;

    Part(float* memory, int dim) : sums(memory), total(memory + dim), highest(memory + dim + 1) {}
};

// into = what it and `part` attend to. Not inlined, so that it is rounded alike wherever it is
// called. Scores that are all NaN have no highest one either, but a total, which is NaN.
__attribute__((noinline)) static void merge(const Part& part, int dim, const Part& into) {
    if (*part.total == 0) return;
    const float most = *part.highest > *into.highest ? *part.highest : *into.highest;
    const float kept = exp(broadcast(*into.highest - most))[0];
    const float added = exp(broadcast(*part.highest - most))[0];
    int d = 0;
    for (; d + LANES <= dim; d += LANES)
        store(into.sums + d, load(into.sums + d) * kept + load(part.sums + d) * added);
    for (; d < dim; d++) into.sums[d] = into.sums[d] * kept + part.sums[d] * added;
    *into.total = *into.total * kept + *part.total * added;
    *into.highest = most;
}

// Queries of `count` consecutive tokens of rows, of the heads that share a key head: of one row,
// whose tokens see the same of its prefix, or of several whose prefixes begin in the same slots, which
// are read once for all of them. Chunk c of a query has tokens [CHUNK c, CHUNK (c + 1)) of those that it sees, in
// order of position; its sums run over them in this order, and chunks are merged in theirs. So they
// depend neither on the queries beside it nor on the threads (as Flash-Decoding, Dao et al. 2023).
template <class T> class Together {
  public:
    // scratch: together_size() floats.
    Together(
        const Model& model, const Layer& layer, const Call& call, const Scratch& b,
        const Row& first, int n, int count, int kv_head, const T* keys, const T* values,
        float* scratch)
        : layer(layer), b(b), first(first), n(n), count(count),
          group(model.num_heads / model.num_kv_heads), dim(model.head_dim),
          rotated(model.rotary_dim), page_size(call.page_size), num_heads(model.num_heads),
          low(Sight(first, n, layer.window).low),
          stride(int64_t(model.num_kv_heads) * entry_size<T>(dim)), cap(model.score_cap),
          keys(keys + kv_head * entry_size<T>(dim)), values(values + kv_head * entry_size<T>(dim)),
          scores(scratch), first_head(int64_t(kv_head) * group) {
        own_parts = scores + int64_t(group) * count * SCORES_WIDTH;
        offsets = (int64_t*)(own_parts + 2 * int64_t(group) * count * b.part_width);
    }

    // As many tokens as scratch memory and threads allow.
    static int tokens(const Model& model, const Layer& layer, const Row& row, Thread thread) {
        if (layer.window) return 1; // each sees another part of the prefix
        const int64_t most = TOGETHER_ROWS / (model.num_heads / model.num_kv_heads);
        const int64_t shared = row.num_tokens * model.num_kv_heads / thread.count;
        return int(most < 1 || shared < 1 ? 1 : most < shared ? most : shared);
    }

    int num_chunks() const { // of the token that sees the most
        return (seen_prefix(first) + int(first.num_recent) + CHUNK - 1) / CHUNK;
    }

    void attend() const {
        const int64_t width = int64_t(group) * b.part_width;
        const Parts all{own_parts, width}, next{own_parts + count * width, width};
        attend_chunk(0, prefix_in(first, 0), all);
        for (int chunk = 1; chunk < num_chunks(); chunk++) {
            attend_chunk(chunk, prefix_in(first, chunk), next);
            for (int i = 0; i < count * group; i++) merge(part(next, i), dim, part(all, i));
        }
        for (int i = 0; i < count * group; i++) write(i, part(all, i));
    }

    // Tokens of the prefix that a chunk has.
    int prefix_in(const Row& row, int chunk) const {
        const int count = seen_prefix(row) - chunk * CHUNK;
        return count < 0 ? 0 : count < CHUNK ? count : CHUNK;
    }

    // One chunk, whose parts are kept for merge_kept(); the rows share its first tokens.
    void attend_kept(int chunk, int shared) const { attend_chunk(chunk, shared, kept(chunk)); }

    // The outputs, from the chunks that are kept.
    void merge_kept() const {
        for (int i = 0; i < count * group; i++) {
            const Part all = part(kept(0), i);
            for (int chunk = 1; chunk < num_chunks(); chunk++)
                merge(part(kept(chunk), i), dim, all);
            write(i, all);
        }
    }

  private:
    struct Parts { // of one chunk of each query
        float* first;
        int64_t token_stride;
    };

    const Layer& layer;
    const Scratch& b;
    const Row& first; // the others follow it in the call
    const int n, count, group, dim, rotated, page_size, num_heads;
    const int low; // the first token of the prefix that is seen
    const int64_t stride;
    const float cap;
    const T *keys, *values;
    float *scores, *own_parts; // [count, group, SCORES_WIDTH], [2, count, group, part_width]
    const int64_t first_head;
    int64_t* offsets; // [SCORES_WIDTH]: of keys and values of a chunk, in elements

    int seen_prefix(const Row& row) const { return row.prefix > low ? int(row.prefix) - low : 0; }

    // The row of token `m`, which becomes its number there.
    const Row& row_of(int& m) const {
        const Row* row = &first;
        for (m += n; m >= row->num_tokens; row++) m -= int(row->num_tokens);
        return *row;
    }

    float* scores_of(int i) const { return scores + int64_t(i) * SCORES_WIDTH; }

    const float* query_of(int i) const {
        return b.qkv + (first.start + n + i / group) * b.qkv_width + (first_head + i % group) * dim;
    }

    Parts kept(int chunk) const {
        const int64_t token_stride = b.max_chunks * num_heads * b.part_width;
        const int64_t head = int64_t(chunk) * num_heads + first_head;
        return {b.parts + (first.start + n) * token_stride + head * b.part_width, token_stride};
    }

    Part part(const Parts& parts, int i) const {
        return Part(parts.first + i / group * parts.token_stride + i % group * b.part_width, dim);
    }

    void write(int i, const Part& from) const {
        float* out = b.mixed + (first.start + n + i / group) * b.mixed_width +
                     (first_head + i % group) * dim;
        for (int d = 0; d < dim; d++) out[d] = from.sums[d] / *from.total;
    }

    // shared: tokens of the prefix that all tokens see, in the same slots.
    void attend_chunk(int chunk, int shared, const Parts& parts) const {
        const int begin = chunk * CHUNK, queries = count * group;
        list_prefix(first, begin, 0, shared);
        if (!first.num_segments)
            each_few(0, queries, [&](auto few, int i) { score<few()>(i, 0, shared); });
        for (int m = 0; m < count; m++) {
            const int size = list_others(m, chunk, shared);
            score_own(m, begin, shared, size);
            for (int i = m * group; i < (m + 1) * group; i++) weigh(i, size, part(parts, i));
        }
        each_few(0, queries, [&](auto few, int i) { mix<few()>(parts, i, 0, shared); });
        for (int m = 0; m < count; m++) {
            const int size = list_others(m, chunk, shared);
            each_few(m * group, (m + 1) * group, [&](auto few, int i) {
                mix<few()>(parts, i, shared, size);
            });
        }
    }

    // Tokens [from, size) of the chunk that begins with token `begin` of those that are seen.
    void list_prefix(const Row& row, int begin, int from, int size) const {
        for (int i = from, run; i < size; i += run) {
            const int position = low + begin + i;
            const int64_t slot = prefix_slot(row, position, page_size);
            run = row.first_slot >= 0 ? size : page_size - position % page_size;
            run = run < size - i ? run : size - i;
            for (int j = 0; j < run; j++) offsets[i + j] = (slot + j) * stride;
        }
        pad_offsets(size);
    }

    // The tokens after the shared ones that token `m` sees in a chunk; returns the size of the chunk.
    int list_others(int m, int chunk, int shared) const {
        if (shared == CHUNK) return CHUNK;
        const Row& row = row_of(m);
        const int begin = chunk * CHUNK;
        int size = prefix_in(row, chunk);
        list_prefix(row, begin, shared, size);
        const int before = begin + size - seen_prefix(row); // recent tokens of the chunks before
        const Sight sight(row, m, layer.window);
        const bool all = !row.visible && !layer.window; // up to its own are seen
        int seen = all ? before : 0;
        for (int r = seen; r < row.num_recent && size < CHUNK; r++)
            if (sight.sees(r) && seen++ >= before) offsets[size++] = row.slots[r] * stride;
        pad_offsets(size);
        return size;
    }

    // Vectors of them are read whole, and some in advance: behind the last one they read it again.
    void pad_offsets(int size) const {
        for (int i = 0; i < LANES + TOKENS_AHEAD && size > 0; i++)
            offsets[size + i] = offsets[size - 1];
    }

    void score_own(int m, int begin, int shared, int size) const {
        if (first.num_segments) {
            for (int i = m * group; i < (m + 1) * group; i++)
                score_segments(i, begin, begin + size);
        } else {
            each_few(m * group, (m + 1) * group, [&](auto few, int i) {
                score<few()>(i, shared, size);
            });
        }
    }

    // Scores of tokens [begin, end) of those that a query sees, which is rotated for each segment.
    void score_segments(int i, int begin, int end) const {
        float turned[MAX_HEAD_DIM];
        const float* q = query_of(i);
        int start = 0;                                  // of a segment
        for (int s = 0; s <= first.num_segments; s++) { // what follows the segments is its own
            const bool own = s == first.num_segments;
            const int last = own ? end : start + int(first.segments[2 * s]);
            const int from = start > begin ? start : begin, to = last < end ? last : end;
            start = last;
            if (from >= to) continue;
            turn(q, own ? 0 : first.segments[2 * s + 1], turned);
            const float* turned_q = turned;
            float* scored = scores_of(i) + from - begin;
            score_keys<T, 1>(
                &turned_q, keys, offsets + from - begin, to - from, dim, layer.scale, cap, &scored);
        }
    }

    // A rotated query, rotated by further positions. A factor of the table, its cosine at position
    // 0, is in the query already.
    void turn(const float* q, int64_t positions, float* turned) const {
        memcpy(turned, q, dim * 4);
        if (!positions) return;
        const float* cosines = layer.rotary + positions * 2 * rotated;
        const float* sines = cosines + rotated;
        const int half = rotated / 2;
        for (int d = 0; d < rotated; d++) {
            const float other = d < half ? q[d + half] : q[d - half];
            turned[d] = (q[d] * cosines[d] + other * sines[d]) / layer.rotary[0];
        }
    }

    // Begin a part: nothing is summed yet but the exponentials of the scores, which take their place.
    void weigh(int i, int size, const Part& to) const {
        *to.highest = maximum(scores_of(i), size);
        *to.total = exponentials(scores_of(i), size, *to.highest);
        memset(to.sums, 0, dim * 4);
    }

    // Queries [begin, end), up to MAX_QUERIES at a time.
    template <class F> static void each_few(int begin, int end, F&& compute) {
        for (int i = begin; i < end; i += MAX_QUERIES) switch (end - i) {
                case 1: compute(std::integral_constant<int, 1>(), i); break;
                case 2: compute(std::integral_constant<int, 2>(), i); break;
                case 3: compute(std::integral_constant<int, 3>(), i); break;
                default: compute(std::integral_constant<int, MAX_QUERIES>(), i);
            }
    }

    // Of tokens [begin, end) of the chunk.
    template <int N> void score(int first, int begin, int end) const {
        const float* q[N];
        float* to[N];
        for (int i = 0; i < N; i++)
            q[i] = query_of(first + i), to[i] = scores_of(first + i) + begin;
        score_keys<T, N>(q, keys, offsets + begin, end - begin, dim, layer.scale, cap, to);
    }

    template <int N> void mix(const Parts& parts, int first, int begin, int end) const {
        float *weights[N], *out[N];
        for (int i = 0; i < N; i++) {
            weights[i] = scores_of(first + i) + begin;
            out[i] = part(parts, first + i).sums;
        }
        const int64_t* from = offsets + begin;
        if constexpr (sizeof(T) == 1) scale_weights<N>(weights, values, from, end - begin, dim);
        for (int p = 0, next; p < end - begin; p = next) {
            next = p + MIX_TOKENS < end - begin ? p + MIX_TOKENS : end - begin;
            mix_values<T, N>(weights, values, from, p, next, dim, out);
        }
    }
};
