// libnvidia-ml.so.1 of a machine with H100s: NVML_GPUS of them (1), of each NVML_USED_GIB in use (0). Their UUIDs begin with
// NVML_MACHINE (00000000), so that tests side by side have GPUs of their own.
#include <cstdio>
#include <cstdlib>
#include <cstring>

namespace {

constexpr unsigned long long TOTAL = 85520809984ull; // bytes of an H100 80GB HBM3
constexpr int SUCCESS = 0, INVALID_ARGUMENT = 2;
constexpr unsigned MOST_GPUS = 10; // the last digit of a UUID tells them apart

struct Gpu { unsigned index; } gpus[MOST_GPUS];

unsigned num_gpus() {
  const char* number = std::getenv("NVML_GPUS");
  const unsigned wanted = number ? std::atoi(number) : 1;
  return wanted < MOST_GPUS ? wanted : MOST_GPUS;
}

unsigned long long used() {
  const char* gib = std::getenv("NVML_USED_GIB");
  return gib ? (unsigned long long)(std::atof(gib) * (1ull << 30)) : 0;
}

} // namespace

extern "C" {

struct Memory { unsigned long long total, free, used; };
struct Memory_v2 { unsigned version; unsigned long long total, reserved, free, used; };
struct Process { unsigned pid; unsigned long long used; unsigned gpu_instance, compute_instance; };

int nvmlInit_v2() { return SUCCESS; }
int nvmlInitWithFlags(unsigned) { return SUCCESS; }
int nvmlShutdown() { return SUCCESS; }
const char* nvmlErrorString(int result) { return result ? "Invalid Argument" : "Success"; }
int nvmlSystemGetDriverVersion(char* version, unsigned length) { return std::snprintf(version, length, "580.95.05"), SUCCESS; }
int nvmlSystemGetCudaDriverVersion(int* version) { return *version = 13000, SUCCESS; }
int nvmlSystemGetCudaDriverVersion_v2(int* version) { return *version = 13000, SUCCESS; }
int nvmlDeviceGetCount_v2(unsigned* count) { return *count = num_gpus(), SUCCESS; }

int nvmlDeviceGetHandleByIndex_v2(unsigned index, Gpu** gpu) {
  if (index >= num_gpus()) return INVALID_ARGUMENT;
  gpus[index].index = index;
  *gpu = &gpus[index];
  return SUCCESS;
}
int nvmlDeviceGetHandleByUUID(const char* uuid, Gpu** gpu) {
  const size_t length = std::strlen(uuid);
  return length ? nvmlDeviceGetHandleByIndex_v2(unsigned(uuid[length - 1] - '0'), gpu) : INVALID_ARGUMENT;
}
int nvmlDeviceGetIndex(Gpu* gpu, unsigned* index) { return *index = gpu->index, SUCCESS; }
int nvmlDeviceGetName(Gpu*, char* name, unsigned length) { return std::snprintf(name, length, "NVIDIA H100 80GB HBM3"), SUCCESS; }
int nvmlDeviceGetUUID(Gpu* gpu, char* uuid, unsigned length) {
  const char* machine = std::getenv("NVML_MACHINE");
  return std::snprintf(uuid, length, "GPU-%.8s-0000-0000-0000-00000000000%u", machine ? machine : "00000000", gpu->index), SUCCESS;
}
int nvmlDeviceGetMemoryInfo(Gpu*, Memory* memory) { return *memory = {TOTAL, TOTAL - used(), used()}, SUCCESS; }
int nvmlDeviceGetMemoryInfo_v2(Gpu*, Memory_v2* memory) {
  return *memory = {memory->version, TOTAL, 0, TOTAL - used(), used()}, SUCCESS;
}
int nvmlDeviceGetCudaComputeCapability(Gpu*, int* major, int* minor) { return *major = 9, *minor = 0, SUCCESS; }
int nvmlDeviceGetMigMode(Gpu*, unsigned* current, unsigned* pending) { return *current = *pending = 0, SUCCESS; }
int nvmlDeviceGetP2PStatus(Gpu*, Gpu*, int, int* status) { return *status = 0, SUCCESS; }
int nvmlDeviceGetNumaNodeId(Gpu*, unsigned* node) { return *node = 0, SUCCESS; }
int nvmlDeviceGetComputeRunningProcesses(Gpu*, unsigned* count, Process*) { return *count = 0, SUCCESS; }
int nvmlDeviceGetComputeRunningProcesses_v2(Gpu*, unsigned* count, Process*) { return *count = 0, SUCCESS; }
int nvmlDeviceGetComputeRunningProcesses_v3(Gpu*, unsigned* count, Process*) { return *count = 0, SUCCESS; }
}
