// Runs kernels for ARM under qemu: loads shared objects and calls their functions with tensors that come by standard
// input, and go back by standard output with what was written into them.
//
//   load PATH              ->  ok
//   call N, then for each tensor "CODE BITS NDIM SHAPE..." and its bytes  ->  ok and the bytes of all, or error TEXT
//
// What kernels take from TVM's runtime is here: workspace, and loops, whose tasks run one after another.
#include <dlfcn.h>
#include <dlpack/dlpack.h>
#include <tvm/ffi/c_api.h>

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <iostream>
#include <string>
#include <vector>

struct Group {
  void* sync;
  int32_t tasks;
};
using Task = int (*)(int, Group*, void*);

static std::string raised;

extern "C" {
void TVMFFIErrorSetRaisedFromCStrParts(const char* kind, const char** parts, int32_t count) {
  raised = kind;
  raised += ": ";
  for (int32_t i = 0; i < count; ++i) raised += parts[i] ? parts[i] : "";
}
void TVMFFIErrorSetRaisedFromCStr(const char* kind, const char* text) {
  TVMFFIErrorSetRaisedFromCStrParts(kind, &text, 1);
}
}

static void* allocate(int, int, uint64_t size, int, int) { return aligned_alloc(64, (size + 63) / 64 * 64); }

static int release(int, int, void* place) {
  free(place);
  return 0;
}

static int launch(Task task, void* data, int count) {
  Group group{nullptr, count > 0 ? count : 2};
  for (int i = 0; i < group.tasks; ++i)
    if (int code = task(i, &group, data)) return code;
  return 0;
}

int main() {
  std::string word;
  TVMFFISafeCallType kernel = nullptr;
  while (std::cin >> word) {
    if (word == "load") {
      std::cin >> word;
      void* library = dlopen(word.c_str(), RTLD_NOW | RTLD_LOCAL);
      kernel = library ? reinterpret_cast<TVMFFISafeCallType>(dlsym(library, "__tvm_ffi_kernel")) : nullptr;
      if (!kernel) {
        std::cout << "error " << dlerror() << std::endl;
        continue;
      }
      const std::pair<const char*, void*> given[] = {
          {"__TVMBackendAllocWorkspace", reinterpret_cast<void*>(allocate)},
          {"__TVMBackendFreeWorkspace", reinterpret_cast<void*>(release)},
          {"__TVMBackendParallelLaunch", reinterpret_cast<void*>(launch)},
      };
      for (auto [name, function] : given)
        if (void* slot = dlsym(library, name)) *static_cast<void**>(slot) = function;
      std::cout << "ok" << std::endl;
      continue;
    }
    size_t count;
    std::cin >> count;
    std::vector<DLTensor> tensors(count);
    std::vector<std::vector<int64_t>> shapes(count);
    std::vector<size_t> sizes(count);
    for (size_t i = 0; i < count; ++i) {
      int code, bits, ndim;
      std::cin >> code >> bits >> ndim;
      shapes[i].resize(ndim);
      sizes[i] = bits / 8;
      for (auto& extent : shapes[i]) {
        std::cin >> extent;
        sizes[i] *= extent;
      }
      std::cin.get();
      void* data = aligned_alloc(64, (sizes[i] + 127) / 64 * 64);
      std::cin.read(static_cast<char*>(data), sizes[i]);
      DLDataType type{static_cast<uint8_t>(code), static_cast<uint8_t>(bits), 1};
      tensors[i] = {data, {kDLCPU, 0}, ndim, type, shapes[i].data(), nullptr, 0};
    }
    std::vector<TVMFFIAny> args(count);
    for (size_t i = 0; i < count; ++i) {
      args[i] = {};
      args[i].type_index = kTVMFFIDLTensorPtr;
      args[i].v_ptr = &tensors[i];
    }
    TVMFFIAny result{};
    raised = "no text";
    if (kernel(nullptr, args.data(), static_cast<int32_t>(count), &result)) {
      std::cout << "error " << raised << std::endl;
    } else {
      std::cout << "ok\n";
      for (size_t i = 0; i < count; ++i) std::cout.write(static_cast<char*>(tensors[i].data), sizes[i]);
      std::cout.flush();
    }
    for (auto& tensor : tensors) free(tensor.data);
  }
}
