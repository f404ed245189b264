// The runtime's own view: fibers, warps, blocks, grids, and the worker that runs them on one OS thread.
//
// A CUDA thread is a fiber. All fibers of a cluster live on one OS thread, so nothing below needs a lock
// except what Job shares between workers. A fiber that waits sits in exactly one place: a barrier's or an
// mbarrier's list, a warp collective, the pollers, or the ready queue.
#pragma once
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdarg>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wpsabi"  // vector types of kernels only; none is passed to the runtime
#include "host/device.h"
#pragma GCC diagnostic pop

#pragma GCC visibility push(hidden)
namespace pk::host {

constexpr size_t kArenaBytes = 256 * 1024;  // one block's shared memory; blocks of a cluster lie side by side
constexpr size_t kMaxSmem = 232448;         // 227 KB, as sm_90
constexpr size_t kStaticSmem = 49152;       // what a kernel may claim without asking in its launch
constexpr int kMaxResidentBlocks = 4096;    // arenas reserved per worker
constexpr uint64_t kMaxResidentThreads = 65536;  // fibers of an interleaved grid: its stacks take about 1 GB at most

struct Block;
struct Warp;
struct Worker;
struct Grid;
struct Check;

struct Stack {
  char* low;
  size_t bytes;
  char* top;  // where a fresh fiber starts; coloured, see fiber.cpp
};

// A list of waiting fibers, first come, first served.
struct Fiber;
struct FiberList {
  Fiber* head = nullptr;
  Fiber* tail = nullptr;
  int count = 0;
  void push(Fiber* f);
  void clear() { *this = FiberList{}; }
};

struct CopyOp {  // one cp.async
  void* dst;
  const void* src;
  int bytes, source_bytes;
  const void* pc;
  uint32_t id;  // the checker's
};

struct StoreOp {  // one TMA store
  TensorMap map;
  const unsigned char* src;
  int x, y;
  bool done;
  const void* pc;
  uint32_t id;  // the checker's
  const char* file;
  int line;
};

// Groups of asynchronous operations of one thread: operations [0, groups[0]) are the oldest committed
// group, and so on.
template <class Op>
struct OpQueue {
  std::vector<Op> ops;
  std::vector<size_t> groups;
  void commit() { groups.push_back(ops.size()); }
  // How many of the oldest operations must be complete so that at most `pending` groups are in flight.
  size_t due(size_t pending) const {
    return groups.size() > pending ? groups[groups.size() - pending - 1] : 0;
  }
  void retire(size_t count, size_t pending) {
    ops.erase(ops.begin(), ops.begin() + static_cast<ptrdiff_t>(count));
    if (groups.size() > pending) groups.erase(groups.begin(), groups.end() - static_cast<ptrdiff_t>(pending));
    for (size_t& g : groups) g -= count;
  }
  void clear() {
    ops.clear();
    groups.clear();
  }
};

struct FiberAsync {  // made when a thread first issues something asynchronous
  OpQueue<CopyOp> copies;
  OpQueue<StoreOp> stores;
};

struct alignas(64) Fiber : ThreadView {  // what a barrier touches fills two cache lines
  void* sp = nullptr;                    // null: not started, has no stack
  Block* block = nullptr;
  Warp* warp = nullptr;
  Fiber* next = nullptr;     // in a FiberList
  const char* waiting = "";  // what for, and where
  const char* file = "";
  const void* pc = nullptr;  // of the latest collective
  int line = 0;
  bool done = false;
  bool waited = false;     // has passed grid_wait()
  bool triggered = false;  // has called grid_launch_dependents()
  Stack* stack = nullptr;
  const void* spin_address = nullptr;
  uint64_t spin_value = 0;
  bool cluster_arrived = false;  // between the halves of the cluster barrier
  uint32_t cluster_phase = 0;
  uint32_t wgmma_issued = 0;           // wgmmas of this thread so far
  std::vector<uint32_t> wgmma_groups;  // wgmma_issued at each commit not yet waited for
  std::unique_ptr<FiberAsync> async;

