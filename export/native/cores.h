// Processors that this process may use.
#pragma once

#include <sched.h>

#include <fstream>
#include <set>
#include <string>
#include <vector>

#include "files.h"

namespace runner {

inline std::vector<int> usable_cpus() {
  cpu_set_t set;
  std::vector<int> cpus;
  if (sched_getaffinity(0, sizeof set, &set) == 0) {
    for (int cpu = 0; cpu < CPU_SETSIZE; ++cpu) {
      if (CPU_ISSET(cpu, &set)) cpus.push_back(cpu);
    }
  }
  if (cpus.empty()) fail(kUnusable, "this process's CPUs cannot be found out: ", std::strerror(errno));
  return cpus;
}

inline int available_cores() {  // physical ones, by affinity and the control group's quota
  std::set<std::string> cores;
  for (int cpu : usable_cpus()) {
    std::string name = "/sys/devices/system/cpu/cpu" + std::to_string(cpu), siblings;
    std::getline(std::ifstream(name + "/topology/thread_siblings_list"), siblings);
    cores.insert(siblings.empty() ? name : siblings);
  }
  std::string share;
  int64_t quota, period, count = int64_t(cores.size());
  std::ifstream limits("/sys/fs/cgroup/cpu.max");
  if (limits >> share >> period && share != "max" && period > 0) {
    std::istringstream(share) >> quota;
    count = std::max<int64_t>(1, std::min(count, quota / period));
  }
  return int(count);
}

}  // namespace runner
