// Payloads to rows of values, as native/reference.py defines them.
#pragma once

#include "quantize.h"

namespace tw {
namespace TW_NS {

// Decodes rows of one length.
template <Mode mode, bool table>
class Decoder {
 public:
  Decoder(const tw_format& f, int64_t n)
      : layout(f, n), unpack(unpack_of(f.bits)), levels(f.bits, layout.symmetric),
        nibbles(table && f.bits == 4 && layout.group % (2 * W) == 0 && (layout.group % kHalf == 0 || kHalf % layout.group == 0)) {}

  // Values [a, b) of a row, as Kernels::decode says, into the sink.
  template <class Sink>
  void run(int64_t a, int64_t b, const uint8_t* row, Sink& out) const {
    Sink sink = out;  // a local one, whose parts can stay in registers
    if constexpr (table)
      if (nibbles) a = layout.group <= kHalf ? small_groups(a, b, row, sink) : large_groups(a, b, row, sink);
    if (a < b) by_pieces(a, b, row, sink);
    out = sink;
  }

 private:
  typedef Dequantizer<mode, table> Group;
  static constexpr int64_t kPiece = 1024, kHalf = kBlock / 2;
  const Row layout;
  const Unpack unpack;
  const Group levels;
  const bool nibbles;  // whether whole blocks can be decoded from their bytes

  TW_INLINE Group group(const uint8_t* row, int64_t g) const {
    float scale, offset;
    layout.get(row, g, &scale, &offset);
    return levels.group(scale, offset);
  }

  // Whole blocks from a on, of groups that halve half a block, or are a multiple of it; where they end.
  template <class Sink>
  TW_INLINE int64_t small_groups(int64_t a, int64_t b, const uint8_t* row, Sink& sink) const {
    const int64_t size = layout.group, apart = layout.whole_groups(kHalf);
    for (int64_t first = layout.whole_groups(a); b - a >= kBlock; a += kBlock, first += 2 * apart)
      for (int64_t k = 0; k < apart; ++k)
        dequantize_nibbles(group(row, first + k), group(row, first + apart + k), row + layout.code_at(a), a, k * size,
                           (k + 1) * size, sink);
    return a;
  }
  template <class Sink>
  TW_INLINE int64_t large_groups(int64_t a, int64_t b, const uint8_t* row, Sink& sink) const {
    int64_t g = layout.whole_groups(a), left = (g + 1) * layout.group - a;  // of the group, in values
    Group now = group(row, g);
    const auto advance = [&]() __attribute__((always_inline)) {
      const Group before = now;
      if ((left -= kHalf) == 0 && g + 1 < layout.groups) now = group(row, ++g), left = layout.group;
      return before;
    };
    for (; b - a >= kBlock; a += kBlock) {
      const Group low = advance(), high = advance();
      dequantize_nibbles(low, high, row + layout.code_at(a), a, 0, kHalf, sink);
    }
    return a;
  }

  template <class Sink>
  TW_INLINE void by_pieces(int64_t a, int64_t b, const uint8_t* row, Sink& sink) const {
    alignas(64) uint8_t codes[kPiece + 8];
    int64_t g = layout.whole_groups(a), end = std::min((g + 1) * layout.group, b);
    Group now = group(row, g);
    for (int64_t piece = a; piece < b; piece += kPiece) {
      const int64_t stop = std::min(piece + kPiece, b);
      unpack(row + layout.code_at(piece), stop - piece, codes);
      for (int64_t i = piece; i < stop;) {
        if (i == end) {
          now = group(row, ++g);
          end = std::min(end + layout.group, b);
        }
        const int64_t until = std::min(end, stop);
        dequantize(now, codes + (i - piece), i, until, sink);
        i = until;
      }
    }
  }
};

}  // namespace TW_NS
}  // namespace tw
