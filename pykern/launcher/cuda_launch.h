// What the launcher does on a GPU: device guard, kernel preparation, launch attributes, tensor maps.
#pragma once
#include <cuda.h>
#include <cuda_runtime_api.h>

#include <cstddef>
#include <string>

#include "host/abi.h"
#include "record.h"

// Cheaper than a heap-allocated guard when the device is already current, which is nearly always.
struct DeviceScope {
  int previous = -1;
  explicit DeviceScope(int device) {
    if (device < 0) return;
    int current;
    cudaGetDevice(&current);
    if (current == device) return;
    previous = current;
    cudaSetDevice(device);
  }
  ~DeviceScope() {
    if (previous >= 0) cudaSetDevice(previous);
  }
};

inline std::string cuda_text(cudaError_t e) {
  cudaGetLastError();  // a sticky error stays, a launch error must not surface in the next call
  return std::string(cudaGetErrorName(e)) + ": " + cudaGetErrorString(e);
}

inline unsigned cluster_size(const Launch& l) { return l.cluster[0] * l.cluster[1] * l.cluster[2]; }

// A function of the driver, found through the runtime, so that nothing links to libcuda; null where it has none.
// `version`: of the function's signature.
template <class F>
F driver_function(const char* name, unsigned version) {
  void* f = nullptr;
  cudaDriverEntryPointQueryResult found;
  if (cudaGetDriverEntryPointByVersion(name, &f, version, cudaEnableDefault, &found) != cudaSuccess ||
      found != cudaDriverEntryPointSuccess) {
    cudaGetLastError();
    return nullptr;
  }
  return reinterpret_cast<F>(f);
}

// The driver's type and the runtime's are laid out alike and number their kinds alike.
static_assert(sizeof(CUlaunchAttribute) == sizeof(cudaLaunchAttribute));
static_assert(offsetof(CUlaunchAttribute, value) == offsetof(cudaLaunchAttribute, val));

// Fills attr, of at least 3 elements; returns how many there are.
inline unsigned launch_attributes(const Launch& l, cudaLaunchAttribute* attr) {
  unsigned n = 0;
  if (cluster_size(l) > 1) {
    attr[n].id = cudaLaunchAttributeClusterDimension;
    attr[n].val.clusterDim.x = l.cluster[0];
    attr[n].val.clusterDim.y = l.cluster[1];
    attr[n++].val.clusterDim.z = l.cluster[2];
  }
  if (l.flags & PK_LAUNCH_PDL) {
    attr[n].id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attr[n++].val.programmaticStreamSerializationAllowed = 1;
  }
  if (l.flags & PK_LAUNCH_COOPERATIVE) {
    attr[n].id = cudaLaunchAttributeCooperative;
    attr[n++].val.cooperative = 1;
  }
  return n;
}

// Per device, once per plan; also forces the lazy module load outside any graph capture. The driver's handle of the
// kernel spares every launch the runtime's search for it; without one launches go through the runtime.
inline std::string cuda_prepare(Launch& l) {
  cudaFuncAttributes a;
  cudaError_t e = cudaFuncGetAttributes(&a, l.fn);
  if (!e && l.smem + a.sharedSizeBytes > 48 * 1024)
    e = cudaFuncSetAttribute(l.fn, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(l.smem));
  if (!e && cluster_size(l) > 8) e = cudaFuncSetAttribute(l.fn, cudaFuncAttributeNonPortableClusterSizeAllowed, 1);
  if (e) return cuda_text(e);
  cudaFunction_t handle;
  if (cudaGetFuncBySymbol(&handle, l.fn) == cudaSuccess)
    l.handle = handle;
  else
    cudaGetLastError();
  return {};
}

