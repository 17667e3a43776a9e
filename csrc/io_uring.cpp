#include "io_engine.h"

#if defined(SPILLWAY_HAVE_URING)

#include <errno.h>
#include <linux/io_uring.h>
#include <sched.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <unistd.h>

#include <algorithm>
#include <condition_variable>
#include <cstring>
#include <mutex>
#include <vector>

#include "io_pieces.h"
#include "process_local.h"

// Of Linux 5.19, for headers that are older than the kernel.
#ifndef IORING_SETUP_COOP_TASKRUN
#define IORING_SETUP_COOP_TASKRUN (1U << 8)
#endif
#ifndef IORING_SETUP_TASKRUN_FLAG
#define IORING_SETUP_TASKRUN_FLAG (1U << 9)
#endif
#ifndef IORING_SQ_TASKRUN
#define IORING_SQ_TASKRUN (1U << 2)
#endif

namespace spillway {
namespace {

// The longest range that the kernel registers as one.
constexpr uint64_t kRegisteredBytes = uint64_t{1} << 30;

// Submissions in a row that the kernel puts off (EAGAIN, EBUSY) with nothing in flight, before they are given up.
constexpr int kMaxIdleSubmissions = 1000;

struct Mapping {
  void* begin = MAP_FAILED;
  size_t nbytes = 0;

  Mapping(int file, off_t offset, size_t nbytes)
      : begin(mmap(nullptr, nbytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_POPULATE, file, offset)), nbytes(nbytes) {
    // A child that shared the queues could submit into its parent's.
    if (begin != MAP_FAILED) madvise(begin, nbytes, MADV_DONTFORK);
  }
  ~Mapping() {
    if (begin != MAP_FAILED) munmap(begin, nbytes);
  }
  Mapping(const Mapping&) = delete;
  Mapping& operator=(const Mapping&) = delete;

  template <class Type>
  Type* at(uint32_t offset) const {
    return reinterpret_cast<Type*>(static_cast<char*>(begin) + offset);
  }
};

// A submission and a completion queue shared with the kernel. One thread at a time.
class Ring {
 public:
  // Null where the kernel refuses, with errno in `os_error`.
  static std::unique_ptr<Ring> open(unsigned num_entries, int& os_error) {
    io_uring_params params{};
    int file = -1;
    // Without COOP_TASKRUN (Linux 5.19) a completion interrupts the thread while it computes a checksum.
    for (const uint32_t task_work : {IORING_SETUP_COOP_TASKRUN | IORING_SETUP_TASKRUN_FLAG, 0U}) {
      params = {};
      params.flags = IORING_SETUP_CLAMP | task_work;
      file = static_cast<int>(syscall(__NR_io_uring_setup, num_entries, &params));
      if (file >= 0 || errno != EINVAL) break;
    }
    if (file < 0) {
      os_error = errno;
      return nullptr;
    }
    std::unique_ptr<Ring> ring(new Ring(file, params));
    const bool mapped = ring->queues_.begin != MAP_FAILED && ring->entries_.begin != MAP_FAILED;
    if (mapped && (params.features & IORING_FEAT_SINGLE_MMAP)) return ring;
    os_error = ENOSYS;
    return nullptr;
  }

  ~Ring() {
    unregister();
    close(file_);
  }

  bool supports(std::initializer_list<uint8_t> opcodes) const {
    constexpr unsigned kNumOps = 64;
    std::vector<char> memory(sizeof(io_uring_probe) + kNumOps * sizeof(io_uring_probe_op));
    auto* probe = reinterpret_cast<io_uring_probe*>(memory.data());
    if (syscall(__NR_io_uring_register, file_, IORING_REGISTER_PROBE, probe, kNumOps) < 0) return false;
    return std::all_of(opcodes.begin(), opcodes.end(), [probe](uint8_t opcode) {
      return opcode < probe->ops_len && (probe->ops[opcode].flags & IO_URING_OP_SUPPORTED);
    });
  }

  unsigned num_entries() const { return num_entries_; }

