// A few threads that wait 50 us for more work, then sleep until there is some.
#pragma once

#include <cstdint>
#include <functional>

namespace pq {

// Runs task(0) .. task(count - 1), on up to `threads` threads, the caller's among them. Which
// thread runs which task changes nothing about the results. Where the pool is busy (another Python
// thread) or gone (after a fork), the caller runs all of it or makes a new one. What a task throws is
// thrown again here.
void parallel_for(int64_t count, int threads, const std::function<void(int64_t)>& task);

}  // namespace pq
