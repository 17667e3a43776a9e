// The functions of libnccl that torch's process groups call, over TCP: every rank is a process, and a communicator has
// a connection of its own between each two of its ranks.
//
// An operation is work of its stream. Operations of one communicator run one after another in the order in which they
// were given, also those on different streams: each takes a ticket, and its work waits for the tickets before it. The
// judge learns nothing from that order. Messages of one operation or group move concurrently.
//
// Sums are made in the order of the ranks, float16 and bfloat16 in float32, and rounded once at the end; an average is
// the sum divided by the number of ranks. The real library adds in another order.
//
// Each message has a header that says what its sender does. If that is not what the receiver does, or if a connection
// is closed, the communicator has failed: its operations end without results, and ncclCommGetAsyncError reports it.
//
// Environment: FAKE_NCCL_INIT_SECONDS (init_seconds), FAKE_NCCL_HOST and NCCL_SOCKET_IFNAME (own_address),
// FAKE_NCCL_HANG (fail).
#include <arpa/inet.h>
#include <fcntl.h>
#include <ifaddrs.h>
#include <nccl.h>
#include <net/if.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <random>
#include <sstream>
#include <type_traits>
#include <utility>

#include "device.h"

#define API extern "C" __attribute__((visibility("default")))

using fake::count;
using fake::Device;
using fake::Range;
using fake::Settings;

namespace {

using Time = std::chrono::steady_clock::time_point;

constexpr int kHelloSeconds = 5;  // for a process that has connected to say who it is
constexpr int kSeenSeconds = 2;   // for a watchdog to see a failure before the work that failed ends

// The last error of this process, for callers without a communicator.
struct LastError {
  std::mutex mutex;
  std::string text;
};

LastError& last_error() {
  static auto* const found = new LastError;
  return *found;
}

ncclResult_t failed(ncclResult_t result, const std::string& text) {
  std::lock_guard<std::mutex> lock(last_error().mutex);
  last_error().text = text;
  return result;
}

Time after(double seconds) {
  return std::chrono::steady_clock::now() +
         std::chrono::duration_cast<std::chrono::nanoseconds>(std::chrono::duration<double>(seconds));
}

int milliseconds_until(Time time) {
  const auto left = std::chrono::duration_cast<std::chrono::milliseconds>(time - std::chrono::steady_clock::now());
  return static_cast<int>(std::clamp<long>(left.count(), 0, 1 << 30));
}

double init_seconds() {
  const char* text = std::getenv("FAKE_NCCL_INIT_SECONDS");
  return text ? std::atof(text) : 60;
}

// --- sockets ---------------------------------------------------------------------------------------------------------

class Socket {
 public:
  explicit Socket(int fd = -1) : fd_(fd) {}
  Socket(Socket&& other) noexcept : fd_(std::exchange(other.fd_, -1)) {}
  Socket& operator=(Socket&& other) noexcept {
    std::swap(fd_, other.fd_);
    return *this;
  }
  ~Socket() {
    if (fd_ >= 0) close(fd_);
  }
  int fd() const { return fd_; }
  bool is_open() const { return fd_ >= 0; }

  // Blocking, within the time limit of the last call of set_deadline.
  bool write_all(const void* data, size_t nbytes) const {
    for (size_t done = 0; done < nbytes;) {
      const ssize_t sent = send(fd_, static_cast<const char*>(data) + done, nbytes - done, MSG_NOSIGNAL);
      if (sent <= 0) return false;
      done += static_cast<size_t>(sent);
    }
    return true;
  }

  bool read_all(void* data, size_t nbytes) const { return recv(fd_, data, nbytes, MSG_WAITALL) == ssize_t(nbytes); }

  void set_deadline(Time deadline) const {
    const int left = std::max(1, milliseconds_until(deadline));
    const timeval limit{left / 1000, left % 1000 * 1000};
    setsockopt(fd_, SOL_SOCKET, SO_RCVTIMEO, &limit, sizeof limit);
    setsockopt(fd_, SOL_SOCKET, SO_SNDTIMEO, &limit, sizeof limit);  // also of connect()
  }

