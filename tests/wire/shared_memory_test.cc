// SPDX-License-Identifier: Apache-2.0
#include "server/wire/shared_memory.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <string>

#include "tests/testutil/status_matchers.h"

namespace ema {
namespace {

using ::testing::HasSubstr;

constexpr int64_t kBytes = 64 << 10;
constexpr int kWindowSeals = F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_FUTURE_WRITE | F_SEAL_SEAL;

bool AdmitAll(int64_t) { return true; }

TEST(SharedMemoryTest, OnlyASealedMemfdOfTheRightSizeIsMapped) {
  const auto refuses = [](int fd) {
    EXPECT_THAT(SharedMemory::Map(fd, 8192),
                StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("8192 bytes")));
    EXPECT_EQ(fcntl(fd, F_GETFD), -1);  // Closed.
  };
  const int unsealed = memfd_create("test", MFD_ALLOW_SEALING);
  ASSERT_EQ(ftruncate(unsealed, 8192), 0);
  refuses(unsealed);
  const int half_sealed = memfd_create("test", MFD_ALLOW_SEALING);
  ASSERT_EQ(ftruncate(half_sealed, 8192), 0);
  ASSERT_EQ(fcntl(half_sealed, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW), 0);
  refuses(half_sealed);
  refuses(dup((*SharedMemory::Create(4096))->fd()));
  refuses(open("/dev/null", O_RDWR));
  int ends[2];
  ASSERT_EQ(pipe(ends), 0);
  close(ends[1]);
  refuses(ends[0]);

