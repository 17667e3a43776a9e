// A CUDA device without hardware: memory of the host, a thread for every stream, and a judge of races.
//
// Work that is given to a stream runs later, on the stream's thread. The judge's findings do not depend on when it
// runs: streams and host threads have vector clocks, work comes after everything that its stream and the giving thread
// know, and an access that does not come after an earlier access to the same bytes is a race. Threads share one clock,
// except those that ask for their own (fake_cuda_own_clock): these must pass on what they know with fake_cuda_tell and
// fake_cuda_hear.
#pragma once

#include <atomic>
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

// How streams run their work. Eager: at once, while the giving thread waits. Delayed: each piece after a random delay.
// Reordered: by turns, some streams are slow while others are fast.
enum class Mode { kEager, kDelayed, kReordered };

struct Settings {
  int num_devices = 1;
  size_t memory_bytes = size_t{8} << 30;
  Mode mode = Mode::kEager;
  unsigned seed = 0;
  int delay_us = 300;
  bool is_virtual = false;  // memory is only counted and given addresses; copies and kernels do nothing
  bool is_immediate() const { return is_virtual && mode == Mode::kEager; }  // no streams' threads, no check of races

  static const Settings& get();  // from FAKE_CUDA_DEVICES, _MIB, _MODE, _SEED, _DELAY_US, _VIRTUAL
};

constexpr unsigned char kPoison = 0xA5;  // fills new memory: -2.9e-16 as a float, far out of range as an index

void count(const std::string& name, long number = 1);

using Clock = std::vector<uint64_t>;  // number of known steps, by stream

struct Range {
  const void* address;
  size_t nbytes;
};

// A mark in a stream; done when the stream has reached it.
class Mark {
 public:
  explicit Mark(Clock clock, bool is_of_group = false) : clock(std::move(clock)), is_of_group(is_of_group) {}
  void set();
  void wait();
  bool is_done();
  double seconds();  // when it was set

  const Clock clock;
  std::atomic<bool> is_of_group;  // directly before or after remote work: a process group retires its work by it
  std::atomic<bool> was_asked_for{false};  // by a thread that gives work
  std::atomic<bool> is_waited_for{false};  // by a stream

 private:
  std::mutex mutex_;
  std::condition_variable set_;
  bool is_done_ = false;
  double seconds_ = 0;
};

class Stream {
 public:
  explicit Stream(int device);

  // `work` runs after all earlier work of this stream. `label` names it in reports of races. The giving thread never
  // waits for remote work, which other processes may hold up until this thread has done more.
  void put(std::function<void()> work, const std::vector<Range>& reads, const std::vector<Range>& writes,
           const std::string& label, bool is_remote = false);
  std::shared_ptr<Mark> mark();
  void born(const Range& range, const std::string& label);  // the allocator hands out memory to this stream
  void wait(const std::shared_ptr<Mark>& mark);
  void synchronize();
  bool is_idle();

  const int device;

 private:
  void tick();
  void give(std::function<void()> work);
  void run();

  const int actor_;
  Clock clock_;                 // guarded by the judge's mutex, as the next two
  std::shared_ptr<Mark> last_;  // the mark after which nothing was given
  bool is_after_remote_ = false;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<std::function<void()>> waiting_;
  long num_given_ = 0, num_done_ = 0;
  std::thread thread_;
};

// The calling thread learns that `clock` was reached; whether the thread knows that.
void thread_learns(const Clock& clock);
bool thread_knows(const Clock& clock);

bool thread_gives_work();  // whether the calling thread has given work to a stream: the watchdog of a group never does

// A process group has seen that `clock` was reached, and gives up the memory of its work. No thread learns it.
void group_learns(const Clock& clock);

// Returns the races found since the last call, one per line.
std::string take_races();

class Device {
 public:
  static Device& of(int index);
  static Device& current();  // of the calling thread; a device's context is made at its first use
  static int current_index();
  static void set_current(int index);

  Stream& null_stream();
  Stream& make_stream();
  void synchronize();
  void use(const char* why);  // makes the context unless there is one, and counts it

  bool take(size_t nbytes);  // returns false if there is not enough memory
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

Stream& stream_of(void* stream);  // of a cudaStream_t; null and the two special values are the null stream

// Which addresses are memory of a device, and which are registered host memory.
class Places {
 public:
  void add(const void* address, size_t nbytes, int device);  // device -1: registered host memory
  size_t remove(const void* address);                        // returns its bytes; 0: it was not there
  int device_of(const void* address);                        // -1: of no device
  bool is_registered(const void* address, size_t nbytes);

 private:
  struct Place {
    size_t nbytes;
    int device;
  };
  bool find(uintptr_t at, size_t nbytes, Place* place);  // the place that contains all of `nbytes`

  std::mutex mutex_;
  std::map<uintptr_t, Place> places_;
};

Places& places();

}  // namespace fake
