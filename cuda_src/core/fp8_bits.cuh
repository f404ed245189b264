// fp8 <-> float on bit patterns, in integer arithmetic: the host backend's definition of fp8, and the
// fallback of cards without the conversion instructions (before sm_89). Needs PK_DEVICE and the fixed-width
// integers.
//   e4m3: 1-4-3, bias 7, no infinity, NaN 0x7f and 0xff, largest 448.
//   e5m2: 1-5-2, bias 15, infinities, largest 57344.
#pragma once

namespace pk {
namespace detail {

// Float bits to fp8 bits: nearest even, beyond the largest finite value (inf too) to that value, NaN to 0x7f.
// kMant is the number of mantissa bits, kBias the exponent bias, kMax the bits of the largest finite value.
template <int kMant, int kBias, unsigned kMax>
PK_DEVICE constexpr uint8_t fp8_from_float_bits(uint32_t x) {
  const uint32_t sign = x >> 24 & 0x80u;
  const uint32_t magnitude = x & 0x7fffffffu;
  constexpr int kShift = 23 - kMant;
  constexpr int kRebias = 127 - kBias;
  uint32_t result = 0;
  if (magnitude > 0x7f800000u) return 0x7fu;
  if (magnitude >= static_cast<uint32_t>(kRebias + 1) << 23) {
    const uint32_t odd = magnitude >> kShift & 1u;
    const uint32_t rounded = (magnitude + (1u << (kShift - 1)) - 1u + odd) >> kShift;
    result = rounded - (static_cast<uint32_t>(kRebias) << kMant);
    if (result > kMax) result = kMax;
  } else {
    // Below the smallest normal the grid is uniform: shift the mantissa, leading one included, down to it.
    // Beyond 24 bits less than half a step is left.
    const int shift = kShift + kRebias + 1 - static_cast<int>(magnitude >> 23);
    if (shift <= 24) {
      const uint32_t mantissa = (magnitude & 0x7fffffu) | 0x800000u;
      const uint32_t odd = mantissa >> shift & 1u;
      result = (mantissa + (1u << (shift - 1)) - 1u + odd) >> shift;
    }
  }
  return static_cast<uint8_t>(result | sign);
}

PK_DEVICE constexpr uint8_t e4m3_from_float_bits(uint32_t x) { return fp8_from_float_bits<3, 7, 0x7eu>(x); }
PK_DEVICE constexpr uint8_t e5m2_from_float_bits(uint32_t x) { return fp8_from_float_bits<2, 15, 0x7bu>(x); }

// fp8 bits to half bits: both formats fit into half exactly. NaN becomes 0x7fff, as the instruction gives.
PK_DEVICE constexpr uint16_t e4m3_to_half_bits(uint8_t x) {
  const uint32_t sign = static_cast<uint32_t>(x & 0x80u) << 8;
  const uint32_t magnitude = x & 0x7fu;
  // Subnormals are magnitude * 2^-9, normal in half: shift until the leading one sits at bit 3. All by selection: with
  // branches, what uses this many times over takes the compiler minutes.
  const uint32_t up = 1u + (magnitude < 4u) + (magnitude < 2u);
  const uint32_t small = magnitude == 0u ? 0u : (((magnitude << up) & 7u) << 7) | ((9u - up) << 10);
  const uint32_t finite = sign | (magnitude >= 8u ? (magnitude << 7) + (8u << 10) : small);
  return static_cast<uint16_t>(magnitude == 0x7fu ? 0x7fffu : finite);
}

PK_DEVICE constexpr uint16_t e5m2_to_half_bits(uint8_t x) {
  return (x & 0x7fu) > 0x7cu ? uint16_t(0x7fff) : static_cast<uint16_t>(static_cast<uint32_t>(x) << 8);
}

}  // namespace detail
}  // namespace pk
