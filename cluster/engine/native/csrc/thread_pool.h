// A pool of threads that share out the tasks of one call at a time and sleep in between.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <exception>
#include <mutex>
#include <thread>
#include <type_traits>
#include <vector>

namespace baton {

class Pool {
 public:
  // The process's own; it has one thread, the caller's, until told otherwise.
  static Pool& instance();

  // `num_threads` counts the caller. Not while a call runs.
  void set_num_threads(int num_threads);
  int num_threads() const { return static_cast<int>(threads_.size()) + 1; }

  // Calls fn(0) … fn(num_tasks - 1), each once, in any order and on any thread, and returns when all are done. Runs them inline with
  // one thread, and when another call holds the pool. What a task throws is thrown here, when no task runs any more; of several, one.
  template <class Fn>
  void parallel(int64_t num_tasks, Fn&& fn) {
    using Task = std::remove_reference_t<Fn>;
    run(num_tasks, [](void* task, int64_t index) { (*static_cast<Task*>(task))(index); }, &fn);
  }

  Pool() = default;
  Pool(const Pool&) = delete;
  Pool& operator=(const Pool&) = delete;
  ~Pool();

 private:
  using Function = void (*)(void* task, int64_t index);

  void run(int64_t num_tasks, Function function, void* task);
  bool run_one();
  void run_task(int64_t index) noexcept;
  bool has_task() const;
  void work();
  void wait_until_done(int64_t num_tasks);
  void stop();

  // Number of tasks and index of the next one in one word: whoever moves the index has a task of the present call, however long
  // it slept, so a call never waits for a thread that has not woken yet.
  std::atomic<uint64_t> ticket_{0};
  std::atomic<int64_t> num_done_{0};
  Function function_ = nullptr;
  void* task_ = nullptr;
  std::exception_ptr error_;  // of the present call; under mutex_ until all its tasks are done

  std::atomic<bool> is_busy_{false};
  std::atomic<bool> is_stopping_{false};
  std::atomic<int> num_sleeping_{0};
  std::atomic<bool> is_caller_sleeping_{false};
  std::mutex mutex_;
  std::condition_variable has_work_;
  std::condition_variable is_done_;
  std::vector<std::thread> threads_;
};

}  // namespace baton
