#include "device.h"

#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <random>

namespace fake {
namespace {

// An object that is never destroyed, because the streams' threads still run when destructors of static objects run.
template <class T>
T& immortal() {
  static T* const found = new T;
  return *found;
}

double now() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

long number(const char* name, long otherwise) {
  const char* text = std::getenv(name);
  return text ? std::atol(text) : otherwise;
}

// --- the judge -------------------------------------------------------------------------------------------------------

struct Access {
  int actor = 0;
  uint64_t step = 0;
  std::string label;
};

struct Bytes {  // accesses to the bytes from an address in the map to the next address in it
  Access write;
  std::vector<Access> reads;  // since that write
};

constexpr size_t kMostRaces = 50;
constexpr size_t kGroups = 1;  // the clock of what process groups have seen; nothing is given by it

struct Judge {
  std::mutex mutex;
  int num_streams = 0;
  std::deque<Clock> threads = std::deque<Clock>(2);  // the first: of all threads without one of their own; kGroups
  std::deque<Clock> told;
  std::map<uintptr_t, Bytes> memory{{0, {}}};
  std::vector<std::string> races;

  static void join(Clock& into, const Clock& other) {
    if (into.size() < other.size()) into.resize(other.size());
    for (size_t i = 0; i < other.size(); ++i) into[i] = std::max(into[i], other[i]);
  }

  static bool knows(const Clock& clock, const Access& access) {
    return access.step == 0 || (clock.size() > size_t(access.actor) && clock[access.actor] >= access.step);
  }

  void cut(uintptr_t at) {
    auto found = std::prev(memory.upper_bound(at));
    if (found->first != at) memory.emplace_hint(std::next(found), at, found->second);
  }

  void race(const char* kind, const Access& first, const Access& second, uintptr_t at) {
    if (races.size() >= kMostRaces) return;
    char place[32];
    snprintf(place, sizeof place, "%#lx", static_cast<unsigned long>(at));
    races.push_back(std::string(kind) + ": " + second.label + " (stream " + std::to_string(second.actor) +
                    ") is not ordered after " + first.label + " (stream " + std::to_string(first.actor) + ") at " + place);
  }

  // The allocator hands out memory: a thread or `clock` must know that every earlier access is complete. An access that
  // only `clock` knows is kept, because another stream that uses the memory must still come after it.
  void born(const Range& range, const Access& owner, const Clock& clock) {
    const auto first = reinterpret_cast<uintptr_t>(range.address), end = first + range.nbytes;
    cut(first);
    cut(end);
    auto is_over = [&](const Access& access) {
      return std::any_of(threads.begin(), threads.end(), [&](const Clock& thread) { return knows(thread, access); });
    };
    for (auto place = memory.find(first); place->first < end; ++place) {
      auto& [write, reads] = place->second;
      if (is_over(write)) write = {};
      reads.erase(std::remove_if(reads.begin(), reads.end(), is_over), reads.end());
      std::vector<Access> left = reads;
      left.push_back(write);
      for (const Access& access : left)
        if (!knows(clock, access)) {
          race("handed out in use", access, owner, place->first);
          break;
        }
    }
  }

