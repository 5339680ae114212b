// Scores of a block of keys become weights, and what a row has summed up so far is rescaled when its maximum grows. L
// is a vector layer.

#pragma once

#include "key_span.h"
#include "sums.h"

#include <type_traits>

namespace mixedkv {
namespace {

// f(n as a constant), n from 1 to 4
template <class F>
void with_rows(int n, F f) {
    switch (n) {
    case 1:
        return f(std::integral_constant<int, 1>{});
    case 2:
        return f(std::integral_constant<int, 2>{});
    case 3:
        return f(std::integral_constant<int, 3>{});
    default:
        return f(std::integral_constant<int, 4>{});
    }
}

template <class L>
struct softmax_of {
    using V    = typename L::V;
    using sums = sums_of<L>;

    // Scores of n keys become weights 2^(s - max), zeros from n to a whole vector; acc is rescaled when max grows.
    // Compiled once, so that all have the same bits.
    [[gnu::noinline]] static void update(const row_rule & rule, float * s, int n, float & max, float & sum, float * acc,
                                         int64_t d_v) {
        const int        padded = int(round_up(n, L::width));
        uint16_t         local[most_keys];
        const uint16_t * mask = rule.mask;
        if (mask && padded != n) {
            std::memcpy(local, mask, n * sizeof(uint16_t));
            std::memset(local + n, 0, (padded - n) * sizeof(uint16_t));
            mask = local;
        }
        if (rule.softcap != 0.0f) {
            for (int j = 0; j < padded; j += L::width) { // cap * tanh(x) = cap * (1 - 2 / (1 + e^2x))
                const V e = L::exp2(L::mul(L::load(s + j), L::set(2 * log2e)));
                const V t = L::fma(L::set(-2.0f), L::div(L::set(1.0f), L::add(L::set(1.0f), e)), L::set(1.0f));
                L::store(s + j, L::mul(L::set(rule.softcap), t));
            }
        }
        for (int j = 0; mask && j < padded; j += L::width) {
            L::store(s + j, L::fma(L::set(rule.slope), L::load_half(mask + j), L::load(s + j)));
        }
        for (int j = 0; rule.inverse_probability && j < padded; j += L::width) {
            L::store(s + j, L::add(L::load(rule.inverse_probability + j), L::load(s + j)));
        }
        for (int j = n; j < padded; j++) {
            s[j] = -INFINITY;
        }
        V top = L::set(max);
        for (int j = 0; j < padded; j += L::width) {
            top = L::max(top, L::load(s + j));
        }
        const float highest = L::highest(top);
        if (highest == -INFINITY) { // nothing visible so far
            std::memset(s, 0, padded * sizeof(float));
            return;
        }
        if (highest > max) {
            sums::rescale(highest, max, sum, acc, d_v);
        }
        V total = L::zero();
        for (int j = 0; j < padded; j += L::width) {
            const V p = L::exp2(L::add(L::load(s + j), L::set(-highest)));
            L::store(s + j, p);
            total = L::add(total, p);
        }
        sum += L::sum(total);
    }

    // As update(), of R <= 4 rows whose scores have no cap and no more added to them than masks: their latencies
    // overlap. The same bits, where scores are numbers.
    template <int R>
    [[gnu::noinline]] static void update_together(const row_rule (&rules)[R], float * s, int n, float * max,
                                                  float * sum, float * acc, int64_t d_v) {
        const int padded = int(round_up(n, L::width));
        V         top[4], total[4];
        float     highest[4], more[4];
        bool      any_hidden = false;
        for (int r = 0; r < 4; r++) {
            top[r] = total[r] = L::zero();
        }
        for (int r = 0; r < R; r++) {
            float * row = s + r * key_block;
            for (int j = 0; rules[r].mask && j < padded; j += L::width) {
                L::store(row + j, L::fma(L::set(rules[r].slope), L::load_half(rules[r].mask + j), L::load(row + j)));
            }
            for (int j = n; j < padded; j++) {
                row[j] = -INFINITY;
            }
            top[r] = L::set(max[r]);
            for (int j = 0; j < padded; j += L::width) {
                top[r] = L::max(top[r], L::load(row + j));
            }
        }
        L::highest_of_four(top, highest);
        for (int r = 0; r < R; r++) {
            any_hidden |= !(highest[r] > -INFINITY);
        }
        if (any_hidden) {
            for (int r = 0; r < R; r++) { // masks are added
                update({}, s + r * key_block, n, max[r], sum[r], acc + r * d_v, d_v);
            }
            return;
        }
        for (int r = 0; r < R; r++) {
            if (highest[r] > max[r]) {
                sums::rescale(highest[r], max[r], sum[r], acc + r * d_v, d_v);
            }
        }
        for (int j = 0; j < padded; j += L::width) {
            for (int r = 0; r < R; r++) {
                float * at = s + r * key_block + j;
                const V p  = L::exp2(L::add(L::load(at), L::set(-highest[r])));
                L::store(at, p);
                total[r] = L::add(total[r], p);
            }
        }
        L::sum_of_four(total, more);
        for (int r = 0; r < R; r++) {
            sum[r] += more[r];
        }
    }
};

} // namespace
} // namespace mixedkv
