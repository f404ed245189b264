// The memo of plans: argument metadata -> launch record. Readers take no lock. Its size is bounded: a full generation
// is unlinked and freed once no reader that could have seen it is still inside a call (a thread publishes the
// generation it entered with; retired nodes wait for all threads that entered earlier).
#pragma once
#include <atomic>
#include <cstdint>
#include <cstring>
#include <memory>
#include <mutex>
#include <utility>
#include <vector>

#include "record.h"

class Memo {
  struct Node {
    uint64_t h;
    std::vector<int64_t> key;
    std::unique_ptr<Record> rec;
    Node* next;
  };
  struct Retired {
    uint64_t generation;
    std::vector<Node*> nodes;
  };

 public:
  struct Slot {  // one per thread that ever called an op
    std::atomic<uint64_t> inside{0};
    std::atomic<bool> free{false};
  };
  class Reader {  // marks the calling thread as inside the memo for its lifetime; calls may nest
    Slot* slot_;
    uint64_t before_;

   public:
    explicit Reader(Memo& m) : slot_(m.my_slot()), before_(slot_->inside.load(std::memory_order_relaxed)) {
      if (!before_) slot_->inside.store(m.generation_.load());
    }
    ~Reader() { slot_->inside.store(before_, std::memory_order_release); }
    Reader(const Reader&) = delete;
  };

  static uint64_t hash(const int64_t* k, size_t n) {
    uint64_t h = 0x9e3779b97f4a7c15ull ^ n;
    for (size_t i = 0; i < n; ++i) {
      h = (h ^ static_cast<uint64_t>(k[i])) * 0xff51afd7ed558ccdull;
      h ^= h >> 32;
    }
    return h;
  }
  int64_t epoch() const { return epoch_.load(std::memory_order_relaxed); }
  int64_t misses() const { return misses_.load(); }
  int64_t size() const { return count_.load(); }

  const Record* find(uint64_t h, const int64_t* key, size_t n) const {
    for (Node* p = bucket_[h % kBuckets].load(std::memory_order_acquire); p; p = p->next)
      if (p->h == h && p->key.size() == n && !memcmp(p->key.data(), key, n * 8)) return p->rec.get();
    return nullptr;
  }

  // Adds a record unless another thread was first; the caller is inside a Reader.
  const Record* publish(uint64_t h, const int64_t* key, size_t n, std::unique_ptr<Record> rec) {
    ++misses_;
    std::lock_guard<std::mutex> lock(write_);
    if (const Record* r = find(h, key, n)) return r;
    if (count_.load() >= kMaxNodes) retire();
    auto& head = bucket_[h % kBuckets];
    auto* node = new Node{h, std::vector<int64_t>(key, key + n), std::move(rec), head.load()};
    head.store(node, std::memory_order_release);
    ++count_;
    return node->rec.get();
  }

  // Forget every plan: a tuning file or an option changed.
  void bump() {
    std::lock_guard<std::mutex> lock(write_);
    ++epoch_;
    retire();
  }

 private:
  static constexpr size_t kBuckets = 1 << 13;
  static constexpr int64_t kMaxNodes = 1 << 15;

  void retire() {  // write_ is held
    Retired old{generation_.load(), {}};
    for (auto& b : bucket_)
      for (Node* p = b.exchange(nullptr); p; p = p->next) old.nodes.push_back(p);
    count_.store(0);
    generation_.fetch_add(1);
    retired_.push_back(std::move(old));
    for (size_t i = 0; i < retired_.size();) {
      bool busy = false;
      for (auto& s : slots_) {
        const uint64_t in = s->inside.load();
        busy |= in != 0 && in <= retired_[i].generation;
      }
      if (busy) {
        ++i;
        continue;
      }
      for (Node* p : retired_[i].nodes) delete p;
      retired_.erase(retired_.begin() + static_cast<ptrdiff_t>(i));
    }
  }

  Slot* my_slot() {
    struct Owner {
      Slot* slot = nullptr;
      ~Owner() {
        if (slot) slot->free.store(true);
      }
    };
    static thread_local Owner owner;
    if (!owner.slot) {
      std::lock_guard<std::mutex> lock(write_);
      for (auto& s : slots_) {
        bool was = true;
        if (s->free.compare_exchange_strong(was, false)) {
          owner.slot = s.get();
          break;
        }
      }
      if (!owner.slot) {
        slots_.push_back(std::make_unique<Slot>());
        owner.slot = slots_.back().get();
      }
    }
    return owner.slot;
  }

  std::atomic<Node*> bucket_[kBuckets] = {};
  std::atomic<int64_t> epoch_{0}, misses_{0}, count_{0};
  std::atomic<uint64_t> generation_{1};
  std::mutex write_;
  std::vector<Retired> retired_;
  std::vector<std::unique_ptr<Slot>> slots_;
};