  void access(const Range& range, bool writes, const Access& access, const Clock& clock) {
    if (range.nbytes == 0) return;
    const auto first = reinterpret_cast<uintptr_t>(range.address), end = first + range.nbytes;
    cut(first);
    cut(end);
    bool told = false;
    for (auto place = memory.find(first); place->first < end; ++place) {
      Bytes& bytes = place->second;
      if (!knows(clock, bytes.write) && !told) {
        race(writes ? "write after write" : "read after write", bytes.write, access, place->first);
        told = true;
      }
      if (writes) {
        for (const Access& read : bytes.reads)
          if (!knows(clock, read) && !told) {
            race("write after read", read, access, place->first);
            told = true;
          }
        bytes.reads.clear();
        bytes.write = access;
      } else {
        auto& reads = bytes.reads;
        auto same = std::find_if(reads.begin(), reads.end(), [&](auto& read) { return read.actor == access.actor; });
        if (same == reads.end())
          reads.push_back(access);
        else
          *same = access;
      }
    }
    if (writes) {  // joins the range to one entry; otherwise, the map would only grow
      auto begin = memory.find(first);
      memory.erase(std::next(begin), memory.find(end));
    }
  }
};

Judge& judge() { return immortal<Judge>(); }

thread_local size_t own_clock = 0;
thread_local bool gives_work = false;

struct Counters {
  std::mutex mutex;
  std::map<std::string, long> values;
};

thread_local int current_device = 0;

}  // namespace

const Settings& Settings::get() {
  static const Settings found = [] {
    Settings made;
    made.num_devices = static_cast<int>(number("FAKE_CUDA_DEVICES", 1));
    made.memory_bytes = static_cast<size_t>(number("FAKE_CUDA_MIB", 8192)) << 20;
    made.seed = static_cast<unsigned>(number("FAKE_CUDA_SEED", 0));
    made.delay_us = static_cast<int>(number("FAKE_CUDA_DELAY_US", 300));
    made.is_virtual = number("FAKE_CUDA_VIRTUAL", 0) != 0;
    const char* mode = std::getenv("FAKE_CUDA_MODE");
    if (mode && !std::strcmp(mode, "delayed")) made.mode = Mode::kDelayed;
    if (mode && !std::strcmp(mode, "reordered")) made.mode = Mode::kReordered;
    return made;
  }();
  return found;
}

void count(const std::string& name, long number) {
  auto& counters = immortal<Counters>();
  std::lock_guard<std::mutex> lock(counters.mutex);
  counters.values[name] += number;
}

// --- streams ---------------------------------------------------------------------------------------------------------

void Mark::set() {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    is_done_ = true;
    seconds_ = now();
  }
  set_.notify_all();
}

void Mark::wait() {
  std::unique_lock<std::mutex> lock(mutex_);
  set_.wait(lock, [this] { return is_done_; });
}

bool Mark::is_done() {
  std::lock_guard<std::mutex> lock(mutex_);
  return is_done_;
}

double Mark::seconds() {
  std::lock_guard<std::mutex> lock(mutex_);
  return seconds_;
}

Stream::Stream(int device)
    : device(device),
      actor_([] {
        std::lock_guard<std::mutex> lock(judge().mutex);
        return judge().num_streams++;
      }()),
      thread_([this] { run(); }) {
  thread_.detach();
}

void Stream::put(std::function<void()> work, const std::vector<Range>& reads, const std::vector<Range>& writes,
                 const std::string& label, bool is_remote) {
  if (Settings::get().is_immediate()) return work();
  gives_work = true;
  {
    std::lock_guard<std::mutex> lock(judge().mutex);
    tick();
    if (is_remote && last_) last_->is_of_group = true;
    last_ = nullptr;
    is_after_remote_ = is_remote;
    const Access access{actor_, clock_[actor_], label};
    for (const Range& range : reads) judge().access(range, false, access, clock_);
    for (const Range& range : writes) judge().access(range, true, access, clock_);
    give(std::move(work));
  }
  if (Settings::get().mode == Mode::kEager && !is_remote) {
    std::unique_lock<std::mutex> lock(mutex_);
    const long given = num_given_;
    changed_.wait(lock, [&] { return num_done_ >= given; });
  }
}

std::shared_ptr<Mark> Stream::mark() {
  if (Settings::get().is_immediate()) {
    auto made = std::make_shared<Mark>(Clock());
    made->set();
    return made;
  }
  std::lock_guard<std::mutex> lock(judge().mutex);
  tick();
  auto made = std::make_shared<Mark>(clock_, is_after_remote_);
  last_ = made;
  is_after_remote_ = false;
  give([made] { made->set(); });
  return made;
}

void Stream::wait(const std::shared_ptr<Mark>& mark) {
  if (Settings::get().is_immediate()) return;
  mark->is_waited_for = true;
  std::lock_guard<std::mutex> lock(judge().mutex);
  Judge::join(clock_, mark->clock);
  last_ = nullptr;
  is_after_remote_ = false;
  give([mark] { mark->wait(); });
}

