#include <pthread.h>

#include <ATen/core/grad_mode.h>

#include <atomic>
#include <condition_variable>
#include <deque>
#include <exception>
#include <mutex>
#include <thread>

#include "flatshard/core/error.h"
#include "flatshard/core/log.h"
#include "flatshard/device/device_backend.h"

namespace flatshard::detail {
namespace {

thread_local bool is_worker = false;

// The first exception of a worker, and whether an owner has received it.
struct Failure {
  std::exception_ptr exception;
  std::atomic<bool> seen = false;
};

class CpuEvent : public Event::State {
 public:
  void complete(std::shared_ptr<Failure> failure) {
    {
      const std::lock_guard lock(mutex_);
      done_ = true;
      failure_ = std::move(failure);
    }
    changed_.notify_all();
  }

  void synchronize() override {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [this] { return done_; });
    if (failure_) {
      failure_->seen = true;
      std::rethrow_exception(failure_->exception);
    }
  }

  bool query() override {
    const std::lock_guard lock(mutex_);
    return done_;
  }

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  bool done_ = false;
  std::shared_ptr<Failure> failure_;
};

class CpuStream : public Stream {
 public:
  CpuStream(std::string name, StreamOptions options)
      : Stream(at::Device(at::kCPU), std::move(name)),
        worker_(std::make_shared<Worker>()) {
    worker_->name = this->name();
    worker_->options = options;
    thread_ = std::thread([worker = worker_] { worker->run(); });
  }

  // Work that was submitted still runs, as on a GPU.
  ~CpuStream() override {
    worker_->push({Task::Kind::stop, {}, {}});
    if (thread_.get_id() == std::this_thread::get_id()) {
      thread_.detach();  // one of the stream's own tasks was the last owner
    } else {
      thread_.join();
    }
  }

  void submit(std::function<void()> work) override {
    worker_->push({Task::Kind::work, std::move(work), {}});
  }

  void synchronize() override { record({})->synchronize(); }

  void reset() noexcept override {
    try {
      synchronize();
    } catch (...) {  // known to the owner, who asks to forget it
      worker_->clear_failure();
    }
  }

 protected:
  std::shared_ptr<Event::State> record(
      std::shared_ptr<Event::State> /*previous*/) override {
    auto point = std::make_shared<CpuEvent>();
    worker_->push({Task::Kind::record, {}, point});
    return point;
  }

  void wait(const std::shared_ptr<Event::State>& point) override {
    worker_->push({Task::Kind::wait, {}, point});
  }

 private:
  struct Task {
    enum class Kind { work, record, wait, stop };
    Kind kind;
    std::function<void()> work;
    std::shared_ptr<Event::State> point;
  };

  // Shared with the thread, because it may outlive the stream object.
  struct Worker {
    std::string name;
    StreamOptions options;

    void push(Task task) {
      {
        const std::lock_guard lock(mutex);
        queue.push_back(std::move(task));
      }
      arrived.notify_one();
    }

    void clear_failure() {
      const std::lock_guard lock(mutex);
      failure.reset();
    }

    void run() {
      pthread_setname_np(pthread_self(), name.substr(0, 15).c_str());
      const at::NoGradGuard no_grad;
      is_worker = true;
      while (true) {
        Task task = pop();
        if (task.kind == Task::Kind::stop) {
          break;
        }
        carry_out(task);
      }
      if (failure && !failure->seen) {
        log_unseen_failure();
      }
    }

    Task pop() {
      std::unique_lock lock(mutex);
      arrived.wait(lock, [this] { return !queue.empty(); });
      Task task = std::move(queue.front());
      queue.pop_front();
      return task;
    }

    void carry_out(Task& task) {
      std::shared_ptr<Failure> failed;
      {
        const std::lock_guard lock(mutex);
        failed = failure;
      }
      if (task.kind == Task::Kind::record) {
        static_cast<CpuEvent&>(*task.point).complete(std::move(failed));
        return;
      }
      if (failed) {
        return;
      }
      try {
        if (task.kind == Task::Kind::wait) {
          task.point->synchronize();
        } else {
          const int delay = delay_us(name, num_tasks++, options);
          if (delay > 0) {
            std::this_thread::sleep_for(std::chrono::microseconds(delay));
          }
          task.work();
        }
      } catch (...) {
        auto first = std::make_shared<Failure>();
        first->exception = std::current_exception();
        const std::lock_guard lock(mutex);
        failure = std::move(first);
      }
    }

    void log_unseen_failure() const {
      try {
        std::rethrow_exception(failure->exception);
      } catch (const std::exception& error) {
        log_error(
            "stream '{}' ended with an unhandled error: {}",
            name,
            error.what());
      } catch (...) {
        log_error("stream '{}' ended with an unknown error", name);
      }
    }

    std::mutex mutex;
    std::condition_variable arrived;
    std::deque<Task> queue;
    std::shared_ptr<Failure> failure;
    std::uint64_t num_tasks = 0;
  };

  std::shared_ptr<Worker> worker_;
  std::thread thread_;
};

// The calling thread as a stream: everything has happened already.
class CallerStream : public Stream {
 public:
  CallerStream() : Stream(at::Device(at::kCPU), "caller") {}

  void submit(std::function<void()> work) override {
    const at::NoGradGuard no_grad;
    work();
  }
  void synchronize() override {}
  void reset() noexcept override {}

 protected:
  std::shared_ptr<Event::State> record(
      std::shared_ptr<Event::State> /*previous*/) override {
    static const auto complete = [] {
      auto point = std::make_shared<CpuEvent>();
      point->complete({});
      return point;
    }();
    return complete;
  }
  void wait(const std::shared_ptr<Event::State>& point) override {
    point->synchronize();
  }
};

}  // namespace

std::shared_ptr<Stream> make_cpu_stream(
    std::string name,
    StreamOptions options) {
  return std::make_shared<CpuStream>(std::move(name), options);
}

bool on_cpu_stream_thread() {
  return is_worker;
}

std::shared_ptr<Stream> caller_stream() {
  static const auto stream = std::make_shared<CallerStream>();
  return stream;
}

}  // namespace flatshard::detail
