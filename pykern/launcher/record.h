// Launch records: what one plan means to the launcher. Python packs a plan into int64 words (pykern/launcher/record.py
// is the writer and must agree), decoded once when the plan is made.
#pragma once
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

constexpr int64_t kMagic = 0x706b02;
inline const int64_t kOne = 1;

enum ArgKind : int64_t { IN_PTR, OUT_PTR, WS_PTR, I32, I64, F32, RUN_F32, RUN_I32, RUN_I64, MAP };

struct Arg {
  ArgKind kind;
  int64_t v;
};
struct Launch {
  const void* fn;          // the kernel, as the runtime knows it
  void* handle = nullptr;  // and as the driver does, on the plan's device
  std::string kernel;
  uint32_t grid[3], block[3], cluster[3];
  uint64_t smem;
  int64_t flags;  // PK_LAUNCH_*
  std::vector<Arg> args;
};
struct Out {
  int32_t dtype;
  std::vector<int64_t> size, stride;
};
struct WorkspaceSpec {
  int64_t nbytes;
  bool counter;
};
struct MapSpec {
  ArgKind kind;  // IN_PTR, OUT_PTR or WS_PTR
  int64_t index, dtype, elem_bytes, rows, cols, row_bytes, box_rows, box_cols, swizzle;
};
struct Overlap {
  int out, other;
  bool same_ok;
};
struct Record {
  std::vector<Out> outs;
  std::vector<WorkspaceSpec> ws;
  std::vector<std::string> names;  // flat inputs, then outputs
  std::vector<int32_t> roles;      // of the flat inputs
  std::vector<Overlap> overlaps;
  std::vector<MapSpec> maps;
  std::vector<Launch> launches;
};
