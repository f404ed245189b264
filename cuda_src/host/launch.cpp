// From a launch to workers: validation, the pool of OS threads, sequences, and the text of the last failure.
#include <pthread.h>

#include <algorithm>
#include <condition_variable>
#include <thread>

#include "host/checker.h"
#include "host/runtime.h"

namespace pk::host {
namespace {

constexpr uint64_t kSmallLaunch = 2048;  // threads; below it waking a second core may cost more than it brings

const PkOptions kDefaults{0, 0, 0, PK_ASYNC_EAGER, 0, 0};

// Per thread, with a pointer as the only static TLS.
struct ThreadState {
  std::string error;
  std::string report;
  std::vector<struct Recorded>* recording = nullptr;
  Check* check = nullptr;  // of the run being recorded
};
__thread ThreadState* tls_state __attribute__((tls_model("initial-exec")));
pthread_key_t state_key;
pthread_once_t state_once = PTHREAD_ONCE_INIT;

ThreadState& state() {
  if (tls_state == nullptr) {
    pthread_once(&state_once, [] {
      pthread_key_create(&state_key, [](void* p) {
        delete static_cast<ThreadState*>(p);
        tls_state = nullptr;
      });
    });
    tls_state = new ThreadState;
    pthread_setspecific(state_key, tls_state);
  }
  return *tls_state;
}

// Workers keep their stacks and arenas; a launch borrows as many as it has OS threads. Never destroyed: a
// pool thread may still be asleep when the process exits.
struct Pool {
  std::mutex mutex;
  std::condition_variable wake;
  std::vector<Worker*> free;
  std::vector<Job*> jobs;  // that want helpers
  std::vector<int> wanted;
  int threads = 0, idle = 0;
};
Pool* pool_instance;
pthread_once_t pool_once = PTHREAD_ONCE_INIT;
Pool& pool() {
  pthread_once(&pool_once, [] {
    pool_instance = new Pool;
    // The child of a fork has none of the threads and must not trust the locks.
    pthread_atfork(nullptr, nullptr, [] { pool_instance = new Pool; });
  });
  return *pool_instance;
}

Worker* borrow_worker() {
  Pool& p = pool();
  std::lock_guard<std::mutex> lock(p.mutex);
  if (p.free.empty()) return new Worker;
  Worker* w = p.free.back();
  p.free.pop_back();
  return w;
}

void return_worker(Worker* w) {
  Pool& p = pool();
  std::lock_guard<std::mutex> lock(p.mutex);
  p.free.push_back(w);
}

void set_options(Worker* w, const PkOptions& o) {
  w->random = o.seed ? o.seed * 0x9e3779b97f4a7c15ull + 0x94d049bb133111ebull : 0;
  w->async_order = o.async_order;
  if (w->async_order == PK_ASYNC_RANDOM && w->random == 0) w->random = 0x94d049bb133111ebull;
}

void work(Job* job) {
  Worker* w = borrow_worker();
  set_options(w, job->grid->launch->options ? *job->grid->launch->options : kDefaults);
  w->check = nullptr;
  run_serial(w, job);
  return_worker(w);
}

void helper_main() {
  Pool& p = pool();
  std::unique_lock<std::mutex> lock(p.mutex);
  for (;;) {
    if (p.jobs.empty()) {
      ++p.idle;
      p.wake.wait(lock);
      --p.idle;
      continue;
    }
    Job* job = p.jobs.back();
    if (--p.wanted.back() == 0) {
      p.jobs.pop_back();
      p.wanted.pop_back();
    }
    ++job->helpers;
    lock.unlock();
    work(job);
    lock.lock();
    --job->helpers;
    job->done.notify_all();
  }
}

void ask(Job* job, int helpers) {
  Pool& p = pool();
  {
    std::lock_guard<std::mutex> lock(p.mutex);
    while (p.threads < helpers) {
      std::thread(helper_main).detach();
      ++p.threads;
    }
    p.jobs.push_back(job);
    p.wanted.push_back(helpers);
  }
  for (int i = 0; i < helpers; ++i) p.wake.notify_one();
}

// Waits for the helpers that have come; the others are no longer wanted.
void dismiss(Job* job) {
  Pool& p = pool();
  std::unique_lock<std::mutex> lock(p.mutex);
  for (size_t i = 0; i < p.jobs.size(); ++i) {
    if (p.jobs[i] != job) continue;
    p.jobs.erase(p.jobs.begin() + static_cast<ptrdiff_t>(i));
    p.wanted.erase(p.wanted.begin() + static_cast<ptrdiff_t>(i));
    break;
  }
  job->done.wait(lock, [job] { return job->helpers == 0; });
}

std::string dims(const uint32_t* d) {
  return "(" + std::to_string(d[0]) + ", " + std::to_string(d[1]) + ", " + std::to_string(d[2]) + ")";
}

// Fills the grid from the launch; says what is wrong with it, or nothing.
std::string make_grid(Grid* g, const PkLaunch* l, void (*thunk)(const void*), const void* closure,
                      size_t bytes, int nargs) {
  g->launch = l;
  g->name = l->kernel && *l->kernel ? l->kernel : "kernel";
  g->thunk = thunk;
  g->closure = closure;
  g->closure_bytes = bytes;
  const std::string name = std::string(g->name) + ": ";
  if (l->nargs > 0 && l->nargs != nargs) {
    return name + std::to_string(l->nargs) + " arguments for a kernel with " + std::to_string(nargs);
  }
  const uint64_t threads = uint64_t{l->block[0]} * l->block[1] * l->block[2];
  if (threads == 0 || threads > 1024) {
    return name + "block " + dims(l->block) + " has " + std::to_string(threads) +
           " threads; 1 to 1024 are allowed";
  }
  uint64_t cluster = 1;
  for (int i = 0; i < 3; ++i) {
    g->cluster_dim[i] = l->cluster[i] ? l->cluster[i] : 1;
    cluster *= g->cluster_dim[i];
  }
  if (cluster > 16)
    return name + "cluster " + dims(l->cluster) + " has " + std::to_string(cluster) +
           " blocks; at most 16 are allowed";
  g->blocks = g->clusters = 1;
  for (int i = 0; i < 3; ++i) {
    if (l->grid[i] == 0 || l->grid[i] % g->cluster_dim[i] != 0 || (i > 0 && l->grid[i] > 65535) ||
        l->grid[i] > 0x7fffffffu) {
      return name + "grid " + dims(l->grid) + " is empty, too large, or no multiple of the cluster " +
             dims(g->cluster_dim);
    }
    g->blocks *= l->grid[i];
    g->clusters *= l->grid[i] / g->cluster_dim[i];
  }
  if (l->smem > kMaxSmem) {
    return name + std::to_string(l->smem) + " bytes of dynamic shared memory; at most " +
           std::to_string(kMaxSmem) + " are allowed";
  }
  g->threads = static_cast<uint32_t>(threads);
  g->cluster_n = static_cast<uint32_t>(cluster);
  g->cooperative = (l->flags & PK_LAUNCH_COOPERATIVE) != 0;
  g->pdl = (l->flags & PK_LAUNCH_PDL) != 0;
  if (g->cooperative && (g->blocks > kMaxResidentBlocks || g->blocks * threads > kMaxResidentThreads)) {
    return name + "a cooperative launch of " + std::to_string(g->blocks) + " blocks of " +
           std::to_string(threads) + " threads; the host backend keeps at most " +
           std::to_string(kMaxResidentBlocks) + " blocks and " + std::to_string(kMaxResidentThreads) +
           " threads resident";
  }
  return "";
}

std::string run_one(Grid* g) {
  const PkOptions& o = g->launch->options ? *g->launch->options : kDefaults;
  if (g->cooperative) {
    Worker* w = borrow_worker();
    set_options(w, o);
    w->check = nullptr;
    g->interleaved = true;
    std::vector<Grid*> grids{g};
    run_interleaved(w, grids);
    std::string error = w->failed ? w->error : "";
    return_worker(w);
    return error;
  }
  Job job;
  job.grid = g;
  int threads = o.threads > 0 ? o.threads : static_cast<int>(std::thread::hardware_concurrency());
  threads = static_cast<int>(std::min<uint64_t>(static_cast<uint64_t>(std::max(threads, 1)), g->clusters));
  const int helpers = threads - 1;
  if (helpers > 0 && o.threads <= 0 && g->blocks * g->threads < kSmallLaunch) {
    job.reserve = helpers;
    job.ask = ask;
    job.began = std::chrono::steady_clock::now();
  } else if (helpers > 0) {
    ask(&job, helpers);
  }
  work(&job);
  if (helpers > 0 && job.reserve == 0) dismiss(&job);
  return job.error;
}

// A launch of a sequence that may overlap others: its closure is kept beyond its entry's return.
struct Recorded {
  Grid grid;
  std::unique_ptr<unsigned char[]> storage;
};

// Runs launches that may overlap, on this thread, perhaps under the checker. Returns what went wrong.
std::string run_recorded(std::vector<Recorded>& recorded, const PkOptions& o, Check* check) {
  std::vector<Grid*> grids;
  for (size_t i = 0; i < recorded.size(); ++i) {
    Grid* g = &recorded[i].grid;
    g->index = static_cast<int>(i);
    g->interleaved = true;
    g->previous = i > 0 ? grids.back() : nullptr;
    if (i > 0) g->previous->next = g;
    grids.push_back(g);
    if (check) {
      LaunchTotals total;
      total.kernel = g->name;
      total.blocks = g->blocks;
      total.threads = g->threads;
      check->totals.push_back(std::move(total));
    }
  }
  Worker* w = borrow_worker();
  set_options(w, o);
  w->check = check;
  if (check) check->worker = w;
  run_interleaved(w, grids);
  std::string error = w->failed ? w->error : "";
  if (check) {
    if (!error.empty()) check->failure(error);
    check->close(!w->failed);
    if (!check->findings.empty()) error = check->first_words();
    state().report = check->json();
  }
  w->check = nullptr;
  return_worker(w);
  return error;
}

}  // namespace

std::string describe_thread(const Fiber* f) {
  const uint3 b = f->block->index, t = f->index;
  char text[192];
  snprintf(text, sizeof text, "%s, block (%u,%u,%u), thread (%u,%u,%u)", f->block->grid->name, b.x, b.y, b.z,
           t.x, t.y, t.z);
  return text;
}

int set_error(const std::string& text) {
  state().error = text;
  return text.empty() ? 0 : 1;
}

// The first failure of a worker is the one that is told. With a place the text starts with it, with a thread
// it ends with that.
void fail_worker(Worker* w, std::string text, const Fiber* f, const char* file, int line) {
  if (w->failed) return;
  w->failed = true;
  w->failed_kernel = f ? f->block->grid->name : "";
  w->failed_file = base_name(file);
  w->failed_line = line;
  w->failed_block = f ? f->block->index : uint3{0, 0, 0};
  w->failed_thread = f ? f->index : uint3{0, 0, 0};
  w->failed_pc = f ? f->pc : nullptr;
  if (!w->failed_file.empty()) text = w->failed_file + ":" + std::to_string(line) + ": " + text;
  if (f) text += " [" + describe_thread(f) + "]";
  w->error = std::move(text);
}

}  // namespace pk::host

