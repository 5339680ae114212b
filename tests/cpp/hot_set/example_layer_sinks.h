// The worked example of docs/extending.md: another rule for hot rows. Layers have different numbers of attention sinks:
// the first layers attend to none, later ones to several (Xiao et al. 2023; Sun et al. 2024, "Massive Activations").
//
// What is held stays one rule for all layers, `held`, since the ring has one bookkeeping. A layer's own rule says what
// it reads of that, and can only be narrower. So layout, slots, cuts and checkpoints ask `held`, and a layer's mask
// asks `of`.

#pragma once

#include "hot_set/hot_window.h"

#include <algorithm>
#include <string>
#include <utility>
#include <vector>

namespace mixedkv {

class layer_sinks {
  public:
    layer_sinks(hot_window window, std::vector<uint32_t> by_layer) : shared(window), by_layer(std::move(by_layer)) {
        shared.sink_tokens = 0;
        for (const uint32_t n : this->by_layer) {
            shared.sink_tokens = std::max(shared.sink_tokens, n);
        }
    }

    // What a sequence holds in F16, in every layer.
    const hot_window & held() const { return shared; }

    // What layer il reads of it.
    hot_window of(uint32_t il) const {
        hot_window res  = shared;
        res.sink_tokens = by_layer[il];
        return res;
    }

    // Rows of all layers that are held and not read, of one sequence: what one bookkeeping for all layers costs.
    uint64_t unread_rows() const {
        uint64_t res = 0;
        for (const uint32_t n : by_layer) {
            res += shared.sink_tokens - n;
        }
        return res;
    }

    std::string problem() const {
        return by_layer.empty() ? "give a number of sinks for each layer" : shared.problem();
    }

  private:
    hot_window            shared;
    std::vector<uint32_t> by_layer;
};

} // namespace mixedkv
