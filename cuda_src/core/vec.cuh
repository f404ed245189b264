// Vectors of N elements that travel in one access, and the vector structs of CUDA with them. Every global or
// shared access wider than one element goes through these: g++ does not merge scalar accesses, as nvcc does.
#pragma once
#include "core/target.cuh"

namespace pk {

template <class T, int N>
struct alignas(sizeof(T) * N) Vec {
  static_assert(N > 0 && (N & (N - 1)) == 0, "Vec: N is a power of two");
  T data[N];
  PK_DEVICE T& operator[](int i) { return data[i]; }
  PK_DEVICE const T& operator[](int i) const { return data[i]; }
};

// The widest access there is, in elements of T.
template <class T>
constexpr int kMaxVec = 16 / static_cast<int>(sizeof(T));

// N elements from p, which is aligned to N * sizeof(T).
template <class T, int N>
PK_DEVICE Vec<T, N> ld_vec(const T* p) {
  return ld(reinterpret_cast<const Vec<T, N>*>(p));
}
template <class T, int N>
PK_DEVICE void st_vec(T* p, Vec<T, N> v) {
  st(reinterpret_cast<Vec<T, N>*>(p), v);
}
template <class T, int N>
PK_DEVICE Vec<T, N> ld_vec_nc(const T* p) {
  return ld_nc(reinterpret_cast<const Vec<T, N>*>(p));
}
template <class T, int N>
PK_DEVICE Vec<T, N> ld_vec_stream(const T* p) {
  return ld_stream(reinterpret_cast<const Vec<T, N>*>(p));
}
template <class T, int N>
PK_DEVICE void st_vec_stream(T* p, Vec<T, N> v) {
  st_stream(reinterpret_cast<Vec<T, N>*>(p), v);
}

// A vector's bits as 32-bit registers, and back. 16-bit elements that are held as registers stay two in one: those that
// are held as elements, and may be either of two, take a register and an instruction each.
template <class T, int N>
union VecWords {
  static_assert(sizeof(T) * N % 4 == 0, "whole words");
  static constexpr int kWords = static_cast<int>(sizeof(T)) * N / 4;
  Vec<T, N> vec;
  Vec<uint32_t, kWords> words;
  PK_DEVICE VecWords() {}
};
template <class T, int N>
PK_DEVICE Vec<uint32_t, VecWords<T, N>::kWords> to_words(const Vec<T, N>& v) {
  VecWords<T, N> both;
  both.vec = v;
  return both.words;
}
template <class T, int kWords, int N = kWords * 4 / static_cast<int>(sizeof(T))>
PK_DEVICE Vec<T, N> from_words(const Vec<uint32_t, kWords>& words) {
  VecWords<T, N> both;
  both.words = words;
  return both.vec;
}

// Element by element; 16-bit types in pairs, as the instructions have it.
template <class T, int N>
PK_DEVICE Vec<float, N> to_float(Vec<T, N> v) {
  Vec<float, N> f;
  if constexpr (N >= 2 && (detail::same<T, half>::value || detail::same<T, bf16>::value)) {
    const auto words = to_words(v);
#pragma unroll
    for (int i = 0; i < N / 2; ++i) {
      const float2 pair = unpack2<T>(words[i]);
      f[2 * i] = pair.x;
      f[2 * i + 1] = pair.y;
    }
  } else {
#pragma unroll
    for (int i = 0; i < N; ++i) f[i] = to_float(v[i]);
  }
  return f;
}
template <class T, int N>
PK_DEVICE Vec<T, N> from_float(Vec<float, N> f) {
  if constexpr (N >= 2 && (detail::same<T, half>::value || detail::same<T, bf16>::value)) {
    Vec<uint32_t, N / 2> words;
#pragma unroll
    for (int i = 0; i < N / 2; ++i) words[i] = pack2<T>(f[2 * i], f[2 * i + 1]);
    return from_words<T>(words);
  } else {
    Vec<T, N> v;
#pragma unroll
    for (int i = 0; i < N; ++i) v[i] = from_float<T>(f[i]);
    return v;
  }
}

}  // namespace pk
