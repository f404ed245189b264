// The C interface between the launcher, a compiled kernel variant and the host runtime.
//
// A variant exports `const void* pk_entry()`; on the host backend what it returns is a PkEntry. The launcher
// calls pkh_run_sequence() with every launch of one op call; the runtime calls the entries back. Everything
// here is plain C so that ctypes and other compilers can follow it. Fields are only ever added at the end.
#pragma once
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

enum {
  PK_LAUNCH_PDL = 1,  // programmatic dependent launch: blocks may start before the previous launch is done
  PK_LAUNCH_COOPERATIVE = 2,  // all blocks are resident at once; the scheduler interleaves the whole grid
};

enum {
  PK_ROLE_INPUT = 0,      // only read
  PK_ROLE_WEIGHT = 1,     // only read, and not written while a kernel is in flight: may be read before grid_wait()
  PK_ROLE_OUTPUT = 2,     // written; holds nothing before the launch
  PK_ROLE_MUTATED = 3,    // read and written (caches, in-place tensors, counters)
  PK_ROLE_WORKSPACE = 4,  // scratch; holds nothing before the launch
};

enum {
  PK_REGION_INITIALISED = 1,  // an output or a workspace that does hold something (self-resetting counters)
};

enum { PK_ASYNC_EAGER = 0, PK_ASYNC_LAZY = 1, PK_ASYNC_RANDOM = 2 };

struct PkRegion {
  void* base;             // address of element 0
  int64_t bytes;          // extent from base to the end of the last element
  const char* name;       // the tensor's name in the op's schema
  int32_t role;           // PK_ROLE_*
  int32_t elem_bytes;     // size of one element
  int32_t ndim;           // 0: one contiguous run of `bytes`
  const int64_t* size;    // [ndim], elements
  const int64_t* stride;  // [ndim], elements
  int32_t flags;          // PK_REGION_*
};

struct PkOptions {
  int32_t check;        // 1: run under the checker (needs a variant compiled for it)
  int32_t threads;      // OS threads; 0: one per core
  uint64_t seed;        // 0: first come, first served; else a random schedule
  int32_t async_order;  // PK_ASYNC_*: when asynchronous copies and wgmma take effect
  int32_t trace;        // with check: also collect the per-line traffic table
  int32_t sms;          // multiprocessors to pretend (0: 4): how many blocks are resident in a PDL overlap
};

struct PkLaunch {
  uint32_t grid[3], block[3], cluster[3];
  uint32_t flags;             // PK_LAUNCH_*
  uint64_t smem;              // dynamic shared memory, bytes
  const char* kernel;         // name for messages
  int32_t nargs;              // length of args
  int32_t nregions;           // length of regions
  const int32_t* arg_region;  // [nargs]: region a pointer argument points into, or -1; may be null
  const struct PkRegion* regions;
  const struct PkOptions* options;  // may be null: all zero
};

// args as for cuLaunchKernel; returns 0 on success.
typedef int (*PkEntry)(const struct PkLaunch*, void** args);

// Runs the launches of one op call in order (0 on success). A launch with PK_LAUNCH_PDL may overlap the one
// before it.
int pkh_run_sequence(const struct PkLaunch* launches, const PkEntry* entries, void*** args, int n);

// Text of the last failure on this thread, "" if the last run succeeded.
const char* pkh_error(void);

// JSON of the last checked run on this thread: findings, the per-line table, totals per launch.
const char* pkh_check_report(void);

// Encodes a 2-D tensor map (128 bytes, for a parameter of type pk::TensorMap), where the driver would encode
// a CUtensorMap. dims and box: elements, the contiguous axis first. swizzle: 0 none, 1: 32 bytes, 2: 64, 3:
// 128. Refuses what the driver refuses: 0 on success, else pkh_error() says why.
int pkh_tensor_map(void* out, void* base, int elem_bytes, const uint64_t* dims, uint64_t row_bytes,
                   const uint32_t* box, int swizzle);

// Version of this interface.
int pkh_version(void);

#ifdef __cplusplus
}
#endif
