// Random faults in every call: a transfer moves the right bytes or says that it failed. Argument: operations, 10000.
#include <errno.h>

#include <cstring>
#include <mutex>
#include <random>
#include <vector>

#include "check.h"
#include "crc32c.h"
#include "spillway.h"

namespace {

constexpr uint64_t kExtent = 16384, kExtents = 32;

// A file in memory that fails one call in a hundred, in one of five ways.
struct FaultyFile {
  std::vector<char> bytes = std::vector<char>(kExtent * kExtents);
  std::mt19937 random{1};
  std::mutex mutex;
  int64_t num_calls = 0, num_faults = 0;
  bool is_sound = false;

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

void test_random_faults(int64_t num_operations) {
  FaultyFile file;
  spillway_io* io = nullptr;
  CHECK(spillway_io_open(SPILLWAY_ENGINE_THREADS, 0, 3, faulty_call, &file, &io) == SPILLWAY_OK);
  std::mt19937 random(2);
  std::vector<std::vector<char>> held(kExtents);  // what each extent must hold; empty when unknown
  std::vector<uint32_t> checksums(kExtents);
  int64_t num_failed = 0;
  while (file.num_calls < num_operations) {
    const uint64_t begin = random() % (kExtents - 3);
    std::vector<std::vector<char>> buffers(4, std::vector<char>(kExtent));
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
        CHECK(buffers[i] == held[begin + i]);
      }
    }
  }
  spillway_io_close(io);
  std::printf("%ld calls, %ld faults, %ld failed requests, 0 silent errors\n", static_cast<long>(file.num_calls),
              static_cast<long>(file.num_faults), static_cast<long>(num_failed));
  CHECK(file.num_faults > num_operations / 200 && num_failed > 0);
}

void test_pieces_and_the_end_of_the_file() {
  FaultyFile file;
  file.is_sound = true;
  file.bytes.resize(10 << 20);
  spillway_io* io = nullptr;
  CHECK(spillway_io_open(SPILLWAY_ENGINE_THREADS, 0, 4, faulty_call, &file, &io) == SPILLWAY_OK);
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
  CHECK(spillway_io_open(99, 0, 1, nullptr, nullptr, &io) == SPILLWAY_ENGINE_UNAVAILABLE);
  spillway_io_close(io);
  spillway_io_close(nullptr);
}

}  // namespace

int main(int argc, char** argv) {
  test_pieces_and_the_end_of_the_file();
  test_random_faults(argc > 1 ? std::atol(argv[1]) : 10000);
}
