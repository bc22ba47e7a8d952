/* Answers of CANN's runtime to torch_npu, for one NPU without memory: enough to import torch_npu, to ask what chip there
   is and to run autograd on its device. Every other function that torch_npu's libraries link to returns 0
   (stand_in_libraries.py); a function that they look up by name must be here. */
#include <cstdint>
#include <string>
#include <unordered_set>

/* libc10's names of allocator settings. torch_npu 2.14 and torch's CUDA build add the same names, which ends a process:
   each gets a set of its own. */
namespace c10::CachingAllocator {
struct AcceleratorAllocatorConfig {
  static std::unordered_set<std::string> &getMutableKeys();
};
std::unordered_set<std::string> &AcceleratorAllocatorConfig::getMutableKeys() {
  return *new std::unordered_set<std::string>;
}
}  // namespace c10::CachingAllocator

extern "C" {

static char context_handle, stream_handle; /* never read */

const char *aclrtGetSocName(void) { return "Ascend910B2"; }
const char *aclGetRecentErrMsg(void) { return ""; }

int aclrtGetDeviceCount(uint32_t *count) {
  *count = 1;
  return 0;
}

int aclrtGetDevice(int32_t *device) {
  *device = 0;
  return 0;
}

int aclrtGetCurrentContext(void **context) {
  *context = &context_handle;
  return 0;
}

int aclrtCreateStreamWithConfig(void **stream, uint32_t priority, uint32_t flags) {
  *stream = &stream_handle;
  return 0;
}

int aclrtGetSysParamOpt(int option, int64_t *value) {
  *value = 0;
  return 0;
}

int aclrtCtxSetSysParamOpt(int option, int64_t value) { return 0; }
int aclrtSetDeviceSatMode(int mode) { return 0; }
int aclrtSetOpExecuteTimeOut(uint32_t seconds) { return 0; }
int aclrtDestroyStreamForce(void *stream) { return 0; }
int aclSetCompileopt(int option, const char *value) { return 0; }
}