void Stream::synchronize() {
  Clock reached;
  long given;
  {
    std::lock_guard<std::mutex> judging(judge().mutex);
    std::lock_guard<std::mutex> lock(mutex_);
    reached = clock_;
    given = num_given_;
  }
  {
    std::unique_lock<std::mutex> lock(mutex_);
    changed_.wait(lock, [&] { return num_done_ >= given; });
  }
  thread_learns(reached);
}

bool Stream::is_idle() {
  std::lock_guard<std::mutex> lock(mutex_);
  return num_done_ == num_given_;
}

// Begins the next step, which comes after everything that the calling thread knows. The judge's mutex must be held.
void Stream::tick() {
  Judge::join(clock_, judge().threads[own_clock]);
  if (clock_.size() <= size_t(actor_)) clock_.resize(actor_ + 1);
  ++clock_[actor_];
}

// The judge's mutex must be held, so that the order in the queue is the order of the clocks.
void Stream::give(std::function<void()> work) {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    waiting_.push_back(std::move(work));
    ++num_given_;
  }
  changed_.notify_all();
}

void Stream::run() {
  const Settings& settings = Settings::get();
  std::mt19937 random(settings.seed * 7919u + static_cast<unsigned>(actor_));
  bool dawdles = false;
  for (long turn = 0;; ++turn) {
    std::function<void()> work;
    {
      std::unique_lock<std::mutex> lock(mutex_);
      changed_.wait(lock, [this] { return !waiting_.empty(); });
      work = std::move(waiting_.front());
      waiting_.pop_front();
    }
    if (settings.mode == Mode::kDelayed) usleep(random() % static_cast<unsigned>(settings.delay_us + 1));
    if (settings.mode == Mode::kReordered) {
      if (turn % 16 == 0) dawdles = random() % 2;
      if (dawdles) usleep(static_cast<unsigned>(settings.delay_us));
    }
    work();
    work = nullptr;  // releases what it holds before anybody learns that it is done
    {
      std::lock_guard<std::mutex> lock(mutex_);
      ++num_done_;
    }
    changed_.notify_all();
  }
}

void thread_learns(const Clock& clock) {
  std::lock_guard<std::mutex> lock(judge().mutex);
  Judge::join(judge().threads[own_clock], clock);
}

bool thread_gives_work() { return gives_work; }

void group_learns(const Clock& clock) {
  std::lock_guard<std::mutex> lock(judge().mutex);
  Judge::join(judge().threads[kGroups], clock);
}

bool thread_knows(const Clock& clock) {
  std::lock_guard<std::mutex> lock(judge().mutex);
  const Clock& host = judge().threads[own_clock];
  for (size_t i = 0; i < clock.size(); ++i)
    if (clock[i] > (i < host.size() ? host[i] : 0)) return false;
  return true;
}

std::string take_races() {
  std::lock_guard<std::mutex> lock(judge().mutex);
  std::string found;
  for (const std::string& race : judge().races) found += race + "\n";
  judge().races.clear();
  return found;
}

void Stream::born(const Range& range, const std::string& label) {
  std::lock_guard<std::mutex> lock(judge().mutex);
  Clock known = clock_;
  Judge::join(known, judge().threads[own_clock]);
  if (range.nbytes) judge().born(range, {actor_, 0, label}, known);
}

// --- devices and places ----------------------------------------------------------------------------------------------

Device& Device::of(int index) {
  static Device* const devices = [] {
    auto* made = new Device[16];
    for (int i = 0; i < 16; ++i) made[i].index_ = i;
    return made;
  }();
  return devices[index];
}

int Device::current_index() { return current_device; }
void Device::set_current(int index) { current_device = index; }
Device& Device::current() { return of(current_device); }

void Device::use(const char* why) {
  std::lock_guard<std::mutex> lock(mutex_);
  if (has_context_) return;
  has_context_ = true;
  count("contexts");
  count("context on device " + std::to_string(index_) + " by " + why);
}

bool Device::has_context() {
  std::lock_guard<std::mutex> lock(mutex_);
  return has_context_;
}

