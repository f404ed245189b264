// The checker's own structures. A checked run happens on one OS thread, so nothing here is locked.
//
// Order. An access is stamped (block, era, thread, clock). A block's era counts its full barriers: whatever
// happened in an earlier era of one's own block is ordered before now, whoever did it. Within an era, and
// between blocks, a thread knows what it acquired: a Knowledge holds, for each block, an era and a clock per
// thread. Clocks advance when a thread releases (__syncwarp, named barriers, mbarriers, cluster barriers,
// fences and flags). Shuffles and votes order nothing.
#pragma once
#include <deque>
#include <map>
#include <unordered_map>

#include "host/check.h"

#pragma GCC visibility push(hidden)
namespace pk::host {

// ---- who knows what
struct Knowledge {
  struct Entry {
    uint32_t block, era;
    std::vector<uint32_t> clock;  // by thread; then one per mbarrier: phases completed
  };
  std::vector<Entry> entries;

  void clear() { entries.clear(); }
  Entry& at(uint32_t block, uint32_t era);
  void set(uint32_t block, uint32_t era, uint32_t index, uint32_t clock);
  void join(const Knowledge& other);
  bool covers(uint32_t block, uint32_t era, uint32_t index, uint32_t clock) const;
};

struct Accumulator {  // registers a wgmma in flight writes: addresses on the thread's stack
  uintptr_t low, high;
  uint32_t index;  // wgmma of the thread; in flight until it has waited beyond it
};

struct ThreadCheck {
  uint32_t clock = 1;
  Knowledge know;
  uint32_t proxy_fences = 0;  // fence.proxy.async so far
  uint32_t proxy_era = 0;     // at the latest of them: the era, and what was known
  Knowledge proxy_know;
  bool fenced = false;  // has executed __threadfence: `fence` is what it releases
  Knowledge fence, to_acquire;
  bool wgmma_ready = false;  // no wgmma_fence is missing
  uint32_t wgmma_done = 0;
  std::vector<Accumulator> accumulators;
  std::vector<std::pair<uint32_t, uint32_t>> wgmma_ops;  // (wgmma of the thread, operation)
  uint32_t copy_op = 0;                                  // of the cp.async group being filled
  uint32_t accesses = 0;                                 // so far, against endless loops
};

// ---- what happened to memory
enum NodeFlags : uint8_t {
  kWrite = 1,
  kAtomic = 2,
  kOp = 4,       // asynchronous: `clock` is an operation, complete when its thread has waited for it
  kLoad = 8,     // a TMA load: `clock` is the phase, `warp` the mbarrier it completes on
  kGeneric = 16  // a write that the async proxy sees only after a proxy fence
};

struct Node {  // accesses of lanes of one warp, alike in all but the lane
  uint32_t next;
  uint32_t block, era, clock, lanes;
  uint16_t warp, launch;
  uint8_t bytes, flags;
  uint16_t grid_era;
  uint32_t fences;  // proxy fences of the writers before it
  const void* pc;
};

struct Cell {       // four bytes
  uint32_t head;    // nodes, 0: none
  uint8_t written;  // which bytes hold something
};

struct AsyncOp {
  const char* what = "";
  uint32_t block = 0, thread = 0;
  bool done = false;
  uint32_t era = 0, clock = 0, fences = 0;  // when its thread had waited for it
};

// ---- tensors
struct Tensor {
  std::string name;
  const PkRegion* region;
  char* original;
  char* mapped;
  int64_t bytes;
  int elem_bytes;
};

struct OwnerSet {  // the tensors that hold a byte
  std::vector<int> tensors;
  bool initialised = false, writable = false;
};

struct Group {  // tensors whose extents overlap: they keep their places relative to each other
  char* original;
  char* mapped;
  int64_t bytes;
  std::vector<int> tensors;
  std::vector<uint16_t> owner;  // per byte: index of an OwnerSet, 0: none's. Empty: all bytes are `simple`'s
  uint16_t simple = 0;
  bool shadowed = false;  // somebody may write it
  Cell* cells = nullptr;
  size_t cell_bytes = 0;
};

struct LaunchTotals {
  std::string kernel;
  uint64_t blocks = 0;
  uint32_t threads = 0;
  uint32_t smem = 0;
  // By tensor: bitmaps of the bytes read and of the bytes written.
  std::map<int, std::pair<std::vector<uint64_t>, std::vector<uint64_t>>> touched;
};

// ---- the per-line table
struct PcStats {
  const char* space;
  const char* op;
  const char* by = "";  // "cp.async", "matrix" (ldmatrix and stmatrix), or an ordinary access
  uint32_t bytes = 0;
  uint64_t requests = 0, lanes = 0, sectors = 0, ideal_sectors = 0, wavefronts = 0, ideal_wavefronts = 0;
  std::unordered_map<uint64_t, uint32_t> unique;  // 32-byte sector: its bytes
};

enum LogOp : uint8_t {
  kLogLoad,
  kLogStore,
  kLogAtomic,
  kLogMatrixLoad,
  kLogMatrixStore,
  kLogCopyLoad,
  kLogCopyStore
};

struct PcLog {  // one instruction in one warp since the lanes last converged
  uint32_t bytes = 0;
  bool shared = false;
  LogOp op = kLogLoad;
  uint32_t base = 0;  // requests completed
  uint32_t count[32] = {};
  struct Request {
    uint32_t mask = 0;
    uintptr_t address[32];
  };
  std::deque<Request> open;
};

struct MbarrierCheck {
  Knowledge arriving, released;
  std::vector<uint32_t> acquired_era;  // by phase: era in which a thread of the block first acquired it
};

struct ClusterCheck {
  Knowledge arriving, released;
};

struct BlockCheck {
  uint32_t uid = 0, era = 0;
  Knowledge shared;           // what every thread of the block knows of other blocks
  uint32_t proxy_cover = 0;   // writes of earlier eras are fenced for the async proxy
  bool proxy_fenced = false;  // some thread fenced in this era
  std::vector<Cell> smem;
  std::vector<ThreadCheck> threads;
  std::vector<MbarrierCheck> mbarriers;
  Knowledge barrier[16];  // released by bar.arrive
  std::unordered_map<const void*, PcLog> log[32];
};

struct Finding {
  std::string kind, kernel, file, tensor, message;
  const void* pc = nullptr;
  const void* other_pc = nullptr;
  int line = 0;
  uint3 block{0, 0, 0}, thread{0, 0, 0};
  uint64_t address = 0;
  int64_t offset = 0;
};

struct BlockName {
  uint3 index;
  dim3 dim;
};

struct Access {
  Fiber* f;
  uintptr_t address;
  uint32_t bytes;
  uint8_t flags;  // kWrite, kAtomic, kOp or kLoad, kGeneric
  const void* pc;
  uint32_t clock = 0;     // for kOp and kLoad
  uint32_t owner = 0;     // for kLoad: mbarrier; the block is the cells'
  bool proxy = false;     // by the async proxy
  const char* file = "";  // where it is known without its pc
  int line = 0;
};

struct Check {
  PkOptions options;
  Worker* worker = nullptr;
  std::vector<const PkLaunch*> launches;

