// Real files, fork, threads, and random faults: a transfer moves the right bytes or reports a failure. Arguments: the
// number of operations with random faults (default 10000) and the seed (default 1).
#include <errno.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstring>
#include <mutex>
#include <random>
#include <thread>
#include <vector>

#include "check.h"
#include "crc32c.h"
#include "spillway.h"

namespace {

constexpr uint64_t kExtent = 16384, kExtents = 32;

spillway_io* opened(int32_t file, int32_t queue_depth, spillway_io_call call = nullptr,
                    void* context = nullptr) {
  spillway_io* io = nullptr;
  CHECK(spillway_io_open(file, queue_depth, call, context, &io) == SPILLWAY_OK);
  return io;
}

// A file in memory that fails one call in a hundred, in one of five ways.
struct FaultyFile {
  std::vector<char> bytes = std::vector<char>(kExtent * kExtents);
  std::mt19937 random;
  std::mutex mutex;
  int64_t num_calls = 0, num_faults = 0;
  bool is_sound = false;

  explicit FaultyFile(uint32_t seed) : random(seed) {}

  int64_t call(int32_t direction, char* buffer, uint64_t nbytes, uint64_t offset) {
    std::lock_guard<std::mutex> lock(mutex);
    ++num_calls;
    uint32_t fault = random() % 500;
    if (is_sound) fault = 999;
    if (fault < 5) ++num_faults;
    if (fault == 0) return -EINTR;
    if (fault == 1) return -EIO;
    if (fault == 2) return -ENOSPC;
    if (fault == 3) nbytes = nbytes > 512 ? nbytes / 2 / 512 * 512 : nbytes;
    if (offset >= bytes.size()) return 0;
    nbytes = nbytes < bytes.size() - offset ? nbytes : bytes.size() - offset;
    char* dst = direction == SPILLWAY_WRITE ? bytes.data() + offset : buffer;
    std::memcpy(dst, direction == SPILLWAY_WRITE ? buffer : bytes.data() + offset, nbytes);
    if (fault == 4) dst[random() % nbytes] ^= static_cast<char>(1 << random() % 8);
    return static_cast<int64_t>(nbytes);
  }
};

int64_t faulty_call(void* context, int32_t direction, int32_t, void* buffer, uint64_t nbytes, uint64_t offset) {
  return static_cast<FaultyFile*>(context)->call(direction, static_cast<char*>(buffer), nbytes, offset);
}

void test_random_faults(int64_t num_operations, uint32_t seed) {
  FaultyFile file(seed);
  spillway_io* io = opened(0, 3, faulty_call, &file);
  std::mt19937 random(seed + 1);
  std::vector<std::vector<char>> held(kExtents);  // what each extent must hold; empty when unknown
  std::vector<uint32_t> checksums(kExtents);
  std::vector<std::vector<char>> buffers(4, std::vector<char>(kExtent));
  int64_t num_failed = 0, num_silent = 0;
  while (file.num_calls < num_operations) {
    const uint64_t begin = random() % (kExtents - 3);
    std::vector<spillway_io_request> requests(4);
    bool all_held = true;
    for (uint64_t i = 0; i < 4; ++i) {
      all_held = all_held && !held[begin + i].empty();
      for (uint64_t at = 0; at < kExtent; at += 64) buffers[i][at] = static_cast<char>(random());
      requests[i] = {buffers[i].data(), kExtent, (begin + i) * kExtent, checksums[begin + i], 0, -1, -1, 0};
    }
    const int32_t direction = all_held && random() % 2 ? SPILLWAY_READ : SPILLWAY_WRITE;
    const int32_t error = spillway_io_transfer(io, direction, requests.data(), 4);
    CHECK(error == SPILLWAY_OK || error == SPILLWAY_IO_FAILED || error == SPILLWAY_CHECKSUM_MISMATCH);
    for (uint64_t i = 0; i < 4; ++i) {
      num_failed += requests[i].error != SPILLWAY_OK;
      if (requests[i].error != SPILLWAY_OK) {
        held[begin + i].clear();
      } else if (direction == SPILLWAY_WRITE) {
        held[begin + i] = buffers[i], checksums[begin + i] = requests[i].crc32c;
      } else {
        num_silent += buffers[i] != held[begin + i];
      }
    }
  }
  spillway_io_close(io);
  std::printf("seed %u: %ld calls, %ld faults, %ld failed requests, %ld silent errors\n", seed,
              static_cast<long>(file.num_calls), static_cast<long>(file.num_faults), static_cast<long>(num_failed),
              static_cast<long>(num_silent));
  CHECK(file.num_faults > num_operations / 200 && num_failed > 0 && num_silent == 0);
}

void test_pieces_and_the_end_of_the_file() {
  FaultyFile file(1);
  file.is_sound = true;
  file.bytes.resize(10 << 20);
  spillway_io* io = opened(0, 4, faulty_call, &file);
  std::vector<char> text(9 << 20), found(9 << 20);
  for (size_t i = 0; i < text.size(); ++i) text[i] = static_cast<char>(i * 31 + i / 4096);
  spillway_io_request request = {text.data(), text.size(), 512, 0, 0, -1, -1, 0};
  CHECK(spillway_io_transfer(io, SPILLWAY_WRITE, &request, 1) == SPILLWAY_OK);
  CHECK(request.crc32c == spillway_crc32c(0, text.data(), text.size()) && file.num_calls == 3);
  request.buffer = found.data();
  CHECK(spillway_io_transfer(io, SPILLWAY_READ, &request, 1) == SPILLWAY_OK && found == text);
  request.crc32c ^= 1;
  CHECK(spillway_io_transfer(io, SPILLWAY_READ, &request, 1) == SPILLWAY_CHECKSUM_MISMATCH);
  request.offset = 2 << 20;
  CHECK(spillway_io_transfer(io, SPILLWAY_READ, &request, 1) == SPILLWAY_END_OF_FILE);
  CHECK(request.error_offset == 10 << 20);
  CHECK(spillway_io_transfer(io, SPILLWAY_READ, nullptr, 0) == SPILLWAY_OK);
  CHECK(spillway_io_transfer(io, 7, &request, 1) == SPILLWAY_BAD_ARGUMENT);
  spillway_io_close(io);
  spillway_io_close(nullptr);
}

// Endless EAGAIN or EINTR is an error after some time, and no call of the engine waits forever.
void test_a_call_that_never_moves_is_given_up() {
  for (const int64_t result : {-EAGAIN, -EINTR}) {
    int64_t answer = result;
    spillway_io* io = opened(0, 2, [](void* context, int32_t, int32_t, void*, uint64_t, uint64_t) {
      return *static_cast<int64_t*>(context);
    }, &answer);
    char block[512];
    spillway_io_request request = {block, sizeof block, 0, 0, 0, -1, -1, 0};
    CHECK(spillway_io_transfer(io, SPILLWAY_WRITE, &request, 1) == SPILLWAY_IO_FAILED && request.os_error == -result);
    spillway_io_close(io);
  }
}

struct RealFile {
  FILE* const stream = std::tmpfile();  // without a name
  int file = -1;

