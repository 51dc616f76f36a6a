// Panels of weights as integers, and the scales that groups of GROUP inputs share.
//
// A weight is (q - zero) * scale * factor + offset, of which each type has a part. A panel holds for
// each group of inputs the integers q of all outputs: quads [8, PANEL, 4] of inputs, of which vectors
// hold four bytes for each output. Of less than 8 bits the lower four of quads k and k + 4 share the
// bytes of [4, PANEL, 4], quad k in the low half. The fifth bits follow in bytes [PANEL, 4], bit k of
// each that of quad k; the highest two of six in bytes [2, PANEL, 4] of quads 0 to 3 and 4 to 7.
//
// The scales of all panels follow each other at Linear::scale, those of a panel in order of inputs:
//     Q8_0, Q4_0, Q5_0   scale float16 [PANEL] of each group
//     Q4_1, Q5_1         scale and offset float16 [2, PANEL] of each group
//     Q4_K, Q5_K         of 8 groups: two float16 [2, PANEL], and two bytes [8, 2, PANEL] that they
//                        are multiplied by: scale, and offset but for its sign
//     Q6_K               of 8 groups: scale float16 [PANEL], factors int8 [8, 2, PANEL] of each half
//                        of a group
//     W4A8               bf16 [PANEL] of each `group_size` inputs; Linear::zero: bytes [PANEL], the
//                        offset is -zero * scale
//     W8A8               float32 for each output, which multiplies the sum of all groups

#pragma once

#include "../structures.h"
#include "byte_sums.h"
#include "panels.h"
#include "rounded_row.h"

#include <cstdint>
#include <type_traits>

constexpr int SUPER_GROUPS = 8; // groups of a block of 256 inputs

static inline bool is_blocks(const Linear& w) { return w.type >= Q8_0; }

constexpr int bits_of(int type) {
    if (type == W8A8 || type == Q8_0) return 8;
    if (type == Q6_K) return 6;
    return type == Q5_0 || type == Q5_1 || type == Q5_K ? 5 : 4;
}

constexpr int zero_of(int type) {
    return type == Q4_0 ? 8 : type == Q5_0 ? 16 : type == Q6_K ? 32 : 0;
}

constexpr bool has_super_groups(int type) { return type == Q4_K || type == Q5_K || type == Q6_K; }

constexpr bool has_factors(int type) { return type == Q6_K; }

constexpr bool has_offsets(int type) {
    return type == W4A8 || type == Q4_1 || type == Q5_1 || type == Q4_K || type == Q5_K;
}

// Bytes of the integers of a group of a panel.
constexpr int group_bytes(int type) { return PANEL * GROUP / 8 * bits_of(type); }

// Bytes of the scales of a panel of blocks.
constexpr int64_t scale_bytes(int type, int64_t num_groups) {
    if (type == Q6_K) return num_groups / SUPER_GROUPS * PANEL * (2 + 2 * SUPER_GROUPS);
    if (has_super_groups(type)) return num_groups / SUPER_GROUPS * PANEL * (4 + 2 * SUPER_GROUPS);
    return num_groups * PANEL * (has_offsets(type) ? 4 : 2);
}

// Call f with the type of w, one of integers, as an integral_constant.
template <class F> static inline void with_type(const Linear& w, F&& f) {
    switch (w.type) {
        case W8A8: return f(std::integral_constant<int, W8A8>());
        case W4A8: return f(std::integral_constant<int, W4A8>());
        case Q8_0: return f(std::integral_constant<int, Q8_0>());
        case Q4_0: return f(std::integral_constant<int, Q4_0>());
        case Q4_1: return f(std::integral_constant<int, Q4_1>());
        case Q5_0: return f(std::integral_constant<int, Q5_0>());
        case Q5_1: return f(std::integral_constant<int, Q5_1>());
        case Q4_K: return f(std::integral_constant<int, Q4_K>());
        case Q5_K: return f(std::integral_constant<int, Q5_K>());
        default: return f(std::integral_constant<int, Q6_K>());
    }
}

// Of a group of inputs of OUTPUTS outputs.
struct Scales {
    Floats scale, offset, factors[2];
};