  // No transfer may be in flight.
  bool register_memory(void* memory, uint64_t nbytes) {
    unregister();
    std::vector<iovec> ranges;
    for (uint64_t begin = 0; begin < nbytes; begin += kRegisteredBytes) {
      ranges.push_back({static_cast<char*>(memory) + begin, std::min(kRegisteredBytes, nbytes - begin)});
    }
    const auto count = static_cast<unsigned>(ranges.size());
    if (syscall(__NR_io_uring_register, file_, IORING_REGISTER_BUFFERS, ranges.data(), count) < 0) return false;
    registered_ = std::move(ranges);
    return true;
  }

  void unregister() {
    if (!registered_.empty()) syscall(__NR_io_uring_register, file_, IORING_UNREGISTER_BUFFERS, nullptr, 0);
    registered_.clear();
  }

  // The next entry, zeroed, to be filled in. At most num_entries() may be unsubmitted or in flight.
  io_uring_sqe& push() {
    const uint32_t slot = tail_++ & mask_;
    io_uring_sqe& entry = entries_.at<io_uring_sqe>(0)[slot];
    std::memset(&entry, 0, sizeof entry);
    slots_[slot] = slot;
    return entry;
  }

  void push_transfer(spillway_direction direction, int32_t file, const Piece& piece, uint64_t user_data) {
    io_uring_sqe& entry = push();
    const bool is_write = direction == SPILLWAY_WRITE;
    const auto address = reinterpret_cast<uint64_t>(piece.next_byte());
    const int range = registered_range(address, piece.bytes_left());
    entry.opcode = range >= 0 ? (is_write ? IORING_OP_WRITE_FIXED : IORING_OP_READ_FIXED)
                              : (is_write ? IORING_OP_WRITE : IORING_OP_READ);
    entry.buf_index = static_cast<uint16_t>(std::max(range, 0));
    entry.fd = file;
    entry.addr = address;
    entry.len = static_cast<uint32_t>(piece.bytes_left());
    entry.off = piece.file_offset();
    entry.user_data = user_data;
  }

  // Submits what was pushed and waits for `num_wanted` completions (0: does not). Returns 0 or -errno; a signal, or a
  // submission of only some, is no error: num_unsubmitted() tells.
  int enter(unsigned num_wanted) {
    __atomic_store_n(sq_tail_, tail_, __ATOMIC_RELEASE);
    const unsigned num_unsubmitted = this->num_unsubmitted();
    // Completions may wait in the kernel for this thread to come by.
    const bool has_task_work = __atomic_load_n(sq_flags_, __ATOMIC_RELAXED) & IORING_SQ_TASKRUN;
    if (num_unsubmitted == 0 && num_wanted == 0 && !has_task_work) return 0;
    const unsigned flags = num_wanted > 0 || has_task_work ? IORING_ENTER_GETEVENTS : 0;
    const long entered = syscall(__NR_io_uring_enter, file_, num_unsubmitted, num_wanted, flags, nullptr, 0);
    return entered >= 0 || errno == EINTR ? 0 : -errno;
  }

  // Pushed and not yet taken by the kernel.
  unsigned num_unsubmitted() const { return tail_ - __atomic_load_n(sq_head_, __ATOMIC_ACQUIRE); }

  // Takes back what the kernel has not taken: calls dropped(user_data) for each.
  template <class Dropped>
  void drop_unsubmitted(const Dropped& dropped) {
    const uint32_t head = __atomic_load_n(sq_head_, __ATOMIC_ACQUIRE);
    for (; tail_ != head; --tail_) dropped(entries_.at<io_uring_sqe>(0)[(tail_ - 1) & mask_].user_data);
    __atomic_store_n(sq_tail_, tail_, __ATOMIC_RELEASE);
  }

  // Calls completed(user_data, result) for every completion that has arrived.
  template <class Completed>
  void reap(const Completed& completed) {
    uint32_t head = *cq_head_;
    for (; head != __atomic_load_n(cq_tail_, __ATOMIC_ACQUIRE); ++head) {
      const io_uring_cqe entry = completions_[head & cq_mask_];
      __atomic_store_n(cq_head_, head + 1, __ATOMIC_RELEASE);
      completed(entry.user_data, entry.res);
    }
  }