  RealFile() {
    CHECK(stream != nullptr);
    file = fileno(stream);
    CHECK(ftruncate(file, 64 << 20) == 0);
  }
  ~RealFile() { std::fclose(stream); }
};

// Writes and reads back `nbytes` at `offset` from `memory` (twice as long).
void check_round_trip(spillway_io* io, char* memory, uint64_t nbytes, uint64_t offset, uint32_t seed) {
  for (uint64_t at = 0; at < nbytes; ++at) memory[at] = static_cast<char>((at + seed) * 2654435761u >> 13);
  std::memset(memory + nbytes, 0, nbytes);
  spillway_io_request request = {memory, nbytes, offset, 0, 0, -1, -1, 0};
  CHECK(spillway_io_transfer(io, SPILLWAY_WRITE, &request, 1) == SPILLWAY_OK);
  CHECK(request.crc32c == spillway_crc32c(0, memory, nbytes));
  request.buffer = memory + nbytes;
  CHECK(spillway_io_transfer(io, SPILLWAY_READ, &request, 1) == SPILLWAY_OK);
  CHECK(request.crc32c_found == request.crc32c && std::memcmp(memory, memory + nbytes, nbytes) == 0);
}

void test_threads_share_a_handle() {
  const RealFile file;
  constexpr uint64_t kBytes = (5 << 20) + 512, kThreads = 4;
  constexpr uint64_t kMemory = kThreads * 2 * kBytes;
  char* memory = static_cast<char*>(mmap(nullptr, kMemory, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0));
  CHECK(memory != MAP_FAILED);
  spillway_io* io = opened(file.file, 3);
  std::vector<std::thread> threads;
  for (uint64_t thread = 0; thread < kThreads; ++thread) {
    threads.emplace_back([=] {
      for (uint32_t round = 0; round < 3; ++round) {
        check_round_trip(io, memory + thread * 2 * kBytes, kBytes, thread * kBytes, round);
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  std::vector<char> elsewhere(2 * kBytes);
  check_round_trip(io, elsewhere.data(), kBytes, 0, 9);

#if !defined(__SANITIZE_THREAD__)  // it does not follow threads started after a multi-threaded fork
  const pid_t child = fork();
  if (child == 0) {
    check_round_trip(io, memory, kBytes, 0, 10);
    spillway_io_close(io);
    _exit(0);
  }
  int status = -1;
  CHECK(waitpid(child, &status, 0) == child && status == 0);
#endif
  check_round_trip(io, memory, kBytes, 0, 11);
  spillway_io_close(io);
  munmap(memory, kMemory);
}

void test_a_file_that_cannot_be_written_is_an_error_with_its_errno() {
  int ends[2];
  CHECK(pipe(ends) == 0);
  char block[4096] = {};
  for (const bool is_write : {true, false}) {
    spillway_io* io = opened(ends[is_write ? 0 : 1], 2);  // the end for the other direction
    spillway_io_request request = {block, sizeof block, 0, 0, 0, -1, -1, 0};
    CHECK(spillway_io_transfer(io, is_write ? SPILLWAY_WRITE : SPILLWAY_READ, &request, 1) == SPILLWAY_IO_FAILED);
    CHECK(request.os_error != 0 && request.error_offset == 0);
    spillway_io_close(io);
  }
  close(ends[0]), close(ends[1]);
}

}  // namespace

int main(int argc, char** argv) {
  spillway_io* io = nullptr;
  CHECK(spillway_io_open(0, 0, nullptr, nullptr, &io) == SPILLWAY_BAD_ARGUMENT);
  test_pieces_and_the_end_of_the_file();
  test_a_call_that_never_moves_is_given_up();
  test_threads_share_a_handle();
  test_a_file_that_cannot_be_written_is_an_error_with_its_errno();
  test_random_faults(argc > 1 ? std::atol(argv[1]) : 10000, argc > 2 ? static_cast<uint32_t>(std::atol(argv[2])) : 1);
}
