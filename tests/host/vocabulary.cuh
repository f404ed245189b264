// Every name of the device dialect used once, so that both compilers see all of it. Never launched: it would make no
// sense. PK_TEST_CARD picks what the card has: 80, 90 (TMA and clusters too) or 901 (sm_90a: wgmma too).
#include "core/async.cuh"
#include "core/block.cuh"
#include "core/epilogue.cuh"
#include "core/mma.cuh"
#include "core/order.cuh"
#include "core/quant.cuh"
#include "core/row.cuh"
#include "core/export.cuh"

struct VocabularySmem {
  alignas(1024) uint16_t a[64 * 64];
  alignas(1024) uint16_t b[256 * 64];
  uint32_t words[1024];
  uint64_t bars[4];
  float scratch[32];
};

template <int N, class T>
PK_DEVICE void use_wgmma(VocabularySmem& s, float* out) {
  float d[N / 2];
  pk::wgmma_fence();
  pk::wgmma<N, T>(d, pk::wgmma_desc_sw128(s.a), pk::wgmma_desc_sw128(s.b), 0);
  pk::wgmma_commit();
  pk::wgmma_wait<1>();
  pk::wgmma_wait<0>(d);
#pragma unroll
  for (int i = 0; i < N / 2; ++i) out[i * 128 + threadIdx.x] += d[i];
}

template <class T>
PK_DEVICE void use_numbers(const float* in, T* out, uint32_t* words) {
  const T v = pk::from_float<T>(in[0]);
  out[0] = static_cast<T>(pk::to_float(v) + static_cast<float>(v));
  words[0] = pk::pack2<T>(in[1], in[2]);
  const float2 two = pk::unpack2<T>(words[1]);
  words[2] = pk::pack2<T>(two.y, two.x);
  words[3] = pk::fma2<T>(words[0], pk::add2<T>(words[1], words[4]), pk::mul2<T>(words[2], words[5]));
  pk::st_vec(out + 8, pk::from_float<T>(pk::to_float(pk::ld_vec_nc<T, 8>(out + 16))));
  pk::st_vec_stream(out + 24, pk::ld_vec_stream<T, 8>(out + 32));
}

