// Source of the binaries beside it, small kernels that differ in one resource each. Made with CUDA 13.0:
//   nvcc -std=c++17 -cubin -arch=sm_XX kernels.cu -o sm_XX.cubin -Xptxas -v 2> sm_XX.log      (XX = 75 80 90a 100 120)
//   nvcc -std=c++17 -ptx -arch=sm_90a kernels.cu -o kernels.ptx
//   nvcc -std=c++17 -fatbin -gencode arch=compute_80,code=[sm_80,compute_80] -gencode arch=compute_90a,code=sm_90a
//        --compress-mode=MODE kernels.cu -o MODE.fatbin                                       (MODE = none size speed)
//   nvcc -std=c++17 -shared -Xcompiler -fPIC -cudart none -arch=sm_80 kernels.cu -o host.so
// and with the ptxas of CUDA 12.4, after `.version 9.0` was lowered to 8.4:
//   ptxas -arch=sm_90a -v kernels.ptx -o cuda12_sm_90a.cubin 2> cuda12_sm_90a.log

extern "C" __global__ void plain(const float* x, float* y, int n) {
  int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < n) y[i] = x[i] * 2.0f;
}

// static shared memory whose size is no multiple of 16, one barrier, launch bounds
extern "C" __global__ void __launch_bounds__(256, 4) bounded(const float* x, float* y) {
  __shared__ float s[333];
  s[threadIdx.x] = x[threadIdx.x];
  __syncthreads();
  y[threadIdx.x] = s[(threadIdx.x * 7) % 256];
}

// a run-time barrier id: the compiler reserves all 16
extern "C" __global__ void barriers16(const float* x, float* y, int id) {
  asm volatile("bar.sync %0, 64;" ::"r"(id));
  y[threadIdx.x] = x[threadIdx.x];
}

extern "C" __global__ void barriers5(const float* x, float* y) {
  asm volatile("bar.sync 4, 64;");
  y[threadIdx.x] = x[threadIdx.x];
}

extern "C" __global__ void dynamic(const float* x, float* y, int n) {
  extern __shared__ float s[];
  s[threadIdx.x] = x[threadIdx.x];
  __syncthreads();
  y[threadIdx.x] = s[n];
}

// 32 registers are not enough: spills
extern "C" __global__ void __launch_bounds__(1024, 2) spills(const float* x, float* y, int n) {
  float a[40];
#pragma unroll
  for (int i = 0; i < 40; i++) a[i] = x[i * n];
  for (int k = 0; k < n; k++) {
#pragma unroll
    for (int i = 0; i < 40; i++) a[i] = a[i] * a[(i + 7) % 40];
  }
#pragma unroll
  for (int i = 0; i < 40; i++) y[i * n] = a[i];
}

// an array indexed at run time: local memory, but no spills
extern "C" __global__ void local_array(const float* x, float* y, int n) {
  float a[8];
#pragma unroll 1
  for (int i = 0; i < n; i++) a[(i * n) & 7] = x[i];
  y[threadIdx.x] = a[n & 7];
}
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
extern "C" __global__ void __cluster_dims__(2, 2, 1) __launch_bounds__(128) clustered(const float* x, float* y) {
  y[threadIdx.x] = x[threadIdx.x];
}
#else  // the host side names it for every architecture
extern "C" __global__ void __launch_bounds__(128) clustered(const float* x, float* y) { y[threadIdx.x] = x[threadIdx.x]; }
#endif
