// A custom call for XLA:CPU that sleeps, and the list of when it did. Compiled by sleeper.py where it is used.

#include <chrono>
#include <cstdint>
#include <map>
#include <mutex>
#include <thread>
#include <utility>
#include <vector>

#ifdef __linux__
#include <sys/prctl.h>
#endif

#include "xla/ffi/api/ffi.h"

namespace {

namespace ffi = xla::ffi;
using Clock = std::chrono::steady_clock;

struct Nap {
  int64_t device, op, asked_ns, start_ns, end_ns;
};

struct Sleeper {
  int64_t op_ns = 0;
  std::vector<Nap> naps;
};

std::mutex book;  // of the two maps and of what is in `sleepers`
std::map<int64_t, Sleeper> sleepers;
std::map<std::pair<int64_t, int64_t>, std::mutex> beds;  // by sleeper and device; none ever moves or goes

int64_t ns(Clock::time_point at) {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(at.time_since_epoch()).count();
}

ffi::Error Sleep(ffi::Buffer<ffi::F32> told, ffi::ResultBuffer<ffi::F32> zero, int64_t sleeper, int64_t op,
                 double share) {
  const auto device = static_cast<int64_t>(told.typed_data()[0]);
  int64_t op_ns;
  std::mutex* bed;
  {
    std::lock_guard<std::mutex> lock(book);
    op_ns = sleepers[sleeper].op_ns;
    bed = &beds[{sleeper, device}];
  }
  // A device runs one op after another, even where XLA would run two of them at once.
  std::lock_guard<std::mutex> lie_down(*bed);
#ifdef __linux__
  prctl(PR_SET_TIMERSLACK, 1);  // Linux lets threads wake 50 µs late to save wake-ups
#endif
  // An absolute time, so that a signal cannot shorten the sleep; begun here, so that nothing before it counts.
  const auto start = Clock::now();
  const auto asked_ns = static_cast<int64_t>(share * op_ns);
  const auto until = start + std::chrono::nanoseconds(asked_ns);
  while (Clock::now() < until) std::this_thread::sleep_until(until);
#ifdef __linux__
  prctl(PR_SET_TIMERSLACK, 0);  // as it was
#endif
  zero->typed_data()[0] = 0;
  std::lock_guard<std::mutex> lock(book);
  sleepers[sleeper].naps.push_back({device, op, asked_ns, ns(start), ns(Clock::now())});
  return ffi::Error::Success();
}

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(meshpar_nap, Sleep,
                              ffi::Ffi::Bind()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Ret<ffi::Buffer<ffi::F32>>()
                                  .Attr<int64_t>("sleeper")
                                  .Attr<int64_t>("op")
                                  .Attr<double>("share"));

// How long one op sleeps from now on.
extern "C" void meshpar_set(int64_t sleeper, int64_t op_ns) {
  std::lock_guard<std::mutex> lock(book);
  sleepers[sleeper].op_ns = op_ns;
}

// How many naps there are; the first `room` of them are written as [device, op, asked, start, end].
extern "C" int64_t meshpar_naps(int64_t sleeper, int64_t* out, int64_t room) {
  std::lock_guard<std::mutex> lock(book);
  const auto& naps = sleepers[sleeper].naps;
  for (int64_t i = 0; i < room && i < static_cast<int64_t>(naps.size()); ++i) {
    const int64_t row[] = {naps[i].device, naps[i].op, naps[i].asked_ns, naps[i].start_ns, naps[i].end_ns};
    for (int64_t field : row) *out++ = field;
  }
  return static_cast<int64_t>(naps.size());
}

extern "C" void meshpar_forget(int64_t sleeper) {
  std::lock_guard<std::mutex> lock(book);
  sleepers[sleeper].naps.clear();
}