template <int kCard>
__global__ void __launch_bounds__(128, 1) vocabulary(const __grid_constant__ pk::TensorMap map, const float* in,
                                                     float* out, uint32_t* flag, const void* src) {
  PK_DYN_SMEM(VocabularySmem, s);
  pk::grid_wait();
  use_numbers(in, reinterpret_cast<pk::half*>(out), flag);
  use_numbers(in, reinterpret_cast<pk::bf16*>(out), flag);
  out[0] = pk::to_float(pk::from_float<pk::fp8e4m3>(in[3])) + pk::to_float(pk::from_float<pk::fp8e5m2>(in[3]));
  out[1] = __uint_as_float(pk::to_tf32(in[4]));

  pk::cp_async<4>(s.words, src);
  pk::cp_async<8>(s.words + 2, src);
  pk::cp_async<16>(s.words + 4, src, in[5] > 0.f);
  pk::cp_async_commit();
  pk::cp_async_wait<0>();
  __syncthreads();

  uint32_t r[4];
  pk::ldmatrix<1>(r, s.words), pk::stmatrix<1>(s.words, r);
  pk::ldmatrix<2>(r, s.words), pk::stmatrix<2>(s.words, r);
  pk::ldmatrix<4>(r, s.words), pk::stmatrix<4>(s.words, r);
  pk::ldmatrix<1, true>(r, s.words), pk::stmatrix<1, true>(s.words, r);
  pk::ldmatrix<2, true>(r, s.words), pk::stmatrix<2, true>(s.words, r);
  pk::ldmatrix<4, true>(r, s.words), pk::stmatrix<4, true>(s.words, r);
  float d[4] = {};
  int32_t sums[4] = {};
  pk::mma_m16n8k16<pk::half>(d, r, r + 2);
  pk::mma_m16n8k16<pk::bf16>(d, r, r + 2);
  pk::mma_m16n8k8_tf32(d, r, r + 2);
  pk::mma_m16n8k32_s8(sums, r, r + 2);
  pk::mma_m16n8k32_fp8<pk::fp8e4m3>(d, r, r + 2);
  pk::mma_m16n8k32_fp8<pk::fp8e5m2>(d, r, r + 2);
  for (int i = 0; i < 4; ++i) out[8 + i] = d[i] + static_cast<float>(sums[i]);

  out[12] = pk::block_sum<128>(pk::warp_sum<8>(in[6]), s.scratch) + pk::block_max<128>(in[7], s.scratch);
  out[13] = pk::warp_max(in[6]) + pk::warp_min(in[7]) + pk::block_min<128>(in[8], s.scratch);
  flag[4] = static_cast<uint32_t>(pk::order_index(pk::order_word(in[6], pk::order_key(in[7]))));
  flag[5] = static_cast<uint32_t>(pk::block_max<128>(s.bars[0], s.bars));
  pk::forget(r[0]), pk::forget(d[0]);
  out[14] = static_cast<float>(pk::lop3<0xea>(flag[0], flag[1], flag[2]) + pk::prmt(flag[3], 4, 0x4321));

  pk::mbar_init(s.bars, 1);
  pk::mbar_fence_init();
  pk::mbar_arrive(s.bars);
  if (!pk::mbar_try_wait(s.bars, 0)) pk::mbar_wait(s.bars, 0);
  pk::named_barrier_sync(1, 128);
  pk::named_barrier_arrive(2, 128);
  pk::cluster_arrive();
  pk::cluster_wait();
  pk::cluster_sync();
  out[pk::cluster_ctarank() + pk::cluster_nctarank()] = static_cast<float>(*pk::map_shared_rank(s.words, 0));
  pk::setmaxnreg_inc<232>();
  pk::setmaxnreg_dec<40>();
  pk::fence_proxy_async();
  pk::atomic_add_release(flag, 1);
  flag[1] = pk::atomic_add_acq_rel(flag, 1) + pk::ld_acquire(flag);
  pk::st_release(flag, 2);
  pk::spin_until_ge(flag, 3);
  pk::grid_barrier(flag);

  if constexpr (kCard >= 90) {
    pk::mbar_arrive_expect_tx(s.bars, 4);
    pk::mbar_expect_tx(s.bars, 4);
    pk::mbar_arrive_remote(s.bars, 0);
    pk::tma_load_2d(s.a, &map, 1, 2, s.bars);
    pk::tma_load_2d_multicast(s.a, &map, 1, 2, s.bars, 1);
    pk::tma_store_2d(&map, s.a, 3, 4);
    pk::tma_store_commit();
    pk::tma_store_wait_read<1>();
    pk::tma_store_wait<0>();
    pk::bulk_load(s.a, src, 16, s.bars);
  }
  if constexpr (kCard == 901) {
    use_wgmma<PK_TEST_N, pk::half>(s, out);
    use_wgmma<PK_TEST_N, pk::bf16>(s, out);
  }

  uint32_t pairs[4];
  pk::unpack_u4_pairs<pk::half, 8>(flag[8], pairs);
  pk::unpack_u4_pairs<pk::bf16, 0>(pairs[0], pairs);
  pk::unpack_s8_pairs<pk::half>(pairs[1], pairs);
  pk::Vec<float, 8> x = pk::decode_q4_1(pairs[0], pk::half(in[1]), pk::half(in[2]));
  const pk::Vec<float, 4> y = pk::unpack_fp8<pk::fp8e4m3>(pairs[3]);
  pk::Vec<float, 4> z;
  for (int i = 0; i < 4; ++i) z[i] = x[i] * y[i] + x[i + 4];
  const pk::Epilogue<pk::bf16, pk::Act::kGelu, pk::half, float> epilogue{reinterpret_cast<pk::bf16*>(out), 64,
                                                                          static_cast<const pk::half*>(src), in, 64};
  epilogue.store(z, blockIdx.x, threadIdx.x * 4);
  epilogue.store_edge(z, blockIdx.x, threadIdx.x * 4, 3);
  pk::grid_launch_dependents();
}
PK_VARIANT(vocabulary<PK_TEST_CARD>)
