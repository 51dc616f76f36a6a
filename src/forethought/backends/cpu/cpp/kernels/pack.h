// Packs the blocks of a GGUF file, rows [out, blocks of an output], in the panels of blocks.h.

#pragma once

#include "../structures.h"
#include "blocks.h"
#include "panels.h"

#include <cstdint>
#include <cstring>

// Where the parts of a block are, in bytes.
struct BlockParts {
    int size, low, high; // of the block; its integers: the lowest bits, then those above
    int scale, small;    // float16; bytes that these are multiplied by, of a block of 256 inputs
};

constexpr BlockParts parts_of(int type) {
    switch (type) {
        case Q8_0: return {34, 2, 0, 0, 0};
        case Q4_0: return {18, 2, 0, 0, 0};
        case Q4_1: return {20, 4, 0, 0, 0};
        case Q5_0: return {22, 6, 2, 0, 0};
        case Q5_1: return {24, 8, 4, 0, 0};
        case Q4_K: return {144, 16, 0, 0, 4};
        case Q5_K: return {176, 48, 16, 0, 4};
        default: return {210, 0, 128, 208, 192}; // Q6_K
    }
}

// The integers of a group of an output, four in each quad.
struct Group {
    uint32_t quads[GROUP / 4];
};

static inline Group read_bytes(const uint8_t* from) {
    Group group;
    memcpy(group.quads, from, sizeof group.quads);
    return group;
}

// Fields of bytes, `shift` bits from the lowest.
static inline Group fields(const Group& bytes, int shift, uint32_t mask) {
    Group group;
    for (int k = 0; k < GROUP / 4; k++) group.quads[k] = bytes.quads[k] >> shift & mask;
    return group;
}

// Add further bits.
static inline void add_bits(const Group& bits, int shift, Group& to) {
    for (int k = 0; k < GROUP / 4; k++) to.quads[k] |= bits.quads[k] << shift;
}

template <int TYPE> static inline Group read_group(const uint8_t* block, int number) {
    constexpr uint32_t FOUR = 0x0f0f0f0f, TWO = 0x03030303, ONE = 0x01010101;
    constexpr BlockParts PARTS = parts_of(TYPE);
    const uint8_t *low = block + PARTS.low, *high = block + PARTS.high;
    if (TYPE == Q8_0) return read_bytes(low);
    if (TYPE == Q6_K) { // of 128 inputs 64 bytes of low bits, and 32 of high ones
        low += number / 4 * 64 + number % 2 * 32, high += number / 4 * 32;
        Group group = fields(read_bytes(low), number % 4 / 2 * 4, FOUR);
        add_bits(fields(read_bytes(high), number % 4 * 2, TWO), 4, group);
        return group;
    }
    if (has_super_groups(TYPE)) { // of 64 inputs 32 bytes, the first half in their low bits
        Group group = fields(read_bytes(low + number / 2 * 32), number % 2 * 4, FOUR);
        if (TYPE == Q5_K) add_bits(fields(read_bytes(high), number, ONE), 4, group);
        return group;
    }
    Group group;
    memcpy(group.quads, low, GROUP / 2);
    for (int k = 0; k < 4; k++) {
        group.quads[k + 4] = group.quads[k] >> 4 & FOUR;
        group.quads[k] &= FOUR;
    }
    if (bits_of(TYPE) == 5) {
        uint32_t fifth;
        memcpy(&fifth, high, 4);
        for (int k = 0; k < 8; k++) // four bits, to as many bytes
            group.quads[k] |= ((fifth >> 4 * k & 15) * 0x204081 & ONE) << 4;
    }
    return group;
}

// To the bytes of an output of a panel.
template <int BITS> static inline void write_group(const Group& group, uint8_t* to) {
    const auto write = [to](int quad, uint32_t bytes) { memcpy(to + quad * PANEL * 4, &bytes, 4); };
    const uint32_t* q = group.quads;
    if (BITS == 8) {
        for (int k = 0; k < 8; k++) write(k, q[k]);
        return;
    }
    for (int k = 0; k < 4; k++) write(k, (q[k] & 0x0f0f0f0f) | (q[k + 4] & 0x0f0f0f0f) << 4);
    uint32_t planes[2] = {};
    for (int k = 0; k < 8; k++)
        if (BITS == 5)
            planes[0] |= (q[k] >> 4 & 0x01010101) << k;
        else
            planes[k / 4] |= (q[k] >> 4 & 0x03030303) << k % 4 * 2;
    for (int plane = 0; plane < BITS - 4; plane++) write(4 + plane, planes[plane]);
}

