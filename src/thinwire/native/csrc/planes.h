// Bit planes: codes of 1 to 8 bits in blocks of 256, as native/planes.py defines them.
#pragma once

#include "simd.h"

namespace tw {
namespace TW_NS {

constexpr int kBlock = 256;

// Widths of the planes of a code, low-order bits first.
template <int bits>
struct Planes;
template <> struct Planes<1> { static constexpr int count = 1, widths[] = {1}; };
template <> struct Planes<2> { static constexpr int count = 1, widths[] = {2}; };
template <> struct Planes<3> { static constexpr int count = 2, widths[] = {2, 1}; };
template <> struct Planes<4> { static constexpr int count = 1, widths[] = {4}; };
template <> struct Planes<5> { static constexpr int count = 2, widths[] = {4, 1}; };
template <> struct Planes<6> { static constexpr int count = 2, widths[] = {4, 2}; };
template <> struct Planes<7> { static constexpr int count = 3, widths[] = {4, 2, 1}; };
template <> struct Planes<8> { static constexpr int count = 1, widths[] = {8}; };

// Bytes side by side; shifts go by 16 bits, and masks remove what crosses from byte to byte.
template <int nbytes>
struct Bytes {
  typedef uint16_t V __attribute__((vector_size(nbytes)));
  static TW_INLINE V all(int byte) { return V{} + static_cast<uint16_t>(byte * 0x0101); }
};

// One plane of `size` codes, whose fields lie `shift` bits up; `masked`: there are others above.
template <int width, int step>
TW_INLINE void pack_plane_by(const uint8_t* codes, int length, int shift, bool masked, uint8_t* out) {
  typedef Bytes<step> B;
  typedef typename B::V V;
  const V mask = B::all((1 << width) - 1);
  for (int j = 0; j < length; j += step) {
    V bytes{};
    for (int k = 0; k < 8 / width; ++k) {
      V field = load<V>(codes + j + k * length) >> shift;
      if (masked || shift) field &= mask;
      bytes |= field << (k * width);
    }
    store(out + j, bytes);
  }
}

template <int width, int step>
TW_INLINE void unpack_plane_by(const uint8_t* in, int length, int shift, uint8_t* codes) {
  typedef Bytes<step> B;
  typedef typename B::V V;
  const V mask = B::all(((1 << width) - 1) << shift);
  for (int j = 0; j < length; j += step) {
    const V bytes = load<V>(in + j);
    for (int k = 0; k < 8 / width; ++k) {
      const int right = k * width - shift;
      V field = (right >= 0 ? bytes >> right : bytes << -right) & mask;
      uint8_t* const p = codes + j + k * length;
      if (shift) field |= load<V>(p);
      store(p, field);
    }
  }
}

template <int width>
TW_INLINE void pack_plane(const uint8_t* codes, int size, int shift, bool masked, uint8_t* out) {
  constexpr int whole = kBlock * width / 8, step = whole < 4 * W ? whole : 4 * W;
  if (size == kBlock) return pack_plane_by<width, step>(codes, whole, shift, masked, out);
  const int length = size * width / 8, mask = (1 << width) - 1;
  for (int j = 0; j < length; ++j) {
    int byte = 0;
    for (int k = 0; k < 8 / width; ++k) byte |= ((codes[j + k * length] >> shift) & mask) << (k * width);
    out[j] = static_cast<uint8_t>(byte);
  }
}

template <int width>
TW_INLINE void unpack_plane(const uint8_t* in, int size, int shift, uint8_t* codes) {
  constexpr int whole = kBlock * width / 8, step = whole < 4 * W ? whole : 4 * W;
  if (size == kBlock) return unpack_plane_by<width, step>(in, whole, shift, codes);
  const int length = size * width / 8, mask = (1 << width) - 1;
  for (int k = 0; k < 8 / width; ++k)
    for (int j = 0; j < length; ++j) {
      const uint8_t field = static_cast<uint8_t>(((in[j] >> (k * width)) & mask) << shift);
      codes[k * length + j] = shift ? codes[k * length + j] | field : field;
    }
}

// One block of `size` codes (a multiple of 8, at most 256).
template <int bits>
TW_INLINE void pack_block(const uint8_t* codes, int size, uint8_t* out) {
  if constexpr (bits == 8) {
    std::memcpy(out, codes, size);
    return;
  }
  typedef Planes<bits> P;
  constexpr int a = P::widths[0], b = P::count > 1 ? P::widths[1 % P::count] : 0,
                c = P::count > 2 ? P::widths[2 % P::count] : 0;
  pack_plane<a>(codes, size, 0, bits != a, out);
  if constexpr (b != 0) pack_plane<b>(codes, size, a, bits != a + b, out + size * a / 8);
  if constexpr (c != 0) pack_plane<c>(codes, size, a + b, false, out + size * (a + b) / 8);
}

template <int bits>
TW_INLINE void unpack_block(const uint8_t* in, int size, uint8_t* codes) {
  if constexpr (bits == 8) {
    std::memcpy(codes, in, size);
    return;
  }
  typedef Planes<bits> P;
  constexpr int a = P::widths[0], b = P::count > 1 ? P::widths[1 % P::count] : 0,
                c = P::count > 2 ? P::widths[2 % P::count] : 0;
  unpack_plane<a>(in, size, 0, codes);
  if constexpr (b != 0) unpack_plane<b>(in + size * a / 8, size, a, codes);
  if constexpr (c != 0) unpack_plane<c>(in + size * (a + b) / 8, size, a + b, codes);
}

// `n` codes (readable and writable up to the next multiple of 8), a multiple of 256 but at a row's end.
template <int bits>
void pack(uint8_t* codes, int64_t n, uint8_t* out) {
  for (; n >= kBlock; n -= kBlock, codes += kBlock, out += kBlock / 8 * bits)
    pack_block<bits>(codes, kBlock, out);
  if (n > 0) {
    const int size = static_cast<int>((n + 7) / 8 * 8);
    for (int k = static_cast<int>(n); k < size; ++k) codes[k] = 0;
    pack_block<bits>(codes, size, out);
  }
}

template <int bits>
void unpack(const uint8_t* in, int64_t n, uint8_t* codes) {
  for (; n >= kBlock; n -= kBlock, codes += kBlock, in += kBlock / 8 * bits)
    unpack_block<bits>(in, kBlock, codes);
  if (n > 0) unpack_block<bits>(in, static_cast<int>((n + 7) / 8 * 8), codes);
}

typedef void (*Pack)(uint8_t* codes, int64_t n, uint8_t* out);
typedef void (*Unpack)(const uint8_t* in, int64_t n, uint8_t* codes);

inline Pack pack_of(int bits) {
  static constexpr Pack all[] = {pack<1>, pack<2>, pack<3>, pack<4>, pack<5>, pack<6>, pack<7>, pack<8>};
  return all[bits - 1];
}
inline Unpack unpack_of(int bits) {
  static constexpr Unpack all[] = {unpack<1>, unpack<2>, unpack<3>, unpack<4>,
                                   unpack<5>, unpack<6>, unpack<7>, unpack<8>};
  return all[bits - 1];
}

}  // namespace TW_NS
}  // namespace tw