 private:
  Ring(int file, const io_uring_params& params)
      : file_(file),
        num_entries_(params.sq_entries),
        queues_(file, IORING_OFF_SQ_RING,
                std::max<size_t>(params.sq_off.array + params.sq_entries * sizeof(uint32_t),
                                 params.cq_off.cqes + params.cq_entries * sizeof(io_uring_cqe))),
        entries_(file, IORING_OFF_SQES, params.sq_entries * sizeof(io_uring_sqe)) {
    if (queues_.begin == MAP_FAILED || entries_.begin == MAP_FAILED) return;
    sq_head_ = queues_.at<uint32_t>(params.sq_off.head), sq_tail_ = queues_.at<uint32_t>(params.sq_off.tail);
    sq_flags_ = queues_.at<uint32_t>(params.sq_off.flags), slots_ = queues_.at<uint32_t>(params.sq_off.array);
    mask_ = *queues_.at<uint32_t>(params.sq_off.ring_mask);
    cq_head_ = queues_.at<uint32_t>(params.cq_off.head), cq_tail_ = queues_.at<uint32_t>(params.cq_off.tail);
    cq_mask_ = *queues_.at<uint32_t>(params.cq_off.ring_mask);
    completions_ = queues_.at<io_uring_cqe>(params.cq_off.cqes);
    tail_ = *sq_tail_;
  }

  // Index of the registered range that holds all of these bytes, or -1.
  int registered_range(uint64_t address, uint64_t nbytes) const {
    for (size_t i = 0; i < registered_.size(); ++i) {
      const auto begin = reinterpret_cast<uint64_t>(registered_[i].iov_base);
      if (address >= begin && address + nbytes <= begin + registered_[i].iov_len) return static_cast<int>(i);
    }
    return -1;
  }

  const int file_;
  const unsigned num_entries_;
  const Mapping queues_, entries_;
  uint32_t *sq_head_ = nullptr, *sq_tail_ = nullptr, *sq_flags_ = nullptr, *slots_ = nullptr;
  uint32_t *cq_head_ = nullptr, *cq_tail_ = nullptr;
  const io_uring_cqe* completions_ = nullptr;
  uint32_t mask_ = 0, cq_mask_ = 0;
  uint32_t tail_ = 0;
  std::vector<iovec> registered_;
};

// The rings of one process: one for each thread that transfers at the moment.
struct Rings {
  std::mutex mutex;
  std::condition_variable given_back;
  std::vector<std::unique_ptr<Ring>> idle;
  size_t num_rings = 0;
  void* registered = nullptr;
  uint64_t registered_bytes = 0;

  // Waits for one in use where the system has no more; null, with errno in `os_error`, where there is none at all.
  std::unique_ptr<Ring> take(unsigned num_entries, int& os_error) {
    std::unique_lock<std::mutex> lock(mutex);
    if (idle.empty()) {
      idle.reserve(num_rings + 1);
      if (std::unique_ptr<Ring> ring = Ring::open(num_entries, os_error)) {
        if (registered_bytes > 0) ring->register_memory(registered, registered_bytes);
        ++num_rings;
        return ring;
      }
      if (num_rings == 0) return nullptr;
      given_back.wait(lock, [this] { return !idle.empty(); });
    }
    std::unique_ptr<Ring> ring = std::move(idle.back());
    idle.pop_back();
    return ring;
  }

  void give_back(std::unique_ptr<Ring> ring) {
    std::lock_guard<std::mutex> lock(mutex);
    idle.push_back(std::move(ring));
    given_back.notify_one();
  }
};

class UringEngine final : public IoEngine {
 public:
  UringEngine(int32_t file, int32_t queue_depth, spillway_io_call call, void* context)
      : file_(file), queue_depth_(static_cast<unsigned>(queue_depth)), call_(call), context_(context) {}

