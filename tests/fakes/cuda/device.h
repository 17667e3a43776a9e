// A CUDA device without hardware: memory of the host, a thread for every stream, and a judge of races.
//
// Work given to a stream runs late, on the stream's thread. The judge does not depend on when: streams and host threads
// carry vector clocks, what a stream is given comes after all that it and the thread know, and an access that does not
// come after an earlier one to the same bytes is a race. Threads share one clock, but those that ask for their own
// (fake_cuda_own_clock): these must tell and hear what they hand to each other.
#pragma once

#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

namespace fake {

// How streams run what they are given. Eager: at once, and who gives it waits. Delayed: each piece a random time later.
// Reordered: by turns, some streams dawdle while others hurry.
enum class Mode { kEager, kDelayed, kReordered };

struct Settings {
  int num_devices = 1;
  size_t memory_bytes = size_t{8} << 30;
  Mode mode = Mode::kEager;
  unsigned seed = 0;
  int delay_us = 300;
  bool is_virtual = false;  // memory is counted and addressed, copies and kernels do nothing
  bool is_immediate() const { return is_virtual && mode == Mode::kEager; }  // no threads, nothing to judge

  static const Settings& get();  // from FAKE_CUDA_DEVICES, _MIB, _MODE, _SEED, _DELAY_US, _VIRTUAL
};

constexpr unsigned char kPoison = 0xA5;  // new memory: -2.9e-16 as a float, far out of range as an index

void count(const std::string& name, long number = 1);

using Clock = std::vector<uint64_t>;  // by stream, how many of its steps are known

struct Range {
  const void* address;
  size_t nbytes;
};

// One mark in a stream; done when the stream has come to it.
class Mark {
 public:
  explicit Mark(Clock clock) : clock(std::move(clock)) {}
  void set();
  void wait();
  bool is_done();
  double seconds();  // when it was set

  const Clock clock;

 private:
  std::mutex mutex_;
  std::condition_variable set_;
  bool is_done_ = false;
  double seconds_ = 0;
};

class Stream {
 public:
  explicit Stream(int device);

  // `work` runs after all this stream was given before. `label` names it where it races.
  void put(std::function<void()> work, const std::vector<Range>& reads, const std::vector<Range>& writes,
           const std::string& label);
  std::shared_ptr<Mark> mark();
  void born(const Range& range, const std::string& label);  // the allocator hands out memory to it
  void wait(const std::shared_ptr<Mark>& mark);
  void synchronize();
  bool is_idle();

  const int device;

 private:
  void tick();
  void give(std::function<void()> work);
  void run();

  const int actor_;
  Clock clock_;  // guarded by the judge's mutex
  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<std::function<void()>> waiting_;
  long num_given_ = 0, num_done_ = 0;
  std::thread thread_;
};

// The calling thread has waited until `clock` was reached; whether it has.
void thread_learns(const Clock& clock);
bool thread_knows(const Clock& clock);

// Races since the last call, one a line.
std::string take_races();

class Device {
 public:
  static Device& of(int index);
  static Device& current();  // of the calling thread; its context is made when it is first used
  static int current_index();
  static void set_current(int index);

  Stream& null_stream();
  Stream& make_stream();
  void synchronize();
  void use(const char* why);  // makes the context, which is counted

  bool take(size_t nbytes);  // false: there is not enough memory
  void give_back(size_t nbytes);
  size_t free_bytes();
  bool has_context();

 private:
  std::mutex mutex_;
  int index_ = 0;
  bool has_context_ = false;
  size_t used_bytes_ = 0;
  std::unique_ptr<Stream> null_;
  std::vector<std::unique_ptr<Stream>> streams_;
};

// Which addresses are memory of a device, and which are registered host memory.
class Places {
 public:
  void add(const void* address, size_t nbytes, int device);  // device -1: registered host memory
  size_t remove(const void* address);                        // its bytes; 0: was not there
  int device_of(const void* address);                        // -1: of none
  bool is_registered(const void* address, size_t nbytes);

 private:
  struct Place {
    size_t nbytes;
    int device;
  };
  bool find(uintptr_t at, size_t nbytes, Place* place);  // where all of `nbytes` lie

  std::mutex mutex_;
  std::map<uintptr_t, Place> places_;
};

Places& places();

}  // namespace fake
