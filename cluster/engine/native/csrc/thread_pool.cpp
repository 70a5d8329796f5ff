#include "thread_pool.h"

#include <utility>

namespace baton {
namespace {

constexpr int kSpins = 300;  // some ten microseconds: the gap between two kernels of a step
constexpr uint64_t kIndexMask = 0xffffffff;

uint64_t num_tasks_of(uint64_t ticket) { return ticket >> 32; }
uint64_t index_of(uint64_t ticket) { return ticket & kIndexMask; }

void pause() { __builtin_ia32_pause(); }

}  // namespace

Pool& Pool::instance() {
  // Never destroyed: at the end of a process, or in the child of a fork, there may be no threads left to join.
  static Pool* pool = new Pool;
  return *pool;
}

Pool::~Pool() { stop(); }

void Pool::set_num_threads(int num_threads) {
  if (num_threads == this->num_threads()) return;
  stop();
  for (int i = 1; i < num_threads; ++i) threads_.emplace_back([this] { work(); });
}

void Pool::stop() {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    is_stopping_ = true;
  }
  has_work_.notify_all();
  for (std::thread& thread : threads_) thread.join();
  threads_.clear();
  is_stopping_ = false;
}

void Pool::run(int64_t num_tasks, Function function, void* task) {
  const bool fits = num_tasks > 1 && static_cast<uint64_t>(num_tasks) <= kIndexMask;
  if (threads_.empty() || !fits || is_busy_.exchange(true)) {
    for (int64_t i = 0; i < num_tasks; ++i) function(task, i);
    return;
  }
  function_ = function;
  task_ = task;
  num_done_ = 0;
  ticket_ = static_cast<uint64_t>(num_tasks) << 32;
  if (num_sleeping_ > 0) {
    std::lock_guard<std::mutex> lock(mutex_);
    has_work_.notify_all();
  }
  while (run_one()) {
  }
  wait_until_done(num_tasks);
  const std::exception_ptr error = std::exchange(error_, nullptr);
  is_busy_ = false;
  if (error) std::rethrow_exception(error);
}

bool Pool::has_task() const {
  const uint64_t ticket = ticket_;
  return index_of(ticket) < num_tasks_of(ticket);
}

// Takes the next task and runs it; false if there is none.
bool Pool::run_one() {
  uint64_t ticket = ticket_;
  do {
    if (index_of(ticket) >= num_tasks_of(ticket)) return false;
  } while (!ticket_.compare_exchange_weak(ticket, ticket + 1));
  run_task(static_cast<int64_t>(index_of(ticket)));
  const int64_t num_tasks = static_cast<int64_t>(num_tasks_of(ticket));
  if (++num_done_ == num_tasks && is_caller_sleeping_) {
    std::lock_guard<std::mutex> lock(mutex_);
    is_done_.notify_one();
  }
  return true;
}

// What is thrown on a thread of the pool would end the process.
void Pool::run_task(int64_t index) noexcept {
  try {
    function_(task_, index);
  } catch (...) {
    std::lock_guard<std::mutex> lock(mutex_);
    error_ = std::current_exception();
  }
}

void Pool::wait_until_done(int64_t num_tasks) {
  for (int i = 0; i < kSpins; ++i) {
    if (num_done_ == num_tasks) return;
    pause();
  }
  std::unique_lock<std::mutex> lock(mutex_);
  is_caller_sleeping_ = true;
  is_done_.wait(lock, [&] { return num_done_ == num_tasks; });
  is_caller_sleeping_ = false;
}

void Pool::work() {
  int num_spins = 0;
  while (!is_stopping_) {
    if (run_one()) {
      num_spins = 0;
    } else if (++num_spins < kSpins) {
      pause();
    } else {
      std::unique_lock<std::mutex> lock(mutex_);
      ++num_sleeping_;
      has_work_.wait(lock, [this] { return is_stopping_ || has_task(); });
      --num_sleeping_;
      num_spins = 0;
    }
  }
}

}  // namespace baton
