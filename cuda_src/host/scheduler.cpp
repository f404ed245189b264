// Which blocks are resident and which fiber runs next.
//
// Three ways to run a grid. Serial: a worker runs one cluster to its end, then the next; more only join while
// all resident threads wait for a flag. Cooperative: every block is resident from the start. Overlapped:
// launches with PK_LAUNCH_PDL start blocks while the launch before is still running, when the rules and the
// random draw allow it.
#include <sched.h>
#include <sys/mman.h>

#include <algorithm>
#include <map>

#include "host/check.h"
#include "host/runtime.h"

namespace pk::host {
namespace {

// Rounds in which every thread that polls a flag found it unchanged and nothing else could run, before it is
// a deadlock.
constexpr int kIdleRounds = 256;

void reserve_arenas(Worker* w) {
  if (w->arenas != nullptr) return;
  void* p = mmap(nullptr, kArenaBytes * (kMaxResidentBlocks + 1), PROT_READ | PROT_WRITE,
                 MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (p == MAP_FAILED) {
    fprintf(stderr, "pykern host backend: no address space for shared memory\n");
    abort();
  }
  const uintptr_t aligned = (reinterpret_cast<uintptr_t>(p) + kArenaBytes - 1) & ~uintptr_t(kArenaBytes - 1);
  w->arenas = reinterpret_cast<unsigned char*>(aligned);
  w->arena_block.assign(kMaxResidentBlocks, nullptr);
}

Cluster* free_cluster(Worker* w, int size) {
  for (auto& c : w->clusters) {
    if (!c->busy && c->size == size) return c.get();
  }
  if (w->arenas_used + size > kMaxResidentBlocks) {
    // Clusters of another size hold the arenas: none of those is running if this one may start.
    w->clusters.erase(
        std::remove_if(w->clusters.begin(), w->clusters.end(), [](auto& c) { return !c->busy; }),
        w->clusters.end());
    if (w->clusters.empty()) w->arenas_used = 0;
    if (w->arenas_used + size > kMaxResidentBlocks) return nullptr;
  }
  auto c = std::make_unique<Cluster>();
  c->size = size;
  c->first_arena = w->arenas_used;
  w->arenas_used += size;
  for (int i = 0; i < size; ++i) {
    auto b = std::make_unique<Block>();
    b->worker = w;
    b->cluster = c.get();
    b->arena = c->first_arena + i;
    b->rank = static_cast<uint32_t>(i);
    b->smem = w->arenas + kArenaBytes * static_cast<size_t>(b->arena);
    c->blocks.push_back(std::move(b));
  }
  w->clusters.push_back(std::move(c));
  return w->clusters.back().get();
}

void prepare_fibers(Block* b, const PkLaunch* launch) {
  const uint32_t* d = launch->block;
  if (b->fiber_capacity < b->threads) {
    b->fibers = std::make_unique<Fiber[]>(static_cast<size_t>(b->threads));
    b->fiber_capacity = b->threads;
    b->geometry[0] = 0;
  }
  const bool same = b->geometry[0] == d[0] && b->geometry[1] == d[1] && b->geometry[2] == d[2];
  for (int i = 0; i < b->threads; ++i) {
    Fiber& f = b->fibers[static_cast<size_t>(i)];
    if (!same) {
      const auto n = static_cast<uint32_t>(i);
      f.index = {n % d[0], n / d[0] % d[1], n / d[0] / d[1]};
      f.linear = n;
      f.lane = n % 32;
      f.view = b;
      f.block = b;
      f.warp = &b->warps[i / 32];
      f.warp->lane[f.lane] = &f;
    }
    f.sp = nullptr;
    f.stack = nullptr;
    f.done = f.waited = f.triggered = false;
    f.cluster_arrived = false;
    f.failures = 0;
    f.waiting = "";
    f.spin_address = nullptr;
    f.wgmma_issued = 0;
    f.wgmma_groups.clear();
    if (f.async) {
      f.async->copies.clear();
      f.async->stores.clear();
    }
  }
  std::copy(d, d + 3, b->geometry);
}

void start_block(Block* b, Grid* g, uint64_t cluster_index) {
  const PkLaunch* launch = g->launch;
  const uint32_t* cd = g->cluster_dim;
  const uint64_t across = launch->grid[0] / cd[0], down = launch->grid[1] / cd[1];
  const auto cx = static_cast<uint32_t>(cluster_index % across);
  const auto cy = static_cast<uint32_t>(cluster_index / across % down);
  const auto cz = static_cast<uint32_t>(cluster_index / across / down);
  const uint32_t r = b->rank;
  b->grid = g;
  b->index = {cx * cd[0] + r % cd[0], cy * cd[1] + r / cd[0] % cd[1], cz * cd[2] + r / cd[0] / cd[1]};
  b->block_dim = dim3(launch->block[0], launch->block[1], launch->block[2]);
  b->grid_dim = dim3(launch->grid[0], launch->grid[1], launch->grid[2]);
  b->cluster_n = g->cluster_n;
  b->copies_now = b->worker->check == nullptr && b->worker->async_order == PK_ASYNC_EAGER;
  b->threads = b->live = b->untriggered = static_cast<int>(g->threads);
  b->smem_used = static_cast<uint32_t>(launch->smem);
  b->smem_limit = static_cast<uint32_t>(std::max<uint64_t>(launch->smem, kStaticSmem));
  b->worker->arena_block[static_cast<size_t>(b->arena)] = b;
  if (launch->smem > 0) memset(b->smem, 0xff, launch->smem);  // NaN in every floating-point format

  const int warps = (b->threads + 31) / 32;
  for (int i = 0; i < warps; ++i) {
    Warp& warp = b->warps[i];
    const int lanes = std::min(32, b->threads - 32 * i);
    warp.live = lanes == 32 ? 0xffffffffu : (1u << lanes) - 1;
    warp.index = i;
    warp.block = b;
    warp.pending = 0;
  }
  for (Barrier& bar : b->barriers) {
    if (bar.arrived != 0 || bar.waiting.count != 0) bar = Barrier{};
  }
  b->mbarriers.clear();
  for (int i = 0; i < (b->threads + 127) / 128; ++i) {
    Warpgroup& group = b->warpgroups[i];
    group.ops.clear();
    group.base = 0;
    group.waiting.clear();
  }
  prepare_fibers(b, launch);
}

// Groups the waiting threads by what they wait for; the first of them stands for all in the report.
void fail_deadlock(Worker* w) {
  std::map<std::string, int> groups;
  const char* kernel = "";
  const Fiber* first = nullptr;
  for (auto& c : w->clusters) {
    if (!c->busy) continue;
    kernel = c->grid->name;
    for (auto& b : c->blocks) {
      for (int i = 0; i < b->threads; ++i) {
        const Fiber& f = b->fibers[static_cast<size_t>(i)];
        if (f.done) continue;
        if (first == nullptr) first = &f;
        ++groups[std::string(f.waiting) + " at " + base_name(f.file) + ":" + std::to_string(f.line)];
      }
    }
  }
  std::string text = std::string("deadlock in ") + kernel + ": ";
  const char* separator = "";
  for (auto& [what, count] : groups) {
    text += separator + std::to_string(count) + (count == 1 ? " thread in " : " threads in ") + what;
    separator = "; ";
  }
  fail_worker(w, text);
  if (first == nullptr) return;
  w->failed_kernel = kernel;
  w->failed_file = base_name(first->file);
  w->failed_line = first->line;
  w->failed_block = first->block->index;
  w->failed_thread = first->index;
}

// How long a worker's pollers have seen nothing new.
struct Idle {
  uint64_t progress = 0;  // the worker's, when last looked at
  int rounds = 0;
  uint64_t epoch = 0;    // the job's, when the pollers' latest turn began
  bool counted = false;  // among the stuck of that epoch
};

// Whether no worker of the job can do what the pollers wait for. Threads of other workers may: it is a deadlock only
// when all workers have polled in vain since the last of them did anything. Whoever did something and has not said so
// yet is not counted among the stuck.
bool all_stuck(Job* job, Idle* idle) {
  std::lock_guard<std::mutex> lock(job->mutex);
  if (idle->rounds == 0) {
    ++job->epoch;
    job->stuck = 0;
  } else if (idle->epoch == job->epoch && !idle->counted) {
    ++job->stuck;
    idle->counted = true;
  }
  if (idle->epoch != job->epoch) {
    idle->epoch = job->epoch;
    idle->counted = false;
  }
  return idle->counted && job->stuck >= job->active;
}

// Nothing is ready. True if the pollers were given another turn.
bool turn_pollers(Worker* w, Idle* idle) {
  if (w->pollers.empty()) return false;
  idle->rounds = w->progress != idle->progress ? 0 : idle->rounds + 1;
  idle->progress = w->progress;
  const bool long_idle = idle->rounds > kIdleRounds;
  if (long_idle && w->job == nullptr) return false;
  if (w->job != nullptr && (long_idle || idle->rounds == 0) && all_stuck(w->job, idle)) return false;
  if (long_idle) sched_yield();
  for (Fiber* f : w->pollers) w->ready.push(f);
  w->pollers.clear();
  return true;
}

void begin(Worker* w) {
  reserve_arenas(w);
  w->pauses = false;
  w->main_low = nullptr;
  w->ready.clear();
  w->pollers.clear();
  w->loads.clear();
  w->live_clusters = 0;
  w->resident_threads = 0;
  w->progress = 0;
  w->failed = false;
  w->error.clear();
  w->failed_file.clear();
  for (auto& c : w->clusters) c->busy = false;
}

void end(Worker* w) {
  pkh_current = nullptr;
  if (!w->failed) return;
  w->stacks.clear();  // fibers were abandoned where they stood
  for (size_t i = w->all_stacks.size(); i-- > 0;) w->stacks.push_back(w->all_stacks[i].get());
}

}  // namespace

void start_cluster(Worker* w, Grid* g, uint64_t index) {
  Cluster* c = free_cluster(w, static_cast<int>(g->cluster_n));
  if (c == nullptr) {
    fail_worker(
        w, std::string(g->name) + ": more than " + std::to_string(kMaxResidentBlocks) + " resident blocks");
    return;
  }
  c->grid = g;
  c->busy = true;
  c->live_blocks = c->size;
  c->live_threads = c->size * static_cast<int>(g->threads);
  c->arrived = 0;
  c->phase = 0;
  c->waiting.clear();
  ++w->live_clusters;
  w->resident_threads += static_cast<uint64_t>(c->live_threads);
  w->ready.reserve(w->resident_threads + 1);
  ++w->progress;
  for (auto& b : c->blocks) {
    start_block(b.get(), g, index);
    if (w->check) check_block_begin(b.get());
    for (int i = 0; i < b->threads; ++i) w->ready.push(&b->fibers[static_cast<size_t>(i)]);
  }
}

void thread_finished(Fiber* f) {
  Block* b = f->block;
  Worker* w = b->worker;
  copies_thread_exit(f);
  stores_thread_exit(f);
  f->done = true;
  f->warp->live &= ~(1u << f->lane);
  --b->live;
  --b->cluster->live_threads;
  ++w->progress;
  barrier_thread_exit(f);
  warp_thread_exit(f);
  if (b->cluster_n > 1) cluster_thread_exit(f);
  grid_thread_exit(f);
  if (b->live > 0) return;
  if (!w->loads.empty()) loads_block_exit(b);
  if (w->check) check_block_end(b);
  grid_block_exit(b);
  if (--b->cluster->live_blocks > 0) return;
  b->cluster->busy = false;
  --w->live_clusters;
  w->resident_threads -= static_cast<uint64_t>(b->cluster->size * b->threads);
}

void poll(Fiber* f, const void* address, uint64_t seen, const char* what, const char* file, int line) {
  Worker* w = f->block->worker;
  if (f->spin_address != address || f->spin_value != seen) {
    f->spin_address = address;
    f->spin_value = seen;
    ++w->progress;
  }
  w->pollers.push_back(f);
  fiber_suspend(f, what, file, line);
}

namespace {

constexpr auto kWorthWaking = std::chrono::microseconds(60);  // of work left: another core comes in some 20

void ask_for_help(Job* job, uint64_t done, uint64_t clusters) {
  const auto left = (std::chrono::steady_clock::now() - job->began) * (clusters - done) / done;
  if (left < kWorthWaking) return;
  const int helpers = job->reserve;
  job->reserve = 0;
  job->ask(job, helpers);
}

}  // namespace

void run_serial(Worker* w, Job* job) {
  begin(w);
  w->job = job;
  {
    std::lock_guard<std::mutex> lock(job->mutex);
    ++job->active;
  }
  Grid* g = job->grid;
  const uint64_t seed = w->random;
  Idle idle;
  bool more = true;
  while (!w->failed && !job->failed.load(std::memory_order_relaxed)) {
    run_fibers(w);
    if (w->failed) break;
    if (retire_load(w)) continue;
    const bool room = w->resident_threads + uint64_t{g->threads} * g->cluster_n <= kMaxResidentThreads;
    if (more && room && (w->live_clusters == 0 || !w->pollers.empty())) {
      const uint64_t i = job->next.fetch_add(1, std::memory_order_relaxed);
      if (i < g->clusters) {
        if (job->reserve != 0 && i != 0) ask_for_help(job, i, g->clusters);
        // The schedule of a cluster depends on the seed and its place alone, not on who runs it.
        if (seed) w->random = seed * 0x9e3779b97f4a7c15ull + i * 0xbf58476d1ce4e5b9ull + 1;
        start_cluster(w, g, i);
        continue;
      }
      more = false;
    }
    if (w->live_clusters == 0) break;
    if (turn_pollers(w, &idle)) continue;
    fail_deadlock(w);
  }
  {
    std::lock_guard<std::mutex> lock(job->mutex);
    --job->active;
    ++job->epoch;
    job->stuck = 0;
    if (w->failed) {
      if (job->error.empty()) job->error = w->error;
      job->failed = true;
    }
  }
  if (job->failed) w->failed = true;  // whatever is still suspended is abandoned
  end(w);
  w->job = nullptr;
}

void run_interleaved(Worker* w, std::vector<Grid*>& grids) {
  begin(w);
  Idle idle;
  const int sms = grids.empty() || !grids[0]->launch->options || grids[0]->launch->options->sms <= 0
                      ? 4
                      : grids[0]->launch->options->sms;
  w->pauses = grids.size() > 1 && w->random != 0;
  size_t first = 0;  // grids before it are complete
  while (!w->failed) {
    while (first < grids.size() && grids[first]->complete) ++first;
    if (first == grids.size()) break;
    // Start what may start: all of a cooperative grid, a few blocks of others, of a dependent grid as the
    // draw decides.
    bool started = false;
    for (size_t i = first; i < grids.size() && !w->failed; ++i) {
      Grid* g = grids[i];
      if (i > first) {
        const Grid* before = grids[i - 1];
        const bool may =
            g->pdl && before->triggered + before->finished >= before->blocks && before->started > 0;
        if (!may) break;
        if (!w->ready.empty() && w->draw() % 4 != 0) break;
      }
      const uint64_t limit = g->cooperative ? g->clusters : static_cast<uint64_t>(sms);
      uint64_t running = g->started - g->finished / g->cluster_n;
      while (g->started < g->clusters && !w->failed) {
        if (running >= limit && w->pollers.empty()) break;
        if (w->resident_threads + uint64_t{g->threads} * g->cluster_n > kMaxResidentThreads) break;
        if (!g->cooperative && started && w->random && w->draw() % 2) break;
        start_cluster(w, g, g->started++);
        started = true;
        ++running;
      }
      if (g->started < g->clusters)
        break;  // hardware starts a dependent only once all of this grid's blocks run
    }
    if (w->failed) break;
    if (!w->ready.empty()) {
      run_fibers(w);
      continue;
    }
    if (started || retire_load(w)) continue;
    if (turn_pollers(w, &idle)) continue;
    fail_deadlock(w);
  }
  end(w);
}

}  // namespace pk::host

void pkh_spin(const void* p, uint64_t seen, const char* file, int line) {
  pk::host::poll(pk::host::current(), p, seen, "a loop around an atomic", file, line);
}
