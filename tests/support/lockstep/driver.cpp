// What TVM calls of libcuda.so.1 and libcudart.so.13, on the CPU: memory, streams, graphs, modules and launches.
//
// Everything is done at once, but for what a stream captures.  Device memory is apart from the host's: a pointer from
// elsewhere that a kernel or a copy is given, or a write beyond the end of an allocation, is an error.
#include <dlfcn.h>
#include <unistd.h>

#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <map>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "lockstep.h"

namespace {

enum Status {
  SUCCESS = 0, INVALID_VALUE = 1, OUT_OF_MEMORY = 2, INVALID_IMAGE = 200, NOT_FOUND = 500, ILLEGAL_ADDRESS = 700,
  LAUNCH_FAILED = 719, NOT_SUPPORTED = 801, CAPTURE_UNSUPPORTED = 900, CAPTURE_IMPLICIT = 906,
};  // as in driver_types.h

constexpr std::size_t ZONE = 1 << 10;  // bytes before and behind each allocation that nobody may write
constexpr std::size_t STATIC_LIMIT = 48 << 10, DYNAMIC_LIMIT = 227 << 10;
constexpr int MULTIPROCESSORS = 4;  // few, so that small problems need several waves

struct Graph {
  std::vector<std::function<int()>> steps;
};

struct Stream {
  Graph* captured = nullptr;
};

struct Module {
  void* library;
  char *shared, *shared_end;  // all of its static shared memory
};

struct Function {
  std::string name;
  const lockstep_kernel* kernel;
  Module* module;
  std::size_t dynamic_limit;
};

struct Event {
  std::chrono::steady_clock::time_point at;
};

std::map<std::uintptr_t, std::size_t> allocations;  // first byte -> bytes
std::size_t memory = std::size_t(1) << 32, used = 0;
int capability = 90, last_error = SUCCESS, launches = 0, replays = 0;
bool is_descending = false;
Stream* capturing = nullptr;
std::string message = "success";
std::recursive_mutex turn;  // threads of the host take turns
using Turn = std::lock_guard<std::recursive_mutex>;

int fail(int status, const std::string& why) {
  message = "lockstep: " + why;
  return last_error = status;
}

// Bytes from a device address to the end of its allocation; 0 if it is not in one.
std::size_t room(const void* pointer) {
  const auto at = reinterpret_cast<std::uintptr_t>(pointer);
  auto next = allocations.upper_bound(at);
  if (next == allocations.begin()) return 0;
  --next;
  return at < next->first + next->second ? next->first + next->second - at : 0;
}

bool is_written(const unsigned char* zone, std::size_t bytes) {
  for (std::size_t i = 0; i < bytes; ++i)
    if (zone[i] != 0xFF) return true;
  return false;
}

bool has_overrun() {
  for (const auto& [at, bytes] : allocations) {
    const auto* first = reinterpret_cast<const unsigned char*>(at);
    if (is_written(first - ZONE, ZONE) || is_written(first + bytes, ZONE)) return true;
  }
  return false;
}

struct Launch {
  Function* function;
  lockstep_uint3 grid, block;
  std::size_t dynamic;
};

std::string describe(const Launch& launch) {
  char text[160];
  std::snprintf(text, sizeof text, " in a grid of (%u, %u, %u) blocks of (%u, %u, %u)", launch.grid.x, launch.grid.y,
                launch.grid.z, launch.block.x, launch.block.y, launch.block.z);
  return launch.function->name + text;
}

int run(const Launch& launch, void** arguments) {
  const lockstep_kernel& kernel = *launch.function->kernel;
  for (unsigned i = 0; i < kernel.count; ++i)
    if (kernel.pointers[i] && *static_cast<void**>(arguments[i]) && !room(*static_cast<void**>(arguments[i])))
      return fail(ILLEGAL_ADDRESS, "parameter " + std::to_string(i) + " of " + describe(launch) +
                                       " is not an address of the device");
  const Module& module = *launch.function->module;
  const unsigned blocks = launch.grid.x * launch.grid.y * launch.grid.z;
  lockstep_grid_size = launch.grid, lockstep_block_size = launch.block;
  for (unsigned i = 0; i < blocks; ++i) {
    const unsigned b = is_descending ? blocks - 1 - i : i;
    lockstep_block = {b % launch.grid.x, b / launch.grid.x % launch.grid.y, b / launch.grid.x / launch.grid.y};
    if (module.shared != module.shared_end) std::memset(module.shared, 0xFF, module.shared_end - module.shared);
    lockstep_fill_dynamic(launch.dynamic);
    lockstep_watch(module.shared, module.shared_end);
    const char* failed =
        lockstep_run_block(kernel, arguments, launch.block.x * launch.block.y * launch.block.z, is_descending);
    if (failed) return fail(LAUNCH_FAILED, describe(launch) + ": " + failed);
    if (lockstep_overran_dynamic(launch.dynamic))
      return fail(ILLEGAL_ADDRESS, describe(launch) + " wrote behind its dynamic shared memory");
  }
  if (has_overrun()) return fail(ILLEGAL_ADDRESS, describe(launch) + " wrote outside device memory");
  ++launches;
  return SUCCESS;
}

int copy(void* to, const void* from, std::size_t bytes, int kind) {
  if (!bytes) return SUCCESS;
  const bool is_to_device = kind == 1 || kind == 3, is_from_device = kind == 2 || kind == 3;
  if (is_to_device ? room(to) < bytes : room(to) != 0) return fail(INVALID_VALUE, "a copy's target is elsewhere");
  if (is_from_device ? room(from) < bytes : room(from) != 0) return fail(INVALID_VALUE, "a copy's source is elsewhere");
  std::memmove(to, from, bytes);
  return SUCCESS;
}

// Do a step now, or have the stream that captures keep it.
int step(void* stream, std::function<int()> act, bool is_capturable = true) {
  const Turn mine(turn);
  if (!capturing) return act();
  if (stream != capturing) return fail(CAPTURE_IMPLICIT, "work on another stream while one captures");
  if (!is_capturable) return fail(CAPTURE_UNSUPPORTED, "a copy between host and device while a stream captures");
  capturing->captured->steps.push_back(std::move(act));
  return SUCCESS;
}

int refuse_in_capture(const char* what) {
  return capturing ? fail(CAPTURE_UNSUPPORTED, std::string(what) + " while a stream captures") : SUCCESS;
}

}  // namespace