  void transfer(spillway_direction direction, spillway_io_request* requests, int64_t num_requests) override {
    std::vector<Piece> pieces = cut(requests, num_requests);
    if (!pieces.empty()) {
      Batch batch(*this, direction, pieces);
      Rings& rings = rings_.get();
      int os_error = 0;
      if (std::unique_ptr<Ring> ring = rings.take(queue_depth_, os_error)) {
        batch.run(*ring);
        rings.give_back(std::move(ring));
      } else {
        for (Piece& piece : pieces) piece.fail(SPILLWAY_IO_FAILED, os_error);
      }
    }
    finish(direction, requests, num_requests, pieces);
  }

  bool register_memory(void* memory, uint64_t nbytes) override {
    Rings& rings = rings_.get();
    std::lock_guard<std::mutex> lock(rings.mutex);
    rings.registered = nullptr, rings.registered_bytes = 0;
    const bool done = std::all_of(rings.idle.begin(), rings.idle.end(),
                                  [&](std::unique_ptr<Ring>& ring) { return ring->register_memory(memory, nbytes); });
    if (done) {
      rings.registered = memory, rings.registered_bytes = nbytes;
    } else {
      for (std::unique_ptr<Ring>& ring : rings.idle) ring->unregister();
    }
    return done;
  }

  // The first ring, made when the engine is opened so that a refusal shows then.
  bool open_first_ring() {
    int os_error = 0;
    std::unique_ptr<Ring> ring = rings_.get().take(queue_depth_, os_error);
    if (ring == nullptr) return false;
    rings_.get().give_back(std::move(ring));
    return true;
  }

 private:
  // The pieces of one call on their way through one ring. All memory is reserved before the first is submitted: nothing may
  // throw while the kernel holds buffers.
  class Batch {
   public:
    Batch(const UringEngine& engine, spillway_direction direction, std::vector<Piece>& pieces)
        : engine_(engine), direction_(direction), pieces_(pieces) {
      to_resume_.reserve(pieces.size());
      to_check_.reserve(pieces.size());
    }

    void run(Ring& ring) {
      const unsigned depth = std::min(engine_.queue_depth_, ring.num_entries());
      for (;;) {
        while (in_flight_ < depth && push_next(ring)) {
        }
        const bool has_to_check = num_checked_ < to_check_.size();
        if (in_flight_ == 0 && !has_to_check) return;
        const int error = ring.enter(has_to_check || in_flight_ == 0 ? 0 : 1);
        if (error != 0 && !may_go_on(ring, error)) return abandon(ring, -error);
        // One checksum between two looks at the queues: the device is given new work before the next.
        if (has_to_check) pieces_[to_check_[num_checked_++]].compute_checksum();
        ring.reap([this](uint64_t index, int32_t result) { complete(static_cast<uint32_t>(index), result); });
      }
    }

   private:
    bool push_next(Ring& ring) {
      if (to_resume_.empty() && next_ == pieces_.size()) return false;
      const bool is_new = to_resume_.empty();
      const uint32_t index = is_new ? static_cast<uint32_t>(next_++) : to_resume_.back();
      if (!is_new) to_resume_.pop_back();
      // A write's checksum is computed while the device reads the same bytes, a read's when all have arrived.
      if (is_new && direction_ == SPILLWAY_WRITE) to_check_.push_back(index);
      if (engine_.call_ == nullptr) {
        ring.push_transfer(direction_, engine_.file_, pieces_[index], index);
      } else {
        io_uring_sqe& entry = ring.push();
        entry.opcode = IORING_OP_NOP;
        entry.user_data = index;
      }
      ++in_flight_;
      return true;
    }

    void complete(uint32_t index, int64_t result) {
      Piece& piece = pieces_[index];
      --in_flight_;
      if (engine_.call_ != nullptr) {
        result = engine_.call_(engine_.context_, direction_, engine_.file_, piece.next_byte(), piece.bytes_left(),
                               piece.file_offset());
      }
      if (!piece.ends_after(direction_, result)) {
        to_resume_.push_back(index);
        if (result == -EAGAIN) sched_yield();
      } else if (direction_ == SPILLWAY_READ && piece.error == SPILLWAY_OK) {
        to_check_.push_back(index);
      }
    }