using namespace pk::host;

int pkh_run(const PkLaunch* launch, void (*thunk)(const void*), const void* closure, size_t bytes, int nargs,
            int checked) {
  ThreadState& s = state();
  const bool check = launch->options && launch->options->check;
  if (check && !checked) {
    return set_error(std::string(launch->kernel ? launch->kernel : "kernel") +
                     ": this variant was not compiled for the checker (PK_CHECK)");
  }
  if (s.recording == nullptr) {
    if (check) return set_error("a checked launch goes through pkh_run_sequence");
    Grid g;
    const std::string error = make_grid(&g, launch, thunk, closure, bytes, nargs);
    return set_error(error.empty() ? run_one(&g) : error);
  }
  Recorded r;
  r.storage = std::make_unique<unsigned char[]>(bytes + 128);
  const uintptr_t aligned = (reinterpret_cast<uintptr_t>(r.storage.get()) + 127) & ~uintptr_t{127};
  void* copy = reinterpret_cast<void*>(aligned);
  memcpy(copy, closure, bytes);
  const std::string error = make_grid(&r.grid, launch, thunk, copy, bytes, nargs);
  s.recording->push_back(std::move(r));
  return set_error(error);
}

void* pkh_relocate(const void* p) {
  const Check* check = state().check;
  return check && p ? check->relocate(p) : const_cast<void*>(p);
}