  FiberAsync& queues() {
    if (!async) async = std::make_unique<FiberAsync>();
    return *async;
  }
};

inline void FiberList::push(Fiber* f) {
  f->next = nullptr;
  (tail ? tail->next : head) = f;
  tail = f;
  ++count;
}

enum CollectiveKind : int { kSyncwarp, kShuffle, kVote, kReduce, kWarpOp };

struct Collective {
  uint32_t mask = 0, arrived = 0;
  CollectiveKind kind = kSyncwarp;
  int sub = 0;  // VoteKind or ReduceKind
  bool is_signed = false;
  WarpOp op = nullptr;
  int matrices = 0;  // ldmatrix and stmatrix: the first 8 * matrices lanes pass row addresses
  bool store = false;
  const char* name = "";
  const char* file = "";
  int line = 0;
};

struct Warp {
  Fiber* lane[32];
  uint32_t live = 0;  // lanes that exist and have not returned
  int index = 0;      // in the block
  Block* block = nullptr;
  int pending = 0;  // collectives some lanes wait in
  Collective collective[32];
  uint64_t value[32], result[32];
  int source[32];
  void* slot[32];
};

struct Barrier {
  int arrived = 0;   // threads, waiting or not
  int expected = 0;  // of a named barrier; 0: every live thread of the block
  int kind = kPlain;
  int trues = 0, result = 0;
  const char* file = "";
  int line = 0;
  FiberList waiting;
};

struct Mbarrier {
  uint64_t* address = nullptr;
  uint32_t count = 0, pending = 0;
  int64_t bytes = 0;  // transaction count of the current phase
  uint32_t phase = 0;
  uint64_t word = 0;    // what its shared memory holds
  bool fenced = false;  // its initialisation was made visible to the async proxy
  FiberList waiting;
  Fiber* initialiser = nullptr;
  uint32_t check = 0;  // the checker's record of it
};

struct WgmmaTask {
  uint64_t desc_a, desc_b;
  int n, scale_d;
  int arrived = 0;  // threads that have issued it
  bool done = false;
  bool late = false;  // carried out only once nothing else can run
  uint32_t index;     // in the warpgroup's sequence
  WgmmaOp op;
  float* acc[128];
  const void* pc;
  const char* file;
  int line;
};

struct Warpgroup {
  std::vector<std::unique_ptr<WgmmaTask>> ops;  // issued and not done, oldest first
  uint32_t base = 0;                            // done so far
  FiberList waiting;                            // for threads of the group that have yet to issue
};

struct Block : BlockView {
  Grid* grid = nullptr;
  Worker* worker = nullptr;
  int arena = 0;  // index of its arena
  int threads = 0, live = 0;
  int untriggered = 0;  // threads that neither called grid_launch_dependents() nor returned
  struct Cluster* cluster = nullptr;
  std::unique_ptr<Fiber[]> fibers;
  int fiber_capacity = 0;
  uint32_t geometry[3] = {0, 0, 0};  // block_dim the fibers' indices were made for
  Warp warps[32];
  Barrier barriers[16];
  std::vector<std::unique_ptr<Mbarrier>> mbarriers;
  Warpgroup warpgroups[8];
  struct BlockCheck* check = nullptr;
};

struct Cluster {
  Grid* grid = nullptr;
  int size = 0, live_threads = 0, live_blocks = 0;
  int first_arena = 0;
  std::vector<std::unique_ptr<Block>> blocks;
  int arrived = 0;  // cluster barrier: arrivals of this phase
  uint32_t phase = 0;
  FiberList waiting;
  struct ClusterCheck* know = nullptr;
  bool busy = false;
};

// One asynchronous TMA or bulk load in flight.
struct LoadOp {
  TensorMap map;
  bool bulk;
  const unsigned char* src;
  uint32_t bytes;
  uint32_t smem_offset;  // of the destination, in each destination block
  int x, y;
  std::vector<Block*> blocks;   // destinations
  std::vector<Mbarrier*> bars;  // one per destination
  Fiber* issuer;
  const void* pc;
  const char* file;
  int line;
};

struct Grid {
  const PkLaunch* launch = nullptr;
  const char* name = "kernel";
  void (*thunk)(const void*) = nullptr;
  const void* closure = nullptr;
  size_t closure_bytes = 0;
  int index = 0;  // in the sequence
  uint32_t cluster_dim[3] = {1, 1, 1};
  uint32_t cluster_n = 1, threads = 0;
  uint64_t blocks = 0, clusters = 0;
  uint64_t started = 0;    // clusters, where one worker runs the grid
  uint64_t finished = 0;   // blocks
  uint64_t triggered = 0;  // blocks whose dependents may start
  bool complete = false;   // this grid and all before it
  bool cooperative = false, pdl = false;
  bool interleaved = false;  // run by one worker that counts triggers and completions
  Grid* next = nullptr;
  Grid* previous = nullptr;  // what grid_wait() waits for; null: nothing
  FiberList waiting;         // in grid_wait() of the next grid
  uint64_t barrier_arrived = 0;
  FiberList barrier_waiting;
  const void* barrier_counter = nullptr;
};

// What the workers of one launch share.
struct Job {
  Grid* grid = nullptr;
  std::atomic<uint64_t> next{0};
  std::atomic<bool> failed{false};
  std::mutex mutex;  // guards the next four
  int active = 0;    // workers in it
  uint64_t epoch = 0;  // advances after a worker's threads have done what those of another may be polling for
  int stuck = 0;       // workers that have polled in vain since the epoch began
  std::string error;
  int helpers = 0;  // pool threads in it; guarded by the pool's mutex, as is done
  std::condition_variable done;
  // A launch of few threads is begun alone, and asks for `reserve` helpers when its first clusters have shown that the
  // others will take long. Set by the launching thread, and only while it is alone.
  int reserve = 0;
  void (*ask)(Job*, int helpers) = nullptr;
  std::chrono::steady_clock::time_point began;
};

class ReadyQueue {
 public:
  void reserve(size_t n) {
    if (n <= ring_.size()) return;
    size_t size = 64;
    while (size < n) size *= 2;
    std::vector<Fiber*> ring(size);
    for (size_t i = head_; i != tail_; ++i) ring[i & (size - 1)] = ring_[i & (ring_.size() - 1)];
    ring_.swap(ring);
  }
  bool empty() const { return head_ == tail_; }
  size_t size() const { return tail_ - head_; }
  void push(Fiber* f) { ring_[tail_++ & (ring_.size() - 1)] = f; }
  Fiber* pop() { return ring_[head_++ & (ring_.size() - 1)]; }
  Fiber* pop_random(uint64_t r) {
    Fiber*& head = ring_[head_ & (ring_.size() - 1)];
    Fiber*& pick = ring_[(head_ + r % size()) & (ring_.size() - 1)];
    std::swap(head, pick);
    return pop();
  }
  void clear() { head_ = tail_ = 0; }

