// A custom call for XLA:CPU that sleeps, and counts how often. Compiled by schedule.py.

#include <atomic>
#include <chrono>
#include <cstdint>
#include <mutex>
#include <thread>

#ifdef __linux__
#include <sys/prctl.h>
#endif

#include "xla/ffi/api/ffi.h"

namespace ffi = xla::ffi;

constexpr int kDevices = 64;
std::mutex beds[kDevices];  // a device runs one op after another, even where XLA would run two of them at once
std::atomic<int64_t> naps[kDevices][3];

ffi::Error Sleep(ffi::Buffer<ffi::F32> given, ffi::ResultBuffer<ffi::F32> zero, int64_t op, int64_t op_ns) {
  const auto device = static_cast<int64_t>(given.typed_data()[0]);
  std::lock_guard<std::mutex> lie_down(beds[device]);
#ifdef __linux__
  prctl(PR_SET_TIMERSLACK, 1);  // Linux lets threads wake 50 µs late to save wake-ups
#endif
  // An absolute time, so that a signal cannot shorten the sleep; begun here, so that nothing before it counts.
  const auto until = std::chrono::steady_clock::now() + std::chrono::nanoseconds(op_ns);
  while (std::chrono::steady_clock::now() < until) std::this_thread::sleep_until(until);
#ifdef __linux__
  prctl(PR_SET_TIMERSLACK, 0);  // as it was
#endif
  zero->typed_data()[0] = 0;
  ++naps[device][op];
  return ffi::Error::Success();
}

XLA_FFI_DEFINE_HANDLER_SYMBOL(nap, Sleep,
                              ffi::Ffi::Bind()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Ret<ffi::Buffer<ffi::F32>>()
                                  .Attr<int64_t>("op")
                                  .Attr<int64_t>("op_ns"));

// How often a device has slept in an op since this was last asked.
extern "C" int64_t count(int64_t device, int64_t op) { return naps[device][op].exchange(0); }