int pkh_run_sequence(const PkLaunch* launches, const PkEntry* entries, void*** args, int n) {
  ThreadState& s = state();
  s.error.clear();
  const PkOptions& o = n > 0 && launches[0].options ? *launches[0].options : kDefaults;
  bool overlap = o.check != 0;
  for (int i = 1; i < n; ++i) overlap = overlap || (o.seed != 0 && (launches[i].flags & PK_LAUNCH_PDL));
  if (!overlap) {
    for (int i = 0; i < n; ++i) {
      if (const int rc = entries[i](&launches[i], args[i])) return rc;
    }
    return 0;
  }
  std::unique_ptr<Check> check;
  if (o.check) {
    s.report.clear();
    check = std::make_unique<Check>();
    std::vector<const PkLaunch*> all;
    for (int i = 0; i < n; ++i) all.push_back(&launches[i]);
    const std::string error = check->open(all, o);
    if (!error.empty()) {
      check->close(false);
      return set_error(error);
    }
  }
  std::vector<Recorded> recorded;
  recorded.reserve(static_cast<size_t>(n));
  s.recording = &recorded;
  s.check = check.get();
  int rc = 0;
  for (int i = 0; i < n && rc == 0; ++i) rc = entries[i](&launches[i], args[i]);
  s.recording = nullptr;
  s.check = nullptr;
  if (rc != 0) {
    if (check) check->close(false);
    return rc;
  }
  return set_error(run_recorded(recorded, o, check.get()));
}

const char* pkh_error(void) { return tls_state ? tls_state->error.c_str() : ""; }
const char* pkh_check_report(void) { return tls_state ? tls_state->report.c_str() : ""; }
int pkh_version(void) { return 1; }