inline std::string cuda_launch(const Launch& l, void** argv, void* stream) {
  using LaunchEx = CUresult (*)(const CUlaunchConfig*, CUfunction, void**, void**);
  static const auto launch_ex = driver_function<LaunchEx>("cuLaunchKernelEx", 12000);
  cudaLaunchAttribute attr[3];
  const unsigned n = launch_attributes(l, attr);
  if (l.handle && launch_ex) {
    CUlaunchConfig config{};
    config.gridDimX = l.grid[0];
    config.gridDimY = l.grid[1];
    config.gridDimZ = l.grid[2];
    config.blockDimX = l.block[0];
    config.blockDimY = l.block[1];
    config.blockDimZ = l.block[2];
    config.sharedMemBytes = static_cast<unsigned>(l.smem);
    config.hStream = static_cast<CUstream>(stream);
    config.attrs = reinterpret_cast<CUlaunchAttribute*>(attr);
    config.numAttrs = n;
    if (launch_ex(&config, static_cast<CUfunction>(l.handle), argv, nullptr) == CUDA_SUCCESS) return {};
    // Not launched: a thread without a context yet, or an error, which the runtime names.
  }
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(l.grid[0], l.grid[1], l.grid[2]);
  config.blockDim = dim3(l.block[0], l.block[1], l.block[2]);
  config.dynamicSmemBytes = l.smem;
  config.stream = static_cast<cudaStream_t>(stream);
  config.attrs = attr;
  config.numAttrs = n;
  const cudaError_t e = cudaLaunchKernelExC(&config, l.fn, argv);
  return e ? cuda_text(e) : std::string();
}

// torch's ScalarType -> the driver's tensor map element type; -1 where TMA has none.
inline int map_type(int64_t dtype) {
  switch (dtype) {
    case 0:   // uint8
    case 1:   // int8
    case 23:  // float8_e5m2
    case 24:  // float8_e4m3fn
      return CU_TENSOR_MAP_DATA_TYPE_UINT8;
    case 3:
      return CU_TENSOR_MAP_DATA_TYPE_INT32;
    case 5:
      return CU_TENSOR_MAP_DATA_TYPE_FLOAT16;
    case 6:
      return CU_TENSOR_MAP_DATA_TYPE_FLOAT32;
    case 15:
      return CU_TENSOR_MAP_DATA_TYPE_BFLOAT16;
    default:
      return -1;
  }
}

inline std::string cuda_map(void* storage, const MapSpec& m, void* base) {
  using Encode = CUresult (*)(CUtensorMap*, CUtensorMapDataType, cuuint32_t, void*, const cuuint64_t*,
                              const cuuint64_t*, const cuuint32_t*, const cuuint32_t*, CUtensorMapInterleave,
                              CUtensorMapSwizzle, CUtensorMapL2promotion, CUtensorMapFloatOOBfill);
  static const auto encode = driver_function<Encode>("cuTensorMapEncodeTiled", 12000);
  if (!encode) return "the driver has no cuTensorMapEncodeTiled (CUDA 12 or newer is needed)";
  const int type = map_type(m.dtype);
  if (type < 0) return "no TMA element type for this dtype";
  const cuuint64_t dims[2] = {static_cast<cuuint64_t>(m.cols), static_cast<cuuint64_t>(m.rows)};
  const cuuint64_t strides[1] = {static_cast<cuuint64_t>(m.row_bytes)};
  const cuuint32_t box[2] = {static_cast<cuuint32_t>(m.box_cols), static_cast<cuuint32_t>(m.box_rows)};
  const cuuint32_t step[2] = {1, 1};
  const CUtensorMapSwizzle swizzle = m.swizzle == 128  ? CU_TENSOR_MAP_SWIZZLE_128B
                                     : m.swizzle == 64 ? CU_TENSOR_MAP_SWIZZLE_64B
                                     : m.swizzle == 32 ? CU_TENSOR_MAP_SWIZZLE_32B
                                                       : CU_TENSOR_MAP_SWIZZLE_NONE;
  const CUresult e = encode(static_cast<CUtensorMap*>(storage), static_cast<CUtensorMapDataType>(type), 2, base, dims,
                            strides, box, step, CU_TENSOR_MAP_INTERLEAVE_NONE, swizzle,
                            CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  if (e == CUDA_SUCCESS) return {};
  return "cuTensorMapEncodeTiled returned " + std::to_string(static_cast<int>(e)) +
         " (base 16-byte aligned, row stride a multiple of 16 bytes, box <= 256 a side?)";
}

// Identifies the graph being captured on `stream` (0: none).
inline unsigned long long capture_id(void* stream) {
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  unsigned long long id = 0;
  if (cudaStreamGetCaptureInfo(static_cast<cudaStream_t>(stream), &status, &id, nullptr, nullptr, nullptr, nullptr))
    return 0;
  return status == cudaStreamCaptureStatusActive ? id : 0;
}
