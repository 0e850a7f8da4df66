// The kernels of a bundle, by the names of their entries.
#pragma once

#include <dlfcn.h>
#include <tvm/ffi/extra/module.h>

#include <map>
#include <optional>
#include <string>
#include <vector>

#include "cores.h"
#include "parameters.h"

namespace runner {

constexpr int kShareCores = -3;  // TVM's kSpecifyThreadShareAllCore: threads may run on all given cores, none is pinned

// An idle worker of TVM's yields so often before it sleeps.  Its own 300,000 times take minutes where other processes
// want the processor, and the end of a process waits for them; these are half a millisecond where none does.
constexpr const char* kSpins = "1000";

inline void configure_threads(int threads) {
  setenv("TVM_THREAD_POOL_SPIN_COUNT", kSpins, 0);
  std::vector<int> cpus = usable_cpus();
  ffi::Array<ffi::String> names;  // TVM makes a pool as large as this list when it makes one
  while (names.size() < size_t(threads)) {
    for (int cpu : cpus) names.push_back(std::to_string(cpu));
  }
  ffi::Function::GetGlobalRequired("runtime.config_threadpool")(kShareCores, threads, names);
}

class Kernels {
 public:
  Kernels(const fs::path& root, const json::Object& manifest, const std::string& library,
          const ffi::Array<ffi::Tensor>& parameters, int threads)
      : library_(member(root, library)) {
    for (const auto& [name, indices] : read_entries(manifest, parameters.size())) {
      for (int64_t index : indices) entries_[name].parameters.push_back(parameters[index]);
    }
    fs::path runtime = member(root, "lib/libtvm_runtime.so");
    if (dlopen(runtime.c_str(), RTLD_NOW | RTLD_GLOBAL) == nullptr) {
      auto versions = find<json::Object>(manifest, "versions").value_or(json::Object());
      fail(kUnusable, runtime.string(), ": cannot be loaded (", dlerror(), "); build this program with apache-tvm-ffi ",
           find<ffi::String>(versions, "apache-tvm-ffi").value_or("as the bundle's README.md says"));
    }
    try {
      configure_threads(threads);
      ffi::Module module = ffi::Module::LoadFromFile(library_.string());
      machine_ = module->GetFunction("vm_load_executable").value()().cast<ffi::Module>();
      (*machine_)->GetFunction("vm_initialization").value()(1, 0, 2);  // one device: CPU 0, pooled allocator
      for (auto& [name, entry] : entries_) entry.function = (*machine_)->GetFunction(name).value();
    } catch (const std::exception& error) {
      fail(kUnusable, library_.string(), ": cannot be loaded: ", error.what());
    }
  }

  bool has(const std::string& entry) const { return entries_.count(entry) != 0; }

  // At least so many results.
  std::vector<ffi::Tensor> results(const std::string& name, std::vector<ffi::Any> arguments, size_t least) const {
    const Entry& entry = entries_.at(name);
    arguments.push_back(entry.parameters);
    std::vector<ffi::AnyView> views(arguments.begin(), arguments.end());
    ffi::Any result;
    try {
      entry.function.value().CallPacked(views.data(), int32_t(views.size()), &result);
      auto several = result.as<ffi::Array<ffi::Tensor>>();
      if (!several) several = ffi::Array<ffi::Tensor>{result.cast<ffi::Tensor>()};
      if (several->size() < least) throw std::runtime_error("an entry gives too few results");
      return std::vector<ffi::Tensor>(several->begin(), several->end());
    } catch (const std::exception& error) {
      fail(kUnusable, library_.string(), ": does not take what manifest.json describes: ", error.what());
    }
  }

 private:
  struct Entry {
    ffi::Array<ffi::Tensor> parameters;
    std::optional<ffi::Function> function;
  };

  fs::path library_;
  std::optional<ffi::Module> machine_;
  std::map<std::string, Entry> entries_;
};

}  // namespace runner
