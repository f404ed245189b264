// wgmma: d[64, N] (+)= a[64, 16] b[N, 16]^T on one warpgroup (128 threads, aligned), both operands in shared
// memory, K-major with the 128-byte swizzle. sm_90a only. The lists below spell out the registers of each N;
// an asm statement cannot be built in a loop.
#pragma once

// Operands %0 to %(4 n - 1), four more in each line, and the matching output constraints.
#define PK_WGMMA_REGS_1 "%0, %1, %2, %3"
#define PK_WGMMA_REGS_2 PK_WGMMA_REGS_1 ", %4, %5, %6, %7"
#define PK_WGMMA_REGS_3 PK_WGMMA_REGS_2 ", %8, %9, %10, %11"
#define PK_WGMMA_REGS_4 PK_WGMMA_REGS_3 ", %12, %13, %14, %15"
#define PK_WGMMA_REGS_5 PK_WGMMA_REGS_4 ", %16, %17, %18, %19"
#define PK_WGMMA_REGS_6 PK_WGMMA_REGS_5 ", %20, %21, %22, %23"
#define PK_WGMMA_REGS_7 PK_WGMMA_REGS_6 ", %24, %25, %26, %27"
#define PK_WGMMA_REGS_8 PK_WGMMA_REGS_7 ", %28, %29, %30, %31"
#define PK_WGMMA_REGS_9 PK_WGMMA_REGS_8 ", %32, %33, %34, %35"
#define PK_WGMMA_REGS_10 PK_WGMMA_REGS_9 ", %36, %37, %38, %39"
#define PK_WGMMA_REGS_11 PK_WGMMA_REGS_10 ", %40, %41, %42, %43"
#define PK_WGMMA_REGS_12 PK_WGMMA_REGS_11 ", %44, %45, %46, %47"
#define PK_WGMMA_REGS_13 PK_WGMMA_REGS_12 ", %48, %49, %50, %51"
#define PK_WGMMA_REGS_14 PK_WGMMA_REGS_13 ", %52, %53, %54, %55"
#define PK_WGMMA_REGS_15 PK_WGMMA_REGS_14 ", %56, %57, %58, %59"
#define PK_WGMMA_REGS_16 PK_WGMMA_REGS_15 ", %60, %61, %62, %63"
#define PK_WGMMA_REGS_17 PK_WGMMA_REGS_16 ", %64, %65, %66, %67"
#define PK_WGMMA_REGS_18 PK_WGMMA_REGS_17 ", %68, %69, %70, %71"
#define PK_WGMMA_REGS_19 PK_WGMMA_REGS_18 ", %72, %73, %74, %75"
#define PK_WGMMA_REGS_20 PK_WGMMA_REGS_19 ", %76, %77, %78, %79"
#define PK_WGMMA_REGS_21 PK_WGMMA_REGS_20 ", %80, %81, %82, %83"
#define PK_WGMMA_REGS_22 PK_WGMMA_REGS_21 ", %84, %85, %86, %87"
#define PK_WGMMA_REGS_23 PK_WGMMA_REGS_22 ", %88, %89, %90, %91"
#define PK_WGMMA_REGS_24 PK_WGMMA_REGS_23 ", %92, %93, %94, %95"
#define PK_WGMMA_REGS_25 PK_WGMMA_REGS_24 ", %96, %97, %98, %99"
#define PK_WGMMA_REGS_26 PK_WGMMA_REGS_25 ", %100, %101, %102, %103"
#define PK_WGMMA_REGS_27 PK_WGMMA_REGS_26 ", %104, %105, %106, %107"
#define PK_WGMMA_REGS_28 PK_WGMMA_REGS_27 ", %108, %109, %110, %111"
#define PK_WGMMA_REGS_29 PK_WGMMA_REGS_28 ", %112, %113, %114, %115"
#define PK_WGMMA_REGS_30 PK_WGMMA_REGS_29 ", %116, %117, %118, %119"
#define PK_WGMMA_REGS_31 PK_WGMMA_REGS_30 ", %120, %121, %122, %123"
#define PK_WGMMA_REGS_32 PK_WGMMA_REGS_31 ", %124, %125, %126, %127"
#define PK_WGMMA_FOUR(i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
#define PK_WGMMA_OUT_1 PK_WGMMA_FOUR(0)
#define PK_WGMMA_OUT_2 PK_WGMMA_OUT_1, PK_WGMMA_FOUR(4)
#define PK_WGMMA_OUT_3 PK_WGMMA_OUT_2, PK_WGMMA_FOUR(8)
#define PK_WGMMA_OUT_4 PK_WGMMA_OUT_3, PK_WGMMA_FOUR(12)
#define PK_WGMMA_OUT_5 PK_WGMMA_OUT_4, PK_WGMMA_FOUR(16)
#define PK_WGMMA_OUT_6 PK_WGMMA_OUT_5, PK_WGMMA_FOUR(20)
#define PK_WGMMA_OUT_7 PK_WGMMA_OUT_6, PK_WGMMA_FOUR(24)
#define PK_WGMMA_OUT_8 PK_WGMMA_OUT_7, PK_WGMMA_FOUR(28)
#define PK_WGMMA_OUT_9 PK_WGMMA_OUT_8, PK_WGMMA_FOUR(32)
#define PK_WGMMA_OUT_10 PK_WGMMA_OUT_9, PK_WGMMA_FOUR(36)
#define PK_WGMMA_OUT_11 PK_WGMMA_OUT_10, PK_WGMMA_FOUR(40)
#define PK_WGMMA_OUT_12 PK_WGMMA_OUT_11, PK_WGMMA_FOUR(44)
#define PK_WGMMA_OUT_13 PK_WGMMA_OUT_12, PK_WGMMA_FOUR(48)
#define PK_WGMMA_OUT_14 PK_WGMMA_OUT_13, PK_WGMMA_FOUR(52)
#define PK_WGMMA_OUT_15 PK_WGMMA_OUT_14, PK_WGMMA_FOUR(56)
#define PK_WGMMA_OUT_16 PK_WGMMA_OUT_15, PK_WGMMA_FOUR(60)
#define PK_WGMMA_OUT_17 PK_WGMMA_OUT_16, PK_WGMMA_FOUR(64)
#define PK_WGMMA_OUT_18 PK_WGMMA_OUT_17, PK_WGMMA_FOUR(68)
#define PK_WGMMA_OUT_19 PK_WGMMA_OUT_18, PK_WGMMA_FOUR(72)
#define PK_WGMMA_OUT_20 PK_WGMMA_OUT_19, PK_WGMMA_FOUR(76)
#define PK_WGMMA_OUT_21 PK_WGMMA_OUT_20, PK_WGMMA_FOUR(80)
#define PK_WGMMA_OUT_22 PK_WGMMA_OUT_21, PK_WGMMA_FOUR(84)
#define PK_WGMMA_OUT_23 PK_WGMMA_OUT_22, PK_WGMMA_FOUR(88)
#define PK_WGMMA_OUT_24 PK_WGMMA_OUT_23, PK_WGMMA_FOUR(92)
#define PK_WGMMA_OUT_25 PK_WGMMA_OUT_24, PK_WGMMA_FOUR(96)
#define PK_WGMMA_OUT_26 PK_WGMMA_OUT_25, PK_WGMMA_FOUR(100)
#define PK_WGMMA_OUT_27 PK_WGMMA_OUT_26, PK_WGMMA_FOUR(104)
#define PK_WGMMA_OUT_28 PK_WGMMA_OUT_27, PK_WGMMA_FOUR(108)
#define PK_WGMMA_OUT_29 PK_WGMMA_OUT_28, PK_WGMMA_FOUR(112)
#define PK_WGMMA_OUT_30 PK_WGMMA_OUT_29, PK_WGMMA_FOUR(116)
#define PK_WGMMA_OUT_31 PK_WGMMA_OUT_30, PK_WGMMA_FOUR(120)
#define PK_WGMMA_OUT_32 PK_WGMMA_OUT_31, PK_WGMMA_FOUR(124)