  std::vector<Tensor> tensors;
  std::vector<OwnerSet> owners{1};  // [0]: nobody
  std::vector<Group> groups;
  std::vector<int> page_group;          // by page of kMapPage: the nearest group
  std::vector<std::vector<int>> roles;  // [launch][owner set]: PK_ROLE_*, -1: no argument of it
  char* area = nullptr;
  size_t area_bytes = 0;

  std::vector<Node> nodes{1};
  uint32_t free_node = 0;
  std::vector<AsyncOp> ops{1};
  std::vector<BlockName> block_names{1};
  std::vector<uint16_t> grid_era;
  std::unordered_map<uintptr_t, Knowledge> flags;  // released at an address

  std::vector<Finding> findings;
  std::map<std::pair<const void*, std::string>, int> seen;
  std::unordered_map<const void*, PcStats> lines;
  std::vector<LaunchTotals> totals;

  // regions (check_regions.cpp)
  std::string open(const std::vector<const PkLaunch*>& all, const PkOptions& o);
  void* relocate(const void* p) const;  // where a pointer into a tensor points now; others are left alone
  void close(bool copy_back);
  Group* group_at(uintptr_t address);

  // shadow (check_shadow.cpp)
  void touch(const Access& a);
  void global(const Access& a);
  void shared(const Access& a, Block* b);
  [[noreturn]] void outside(const Access& a, const Group& g, int64_t first, int64_t bad);
  [[noreturn]] void misaligned(const Access& a, const Block* owner);
  void count_bytes(const Access& a, int tensor, int64_t offset);
  // home: the block whose shared memory the cells stand for; null for a tensor.
  void touch_cells(const Access& a, Cell* cells, size_t first_byte, BlockCheck* home, bool initialised,
                   const Tensor* tensor, int64_t offset);
  enum class Fate { kStays, kGone, kTookIn };  // of a node: kTookIn stands for the new access too
  bool join_read(const Access& a, const Cell& c, const Node& like, bool in_shared);
  Fate absorb(const Access& a, Node& n, const Node& like);
  bool ordered(const Access& a, const Node& n, BlockCheck* home, bool* pending) const;
  bool fenced(const Access& a, const Node& n) const;
  void report_race(const Access& a, const Node& n, bool in_shared, bool pending, const std::string& name,
                   int64_t offset);
  uint32_t take_node();
  void give_node(uint32_t at);
  void drop_nodes(Cell& c);

  // findings and the report (check_report.cpp)
  void report(const char* kind, const Access& a, const std::string& tensor, int64_t offset,
              const std::string& message, const Node* other = nullptr);
  [[noreturn]] void fatal(const char* kind, const Access& a, const std::string& tensor, int64_t offset,
                          const std::string& message);
  void failure(const std::string& text);
  std::string thread_text(const Node& n) const;
  std::string json() const;
  std::string first_words() const;

  // the per-line table (check_trace.cpp)
  void log(const Access& a, bool shared_space, LogOp op);
  void request(const PcLog& p, const PcLog::Request& r, const void* pc);
  void flush(Block* b, int warp);
};

constexpr size_t kMapPage = 1 << 20;
constexpr size_t kMaxFindings = 100;

inline Check* check_for(const Fiber* f) { return f->block->worker->check; }
inline BlockCheck* check_of(const Block* b) { return b->check; }
inline ThreadCheck& check_of(const Fiber* f) { return f->block->check->threads[f->linear]; }
void release_into(Knowledge* to, const Fiber* f);  // and the thread's clock moves on

}  // namespace pk::host
#pragma GCC visibility pop
