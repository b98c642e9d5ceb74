// Folded images: those of y with a channel for each phase. A folded pixel q has the pixels
// q * fold - cut + phase of both axes. Its channels are lines of `run` values, which follow each
// other in memory along a row: (phase in y, phase in x, channel), or (phase in y, channel, phase in
// x) if y is contiguous.
#pragma once

namespace {

constexpr int fold_run =
    Layer::fold_x * (Layer::fold_channels_last ? Layer::fold_channels : 1);  // of a line
constexpr int folded_channels = Layer::fold_y * Layer::fold_x * Layer::fold_channels;
constexpr bool is_folded = Layer::fold_y * Layer::fold_x > 1;

// A channel of a folded pixel. Without folding, the channel itself.
struct Unfolded {
    int y, x, channel;  // phases, and the channel of y
    int rest;  // the place in its line

    TCONV_DEVICE explicit Unfolded(int folded) {
        if constexpr (!is_folded) {
            y = x = rest = 0;
            channel = folded;
            return;
        }
        int line = folded / fold_run;
        rest = folded - line * fold_run;
        if constexpr (Layer::fold_channels_last) {
            y = line;
            x = rest / Layer::fold_channels;
            channel = rest - x * Layer::fold_channels;
        } else {
            y = line / Layer::fold_channels;
            x = rest;
            channel = line - y * Layer::fold_channels;
        }
    }
};

}  // namespace