    // Whether to try again after an error of enter(): the kernel was short of something, and that can end.
    bool may_go_on(Ring& ring, int error) {
      if (error != -EAGAIN && error != -EBUSY) return false;
      sched_yield();
      num_idle_submissions_ = ring.num_unsubmitted() == in_flight_ ? num_idle_submissions_ + 1 : 0;
      return num_idle_submissions_ < kMaxIdleSubmissions;
    }

    // The kernel takes no more. What it has must end before the caller may have its buffers back; the rest fails.
    void abandon(Ring& ring, int os_error) {
      ring.drop_unsubmitted([&](uint64_t index) {
        pieces_[index].fail(SPILLWAY_IO_FAILED, os_error);
        --in_flight_;
      });
      while (in_flight_ > 0) {
        if (ring.enter(1) != 0) usleep(1000);
        ring.reap([this](uint64_t index, int32_t result) { complete(static_cast<uint32_t>(index), result); });
      }
      for (const uint32_t index : to_resume_) pieces_[index].fail(SPILLWAY_IO_FAILED, os_error);
      for (; next_ < pieces_.size(); ++next_) pieces_[next_].fail(SPILLWAY_IO_FAILED, os_error);
      for (; num_checked_ < to_check_.size(); ++num_checked_) pieces_[to_check_[num_checked_]].compute_checksum();
    }

    const UringEngine& engine_;
    const spillway_direction direction_;
    std::vector<Piece>& pieces_;
    size_t next_ = 0;
    unsigned in_flight_ = 0;            // pushed and not completed
    std::vector<uint32_t> to_resume_;   // ended short, or with EINTR or EAGAIN
    std::vector<uint32_t> to_check_;    // in order; the first num_checked_ have their checksum
    size_t num_checked_ = 0;
    int num_idle_submissions_ = 0;
  };

  const int32_t file_;
  const unsigned queue_depth_;
  const spillway_io_call call_;
  void* const context_;
  ProcessLocal<Rings> rings_;
};

// Writes a block to a file in memory and reads it back.
bool probe() {
  constexpr size_t kBlockBytes = 4096;
  int os_error = 0;
  const std::unique_ptr<Ring> ring = Ring::open(1, os_error);
  if (!ring || !ring->supports({IORING_OP_NOP, IORING_OP_READ, IORING_OP_WRITE, IORING_OP_READ_FIXED, IORING_OP_WRITE_FIXED})) {
    return false;
  }
  const int file = static_cast<int>(syscall(__NR_memfd_create, "spillway-probe", 1U /* MFD_CLOEXEC */));
  if (file < 0) return false;
  std::vector<char> written(kBlockBytes, 'w'), found(kBlockBytes);
  bool sound = true;
  for (const spillway_direction direction : {SPILLWAY_WRITE, SPILLWAY_READ}) {
    spillway_io_request request{};
    request.buffer = direction == SPILLWAY_WRITE ? written.data() : found.data();
    int32_t moved = -1;
    ring->push_transfer(direction, file, Piece{&request, 0, kBlockBytes}, 0);
    while (moved < 0 && ring->enter(1) == 0) {
      ring->reap([&moved](uint64_t, int32_t result) { moved = std::max(result, 0); });
    }
    sound = sound && moved == static_cast<int32_t>(kBlockBytes);
  }
  close(file);
  return sound && written == found;
}

}  // namespace

bool uring_available() {
  static const bool available = probe();
  return available;
}

std::unique_ptr<IoEngine> open_uring_engine(int32_t file, int32_t queue_depth, spillway_io_call call, void* context) {
  if (!uring_available()) return nullptr;
  auto engine = std::make_unique<UringEngine>(file, queue_depth, call, context);
  return engine->open_first_ring() ? std::move(engine) : nullptr;
}

}  // namespace spillway

#else

namespace spillway {

bool uring_available() { return false; }

std::unique_ptr<IoEngine> open_uring_engine(int32_t, int32_t, spillway_io_call, void*) { return nullptr; }

}  // namespace spillway

#endif