// The scale or the offset of a group of Q4_K and Q5_K, from 12 bytes of 8 scales and 8 offsets in 6
// bits.
static inline uint8_t six_bits(const uint8_t* packed, int group, bool offset) {
    const uint8_t* from = packed + (offset ? 4 : 0) + group % 4;
    if (group < 4) return from[0] & 63;
    const int low = offset ? packed[8 + group % 4] >> 4 : packed[8 + group % 4] & 15;
    return uint8_t(low | (from[0] >> 6) << 4);
}

// The scales of a block of an output, to its place among those of the panel.
template <int TYPE> static inline void pack_scales(const uint8_t* block, int lane, uint8_t* to) {
    constexpr BlockParts PARTS = parts_of(TYPE);
    constexpr int COUNT = has_offsets(TYPE) ? 2 : 1; // in float16
    for (int i = 0; i < COUNT; i++)
        memcpy(to + (i * PANEL + lane) * 2, block + PARTS.scale + 2 * i, 2);
    if (!has_super_groups(TYPE)) return;
    const uint8_t* small = block + PARTS.small;
    to += COUNT * PANEL * 2 + lane;
    for (int g = 0; g < SUPER_GROUPS; g++)
        for (int i = 0; i < 2; i++, to += PANEL)
            *to = TYPE == Q6_K ? small[2 * g + i] : six_bits(small, g, i == 1);
}

// One output of a panel; `bytes` and `scales` are those of the panel.
template <int TYPE>
static void pack_output(
    const uint8_t* row, int num_inputs, int lane, uint8_t* bytes, uint8_t* scales) {
    constexpr int GROUPS = has_super_groups(TYPE) ? SUPER_GROUPS : 1; // of a block
    for (int k = 0; k < num_inputs; k += GROUPS * GROUP, row += parts_of(TYPE).size) {
        for (int g = 0; g < GROUPS; g++, bytes += group_bytes(TYPE))
            write_group<bits_of(TYPE)>(read_group<TYPE>(row, g), bytes + lane * 4);
        pack_scales<TYPE>(row, lane, scales);
        scales += scale_bytes(TYPE, GROUPS);
    }
}

// Write the panels and scales of w. Rows [num_outputs, bytes]: those of `halves`
// parts of the outputs, whose panels are in turns.
static inline void pack_panels(
    const Linear& w, const uint8_t* rows, int num_outputs, int halves, Share share) {
    with_type(w, [&](auto type) {
        constexpr int TYPE = decltype(type)::value;
        constexpr int WIDTH = has_super_groups(TYPE) ? SUPER_GROUPS * GROUP : GROUP;
        const int64_t row_bytes = int64_t(w.num_inputs / WIDTH) * parts_of(TYPE).size;
        const int64_t groups = w.num_inputs / GROUP;
        const int half = num_outputs / halves;
        const int64_t panel_bytes = groups * group_bytes(TYPE);
        for (int64_t panel = share.begin; panel < share.end; panel++) {
            uint8_t* bytes = (uint8_t*)w.weight + panel * panel_bytes;
            uint8_t* scales = (uint8_t*)w.scale + panel * scale_bytes(TYPE, groups);
            const int64_t first = panel / halves * PANEL; // output, of those of its half
            if (first + PANEL > half) {                   // the others are zeros
                memset(bytes, 0, panel_bytes);
                memset(scales, 0, scale_bytes(TYPE, groups));
            }
            for (int64_t output = first; output < half && output < first + PANEL; output++)
                pack_output<TYPE>(
                    rows + (panel % halves * half + output) * row_bytes, w.num_inputs,
                    int(output - first), bytes, scales);
        }
    });
}
