#include "pool.h"

#include <unistd.h>

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <exception>
#include <memory>
#include <mutex>
#include <system_error>
#include <thread>
#include <utility>
#include <vector>

namespace pq {
namespace {

// Waits for what another thread is about to do: falling asleep and waking up takes 5 to 50 us, and the
// products of a model follow each other sooner.
template <class Holds>
void wait_briefly(const Holds& holds) {
  const auto end = std::chrono::steady_clock::now() + std::chrono::microseconds(50);
  while (!holds() && std::chrono::steady_clock::now() < end) {
    for (int i = 0; i < 16 && !holds(); ++i) {
#if defined(__x86_64__)
      __builtin_ia32_pause();
#elif defined(__aarch64__)
      asm volatile("yield");
#endif
    }
  }
}

class Pool {
 public:
  Pool() : owner_(getpid()) {}

  ~Pool() {
    {
      std::lock_guard lock(mutex_);
      stopping_ = true;
    }
    wake_.notify_all();
    for (auto& worker : workers_) worker.join();
  }

  bool is_of_this_process() const { return owner_ == getpid(); }

  void run(int64_t count, int threads, const std::function<void(int64_t)>& task) {
    {
      std::lock_guard lock(mutex_);
      const int helpers = make_workers(threads - 1);
      task_ = &task;
      count_ = count;
      next_.store(0, std::memory_order_relaxed);
      wanted_ = helpers;
      ++generation_;
    }
    wake_.notify_all();
    take_tasks(task);
    wait_briefly([this] { return running_.load(std::memory_order_relaxed) == 0; });
    std::unique_lock lock(mutex_);
    task_ = nullptr;  // a helper that wakes up only now finds nothing, and is not waited for
    done_.wait(lock, [this] { return running_ == 0; });
    if (error_) std::rethrow_exception(std::exchange(error_, nullptr));
  }

  std::mutex busy;  // held by the caller whose work is running

 private:
  // Threads for `wanted` helpers, or as many as the system gives.
  int make_workers(int wanted) {
    try {
      while (static_cast<int>(workers_.size()) < wanted)
        workers_.emplace_back([this, index = static_cast<int>(workers_.size())] { work(index); });
    } catch (const std::system_error&) {
      return static_cast<int>(workers_.size());
    }
    return wanted;
  }

  void take_tasks(const std::function<void(int64_t)>& task) {
    for (int64_t i; (i = next_.fetch_add(1, std::memory_order_relaxed)) < count_;) {
      try {
        task(i);
      } catch (...) {  // of memory: raised again by the caller
        std::lock_guard lock(mutex_);
        if (!error_) error_ = std::current_exception();
      }
    }
  }

  void work(int index) {
    uint64_t seen = 0;
    std::unique_lock lock(mutex_);
    for (;;) {
      lock.unlock();
      wait_briefly([&] { return generation_.load(std::memory_order_relaxed) != seen; });
      lock.lock();
      wake_.wait(lock, [&] { return stopping_ || (generation_ != seen && index < wanted_); });
      if (stopping_) return;
      seen = generation_;
      if (!task_) continue;
      const auto& task = *task_;
      ++running_;
      lock.unlock();
      take_tasks(task);
      lock.lock();
      if (--running_ == 0) done_.notify_one();
    }
  }

  const pid_t owner_;
  std::mutex mutex_;
  std::condition_variable wake_, done_;
  std::vector<std::thread> workers_;
  const std::function<void(int64_t)>* task_ = nullptr;
  int64_t count_ = 0;
  std::atomic<int64_t> next_{0};
  int wanted_ = 0;
  std::atomic<int> running_{0};          // written under the mutex, like generation_
  std::atomic<uint64_t> generation_{0};
  std::exception_ptr error_;
  bool stopping_ = false;
};

// Never destroyed at exit, where its threads may be gone already; left behind by a forked child,
// whose threads do not exist. No lock: another thread could hold it at the moment of a fork.
Pool& pool() {
  static std::atomic<Pool*> current{nullptr};
  Pool* found = current.load(std::memory_order_acquire);
  while (!found || !found->is_of_this_process()) {
    Pool* const made = new Pool();
    if (current.compare_exchange_strong(found, made, std::memory_order_acq_rel)) return *made;
    delete made;  // another thread was first
  }
  return *found;
}

}  // namespace

void parallel_for(int64_t count, int threads, const std::function<void(int64_t)>& task) {
  if (threads > 1 && count > 1) {
    Pool& workers = pool();
    std::unique_lock mine(workers.busy, std::try_to_lock);
    if (mine.owns_lock()) {
      workers.run(count, threads < count ? threads : static_cast<int>(count), task);
      return;
    }
  }
  for (int64_t i = 0; i < count; ++i) task(i);
}

}  // namespace pq