 private:
  int fd_;
};

Socket connected(const sockaddr_in& address, Time deadline) {
  Socket made(socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
  made.set_deadline(deadline);
  const int yes = 1;
  setsockopt(made.fd(), IPPROTO_TCP, TCP_NODELAY, &yes, sizeof yes);
  if (connect(made.fd(), reinterpret_cast<const sockaddr*>(&address), sizeof address) != 0) return Socket();
  return made;
}

Socket accepted(const Socket& listener, Time deadline) {
  pollfd waiting{listener.fd(), POLLIN, 0};
  if (poll(&waiting, 1, milliseconds_until(deadline)) != 1) return Socket();
  Socket made(accept4(listener.fd(), nullptr, nullptr, SOCK_CLOEXEC));
  const int yes = 1;
  setsockopt(made.fd(), IPPROTO_TCP, TCP_NODELAY, &yes, sizeof yes);
  made.set_deadline(std::min(deadline, after(kHelloSeconds)));
  return made;
}

// Whether the interface is one of the comma-separated `names`: prefixes, or whole names after "="; after "^", all
// others.
bool is_named(const std::string& interface, std::string names) {
  const bool others = names.rfind('^', 0) == 0, whole = names.rfind('=', others) == size_t(others);
  std::istringstream parts(names.substr(others + whole));
  for (std::string name; std::getline(parts, name, ',');)
    if (whole ? interface == name : interface.rfind(name, 0) == 0) return !others;
  return others;
}

// The IPv4 address at which other ranks reach this process: FAKE_NCCL_HOST, or that of the first interface that
// NCCL_SOCKET_IFNAME names, or 127.0.0.1. Returns false if there is none.
bool own_address(sockaddr_in* found) {
  *found = {};
  found->sin_family = AF_INET;
  const char *host = std::getenv("FAKE_NCCL_HOST"), *names = std::getenv("NCCL_SOCKET_IFNAME");
  if (host || !names || !*names) return inet_pton(AF_INET, host ? host : "127.0.0.1", &found->sin_addr) == 1;
  ifaddrs* all = nullptr;
  if (getifaddrs(&all) != 0) return false;
  bool is_found = false;
  for (ifaddrs* one = all; one && !is_found; one = one->ifa_next) {
    const bool is_ipv4 = one->ifa_addr && one->ifa_addr->sa_family == AF_INET;
    if (!is_ipv4 || !(one->ifa_flags & IFF_UP) || !is_named(one->ifa_name, names)) continue;
    found->sin_addr = reinterpret_cast<sockaddr_in*>(one->ifa_addr)->sin_addr;
    is_found = true;
  }
  freeifaddrs(all);
  return is_found;
}

// A socket that listens at `address`, whose port is set.
Socket listening(sockaddr_in* address) {
  if (!own_address(address)) return Socket();
  Socket made(socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
  socklen_t size = sizeof *address;
  auto* any = reinterpret_cast<sockaddr*>(address);
  if (bind(made.fd(), any, size) != 0 || listen(made.fd(), SOMAXCONN) != 0) return Socket();
  getsockname(made.fd(), any, &size);
  return made;
}

// --- the ranks meet --------------------------------------------------------------------------------------------------

struct Id {  // the content of an ncclUniqueId
  uint64_t secret;
  sockaddr_in address;  // of the process that made it
};
static_assert(sizeof(Id) <= sizeof(ncclUniqueId));

struct Hello {
  uint64_t secret;
  int32_t rank, num_ranks;
  sockaddr_in address;
};

// Tells all ranks the addresses of all ranks, once every rank has come. Gives up at the deadline.
void introduce(const Socket& listener, uint64_t secret, Time deadline) {
  std::vector<Hello> hellos;
  std::vector<Socket> sockets;
  for (size_t missing = 1; missing;) {
    Socket socket = accepted(listener, deadline);
    if (!socket.is_open()) return;
    Hello hello;
    if (!socket.read_all(&hello, sizeof hello) || hello.secret != secret) continue;
    if (hellos.empty()) {
      hellos.resize(static_cast<size_t>(hello.num_ranks));
      sockets.resize(hellos.size());
      missing = hellos.size();
    }
    const auto rank = static_cast<size_t>(hello.rank);
    if (hello.num_ranks != static_cast<int>(hellos.size()) || sockets[rank].is_open()) continue;
    hellos[rank] = hello;
    sockets[rank] = std::move(socket);
    --missing;
  }
  for (const Socket& socket : sockets) socket.write_all(hellos.data(), hellos.size() * sizeof(Hello));
}

ncclResult_t make_id(Id* id) {
  *id = {};
  std::random_device random;
  id->secret = uint64_t{random()} << 32 | random();
  if (Settings::get().is_virtual) return ncclSuccess;
  auto listener = std::make_shared<Socket>(listening(&id->address));
  if (!listener->is_open()) return failed(ncclSystemError, "the interface for the ranks to meet has no address");
  std::thread([listener, secret = id->secret] { introduce(*listener, secret, after(init_seconds())); }).detach();
  return ncclSuccess;
}

// Fills `peers`, by rank, with a connection to each other rank.
ncclResult_t meet(const Id& id, int rank, std::vector<Socket>* peers) {
  const double seconds = init_seconds();
  const Time deadline = after(seconds);
  const std::string who = "rank " + std::to_string(rank) + " of " + std::to_string(peers->size()) + ": ";
  const auto gone = [&] {
    const bool is_late = milliseconds_until(deadline) == 0;
    const std::string late = "not all ranks have come within " + std::to_string(static_cast<int>(seconds)) + " s";
    return failed(ncclRemoteError, who + (is_late ? late : "another rank has ended before all ranks were connected"));
  };
  Hello mine{id.secret, rank, static_cast<int>(peers->size()), {}};
  const Socket listener = listening(&mine.address);
  if (!listener.is_open()) return failed(ncclSystemError, who + "the interface for the ranks to meet has no address");
  const Socket root = connected(id.address, deadline);
  if (!root.is_open()) return failed(ncclSystemError, who + "cannot connect to the process that made the unique id");
  std::vector<Hello> all(peers->size());
  if (!root.write_all(&mine, sizeof mine) || !root.read_all(all.data(), all.size() * sizeof(Hello))) return gone();
  for (int lower = 0; lower < rank; ++lower) {
    Socket& peer = (*peers)[lower] = connected(all[lower].address, deadline);
    if (!peer.is_open() || !peer.write_all(&mine, sizeof mine)) return gone();
  }
  for (int missing = mine.num_ranks - 1 - rank; missing;) {
    Socket peer = accepted(listener, deadline);
    if (!peer.is_open()) return gone();
    Hello hello;
    if (!peer.read_all(&hello, sizeof hello) || hello.secret != id.secret) continue;
    (*peers)[hello.rank] = std::move(peer);
    --missing;
  }
  for (const Socket& peer : *peers)
    if (peer.is_open()) fcntl(peer.fd(), F_SETFL, O_NONBLOCK);
  return ncclSuccess;
}

// --- element types and reductions ------------------------------------------------------------------------------------

const char* const kTypeNames[] = {"int8",    "uint8",   "int32",   "uint32",   "int64",      "uint64",
                                  "float16", "float32", "float64", "bfloat16", "float8e4m3", "float8e5m2"};
const size_t kTypeBytes[] = {1, 1, 4, 4, 8, 8, 2, 4, 8, 2, 1, 1};

struct Reduction {
  ncclRedOp_t kind = ncclSum;
  bool has_factor = false;
  double factor = 1;                    // by which each rank's values are multiplied
  const void* device_factor = nullptr;  // if set, where the factor is when the operation runs
};

template <class T>
using wide_t = std::conditional_t<std::is_arithmetic_v<T>, T, float>;

float widened(__half value) { return __half2float(value); }
float widened(__nv_bfloat16 value) { return __bfloat162float(value); }
template <class T>
T widened(T value) {
  return value;
}

void narrow(__half* to, float value) { *to = __float2half_rn(value); }
void narrow(__nv_bfloat16* to, float value) { *to = __float2bfloat16_rn(value); }
template <class T>
void narrow(T* to, T value) {
  *to = value;
}

template <class W>
W combined(ncclRedOp_t kind, W a, W b) {
  if constexpr (std::is_integral_v<W>) {  // wraps around
    using U = std::make_unsigned_t<W>;
    if (kind == ncclProd) return static_cast<W>(static_cast<U>(a) * static_cast<U>(b));
    if (kind != ncclMax && kind != ncclMin) return static_cast<W>(static_cast<U>(a) + static_cast<U>(b));
  }
  switch (kind) {
    case ncclProd: return a * b;
    case ncclMax: return a < b ? b : a;
    case ncclMin: return b < a ? b : a;
    default: return a + b;
  }
}

// `blocks`: the values of each rank, by rank. `out` may be one of them.
template <class T>
void reduce(const std::vector<const char*>& blocks, char* out, size_t number, Reduction how) {
  using W = wide_t<T>;
  W factor = static_cast<W>(how.factor);
  if (how.device_factor) factor = widened(*static_cast<const T*>(how.device_factor));
  for (size_t i = 0; i < number; ++i) {
    W sum{};
    for (size_t rank = 0; rank < blocks.size(); ++rank) {
      W value = widened(reinterpret_cast<const T*>(blocks[rank])[i]);
      if (how.has_factor) value *= factor;
      sum = rank ? combined(how.kind, sum, value) : value;
    }
    if (how.kind == ncclAvg) sum = static_cast<W>(sum / static_cast<W>(blocks.size()));
    narrow(reinterpret_cast<T*>(out) + i, sum);
  }
}

void reduce(ncclDataType_t type, const std::vector<const char*>& blocks, char* out, size_t number, Reduction how) {
  switch (type) {
    case ncclInt8: return reduce<int8_t>(blocks, out, number, how);
    case ncclUint8: return reduce<uint8_t>(blocks, out, number, how);
    case ncclInt32: return reduce<int32_t>(blocks, out, number, how);
    case ncclUint32: return reduce<uint32_t>(blocks, out, number, how);
    case ncclInt64: return reduce<int64_t>(blocks, out, number, how);
    case ncclUint64: return reduce<uint64_t>(blocks, out, number, how);
    case ncclFloat16: return reduce<__half>(blocks, out, number, how);
    case ncclFloat32: return reduce<float>(blocks, out, number, how);
    case ncclFloat64: return reduce<double>(blocks, out, number, how);
    case ncclBfloat16: return reduce<__nv_bfloat16>(blocks, out, number, how);
    default: return;  // rejected by give()
  }
}

// --- operations ------------------------------------------------------------------------------------------------------

enum Kind : uint32_t {
  kAllGather, kReduceScatter, kAllReduce, kBroadcast, kReduce, kAllToAll, kGather, kScatter, kSend, kReceive, kSplit,
};
const char* const kKindNames[] = {"all-gather", "reduce-scatter", "all-reduce", "broadcast", "reduce", "all-to-all",
                                  "gather",     "scatter",        "send",       "receive",   "split"};

struct Operation {
  Kind kind;
  const void* from;
  void* to;
  size_t number;  // of elements of a block, as NCCL counts them
  ncclDataType_t type;
  int root = -1;  // or the peer of a send or receive
  Reduction how = {};
  uint64_t turn = 0;  // the number of collectives before it, or of sends to (receives from) its peer

  size_t nbytes() const { return number * kTypeBytes[type]; }
  bool is_between_two() const { return kind == kSend || kind == kReceive; }
  bool reduces() const { return kind == kAllReduce || kind == kReduceScatter || kind == kReduce; }
};

struct Header {  // before every message
  uint32_t kind, type;
  int32_t rank, root, how, unused;
  uint64_t turn, number, nbytes;
};

Header header_of(const Operation& operation, int rank, size_t nbytes) {
  const int how = operation.how.has_factor ? ncclNumOps : operation.how.kind;
  return {operation.kind, operation.type, rank, operation.root, how, 0, operation.turn, operation.number, nbytes};
}

std::string described(const Header& header) {
  const char* const hows[] = {"", " (product)", " (maximum)", " (minimum)", " (average)", " (scaled sum)"};
  std::string text = std::string(kKindNames[header.kind]) + " of " + std::to_string(header.number) + " " +
                     kTypeNames[header.type] + hows[header.how];
  const bool is_to_root = header.kind == kSend || header.kind == kReduce || header.kind == kGather;
  if (header.root >= 0) text += (is_to_root ? " to rank " : " from rank ") + std::to_string(header.root);
  return text;
}

struct Message {
  Header header;  // that is sent, or that must come
  char* data;     // of header.nbytes
  Header met{};   // that has come
  size_t done = 0;
};

// Messages that move at the same time.
struct Phase {
  explicit Phase(size_t num_ranks) : out(num_ranks), in(num_ranks) {}

  std::vector<std::deque<Message>> out, in;  // by peer
  std::vector<std::function<void()>> finish;
  std::deque<std::vector<char>> memory;

  char* scratch(size_t nbytes) { return memory.emplace_back(nbytes).data(); }
};

// The first element of block `index`, if `number` elements are divided among `num_blocks`.
size_t cut(size_t number, size_t num_blocks, size_t index) { return number * index / num_blocks; }

}  // namespace

struct ncclComm : std::enable_shared_from_this<ncclComm> {
  ncclComm(int rank, int size, int device) : rank(rank), size(size), device(device) {}

  const int rank, size, device;
  std::vector<Socket> peers;                   // by rank
  std::shared_ptr<ncclComm> self;              // until it is destroyed
  const Socket wake{eventfd(0, EFD_CLOEXEC)};  // is readable once it is aborted

  std::mutex mutex;  // of all that follows
  std::condition_variable changed;
  long num_given = 0, num_done = 0;
  bool is_aborted = false, is_seen = false;
  ncclResult_t error = ncclSuccess;
  std::string text;  // of the error
  uint64_t num_collectives = 0;
  std::vector<uint64_t> num_sent, num_received;  // by peer
  std::map<int, Reduction> reductions;           // made by ncclRedOpCreatePreMulSum

  // Operations of one call or group, on the thread of their stream.
  void run(long ticket, const std::vector<Operation>& operations) {
    std::unique_lock<std::mutex> lock(mutex);
    changed.wait(lock, [&] { return num_done >= ticket || is_aborted; });
    if (!is_over()) {
      lock.unlock();
      if (exchange(sending(operations))) exchange(spreading(operations));
      lock.lock();
      if (error != ncclSuccess)
        changed.wait_until(lock, after(kSeenSeconds), [&] { return is_seen || is_aborted; });
    }
    ++num_done;
    changed.notify_all();
  }

  long take_ticket() {
    std::lock_guard<std::mutex> lock(mutex);
    return num_given++;
  }

  // An all-gather of values of the host, on the calling thread.
  template <class T>
  bool gather(T mine, std::vector<T>* all) {
    all->resize(static_cast<size_t>(size));
    Operation one{kSplit, &mine, all->data(), sizeof mine, ncclUint8};
    {
      std::lock_guard<std::mutex> lock(mutex);
      one.turn = num_collectives++;
    }
    run(take_ticket(), {one});
    std::lock_guard<std::mutex> lock(mutex);
    return !is_over();
  }

  void finish() {
    std::unique_lock<std::mutex> lock(mutex);
    changed.wait(lock, [&] { return num_done >= num_given || is_over(); });
  }

  void abort() {
    {
      std::lock_guard<std::mutex> lock(mutex);
      is_aborted = true;
    }
    changed.notify_all();
    const uint64_t one = 1;
    if (write(wake.fd(), &one, sizeof one) < 0) perror("the fake NCCL cannot abort");
    leave();
  }

  ncclResult_t state() {
    std::lock_guard<std::mutex> lock(mutex);
    return error;
  }

 private:
  bool is_over() const { return is_aborted || error != ncclSuccess; }

  void leave() {  // the peers' operations fail
    for (const Socket& peer : peers)
      if (peer.is_open()) shutdown(peer.fd(), SHUT_RDWR);
  }

  // With FAKE_NCCL_HANG set, an operation whose peer is lost does not fail but waits until it is aborted.
  bool fail(ncclResult_t result, const std::string& why) {
    const char* hangs = std::getenv("FAKE_NCCL_HANG");
    if (result == ncclRemoteError && hangs && std::atoi(hangs)) {
      std::unique_lock<std::mutex> lock(mutex);
      changed.wait(lock, [&] { return is_aborted; });
      return false;
    }
    {
      std::lock_guard<std::mutex> lock(mutex);
      if (is_over()) return false;
      error = failed(result, why);
      text = why;
    }
    leave();
    return false;
  }

  bool lost(int peer, const Header& header) {
    const std::string us = "rank " + std::to_string(rank), them = "rank " + std::to_string(peer);
    return fail(ncclRemoteError, us + ": the connection to " + them + " was closed in " + described(header));
  }

  bool mismatch(const Header& ours, const Header& theirs) {
    const bool are_alike = described(ours) == described(theirs);
    const auto named = [&](int who, const Header& header) {
      const std::string text = "rank " + std::to_string(who) + " " + described(header);
      return are_alike ? text + " as number " + std::to_string(header.turn) : text;
    };
    const std::string us = named(rank, ours), them = named(theirs.rank, theirs);
    return fail(ncclInvalidUsage, rank < theirs.rank ? us + " met " + them : them + " met " + us);
  }

  // The first messages of every operation.
  Phase sending(const std::vector<Operation>& operations) {
    Phase phase(static_cast<size_t>(size));
    std::deque<const Operation*> to_self;
    const size_t n = static_cast<size_t>(size), me = static_cast<size_t>(rank);
    for (const Operation& one : operations) {
      const auto* const from = static_cast<const char*>(one.from);
      auto* const to = static_cast<char*>(one.to);
      const size_t nbytes = one.nbytes(), width = kTypeBytes[one.type], root = static_cast<size_t>(one.root);
      const auto send = [&](size_t peer, const char* data, size_t part) {
        phase.out[peer].push_back({header_of(one, rank, part), const_cast<char*>(data)});
      };
      const auto receive = [&](size_t peer, char* data, size_t part) {
        phase.in[peer].push_back({header_of(one, static_cast<int>(peer), part), data});
      };
      const auto copy = [&](char* into, const char* data, size_t part) {
        if (part && into != data) phase.finish.push_back([=] { memmove(into, data, part); });
      };
      // Receives a block of every rank; `mine` is that of this rank.
      const auto sum = [&](const char* mine, char* into, size_t number) {
        std::vector<const char*> blocks(n, mine);
        for (size_t peer = 0; peer < n; ++peer) {
          if (peer == me) continue;
          char* const block = phase.scratch(number * width);
          receive(peer, block, number * width);
          blocks[peer] = block;
        }
        phase.finish.push_back([=, type = one.type, how = one.how] { reduce(type, blocks, into, number, how); });
      };
      const auto others = [&](auto&& each) {
        for (size_t step = 1; step < n; ++step) each((me + step) % n);
      };
      switch (one.kind) {
        case kAllGather:
        case kSplit:
          others([&](size_t peer) {
            send(peer, from, nbytes);
            receive(peer, to + peer * nbytes, nbytes);
          });
          copy(to + me * nbytes, from, nbytes);
          break;
        case kReduceScatter:
          others([&](size_t peer) { send(peer, from + peer * nbytes, nbytes); });
          sum(from + me * nbytes, to, one.number);
          break;
        case kAllReduce: {  // this phase reduces one block on each rank, the next one spreads the blocks
          const auto first = [&](size_t peer) { return cut(one.number, n, peer); };
          others([&](size_t peer) { send(peer, from + first(peer) * width, (first(peer + 1) - first(peer)) * width); });
          sum(from + first(me) * width, to + first(me) * width, first(me + 1) - first(me));
          break;
        }
        case kBroadcast:
          if (me == root) {
            others([&](size_t peer) { send(peer, from, nbytes); });
            copy(to, from, nbytes);
          } else {
            receive(root, to, nbytes);
          }
          break;
        case kReduce:
          if (me == root)
            sum(from, to, one.number);
          else
            send(root, from, nbytes);
          break;
        case kAllToAll:
          others([&](size_t peer) {
            send(peer, from + peer * nbytes, nbytes);
            receive(peer, to + peer * nbytes, nbytes);
          });
          copy(to + me * nbytes, from + me * nbytes, nbytes);
          break;
        case kGather:
          if (me == root) {
            others([&](size_t peer) { receive(peer, to + peer * nbytes, nbytes); });
            copy(to + me * nbytes, from, nbytes);
          } else {
            send(root, from, nbytes);
          }
          break;
        case kScatter:
          if (me == root) {
            others([&](size_t peer) { send(peer, from + peer * nbytes, nbytes); });
            copy(to, from + me * nbytes, nbytes);
          } else {
            receive(root, to, nbytes);
          }
          break;
        case kSend:
        case kReceive:
          if (root != me) {
            one.kind == kSend ? send(root, from, nbytes) : receive(root, to, nbytes);
          } else if (to_self.empty() || to_self.front()->kind == one.kind) {
            to_self.push_back(&one);
          } else {
            const Operation& other = *to_self.front();
            to_self.pop_front();
            const bool sends = one.kind == kSend;
            copy(static_cast<char*>(sends ? other.to : one.to), static_cast<const char*>(sends ? one.from : other.from),
                 nbytes);
          }
          break;
      }
    }
    return phase;
  }

  // The second messages of all-reduces.
  Phase spreading(const std::vector<Operation>& operations) {
    Phase phase(static_cast<size_t>(size));
    for (const Operation& one : operations) {
      if (one.kind != kAllReduce) continue;
      const auto part = [&](int peer, Message* message) {
        const size_t n = static_cast<size_t>(size), width = kTypeBytes[one.type];
        const size_t first = cut(one.number, n, peer), end = cut(one.number, n, peer + 1);
        *message = {header_of(one, peer, (end - first) * width), static_cast<char*>(one.to) + first * width};
      };
      for (int peer = 0; peer < size; ++peer) {
        if (peer == rank) continue;
        part(rank, &phase.out[peer].emplace_back());
        part(peer, &phase.in[peer].emplace_back());
      }
    }
    return phase;
  }

  // Returns false if the communicator has failed or was aborted.
  bool exchange(Phase phase) {
    std::vector<pollfd> waiting;
    std::vector<int> of;
    while (true) {
      waiting.assign(1, {wake.fd(), POLLIN, 0});
      of.assign(1, rank);
      for (int peer = 0; peer < size; ++peer) {
        const int events = (phase.out[peer].empty() ? 0 : POLLOUT) | (phase.in[peer].empty() ? 0 : POLLIN);
        if (!events) continue;
        waiting.push_back({peers[peer].fd(), static_cast<short>(events), 0});
        of.push_back(peer);
      }
      if (of.size() == 1) break;
      if (poll(waiting.data(), waiting.size(), -1) < 0 && errno != EINTR) return fail(ncclSystemError, "poll failed");
      if (waiting[0].revents) return false;
      for (size_t i = 1; i < of.size(); ++i)  // before a mismatch is found here, so that the peers find it, too
        if (waiting[i].revents & ~POLLIN && !send_some(of[i], phase.out[of[i]])) return false;
      for (size_t i = 1; i < of.size(); ++i)
        if (waiting[i].revents & ~POLLOUT && !receive_some(of[i], phase.in[of[i]])) return false;
    }
    for (const auto& finish : phase.finish) finish();
    return true;
  }

  // Moves a part of the header or of the data by `move`, which returns its bytes; `done` counts both.
  template <class Move>
  static ssize_t moved(Message& message, Header* header, const Move& move) {
    const size_t done = message.done;
    const ssize_t number = done < sizeof(Header)
                               ? move(reinterpret_cast<char*>(header) + done, sizeof(Header) - done)
                               : move(message.data + (done - sizeof(Header)), whole_bytes(message) - done);
    if (number > 0) message.done += static_cast<size_t>(number);
    return number;
  }

  static size_t whole_bytes(const Message& message) { return sizeof(Header) + message.header.nbytes; }

  bool send_some(int peer, std::deque<Message>& messages) {
    while (!messages.empty()) {
      Message& message = messages.front();
      const ssize_t sent = moved(message, &message.header, [&](const char* data, size_t nbytes) {
        return send(peers[peer].fd(), data, nbytes, MSG_NOSIGNAL);
      });
      if (sent < 0 && (errno == EAGAIN || errno == EINTR)) return true;
      if (sent < 0) return lost(peer, message.header);
      if (message.done == whole_bytes(message)) messages.pop_front();
    }
    return true;
  }

  bool receive_some(int peer, std::deque<Message>& messages) {
    while (!messages.empty()) {
      Message& message = messages.front();
      const ssize_t came = moved(message, &message.met, [&](char* data, size_t nbytes) {
        return recv(peers[peer].fd(), data, nbytes, 0);
      });
      if (came < 0 && (errno == EAGAIN || errno == EINTR)) return true;
      if (came <= 0) return lost(peer, message.header);
      if (message.done == sizeof(Header) && !is_expected(message)) return mismatch(message.header, message.met);
      if (message.done == whole_bytes(message)) messages.pop_front();
    }
    return true;
  }

  bool is_expected(const Message& message) const {
    Header expected = message.header;
    if (expected.kind == kReceive) {
      expected.kind = kSend;
      expected.root = rank;
    }
    return memcmp(&expected, &message.met, sizeof expected) == 0;
  }
};

namespace {

// --- calls and groups ------------------------------------------------------------------------------------------------

struct Batch {  // what is given to a stream as one piece of work
  ncclComm_t comm;
  cudaStream_t stream;
  std::vector<Operation> operations;
};

thread_local int group_depth = 0;
thread_local std::vector<Batch> group;

// Number of bytes that this rank sends over the network.
size_t sent_bytes(const ncclComm& comm, const Operation& one) {
  const size_t others = static_cast<size_t>(comm.size) - 1, nbytes = one.nbytes(), n = others + 1;
  const bool is_root = comm.rank == one.root;
  switch (one.kind) {
    case kAllReduce: {
      const size_t mine = cut(one.number, n, comm.rank + 1) - cut(one.number, n, comm.rank);
      return (one.number - mine + others * mine) * kTypeBytes[one.type];
    }
    case kBroadcast:
    case kScatter: return is_root ? others * nbytes : 0;
    case kReduce:
    case kGather:
    case kSend: return is_root ? 0 : nbytes;
    case kReceive: return 0;
    default: return others * nbytes;
  }
}

void ranges_of(const ncclComm& comm, const Operation& one, std::vector<Range>* reads, std::vector<Range>* writes) {
  const size_t nbytes = one.nbytes(), all = nbytes * static_cast<size_t>(comm.size);
  const bool is_root = comm.rank == one.root;
  const bool reads_all = one.kind == kReduceScatter || one.kind == kAllToAll || one.kind == kScatter;
  const bool writes_all = one.kind == kAllGather || one.kind == kAllToAll || one.kind == kGather;
  const bool reads_any = one.kind == kBroadcast || one.kind == kScatter ? is_root : one.kind != kReceive;
  const bool writes_any = one.kind == kReduce || one.kind == kGather ? is_root : one.kind != kSend;
  if (reads_any) reads->push_back({one.from, reads_all ? all : nbytes});
  if (writes_any) writes->push_back({one.to, writes_all ? all : nbytes});
  if (one.how.device_factor) reads->push_back({one.how.device_factor, kTypeBytes[one.type]});
}

void put(const Batch& batch) {
  ncclComm& comm = *batch.comm;
  std::vector<Range> reads, writes;
  for (const Operation& one : batch.operations) {
    const std::string name = std::string("nccl ") + kKindNames[one.kind];
    count(name);
    if (const size_t nbytes = sent_bytes(comm, one)) count(name + " bytes", static_cast<long>(nbytes));
    ranges_of(comm, one, &reads, &writes);
  }
  count("nccl launches");
  std::string label = "nccl " + described(header_of(batch.operations[0], comm.rank, 0));
  if (const size_t more = batch.operations.size() - 1) label += " and " + std::to_string(more) + " more";
  std::function<void()> work = [] {};
  if (!Settings::get().is_virtual)
    work = [held = comm.shared_from_this(), ticket = comm.take_ticket(), operations = batch.operations] {
      held->run(ticket, operations);
    };
  fake::stream_of(batch.stream).put(work, reads, writes, label, true);
}

ncclResult_t end_group() {
  std::vector<Batch> all;
  std::swap(all, group);
  for (const Batch& batch : all) put(batch);
  return ncclSuccess;
}

ncclResult_t give(Operation one, ncclComm_t comm, cudaStream_t stream, int how = ncclSum) {
  if (!comm) return failed(ncclInvalidArgument, "the communicator is null");
  if (one.type < 0 || one.type >= ncclNumTypes) return failed(ncclInvalidArgument, "there is no such element type");
  if (one.reduces() && one.type >= ncclFloat8e4m3)
    return failed(ncclInvalidArgument, "the fake does not reduce float8");
  if (one.root >= comm->size) return failed(ncclInvalidArgument, "there is no rank " + std::to_string(one.root));
  if (fake::stream_of(stream).device != comm->device)
    return failed(ncclInvalidArgument, "the stream is of another device than the communicator");
  std::vector<Range> ranges;
  ranges_of(*comm, one, &ranges, &ranges);
  for (const Range& range : ranges)
    if (range.nbytes && fake::places().device_of(range.address) != comm->device &&
        !fake::places().is_registered(range.address, range.nbytes))
      return failed(ncclInvalidArgument, std::string(kKindNames[one.kind]) + " of memory that is not the device's");
  {
    std::lock_guard<std::mutex> lock(comm->mutex);
    if (comm->is_aborted) return failed(ncclInvalidUsage, "the communicator was aborted");
    if (comm->error != ncclSuccess) return comm->error;
    const auto made = comm->reductions.find(how);
    if (how >= ncclNumOps && made == comm->reductions.end())
      return failed(ncclInvalidArgument, "there is no such reduction");
    one.how = made == comm->reductions.end() ? Reduction{static_cast<ncclRedOp_t>(how)} : made->second;
    one.turn = one.kind == kSend      ? comm->num_sent[one.root]++
               : one.kind == kReceive ? comm->num_received[one.root]++
                                      : comm->num_collectives++;
  }
  auto found = std::find_if(group.begin(), group.end(),
                            [&](const Batch& batch) { return batch.comm == comm && batch.stream == stream; });
  if (found == group.end()) found = group.insert(group.end(), {comm, stream, {}});
  found->operations.push_back(one);
  return group_depth ? ncclSuccess : end_group();
}

ncclResult_t join(ncclComm_t* made, const Id& id, int size, int rank) {
  if (rank < 0 || rank >= size) return failed(ncclInvalidArgument, "there is no such rank");
  Device::current().use("ncclCommInitRank");
  count("nccl communicators");
  auto comm = std::make_shared<ncclComm>(rank, size, Device::current_index());
  comm->peers.resize(static_cast<size_t>(size));
  comm->num_sent.resize(static_cast<size_t>(size));
  comm->num_received.resize(static_cast<size_t>(size));
  if (!Settings::get().is_virtual && size > 1)
    if (const ncclResult_t result = meet(id, rank, &comm->peers)) return result;
  comm->self = comm;
  *made = comm.get();
  return ncclSuccess;
}

Id id_of(const ncclUniqueId& id) {
  Id found;
  memcpy(&found, &id, sizeof found);
  return found;
}

double number_at(const void* scalar, ncclDataType_t type) {
  switch (type) {
    case ncclFloat16: return widened(*static_cast<const __half*>(scalar));
    case ncclBfloat16: return widened(*static_cast<const __nv_bfloat16*>(scalar));
    case ncclFloat32: return *static_cast<const float*>(scalar);
    default: return *static_cast<const double*>(scalar);
  }
}

}  // namespace

// --- communicators ---------------------------------------------------------------------------------------------------

API ncclResult_t ncclGetVersion(int* version) { return *version = NCCL_VERSION_CODE, ncclSuccess; }

API ncclResult_t ncclGetUniqueId(ncclUniqueId* made) {
  Id id;
  const ncclResult_t result = make_id(&id);
  memset(made, 0, sizeof *made);
  memcpy(made, &id, sizeof id);
  return result;
}

API ncclResult_t ncclCommInitRank(ncclComm_t* comm, int size, ncclUniqueId id, int rank) {
  return join(comm, id_of(id), size, rank);
}

API ncclResult_t ncclCommInitRankConfig(ncclComm_t* comm, int size, ncclUniqueId id, int rank, ncclConfig_t*) {
  return join(comm, id_of(id), size, rank);
}

API ncclResult_t ncclCommInitRankScalable(ncclComm_t* comm, int size, int rank, int, ncclUniqueId* ids, ncclConfig_t*) {
  return join(comm, id_of(ids[0]), size, rank);
}

// Where memory is virtual and there are no peers, all ranks are taken to have this rank's color.
API ncclResult_t ncclCommSplit(ncclComm_t comm, int color, int key, ncclComm_t* made, ncclConfig_t*) {
  *made = nullptr;
  count("nccl split");
  using Member = std::pair<int, std::pair<int, int>>;  // color, key, rank
  std::vector<Member> all;
  std::vector<Id> ids(1);
  if (Settings::get().is_virtual) {
    for (int rank = 0; rank < comm->size; ++rank) all.push_back({color, {rank, rank}});
  } else if (!comm->gather(Member{color, {key, comm->rank}}, &all)) {
    return comm->state();
  }
  all.erase(std::remove_if(all.begin(), all.end(), [&](auto& one) { return one.first != color; }), all.end());
  std::sort(all.begin(), all.end());
  const auto mine = std::find_if(all.begin(), all.end(), [&](auto& one) { return one.second.second == comm->rank; });
  const int rank = static_cast<int>(mine - all.begin()), root = all[0].second.second;
  Id id{};
  if (rank == 0 && color >= 0)
    if (const ncclResult_t result = make_id(&id)) return result;
  if (!Settings::get().is_virtual && !comm->gather(id, &ids)) return comm->state();
  return color < 0 ? ncclSuccess : join(made, ids[ids.size() > 1 ? root : 0], static_cast<int>(all.size()), rank);
}

API ncclResult_t ncclCommCount(const ncclComm_t comm, int* size) { return *size = comm->size, ncclSuccess; }
API ncclResult_t ncclCommUserRank(const ncclComm_t comm, int* rank) { return *rank = comm->rank, ncclSuccess; }
API ncclResult_t ncclCommCuDevice(const ncclComm_t comm, int* device) { return *device = comm->device, ncclSuccess; }

API ncclResult_t ncclCommGetAsyncError(ncclComm_t comm, ncclResult_t* error) {
  {
    std::lock_guard<std::mutex> lock(comm->mutex);
    *error = comm->error;
    comm->is_seen = comm->error != ncclSuccess;
  }
  comm->changed.notify_all();
  return ncclSuccess;
}

API ncclResult_t ncclCommFinalize(ncclComm_t comm) {
  comm->finish();
  return comm->state();
}

API ncclResult_t ncclCommDestroy(ncclComm_t comm) {
  if (!comm) return ncclSuccess;
  const ncclResult_t result = ncclCommFinalize(comm);
  comm->self = nullptr;
  return result;
}

// Work that is still pending ends. The communicator stays, because other threads may be in calls with it.
API ncclResult_t ncclCommAbort(ncclComm_t comm) {
  if (!comm) return ncclSuccess;
  count("nccl communicators aborted");
  comm->abort();
  return ncclSuccess;
}

API const char* ncclGetErrorString(ncclResult_t result) {
  switch (result) {
    case ncclSuccess: return "no error";
    case ncclUnhandledCudaError: return "unhandled cuda error";
    case ncclSystemError: return "unhandled system error";
    case ncclInternalError: return "internal error";
    case ncclInvalidArgument: return "invalid argument";
    case ncclInvalidUsage: return "invalid usage";
    case ncclRemoteError: return "remote process exited or there was a network error";
    case ncclInProgress: return "NCCL operation in progress";
    default: return "unknown result code";
  }
}

API const char* ncclGetLastError(ncclComm_t comm) {
  thread_local std::string text;
  text.clear();
  if (comm) {
    std::lock_guard<std::mutex> lock(comm->mutex);
    text = comm->text;
  }
  std::lock_guard<std::mutex> lock(last_error().mutex);
  if (text.empty()) text = last_error().text;
  return text.c_str();
}

API ncclResult_t ncclCommRegister(const ncclComm_t, void* memory, size_t, void** handle) {
  return *handle = memory, ncclSuccess;
}

API ncclResult_t ncclCommDeregister(const ncclComm_t, void*) { return ncclSuccess; }

API ncclResult_t ncclMemAlloc(void** memory, size_t nbytes) {
  return cudaMalloc(memory, nbytes) == cudaSuccess ? ncclSuccess : ncclUnhandledCudaError;
}

API ncclResult_t ncclMemFree(void* memory) {
  return cudaFree(memory) == cudaSuccess ? ncclSuccess : ncclUnhandledCudaError;
}

API ncclResult_t ncclRedOpCreatePreMulSum(ncclRedOp_t* made, void* scalar, ncclDataType_t type,
                                          ncclScalarResidence_t residence, ncclComm_t comm) {
  if (type < ncclFloat16 || type > ncclBfloat16) return failed(ncclInvalidArgument, "a factor must be a float");
  Reduction how{ncclSum, true, 1, nullptr};
  if (residence == ncclScalarDevice)
    how.device_factor = scalar;
  else
    how.factor = number_at(scalar, type);
  std::lock_guard<std::mutex> lock(comm->mutex);
  const int number = comm->reductions.empty() ? ncclNumOps : comm->reductions.rbegin()->first + 1;
  comm->reductions[number] = how;
  *made = static_cast<ncclRedOp_t>(number);
  return ncclSuccess;
}

API ncclResult_t ncclRedOpDestroy(ncclRedOp_t made, ncclComm_t comm) {
  std::lock_guard<std::mutex> lock(comm->mutex);
  return comm->reductions.erase(static_cast<int>(made)) ? ncclSuccess : ncclInvalidArgument;
}

// --- operations ------------------------------------------------------------------------------------------------------

API ncclResult_t ncclGroupStart() { return ++group_depth, ncclSuccess; }

API ncclResult_t ncclGroupEnd() {
  if (group_depth == 0) return failed(ncclInvalidUsage, "a group ends that has not begun");
  return --group_depth ? ncclSuccess : end_group();
}

API ncclResult_t ncclAllGather(const void* from, void* to, size_t number, ncclDataType_t type, ncclComm_t comm,
                               cudaStream_t stream) {
  return give({kAllGather, from, to, number, type}, comm, stream);
}

API ncclResult_t ncclReduceScatter(const void* from, void* to, size_t number, ncclDataType_t type, ncclRedOp_t how,
                                   ncclComm_t comm, cudaStream_t stream) {
  return give({kReduceScatter, from, to, number, type}, comm, stream, how);
}

API ncclResult_t ncclAllReduce(const void* from, void* to, size_t number, ncclDataType_t type, ncclRedOp_t how,
                               ncclComm_t comm, cudaStream_t stream) {
  return give({kAllReduce, from, to, number, type}, comm, stream, how);
}

API ncclResult_t ncclBroadcast(const void* from, void* to, size_t number, ncclDataType_t type, int root,
                               ncclComm_t comm, cudaStream_t stream) {
  return give({kBroadcast, from, to, number, type, root}, comm, stream);
}

API ncclResult_t ncclBcast(void* memory, size_t number, ncclDataType_t type, int root, ncclComm_t comm,
                           cudaStream_t stream) {
  return ncclBroadcast(memory, memory, number, type, root, comm, stream);
}

API ncclResult_t ncclReduce(const void* from, void* to, size_t number, ncclDataType_t type, ncclRedOp_t how, int root,
                            ncclComm_t comm, cudaStream_t stream) {
  return give({kReduce, from, to, number, type, root}, comm, stream, how);
}

API ncclResult_t ncclAlltoAll(const void* from, void* to, size_t number, ncclDataType_t type, ncclComm_t comm,
                              cudaStream_t stream) {
  return give({kAllToAll, from, to, number, type}, comm, stream);
}

API ncclResult_t ncclGather(const void* from, void* to, size_t number, ncclDataType_t type, int root, ncclComm_t comm,
                            cudaStream_t stream) {
  return give({kGather, from, to, number, type, root}, comm, stream);
}

API ncclResult_t ncclScatter(const void* from, void* to, size_t number, ncclDataType_t type, int root, ncclComm_t comm,
                             cudaStream_t stream) {
  return give({kScatter, from, to, number, type, root}, comm, stream);
}

API ncclResult_t ncclSend(const void* from, size_t number, ncclDataType_t type, int peer, ncclComm_t comm,
                          cudaStream_t stream) {
  return give({kSend, from, nullptr, number, type, peer}, comm, stream);
}

API ncclResult_t ncclRecv(void* to, size_t number, ncclDataType_t type, int peer, ncclComm_t comm,
                          cudaStream_t stream) {
  return give({kReceive, nullptr, to, number, type, peer}, comm, stream);
}

// --- what torch refers to and the fake has not -----------------------------------------------------------------------

#define IS_MISSING(name)                          \
  API ncclResult_t missing_##name() __asm__(#name); \
  API ncclResult_t missing_##name() { return failed(ncclInvalidUsage, "the fake NCCL has no " #name); }

IS_MISSING(ncclCommGetUniqueId)
IS_MISSING(ncclCommGrow)
IS_MISSING(ncclCommInitAll)
IS_MISSING(ncclCommMemStats)
IS_MISSING(ncclCommResume)
IS_MISSING(ncclCommRevoke)
IS_MISSING(ncclCommShrink)
IS_MISSING(ncclCommSuspend)
IS_MISSING(ncclCommWindowDeregister)
IS_MISSING(ncclCommWindowRegister)
IS_MISSING(ncclDevCommCreate)
IS_MISSING(ncclDevCommDestroy)
IS_MISSING(ncclGetLsaMultimemDevicePointer)
IS_MISSING(ncclGetPeerDevicePointer)
IS_MISSING(ncclGroupSimulateEnd)
IS_MISSING(ncclPutSignal)
IS_MISSING(ncclSignal)
IS_MISSING(ncclWaitSignal)
IS_MISSING(ncclWinGetUserPtr)