Stream& Device::null_stream() {
  std::lock_guard<std::mutex> lock(mutex_);
  if (!null_) null_ = std::make_unique<Stream>(index_);
  return *null_;
}

Stream& Device::make_stream() {
  std::lock_guard<std::mutex> lock(mutex_);
  return *streams_.emplace_back(std::make_unique<Stream>(index_));
}

void Device::synchronize() {
  std::vector<Stream*> all{&null_stream()};
  {
    std::lock_guard<std::mutex> lock(mutex_);
    for (auto& stream : streams_) all.push_back(stream.get());
  }
  for (Stream* stream : all) stream->synchronize();
}

bool Device::take(size_t nbytes) {
  std::lock_guard<std::mutex> lock(mutex_);
  if (used_bytes_ + nbytes > Settings::get().memory_bytes) return false;
  used_bytes_ += nbytes;
  return true;
}

void Device::give_back(size_t nbytes) {
  std::lock_guard<std::mutex> lock(mutex_);
  used_bytes_ -= nbytes;
}

size_t Device::free_bytes() {
  std::lock_guard<std::mutex> lock(mutex_);
  return Settings::get().memory_bytes - used_bytes_;
}

Stream& stream_of(void* stream) {
  const auto value = reinterpret_cast<uintptr_t>(stream);
  return value <= 2 ? Device::current().null_stream() : *static_cast<Stream*>(stream);
}

Places& places() { return immortal<Places>(); }

void Places::add(const void* address, size_t nbytes, int device) {
  std::lock_guard<std::mutex> lock(mutex_);
  places_[reinterpret_cast<uintptr_t>(address)] = {nbytes, device};
}

size_t Places::remove(const void* address) {
  std::lock_guard<std::mutex> lock(mutex_);
  auto found = places_.find(reinterpret_cast<uintptr_t>(address));
  if (found == places_.end()) return 0;
  const size_t nbytes = found->second.nbytes;
  places_.erase(found);
  return nbytes;
}

bool Places::find(uintptr_t at, size_t nbytes, Place* place) {
  std::lock_guard<std::mutex> lock(mutex_);
  auto found = places_.upper_bound(at);
  if (found == places_.begin()) return false;
  --found;
  *place = found->second;
  return at + nbytes <= found->first + found->second.nbytes;
}

int Places::device_of(const void* address) {
  Place place{};
  return find(reinterpret_cast<uintptr_t>(address), 1, &place) ? place.device : -1;
}

bool Places::is_registered(const void* address, size_t nbytes) {
  Place place{};
  return find(reinterpret_cast<uintptr_t>(address), nbytes, &place) && place.device < 0;
}

}  // namespace fake

extern "C" {

// Returns the counts since the last call, as lines "number name".
const char* fake_cuda_take_counts() {
  thread_local std::string text;
  auto& counters = fake::immortal<fake::Counters>();
  std::lock_guard<std::mutex> lock(counters.mutex);
  text.clear();
  for (auto& [name, value] : counters.values) text += std::to_string(value) + " " + name + "\n";
  counters.values.clear();
  return text.c_str();
}

// Gives the calling thread a clock of its own from now on.
void fake_cuda_own_clock() {
  std::lock_guard<std::mutex> lock(fake::judge().mutex);
  if (fake::own_clock) return;
  fake::own_clock = fake::judge().threads.size();
  fake::judge().threads.emplace_back();
}

// Stores what the calling thread knows; returns its number, with which another thread can learn it by fake_cuda_hear.
size_t fake_cuda_tell() {
  std::lock_guard<std::mutex> lock(fake::judge().mutex);
  fake::judge().told.push_back(fake::judge().threads[fake::own_clock]);
  return fake::judge().told.size() - 1;
}

void fake_cuda_hear(size_t told) {
  std::lock_guard<std::mutex> lock(fake::judge().mutex);
  fake::Judge::join(fake::judge().threads[fake::own_clock], fake::judge().told[told]);
}

const char* fake_cuda_take_races() {
  thread_local std::string text;
  text = fake::take_races();
  return text.c_str();
}
}
