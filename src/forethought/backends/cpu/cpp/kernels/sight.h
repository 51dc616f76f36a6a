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
        if (window && position - window + 1 > low) low = int(position - window + 1);
    }

    bool sees(int recent) const {
        if (window && position - row.positions[recent] >= window) return false;
        if (row.visible) return row.visible[int64_t(n) * row.num_recent + recent];
        return recent <= row.num_recent - row.num_tokens + n;
    }
};
