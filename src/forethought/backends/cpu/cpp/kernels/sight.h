// What the tokens of a row attend to, and where it lies in the cache.

#pragma once

#include "../structures.h"

#include <cstdint>

static inline int64_t prefix_slot(const Row& row, int position, int page_size) {
    if (row.first_slot >= 0) return row.first_slot + position;
    return int64_t(row.pages[position / page_size]) * page_size + position % page_size;
}

// Tokens at the beginning of two prefixes that are stored in the same slots.
static inline int64_t num_common(const Row& row, const Row& other, int page_size) {
    const int64_t most = row.prefix < other.prefix ? row.prefix : other.prefix;
    int64_t count = 0;
    while (count < most &&
           prefix_slot(row, int(count), page_size) == prefix_slot(other, int(count), page_size))
        count += page_size; // pages are shared whole
    return count < most ? count : most;
}

// The tokens of the row that token `n` attends to: prefix [low, prefix), then recent ones.
struct Sight {
    const Row& row;
    int n, window;
    int64_t position;
    int low;

    Sight(const Row& row, int n, int window) : row(row), n(n), window(window) {
        position = row.positions[row.num_recent - row.num_tokens + n];
        low = row.seen_from;
        const int64_t first = window > 0 ? position - window + 1 : chunk_begin(position);
        if (window && first > low) low = int(first);
    }

    bool sees(int recent) const {
        if (window > 0 && position - row.positions[recent] >= window) return false;
        if (window < 0 && chunk_begin(position) != chunk_begin(row.positions[recent])) return false;
        if (row.visible) return row.visible[int64_t(n) * row.num_recent + recent];
        return recent <= row.num_recent - row.num_tokens + n;
    }

    int64_t chunk_begin(int64_t at) const { return window < 0 ? at / -window * -window : 0; }
};
