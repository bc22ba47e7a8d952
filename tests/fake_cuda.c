/* A libcuda.so.1 without a device, for the tests of cached launches: modules load, launches are recorded. */
#include <cuda.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>

#define EXPORT __attribute__((visibility("default")))
enum { KERNELS = 4096, PARAMETERS = 256, RECORD = 1 << 20 };

static long functions = 0;
static int counts[KERNELS];
static size_t sizes[KERNELS][PARAMETERS];
static unsigned char record[RECORD];
static size_t recorded = 0;
static int context_missing = 0, refusals = 0;
/* Launchers let go of the interpreter's lock: without this one, launches of several threads would mix. */
static pthread_mutex_t recording = PTHREAD_MUTEX_INITIALIZER;
/* 1: the next launch waits, as where the driver's queue is full; 2: one does. */
static int holding = 0;
static pthread_cond_t released = PTHREAD_COND_INITIALIZER;

/* How many bytes each parameter of a function has: cuLaunchKernelEx itself does not know. */
EXPORT void fake_describe(long function, int count, const size_t *bytes) {
  counts[function - 1] = count;
  memcpy(sizes[function - 1], bytes, count * sizeof(size_t));
}
EXPORT const unsigned char *fake_record(size_t *bytes) { *bytes = recorded; return record; }
EXPORT void fake_clear(void) { recorded = 0; }
EXPORT void fake_lose_context(void) { context_missing = 1; }
EXPORT void fake_refuse(int times) { refusals = times; }
EXPORT void fake_hold(void) { holding = 1; }
EXPORT int fake_held(void) { return holding == 2; }
EXPORT void fake_release(void) {
  pthread_mutex_lock(&recording);
  holding = 0;
  pthread_cond_broadcast(&released);
  pthread_mutex_unlock(&recording);
}