 private:
  std::vector<Fiber*> ring_;
  size_t head_ = 0, tail_ = 0;
};

struct Worker {
  void* main_sp = nullptr;
  const void* main_low = nullptr;  // its stack, known under AddressSanitizer
  size_t main_bytes = 0;
  ReadyQueue ready;
  std::vector<Fiber*> pollers;
  std::vector<Stack*> stacks;  // free ones; the last is the warmest
  std::vector<std::unique_ptr<Stack>> all_stacks;
  unsigned char* arenas = nullptr;
  std::vector<Block*> arena_block;  // whose arena it is
  int arenas_used = 0;              // handed out to clusters so far
  std::vector<std::unique_ptr<Cluster>> clusters;
  int live_clusters = 0;
  uint64_t resident_threads = 0;
  std::vector<LoadOp> loads;
  uint64_t random = 0;    // 0: first come, first served
  uint64_t progress = 0;  // counts what may end a wait for a flag
  int async_order = 0;
  bool pauses = false;  // fibers now and then give way to the worker's loop
  bool failed = false;
  std::string error;
  std::string failed_kernel, failed_file;  // where, as far as known
  int failed_line = 0;
  uint3 failed_block{0, 0, 0}, failed_thread{0, 0, 0};
  const void* failed_pc = nullptr;
  Job* job = nullptr;
  Check* check = nullptr;

  uint64_t draw() {
    random ^= random << 13;
    random ^= random >> 7;
    random ^= random << 17;
    return random >> 11;
  }
  void wake(Fiber* f) { ready.push(f); }
  void wake_all(FiberList& list, Fiber* except = nullptr) {
    for (Fiber* f = list.head; f != nullptr;) {
      Fiber* next = f->next;
      if (f != except) ready.push(f);
      f = next;
    }
    list.clear();
    ++progress;
  }
};

inline Fiber* current() { return static_cast<Fiber*>(pkh_current); }
inline const char* base_name(const char* path) {
  const char* slash = path ? strrchr(path, '/') : nullptr;
  return slash ? slash + 1 : path ? path : "";
}

// fiber.cpp
void fiber_suspend(Fiber* f, const char* what, const char* file, int line);
void run_fibers(Worker* w);  // until none is ready, one fails, or one pauses
[[noreturn]] void fiber_abandon(Fiber* f);

// scheduler.cpp
void thread_finished(Fiber* f);
void start_cluster(Worker* w, Grid* g, uint64_t index);
void run_serial(Worker* w, Job* job);  // clusters one after the other
void run_interleaved(Worker* w, std::vector<Grid*>& grids);  // that may overlap; all blocks of a cooperative one
void poll(Fiber* f, const void* address, uint64_t seen, const char* what, const char* file, int line);

// barrier.cpp, warp.cpp, copy_async.cpp, tma.cpp, cluster.cpp, grid.cpp: what the exit of a thread means to them
void barrier_thread_exit(Fiber* f);
void warp_thread_exit(Fiber* f);
void copies_thread_exit(Fiber* f);
void stores_thread_exit(Fiber* f);
void cluster_thread_exit(Fiber* f);
void grid_thread_exit(Fiber* f);
void grid_block_exit(Block* b);
void loads_block_exit(Block* b);

bool retire_load(Worker* w);
void map_pieces(const TensorMap& m, uint32_t smem_offset, int x, int y,
                const std::function<void(uint32_t, char*, uint32_t, uint32_t)>& f);
Mbarrier* find_mbarrier(Worker* w, const void* address, Block** owner, const char* file, int line);
void mbarrier_progress(Worker* w, Block* b, Mbarrier* m);
void require_operands(const Block* b, const WgmmaTask& t);  // fails, naming the wgmma's issue
Block* block_of(Worker* w, const void* address);            // null: not shared memory
Block* claimed_block(Fiber* f, const void* address, size_t bytes, const char* what, const char* file,
                     int line);

// launch.cpp
std::string describe_thread(const Fiber* f);
void fail_worker(Worker* w, std::string text, const Fiber* f = nullptr, const char* file = nullptr,
                 int line = 0);
int set_error(const std::string& text);  // returns what the caller should: 0 if the text is empty

#define PKH_PC __builtin_return_address(0)

}  // namespace pk::host
#pragma GCC visibility pop