namespace pk {
namespace detail {

template <int N, class T>
struct wgmma_op {
  static_assert(N >= 8 && N <= 256 && N % 8 == 0, "wgmma: N is 8 to 256, a multiple of 8");
  static_assert(same<T, half>::value || same<T, bf16>::value, "wgmma takes pk::half or pk::bf16");
};

// quads = N / 8; a, b and s are the operand numbers after the N / 2 accumulators.
#define PK_WGMMA_CASE(N, quads, a, b, s, T, name)                                                       \
  template <>                                                                                           \
  struct wgmma_op<N, T> {                                                                               \
    static PK_DEVICE void run(float (&d)[N / 2], uint64_t desc_a, uint64_t desc_b, int scale_d) {       \
      asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %" #s ", 0;\nwgmma.mma_async.sync.aligned.m64n" #N \
                   "k16.f32." #name "." #name " {" PK_WGMMA_REGS_##quads "}, %" #a ", %" #b             \
                                                                         ", p, 1, 1, 0, 0;\n}"          \
                   : PK_WGMMA_OUT_##quads                                                               \
                   : "l"(desc_a), "l"(desc_b), "r"(scale_d));                                           \
    }                                                                                                   \
  };
#define PK_WGMMA_BOTH(N, quads, a, b, s)            \
  PK_WGMMA_CASE(N, quads, a, b, s, ::pk::half, f16) \
  PK_WGMMA_CASE(N, quads, a, b, s, ::pk::bf16, bf16)

PK_WGMMA_BOTH(8, 1, 4, 5, 6)
PK_WGMMA_BOTH(16, 2, 8, 9, 10)
PK_WGMMA_BOTH(24, 3, 12, 13, 14)
PK_WGMMA_BOTH(32, 4, 16, 17, 18)
PK_WGMMA_BOTH(40, 5, 20, 21, 22)
PK_WGMMA_BOTH(48, 6, 24, 25, 26)
PK_WGMMA_BOTH(56, 7, 28, 29, 30)
PK_WGMMA_BOTH(64, 8, 32, 33, 34)
PK_WGMMA_BOTH(72, 9, 36, 37, 38)
PK_WGMMA_BOTH(80, 10, 40, 41, 42)
PK_WGMMA_BOTH(88, 11, 44, 45, 46)
PK_WGMMA_BOTH(96, 12, 48, 49, 50)
PK_WGMMA_BOTH(104, 13, 52, 53, 54)
PK_WGMMA_BOTH(112, 14, 56, 57, 58)
PK_WGMMA_BOTH(120, 15, 60, 61, 62)
PK_WGMMA_BOTH(128, 16, 64, 65, 66)
PK_WGMMA_BOTH(136, 17, 68, 69, 70)
PK_WGMMA_BOTH(144, 18, 72, 73, 74)
PK_WGMMA_BOTH(152, 19, 76, 77, 78)
PK_WGMMA_BOTH(160, 20, 80, 81, 82)
PK_WGMMA_BOTH(168, 21, 84, 85, 86)
PK_WGMMA_BOTH(176, 22, 88, 89, 90)
PK_WGMMA_BOTH(184, 23, 92, 93, 94)
PK_WGMMA_BOTH(192, 24, 96, 97, 98)
PK_WGMMA_BOTH(200, 25, 100, 101, 102)
PK_WGMMA_BOTH(208, 26, 104, 105, 106)
PK_WGMMA_BOTH(216, 27, 108, 109, 110)
PK_WGMMA_BOTH(224, 28, 112, 113, 114)
PK_WGMMA_BOTH(232, 29, 116, 117, 118)
PK_WGMMA_BOTH(240, 30, 120, 121, 122)
PK_WGMMA_BOTH(248, 31, 124, 125, 126)
PK_WGMMA_BOTH(256, 32, 128, 129, 130)

#undef PK_WGMMA_BOTH
#undef PK_WGMMA_CASE

}  // namespace detail

// Before the first wgmma, and whenever the accumulators were touched by other instructions since the last
// one.
PK_DEVICE void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
PK_DEVICE void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
// Until at most kPending groups are in flight. Accumulators and operands must not be touched before.
template <int kPending>
PK_DEVICE void wgmma_wait() {
  static_assert(kPending >= 0 && kPending <= 7, "wgmma_wait: 0 to 7 groups");
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
}

// scale_d 0 overwrites d, 1 adds to it. Thread t of the warpgroup holds d[4 j + i] = element
// (16 (t / 32) + t % 32 / 4 + 8 (i / 2), 8 j + 2 (t % 4) + i % 2).
template <int N, class T>
PK_DEVICE void wgmma(float (&d)[N / 2], uint64_t desc_a, uint64_t desc_b, int scale_d) {
  detail::wgmma_op<N, T>::run(d, desc_a, desc_b, scale_d);
}

}  // namespace pk