// OUTPUTS outputs of a panel.
template <int TYPE> class BlockVector {
  public:
    // From an output on, a multiple of OUTPUTS.
    BlockVector(const Linear& w, int output) : lane(output % PANEL) {
        const int64_t panel = output / PANEL, groups = padded_inputs(w.num_inputs) / GROUP;
        bytes = (const uint8_t*)w.weight + panel * groups * group_bytes(TYPE) + lane * 4;
        if (TYPE == W4A8) {
            const int64_t first = panel * (w.num_inputs / w.group_size) * PANEL + lane;
            scales = (const uint8_t*)w.scale + 2 * first, zeros = (const uint8_t*)w.zero + first;
            while (GROUP << shift < w.group_size) shift++;
        } else {
            scales = (const uint8_t*)w.scale + panel * scale_bytes(TYPE, groups);
        }
    }

    // Four integers of each output, of quad k of a group, in 8 bits, with their sign.
    Ints read_quad(int64_t group, int k) const {
        return load_ints(bytes + group * group_bytes(TYPE) + k * PANEL * 4);
    }

    // Of quads k and k + 4, in fewer bits.
    void read(int64_t group, int k, Ints& low, Ints& high) const {
        constexpr int BITS = bits_of(TYPE), QUAD = PANEL * 4;
        const uint8_t* from = bytes + group * group_bytes(TYPE);
        const Ints both = load_ints(from + k * QUAD);
        low = both & 0x0f0f0f0f, high = both >> 4 & 0x0f0f0f0f;
        if (BITS == 5) {
            const Ints fifth = load_ints(from + 4 * QUAD);
            low |= fifth << (4 - k) & 0x10101010, high |= fifth >> k & 0x10101010;
        } else if (BITS == 6) {
            const auto highest = [k](Ints two) {
                return (k < 2 ? two << (4 - 2 * k) : two >> (2 * k - 4)) & 0x30303030;
            };
            low |= highest(load_ints(from + 4 * QUAD)), high |= highest(load_ints(from + 5 * QUAD));
        }
    }

    // Fetch the integers and scales of a group, of this panel or the next ones, to the L2 cache.
    void fetch(int64_t group) const {
        const uint8_t* from = bytes + group * group_bytes(TYPE);
        for (int i = 0; i < group_bytes(TYPE); i += 64) __builtin_prefetch(from + i, 0, 2);
        if (TYPE >= Q8_0) // of one group or of the same share of a block
            __builtin_prefetch(
                scales + group * scale_bytes(TYPE, SUPER_GROUPS) / SUPER_GROUPS, 0, 2);
    }

    // The scale is 1 where outputs have one.
    Scales read_scales(int64_t group) const {
        Scales to;
        if (TYPE == W4A8) {
            const int64_t at = (group >> shift) * PANEL;
            to.scale = load_bfloat16(scales + 2 * at);
            to.offset = -(load_unsigned(zeros + at) * to.scale);
        } else if (has_super_groups(TYPE)) {
            constexpr int LARGE = PANEL * (has_offsets(TYPE) ? 4 : 2);
            const uint8_t* large =
                scales + group / SUPER_GROUPS * (LARGE + SUPER_GROUPS * 2 * PANEL);
            const uint8_t* small = large + LARGE + group % SUPER_GROUPS * 2 * PANEL + lane;
            large += 2 * lane;
            to.scale = load_float16(large);
            if (has_offsets(TYPE)) {
                to.scale *= load_unsigned(small);
                to.offset = -(load_float16(large + 2 * PANEL) * load_unsigned(small + PANEL));
            } else {
                for (int i = 0; i < 2; i++) to.factors[i] = load_signed(small + i * PANEL);
            }
        } else if (TYPE != W8A8) {
            constexpr int SIZE = PANEL * (has_offsets(TYPE) ? 4 : 2);
            const uint8_t* from = scales + group * SIZE + 2 * lane;
            to.scale = load_float16(from);
            if (has_offsets(TYPE)) to.offset = load_float16(from + 2 * PANEL);
        }
        return to;
    }

    // The weights of a group in float32: to [GROUP, PANEL].
    void dequantize(int64_t group, float* to) const {
        const Scales by = read_scales(group);
        Floats scale[2] = {by.scale, by.scale}; // of each half
        if (has_factors(TYPE))
            for (int half = 0; half < 2; half++) scale[half] *= by.factors[half];
        for (int k = 0; k < 4; k++) {
            Ints quads[2];
            if (bits_of(TYPE) == 8)
                quads[0] = read_quad(group, k), quads[1] = read_quad(group, k + 4);
            else
                read(group, k, quads[0], quads[1]);
            for (int half = 0; half < 2; half++)
                for (int i = 0; i < 4; i++) {
                    const Ints q = bits_of(TYPE) == 8 ? quads[half] << (24 - 8 * i) >> 24
                                                      : quads[half] >> 8 * i & 255;
                    Floats y = __builtin_convertvector(q - zero_of(TYPE), Floats) * scale[half];
                    if (has_offsets(TYPE)) y += by.offset; // the product above is exact
                    memcpy(to + (half * 16 + k * 4 + i) * PANEL + lane, &y, sizeof y);
                }
        }
    }

  private:
    const int lane;
    const uint8_t *bytes, *scales, *zeros = nullptr;
    int shift = 0; // of the number of a group to that of its scale
};

// Groups [begin, end) of a panel of blocks in float32: to [inputs, PANEL].
static inline void dequantize_panel(const Linear& w, int panel, int begin, int end, float* to) {
    with_type(w, [&](auto type) {
        for (int lane = 0; lane < PANEL; lane += OUTPUTS) {
            const BlockVector<decltype(type)::value> from(w, panel * PANEL + lane);
            for (int g = begin; g < end; g++) from.dequantize(g, to + (g - begin) * GROUP * PANEL);
        }
    });
}