static void put(const void *data, size_t bytes) {
  if (recorded + bytes > RECORD) abort();
  memcpy(record + recorded, data, bytes);
  recorded += bytes;
}
static int capturing = 0; /* on the stream that graphs are made by */
static CUresult captured(const unsigned *head, long function, void **p);
static CUresult launch(unsigned x, unsigned y, unsigned z, unsigned threads, unsigned shared, CUstream stream,
                       const CUlaunchAttribute *attributes, unsigned attribute_count, CUfunction function, void **p) {
  if (context_missing) return CUDA_ERROR_INVALID_CONTEXT;
  if (refusals) { refusals--; return CUDA_ERROR_INVALID_VALUE; }
  long index = (long)function - 1;
  unsigned head[6] = {x, y, z, threads, shared, 0};
  for (unsigned i = 0; i < attribute_count; i++)  /* their values are one int each */
    if (*(const int *)&attributes[i].value) head[5] |= 1u << attributes[i].id;
  if (capturing && stream == (CUstream)0x5000) return captured(head, (long)function, p);
  long who[2] = {(long)function, (long)stream};
  pthread_mutex_lock(&recording);
  if (holding == 1)
    for (holding = 2; holding;) pthread_cond_wait(&released, &recording);
  put(head, sizeof head);
  put(who, sizeof who);
  for (int i = 0; i < counts[index]; i++) put(p[i], sizes[index][i]);
  pthread_mutex_unlock(&recording);
  return CUDA_SUCCESS;
}
EXPORT CUresult cuLaunchKernelEx(const CUlaunchConfig *c, CUfunction f, void **p, void **extra) {
  return launch(c->gridDimX, c->gridDimY, c->gridDimZ, c->blockDimX * c->blockDimY * c->blockDimZ, c->sharedMemBytes,
                c->hStream, c->attrs, c->numAttrs, f, p);
}
EXPORT CUresult cuLaunchKernel(CUfunction f, unsigned x, unsigned y, unsigned z, unsigned bx, unsigned by, unsigned bz,
                               unsigned shared, CUstream stream, void **p, void **extra) {
  return launch(x, y, z, bx * by * bz, shared, stream, 0, 0, f, p);
}
/* Graphs: one capture at a time, of launches on its stream. What a graph launches is recorded as its kernels' launches. */
enum { GRAPHS = 256, GRAPH_NODES = 8 };
typedef struct { unsigned head[6]; long function; unsigned char *parameters; } Made;
static struct { Made made[GRAPH_NODES]; int count; } graphs[GRAPHS];
static int graph_total = 0, refuse_graphs = 0, user_captures = 0, graph_launches = 0, ended = 0;
#define CAPTURE_STREAM ((CUstream)0x5000)
EXPORT void fake_refuse_graphs(int how) { refuse_graphs = how; } /* 1: makes none; 2: takes no parameters; 3: launches none */
EXPORT void fake_capture(int whether) { user_captures = whether; }
EXPORT void fake_graphs(int *numbers) { numbers[0] = graph_total; numbers[1] = graph_launches; numbers[2] = ended; }
static size_t bytes_of(long function) {
  size_t total = 0;
  for (int i = 0; i < counts[function - 1]; i++) total += sizes[function - 1][i];
  return total;
}
static void take(Made *made, void **p) {
  size_t at = 0;
  free(made->parameters);
  made->parameters = malloc(bytes_of(made->function) + 1);
  for (int i = 0; i < counts[made->function - 1]; i++) {
    memcpy(made->parameters + at, p[i], sizes[made->function - 1][i]);
    at += sizes[made->function - 1][i];
  }
}
static __thread CUstreamCaptureMode thread_mode = CU_STREAM_CAPTURE_MODE_GLOBAL;
static int disturbed = 0; /* how often a graph was ended so that the driver would have ended a user's capture */
EXPORT int fake_disturbed(void) { return disturbed; }
EXPORT CUresult cuThreadExchangeStreamCaptureMode(CUstreamCaptureMode *mode) {
  CUstreamCaptureMode before = thread_mode;
  thread_mode = *mode;
  *mode = before;
  return 0;
}
static long green = 0; /* the stream of a green context */
EXPORT void fake_green(long stream) { green = stream; }
#if CUDA_VERSION >= 12040
EXPORT CUresult cuStreamGetGreenCtx(CUstream s, CUgreenCtx *context) {
#else
EXPORT CUresult cuStreamGetGreenCtx(CUstream s, void **context) {
#endif
  *context = green && green == (long)s ? (void *)1 : 0;
  return 0;
}
EXPORT CUresult cuStreamCreate(CUstream *s, unsigned flags) { *s = CAPTURE_STREAM; return 0; }
EXPORT CUresult cuStreamDestroy(CUstream s) { return 0; }
EXPORT CUresult cuStreamBeginCapture(CUstream s, CUstreamCaptureMode mode) {
  if (refuse_graphs == 1) return CUDA_ERROR_NOT_SUPPORTED;
  capturing = 1;
  graphs[graph_total].count = 0;
  return 0;
}
EXPORT CUresult cuStreamEndCapture(CUstream s, CUgraph *g) { capturing = 0; *g = (CUgraph)(long)++graph_total; return 0; }
EXPORT CUresult cuGraphGetNodes(CUgraph g, CUgraphNode *nodes, size_t *count) {
  *count = graphs[(long)g - 1].count;
  for (size_t i = 0; i < *count; i++) /* the last one first: they come in any order */
    nodes[*count - 1 - i] = (CUgraphNode)&graphs[(long)g - 1].made[i];
  return 0;
}
EXPORT CUresult cuGraphKernelNodeGetParams(CUgraphNode node, CUDA_KERNEL_NODE_PARAMS *p) {
  memset(p, 0, sizeof *p);
  p->func = (CUfunction)((Made *)node)->function;
  return 0;
}
EXPORT CUresult cuGraphInstantiateWithFlags(CUgraphExec *e, CUgraph g, unsigned long long flags) { *e = (CUgraphExec)g; return 0; }
EXPORT CUresult cuGraphExecKernelNodeSetParams(CUgraphExec e, CUgraphNode node, const CUDA_KERNEL_NODE_PARAMS *p) {
  Made *made = (Made *)node;
  if (refuse_graphs == 2 || (long)p->func != made->function) return CUDA_ERROR_INVALID_VALUE;
  unsigned head[5] = {p->gridDimX, p->gridDimY, p->gridDimZ, p->blockDimX * p->blockDimY * p->blockDimZ, p->sharedMemBytes};
  memcpy(made->head, head, sizeof head);
  take(made, p->kernelParams);
  return 0;
}
EXPORT CUresult cuGraphLaunch(CUgraphExec e, CUstream s) {
  if (context_missing) return CUDA_ERROR_INVALID_CONTEXT;
  if (refuse_graphs == 3 || refusals) { refusals -= refusals > 0; return CUDA_ERROR_INVALID_VALUE; }
  pthread_mutex_lock(&recording);
  if (holding == 1)
    for (holding = 2; holding;) pthread_cond_wait(&released, &recording);
  graph_launches++;
  for (int i = 0; i < graphs[(long)e - 1].count; i++) {
    Made *made = &graphs[(long)e - 1].made[i];
    long who[2] = {made->function, (long)s};
    put(made->head, sizeof made->head);
    put(who, sizeof who);
    put(made->parameters, bytes_of(made->function));
  }
  pthread_mutex_unlock(&recording);
  return 0;
}
EXPORT CUresult cuGraphExecDestroy(CUgraphExec e) {
  if (user_captures && thread_mode != CU_STREAM_CAPTURE_MODE_RELAXED) disturbed++;
  ended++;
  return 0;
}
EXPORT CUresult cuGraphDestroy(CUgraph g) { return 0; }
EXPORT CUresult cuStreamIsCapturing(CUstream s, CUstreamCaptureStatus *status) {
  *status = user_captures ? CU_STREAM_CAPTURE_STATUS_ACTIVE : CU_STREAM_CAPTURE_STATUS_NONE;
  return context_missing ? CUDA_ERROR_INVALID_CONTEXT : 0;
}
static CUresult captured(const unsigned *head, long function, void **p) {
  Made *made = &graphs[graph_total].made[graphs[graph_total].count++];
  memcpy(made->head, head, sizeof made->head);
  made->function = function;
  take(made, p);
  return 0;
}
EXPORT CUresult cuModuleLoadData(CUmodule *m, const void *data) { *m = (CUmodule)1; return 0; }
EXPORT CUresult cuModuleUnload(CUmodule m) { return 0; }
EXPORT CUresult cuModuleGetFunction(CUfunction *f, CUmodule m, const char *name) {
  if (functions == KERNELS) abort();
  *f = (CUfunction)(++functions);
  return 0;
}
EXPORT CUresult cuTensorMapEncodeTiled(CUtensorMap *map, CUtensorMapDataType type, cuuint32_t rank, void *address,
    const cuuint64_t *dims, const cuuint64_t *strides, const cuuint32_t *box, const cuuint32_t *steps,
    CUtensorMapInterleave interleave, CUtensorMapSwizzle swizzle, CUtensorMapL2promotion l2, CUtensorMapFloatOOBfill fill) {
  if (context_missing) return CUDA_ERROR_INVALID_CONTEXT;
  cuuint64_t *words = (cuuint64_t *)map; /* what it was made of, in its place */
  memset(map, 0, sizeof *map);
  words[0] = (cuuint64_t)address;
  words[1] = type | (cuuint64_t)rank << 8 | (cuuint64_t)swizzle << 16 | (cuuint64_t)l2 << 24 | (cuuint64_t)fill << 32;
  for (cuuint32_t i = 0; i < rank; i++) words[2 + i] = dims[i] | (cuuint64_t)box[i] << 32;
  for (cuuint32_t i = 0; i + 1 < rank; i++) words[8 + i] = strides[i];
  return 0;
}
EXPORT CUresult cuGetErrorString(CUresult e, const char **text) { *text = e == CUDA_ERROR_INVALID_VALUE ? "invalid argument" : "an error"; return 0; }
EXPORT CUresult cuCtxGetCurrent(CUcontext *c) { *c = context_missing ? 0 : (CUcontext)1; return 0; }
EXPORT CUresult cuInit(unsigned flags) { return 0; }
EXPORT CUresult cuDeviceGetCount(int *count) { *count = 1; return 0; }
EXPORT CUresult cuCtxGetDevice(CUdevice *d) { *d = 0; return 0; }
EXPORT CUresult cuPointerGetAttributes(unsigned n, CUpointer_attribute *a, void **v, CUdeviceptr p) { return CUDA_ERROR_INVALID_VALUE; }
EXPORT CUresult cuOccupancyMaxActiveClusters(int *n, CUfunction f, const CUlaunchConfig *c) { *n = 1; return 0; }
EXPORT CUresult cuDriverGetVersion(int *v) { *v = 12080; return 0; }
EXPORT CUresult cuDeviceGet(CUdevice *d, int i) { *d = i; return 0; }
EXPORT CUresult cuDevicePrimaryCtxRetain(CUcontext *c, CUdevice d) { *c = (CUcontext)1; return 0; }
EXPORT CUresult cuCtxSetCurrent(CUcontext c) { context_missing = c == 0; return 0; }
EXPORT CUresult cuPointerGetAttribute(void *v, CUpointer_attribute a, CUdeviceptr p) { *(CUdeviceptr *)v = p; return 0; }
EXPORT CUresult cuFuncSetAttribute(CUfunction f, CUfunction_attribute a, int v) { return 0; }
EXPORT CUresult cuDeviceGetAttribute(int *v, CUdevice_attribute a, CUdevice d) { *v = 232448; return 0; }
EXPORT CUresult cuFuncGetAttribute(int *v, CUfunction_attribute a, CUfunction f) { *v = a == CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK ? 1024 : 64; return 0; }
EXPORT CUresult cuFuncSetCacheConfig(CUfunction f, CUfunc_cache c) { return 0; }
EXPORT CUresult cuCtxGetLimit(size_t *v, CUlimit l) { *v = 0; return 0; }
EXPORT CUresult cuCtxSetLimit(CUlimit l, size_t v) { return 0; }
