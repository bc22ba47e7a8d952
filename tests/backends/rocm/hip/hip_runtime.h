// HIP's functions that the runner of bundles calls, in host memory. A launch prints its numbers and runs nothing.
#pragma once
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>

enum hipError_t { hipSuccess, hipErrorInvalidValue };
enum hipMemcpyKind { hipMemcpyHostToDevice, hipMemcpyDeviceToHost };
struct hipDeviceProp_t { char name[256], gcnArchName[256]; };
using hipModule_t = const void*;
using hipFunction_t = const char*;

inline const char* hipGetErrorString(hipError_t) { return "invalid value"; }
inline hipError_t hipGetDeviceProperties(hipDeviceProp_t* found, int) {
    strcpy(found->name, "a stand-in");
    strcpy(found->gcnArchName, getenv("STAND_IN_ARCH"));
    return hipSuccess;
}
inline hipError_t hipRuntimeGetVersion(int* version) { return *version = 70100000, hipSuccess; }
inline hipError_t hipMalloc(void** place, size_t bytes) { return *place = malloc(bytes), hipSuccess; }
inline hipError_t hipFree(void* place) { return free(place), hipSuccess; }
inline hipError_t hipMemcpy(void* to, const void* from, size_t bytes, hipMemcpyKind) {
    return memcpy(to, from, bytes), hipSuccess;
}
inline hipError_t hipModuleLoadData(hipModule_t* module, const void* image) {
    *module = image;
    return memcmp(image, "\x7f" "ELF", 4) ? hipErrorInvalidValue : hipSuccess;
}
inline hipError_t hipModuleGetFunction(hipFunction_t* function, hipModule_t, const char* name) {
    return *function = strdup(name), hipSuccess;
}
inline hipError_t hipModuleUnload(hipModule_t) { return hipSuccess; }
inline hipError_t hipDeviceSynchronize() { return hipSuccess; }
inline hipError_t hipModuleLaunchKernel(hipFunction_t function, unsigned x, unsigned y, unsigned z, unsigned threads,
                                        unsigned, unsigned, unsigned lds, void*, void** arguments, void**) {
    // The last of the arguments is a null pointer of Triton's own.
    printf("%s %u %u %u %u %u %d\n", function, x, y, z, threads, lds, *(uint64_t*)arguments[0] != 0);
    return hipSuccess;
}