extern "C" {

void lockstep_configure(int compute_capability, std::size_t bytes) { capability = compute_capability, memory = bytes; }
void lockstep_set_order(int descending) {
  const Turn mine(turn);  // a launch of another thread keeps its order
  is_descending = descending != 0;
}
int lockstep_launches() { return launches; }
int lockstep_replays() { return replays; }
std::size_t lockstep_memory_used() { return used; }

// libcuda

int cuDeviceGetName(char* name, int size, int) {
  std::snprintf(name, size, "CPU in lockstep");
  return SUCCESS;
}

int cuGetErrorName(int status, const char** name) {
  *name = status ? message.c_str() : "success";
  return SUCCESS;
}

int cuGetErrorString(int status, const char** text) { return cuGetErrorName(status, text); }

int cuTensorMapEncodeTiled() { return fail(NOT_SUPPORTED, "tensor maps"); }

// The image is a shared library, after its size as eight bytes.
int cuModuleLoadData(Module** module, const void* image) {
  std::uint64_t bytes;
  std::memcpy(&bytes, image, sizeof bytes);
  char path[] = "/tmp/lockstep-module-XXXXXX";
  const int file = mkstemp(path);
  const bool is_written = file >= 0 && write(file, static_cast<const char*>(image) + 8, bytes) == ssize_t(bytes);
  if (file >= 0) close(file);
  void* library = is_written ? dlopen(path, RTLD_NOW | RTLD_LOCAL) : nullptr;
  unlink(path);
  if (!library) return fail(INVALID_IMAGE, is_written ? dlerror() : "cannot write a module");
  *module = new Module{library, nullptr, nullptr};
  auto bounds = reinterpret_cast<void (*)(char**, char**)>(dlsym(library, "lockstep_shared_bounds"));
  bounds(&(*module)->shared, &(*module)->shared_end);
  return SUCCESS;
}

int cuModuleUnload(Module* module) {
  dlclose(module->library);
  delete module;
  return SUCCESS;
}

int cuModuleGetFunction(Function** function, Module* module, const char* name) {
  const std::string symbol = std::string("lockstep_kernel_") + name;
  auto kernel = static_cast<const lockstep_kernel*>(dlsym(module->library, symbol.c_str()));
  if (!kernel) return fail(NOT_FOUND, "no kernel " + std::string(name));
  *function = new Function{name, kernel, module, STATIC_LIMIT};
  return SUCCESS;
}

int cuFuncSetAttribute(Function* function, int attribute, int value) {
  if (attribute != 8) return SUCCESS;  // CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
  if (std::size_t(value) > DYNAMIC_LIMIT) return fail(INVALID_VALUE, "too much dynamic shared memory");
  function->dynamic_limit = value;
  return SUCCESS;
}

struct LaunchConfig {
  lockstep_uint3 grid, block;
  unsigned dynamic;
  void* stream;
};  // the beginning of CUlaunchConfig

int cuLaunchKernelEx(const LaunchConfig* config, Function* function, void** arguments, void**) {
  const Launch launch{function, config->grid, config->block, config->dynamic};
  const auto [x, y, z] = launch.grid;
  const std::uint64_t threads = std::uint64_t(launch.block.x) * launch.block.y * launch.block.z;
  if (!x || !y || !z || x > 0x7FFFFFFF || y > 65535 || z > 65535 || !threads || threads > 1024 || launch.block.z > 64)
    return fail(INVALID_VALUE, describe(launch) + ": no such launch");
  if (launch.dynamic > function->dynamic_limit) return fail(INVALID_VALUE, describe(launch) + ": too much shared memory");
  const lockstep_kernel& kernel = *function->kernel;
  std::vector<std::vector<char>> kept;
  for (unsigned i = 0; i < kernel.count; ++i) {
    const char* first = static_cast<const char*>(arguments[i]);
    kept.emplace_back(first, first + kernel.sizes[i]);
  }
  return step(config->stream, [launch, kept = std::move(kept)]() mutable {
    std::vector<void*> given;
    for (auto& one : kept) given.push_back(one.data());
    return run(launch, given.data());
  });
}

// libcudart

int cudaGetDeviceCount(int* count) { return *count = 1, SUCCESS; }
int cudaGetDevice(int* device) { return *device = 0, SUCCESS; }
int cudaSetDevice(int device) { return device ? fail(INVALID_VALUE, "there is one device") : SUCCESS; }
int cudaGetLastError() { return std::exchange(last_error, int(SUCCESS)); }
int cudaPeekAtLastError() { return last_error; }
const char* cudaGetErrorName(int status) { return status ? message.c_str() : "success"; }
const char* cudaGetErrorString(int status) { return cudaGetErrorName(status); }

int cudaDeviceGetAttribute(int* value, int attribute, int) {
  static const std::map<int, int> values{
      {1, 1024}, {2, 1024}, {3, 1024}, {4, 64}, {8, int(STATIC_LIMIT)}, {10, 32}, {12, 65536}, {13, 1000000},
      {16, MULTIPROCESSORS}, {38, 1 << 20}, {97, int(DYNAMIC_LIMIT)},
  };  // as in driver_types.h: threads, dimensions, shared memory, warp, registers, clock, processors, cache, opt-in
  if (attribute == 75 || attribute == 76) return *value = attribute == 75 ? capability / 10 : capability % 10, SUCCESS;
  const auto found = values.find(attribute);
  if (found == values.end()) return fail(INVALID_VALUE, "attribute " + std::to_string(attribute) + " is not known");
  return *value = found->second, SUCCESS;
}

int cudaGetDeviceProperties(char* properties, int) {
  std::memset(properties, 0, 1008);
  std::memcpy(properties + 288, &memory, sizeof memory);  // totalGlobalMem, all that TVM reads
  return SUCCESS;
}

int cudaMemGetInfo(std::size_t* free_bytes, std::size_t* total) {
  *free_bytes = used < memory ? memory - used : 0, *total = memory;  // a test may shrink the memory below what is used
  return SUCCESS;
}

int cudaMalloc(void** pointer, std::size_t bytes) {
  const Turn mine(turn);
  if (const int status = refuse_in_capture("an allocation")) return status;
  if (bytes > memory || used > memory - bytes) return fail(OUT_OF_MEMORY, "out of device memory");
  const std::size_t padded = (bytes + 255) / 256 * 256;
  auto* first = static_cast<unsigned char*>(std::aligned_alloc(256, padded + 2 * ZONE));
  std::memset(first, 0xFF, padded + 2 * ZONE);
  *pointer = first + ZONE;
  allocations[reinterpret_cast<std::uintptr_t>(*pointer)] = bytes ? bytes : 1;
  used += bytes ? bytes : 1;
  return SUCCESS;
}

int cudaFree(void* pointer) {
  const Turn mine(turn);
  if (!pointer) return SUCCESS;
  if (const int status = refuse_in_capture("a deallocation")) return status;
  const auto found = allocations.find(reinterpret_cast<std::uintptr_t>(pointer));
  if (found == allocations.end()) return fail(INVALID_VALUE, "what is freed was not allocated");
  used -= found->second;
  allocations.erase(found);
  std::free(static_cast<unsigned char*>(pointer) - ZONE);
  return SUCCESS;
}

int cudaMallocHost(void** pointer, std::size_t bytes) { return *pointer = std::malloc(bytes), SUCCESS; }
int cudaFreeHost(void* pointer) { return std::free(pointer), SUCCESS; }

int cudaMemcpyAsync(void* to, const void* from, std::size_t bytes, int kind, void* stream) {
  return step(stream, [=] { return copy(to, from, bytes, kind); }, kind == 3);
}

int cudaMemsetAsync(void* to, int value, std::size_t bytes, void* stream) {
  return step(stream, [=] {
    if (bytes && room(to) < bytes) return fail(INVALID_VALUE, "what is filled is elsewhere");
    return std::memset(to, value, bytes), int(SUCCESS);
  });
}

int cudaMemcpyPeerAsync(void* to, int, const void* from, int, std::size_t bytes, void* stream) {
  return cudaMemcpyAsync(to, from, bytes, 3, stream);
}

int cudaStreamCreate(Stream** stream) { return *stream = new Stream, SUCCESS; }
int cudaStreamCreateWithFlags(Stream** stream, unsigned) { return cudaStreamCreate(stream); }
int cudaStreamDestroy(Stream* stream) { return delete stream, SUCCESS; }
int cudaStreamSynchronize(void*) { return refuse_in_capture("waiting for a stream"); }
int cudaStreamWaitEvent(void*, void*, unsigned) { return SUCCESS; }

int cudaStreamBeginCapture(Stream* stream, int) {
  if (!stream || capturing) return fail(CAPTURE_UNSUPPORTED, "the default stream, or a second one, cannot capture");
  stream->captured = new Graph;
  capturing = stream;
  return SUCCESS;
}

int cudaStreamEndCapture(Stream* stream, Graph** graph) {
  if (capturing != stream) return fail(INVALID_VALUE, "the stream does not capture");
  capturing = nullptr;
  *graph = std::exchange(stream->captured, nullptr);
  return SUCCESS;
}

int cudaGraphInstantiate(Graph** ready, Graph* graph, unsigned long long) { return *ready = new Graph(*graph), SUCCESS; }
int cudaGraphDestroy(Graph* graph) { return delete graph, SUCCESS; }
int cudaGraphExecDestroy(Graph* graph) { return delete graph, SUCCESS; }

int cudaGraphLaunch(Graph* graph, void*) {
  const Turn mine(turn);
  if (const int status = refuse_in_capture("a graph's launch")) return status;
  ++replays;
  for (auto& act : graph->steps)
    if (const int status = act()) return status;
  return SUCCESS;
}

int cudaEventCreate(Event** event) { return *event = new Event, SUCCESS; }
int cudaEventDestroy(Event* event) { return delete event, SUCCESS; }
int cudaEventRecord(Event* event, void*) { return event->at = std::chrono::steady_clock::now(), SUCCESS; }
int cudaEventSynchronize(Event*) { return SUCCESS; }

int cudaEventElapsedTime(float* milliseconds, Event* from, Event* to) {
  *milliseconds = std::chrono::duration<float, std::milli>(to->at - from->at).count();
  return SUCCESS;
}
}