  const auto memory = SharedMemory::Create(8192);
  ASSERT_THAT(memory, IsOk());
  EXPECT_NE(ftruncate((*memory)->fd(), 0), 0);
  EXPECT_NE(ftruncate((*memory)->fd(), 1 << 20), 0);
}

// Its ftruncate() would end the process.
TEST(SharedMemoryTest, IsRefusedWhereFilesMayNotBeSoLong) {
  rlimit before{};
  ASSERT_EQ(getrlimit(RLIMIT_FSIZE, &before), 0);
  rlimit low = before;
  low.rlim_cur = kBytes - 1;
  ASSERT_EQ(setrlimit(RLIMIT_FSIZE, &low), 0);
  const absl::Status status = SharedMemory::Create(kBytes).status();
  const absl::Status window_status = SharedMemory::CreateWindow(kBytes).status();
  low.rlim_cur = kBytes;
  ASSERT_EQ(setrlimit(RLIMIT_FSIZE, &low), 0);
  EXPECT_THAT(SharedMemory::Create(kBytes), IsOk());
  EXPECT_THAT(SharedMemory::CreateWindow(kBytes), IsOk());
  ASSERT_EQ(setrlimit(RLIMIT_FSIZE, &before), 0);
  for (const absl::Status& refused : {status, window_status}) {
    EXPECT_THAT(refused, StatusIs(absl::StatusCode::kInternal, HasSubstr("may write files of")));
  }
}

// As in another process: by another descriptor, and without the first mapping.
TEST(SharedWindowTest, OnlyItsMakerWrites) {
  EMA_ASSERT_OK_AND_ASSIGN(const auto made, SharedMemory::CreateWindow(kBytes));
  EMA_ASSERT_OK_AND_ASSIGN(const auto mapped, SharedMemory::MapWindow(dup(made->fd()), AdmitAll));
  ASSERT_EQ(mapped->size_bytes(), kBytes);
  std::memset(made->data(), 7, kBytes);
  EXPECT_EQ(mapped->data()[0], std::byte{7});
  EXPECT_EQ(mapped->data()[kBytes - 1], std::byte{7});

  EXPECT_EQ(mmap(nullptr, kBytes, PROT_READ | PROT_WRITE, MAP_SHARED, mapped->fd(), 0), MAP_FAILED);
  EXPECT_EQ(mprotect(mapped->data(), kBytes, PROT_READ | PROT_WRITE), -1);
  EXPECT_EQ(write(mapped->fd(), "x", 1), -1);
  EXPECT_EQ(mapped->data()[0], std::byte{7});
}

// What would make the reader's mapping end in a signal, or allocate memory for the reader.
TEST(SharedWindowTest, ItsMakerCannotTakePagesAway) {
  EMA_ASSERT_OK_AND_ASSIGN(const auto made, SharedMemory::CreateWindow(kBytes));
  std::memset(made->data(), 7, kBytes);
  EXPECT_EQ(ftruncate(made->fd(), 0), -1);
  EXPECT_EQ(ftruncate(made->fd(), 2 * kBytes), -1);
  EXPECT_EQ(fallocate(made->fd(), FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, 0, kBytes), -1);
  EXPECT_EQ(madvise(made->data(), kBytes, MADV_REMOVE), -1);
  EXPECT_EQ(made->data()[0], std::byte{7});
}

TEST(SharedWindowTest, OnlyAllocatedAndSealedMemfdsAreMapped) {
  const auto refuses = [](int fd) {
    EXPECT_THAT(SharedMemory::MapWindow(fd, AdmitAll),
                StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("allocated completely")));
    EXPECT_EQ(fcntl(fd, F_GETFD), -1);  // Closed.
  };
  const auto make = [](int64_t size_bytes, bool is_written, int seals) {
    const int fd = memfd_create("test", MFD_ALLOW_SEALING);
    EXPECT_EQ(ftruncate(fd, size_bytes), 0);
    if (is_written) {
      const std::string bytes(size_bytes, 'x');
      EXPECT_EQ(pwrite(fd, bytes.data(), bytes.size(), 0), size_bytes);
    } else if (size_bytes == kBytes) {
      // As many blocks as a complete file has, but beyond the end.
      EXPECT_EQ(fallocate(fd, FALLOC_FL_KEEP_SIZE, kBytes, kBytes), 0);
    }
    EXPECT_EQ(fcntl(fd, F_ADD_SEALS, seals), 0);
    return fd;
  };
  for (const int missing : {F_SEAL_SHRINK, F_SEAL_GROW, F_SEAL_FUTURE_WRITE, F_SEAL_SEAL}) {
    refuses(make(kBytes, /*is_written=*/true, kWindowSeals & ~missing));
  }
  refuses(make(kBytes, /*is_written=*/false, kWindowSeals));
  refuses(make(int64_t{1} << 50, /*is_written=*/false, kWindowSeals));
  refuses(make(0, /*is_written=*/false, kWindowSeals));
  EMA_ASSERT_OK_AND_ASSIGN(const auto lane_memory, SharedMemory::Create(kBytes));
  refuses(dup(lane_memory->fd()));
  refuses(open("/dev/zero", O_RDWR));
  int ends[2];
  ASSERT_EQ(pipe(ends), 0);
  close(ends[1]);
  refuses(ends[0]);
  EXPECT_THAT(SharedMemory::MapWindow(make(kBytes, true, kWindowSeals), AdmitAll), IsOk());
}

TEST(SharedWindowTest, IsNotMappedUnlessItsSizeIsAdmitted) {
  EMA_ASSERT_OK_AND_ASSIGN(const auto made, SharedMemory::CreateWindow(kBytes));
  int64_t asked_bytes = 0;
  const auto refuse = [&](int64_t size_bytes) {
    asked_bytes = size_bytes;
    return false;
  };
  const int fd = dup(made->fd());
  EMA_ASSERT_OK_AND_ASSIGN(const auto mapped, SharedMemory::MapWindow(fd, refuse));
  EXPECT_EQ(mapped, nullptr);
  EXPECT_EQ(asked_bytes, kBytes);
  EXPECT_EQ(fcntl(fd, F_GETFD), -1);
}

}  // namespace
}  // namespace ema
