// A small pool of threads: a second OpenMP runtime beside torch's would be one too many.
#pragma once

#include <pthread.h>

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <mutex>
#include <system_error>
#include <thread>

#include "ordinary.h"

namespace tw {

// Runs numbered pieces of work on the calling thread and up to `threads - 1` others, which wait
// between calls. One caller uses the helpers at a time; another works alone meanwhile. A forked
// child starts its own.
class Pool {
 public:
  static Pool& instance() {
    static Pool* const pool = create();
    return *pool;
  }

  template <class F>
  void run(int64_t count, int threads, const F& work) {
    std::atomic<int64_t> next{0};
    const auto loop = [&] {
      const OrdinaryFloats scope;
      for (int64_t k; (k = next.fetch_add(1, std::memory_order_relaxed)) < count;) work(k);
    };
    const int helpers = static_cast<int>(count < threads ? count : threads) - 1;
    State* const state = state_;
    std::unique_lock<std::mutex> turn(state->turn, std::defer_lock);
    if (helpers <= 0 || !turn.try_lock()) {
      loop();
      return;
    }
    const Job job{[](const void* f) { (*static_cast<const decltype(loop)*>(f))(); }, &loop};
    {
      std::lock_guard<std::mutex> hold(state->mutex);
      start(state, helpers);
      state->job = &job;
      state->wanted = state->running = helpers < state->started ? helpers : state->started;
      ++state->round;
    }
    state->wake.notify_all();
    loop();
    std::unique_lock<std::mutex> hold(state->mutex);
    state->done.wait(hold, [&] { return state->running == 0; });
    state->job = nullptr;
  }

 private:
  struct Job {
    void (*call)(const void*);
    const void* argument;
  };

  struct State {
    std::mutex turn, mutex;
    std::condition_variable wake, done;
    const Job* job = nullptr;
    int started = 0, wanted = 0, running = 0;
    uint64_t round = 0;
  };

  State* state_ = new State;

  // Never destroyed: its threads live until the process ends.
  static Pool* create() {
    Pool* const pool = new Pool;
    pthread_atfork(nullptr, nullptr, [] { instance().state_ = new State; });
    return pool;
  }

  // Up to `helpers` threads, or as many as the system allows.
  static void start(State* state, int helpers) {
    try {
      for (; state->started < helpers; ++state->started) std::thread(serve, state, state->started).detach();
    } catch (const std::system_error&) {
    }
  }

  static void serve(State* state, int number) {
    uint64_t seen = 0;
    std::unique_lock<std::mutex> hold(state->mutex);
    for (;;) {
      state->wake.wait(hold, [&] { return state->round != seen && state->job != nullptr; });
      seen = state->round;
      if (number >= state->wanted) continue;
      const Job* const job = state->job;
      hold.unlock();
      job->call(job->argument);
      hold.lock();
      if (--state->running == 0) state->done.notify_one();
    }
  }
};

}  // namespace tw
