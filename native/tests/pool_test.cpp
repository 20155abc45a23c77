// The pool under many callers at once, and in forked processes: for ThreadSanitizer.
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <new>
#include <thread>
#include <vector>

#include "../pool.h"

namespace {

void require(bool holds, const char* what) {
  if (holds) return;
  std::fprintf(stderr, "pool_test: %s\n", what);
  std::_Exit(1);
}

// Every task runs once, whatever the numbers of tasks and threads.
void call_often(unsigned seed, int rounds) {
  for (int round = 0; round < rounds; ++round) {
    seed = seed * 1664525u + 1013904223u;
    const int64_t count = seed >> 8 & 127;
    const int threads = static_cast<int>(seed >> 20 & 7);
    std::vector<int> runs(static_cast<size_t>(count), 0);
    pq::parallel_for(count, threads, [&](int64_t i) { runs[static_cast<size_t>(i)] += 1; });
    for (int times : runs) require(times == 1, "a task ran not once");
  }
}

void call_from_threads(int callers, int rounds) {
  std::vector<std::thread> all;
  for (int i = 0; i < callers; ++i) all.emplace_back([=] { call_often(static_cast<unsigned>(i), rounds); });
  for (auto& one : all) one.join();
}

// What a task throws reaches the caller, once.
void throw_from_tasks(int rounds) {
  for (int round = 0; round < rounds; ++round) {
    std::atomic<int> runs{0};
    bool is_thrown = false;
    try {
      pq::parallel_for(40, 4, [&](int64_t i) {
        ++runs;
        if (i % 8 == 3) throw std::bad_alloc();
      });
    } catch (const std::bad_alloc&) {
      is_thrown = true;
    }
    require(is_thrown && runs == 40, "an error was lost");
    call_often(static_cast<unsigned>(round), 1);
  }
}

void call_in_children(int depth, int rounds) {
  for (int i = 0; i < 3; ++i) {
    const pid_t child = fork();
    require(child >= 0, "fork");
    if (child == 0) {
      call_often(7, rounds);
      if (depth) call_in_children(depth - 1, rounds);
      std::_Exit(0);
    }
    int status = 1;
    require(waitpid(child, &status, 0) == child && status == 0, "a child failed");
  }
}

}  // namespace

int main() {
  call_often(1, 500);
  call_from_threads(4, 500);
  throw_from_tasks(200);
  call_in_children(1, 100);
  call_from_threads(3, 200);
  std::puts("pool_test: every task ran once");
}
