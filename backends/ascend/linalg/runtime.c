/* What lowered kernels need to run as x86 code, and what watches them while they do.

   Buffers end exactly where a page that may not be touched begins. A touch beyond either end is recorded, the page is
   opened, holding NaN, and the kernel goes on: every stray access of a run is seen, with its distance, and none is fatal.
   Scratch memory (the tiles that a kernel allocates) starts as NaN in every program. */
#define _GNU_SOURCE
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <ucontext.h>
#include <unistd.h>

enum { ZONE = 1 << 20, MOST_BUFFERS = 64, MOST_FAULTS = 256, GAP = 64 };
static const uint16_t PATTERN = 0x7fc1; /* NaN as bf16 and, doubled, as fp32; NaN as fp16; far outside as an integer */

typedef struct {
  char *map, *data;
  size_t mapped, size;
} Buffer;

typedef struct {
  int32_t buffer, wrote; /* wrote: 1, 0, or -1 where the machine does not say */
  int64_t offset;        /* bytes from the buffer's start */
} Fault;

static Buffer buffers[MOST_BUFFERS];
static int buffer_count;
static Fault faults[MOST_FAULTS];
static int fault_count;
static size_t page;

static void fill(void *at, size_t bytes) {
  uint16_t *p = at;
  for (size_t i = 0; i < bytes / 2; i++) p[i] = PATTERN;
  if (bytes % 2) ((char *)at)[bytes - 1] = (char)0xc1;
}

static void on_fault(int signal_number, siginfo_t *info, void *context) {
  char *at = info->si_addr;
  for (int i = 0; i < buffer_count; i++) {
    Buffer *b = &buffers[i];
    if (at < b->map || at >= b->map + b->mapped) continue;
    char *start = (char *)((uintptr_t)at & ~(page - 1));
    if (mprotect(start, page, PROT_READ | PROT_WRITE)) break;
    fill(start, page);
    if (fault_count < MOST_FAULTS) {
      int32_t wrote = -1;
#ifdef __x86_64__
      wrote = (((ucontext_t *)context)->uc_mcontext.gregs[REG_ERR] & 2) != 0;
#endif
      faults[fault_count++] = (Fault){i, wrote, at - b->data};
    }
    return;
  }
  static const char text[] = "error: the lowered code touched memory that is nobody's\n";
  if (write(2, text, sizeof text - 1) < 0) _exit(1);
  signal(signal_number, SIG_DFL); /* the access is tried again, and ends the process */
}

int guard_install(void) {
  struct sigaction action = {.sa_sigaction = on_fault, .sa_flags = SA_SIGINFO | SA_NODEFER};
  page = (size_t)sysconf(_SC_PAGESIZE);
  return sigaction(SIGSEGV, &action, NULL) || sigaction(SIGBUS, &action, NULL);
}

/* Memory for `size` bytes that ends at a page that may not be touched; NULL where there is none. */
void *guard_buffer(size_t size) {
  if (buffer_count == MOST_BUFFERS) return NULL;
  size_t inside = (size + page - 1) / page * page;
  Buffer b = {.mapped = inside + 2 * (size_t)ZONE, .size = size};
  b.map = mmap(NULL, b.mapped, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (b.map == MAP_FAILED) return NULL;
  if (inside && mprotect(b.map + ZONE, inside, PROT_READ | PROT_WRITE)) return NULL;
  b.data = b.map + ZONE + inside - size;
  fill(b.map + ZONE, inside - size); /* an odd size ends the pattern one byte before the data */
  buffers[buffer_count++] = b;
  return b.data;
}

/* Whether what lies before a buffer, on its own first page, was written. */
int guard_broken(int buffer) {
  Buffer *b = &buffers[buffer];
  size_t before = (size_t)(b->data - (b->map + ZONE));
  char *expected = malloc(before + 1);
  if (!expected) return -1;
  fill(expected, before);
  int broken = memcmp(expected, b->map + ZONE, before) != 0;
  free(expected);
  return broken;
}

int guard_faults(Fault *out, int most) {
  int n = fault_count < most ? fault_count : most;
  memcpy(out, faults, (size_t)n * sizeof(Fault));
  return fault_count;
}

void guard_release(void) {
  for (int i = 0; i < buffer_count; i++) munmap(buffers[i].map, buffers[i].mapped);
  buffer_count = fault_count = 0;
}

/* Scratch memory: handed out in a line, and given back when a program ends. */
static char *scratch;
static size_t used, capacity = (size_t)1 << 31;

void scratch_reset(void) { used = 0; }

void *_mlir_memref_to_llvm_alloc(uint64_t bytes) {
  if (!scratch) {
    scratch = mmap(NULL, capacity, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (scratch == MAP_FAILED) {
      fputs("error: no memory for the scratch of lowered code\n", stderr);
      abort();
    }
  }
  size_t rounded = (bytes + GAP - 1) / GAP * GAP + GAP;
  if (bytes > capacity || rounded > capacity - used) {
    fprintf(stderr, "error: one program asks for more than %zu bytes of scratch memory\n", capacity);
    abort();
  }
  char *at = scratch + used;
  fill(at, rounded);
  used += rounded;
  return at;
}

void *_mlir_memref_to_llvm_aligned_alloc(uint64_t alignment, uint64_t bytes) {
  used = (used + alignment - 1) / alignment * alignment;
  return _mlir_memref_to_llvm_alloc(bytes);
}

void _mlir_memref_to_llvm_free(void *at) { (void)at; }

/* memref.copy of what is not contiguous (mlir/lib/ExecutionEngine/CRunnerUtils.cpp has the descriptor's layout). */
typedef struct {
  int64_t rank;
  void *descriptor;
} Unranked;

static void copy(int64_t element, char *from, char *to, int64_t *sizes, int64_t *from_strides, int64_t *to_strides,
                 int64_t rank) {
  if (rank == 0) {
    memcpy(to, from, (size_t)element);
    return;
  }
  if (rank == 1 && from_strides[0] == 1 && to_strides[0] == 1) {
    if (sizes[0] > 0) memcpy(to, from, (size_t)(element * sizes[0]));
    return;
  }
  for (int64_t i = 0; i < sizes[0]; i++)
    copy(element, from + i * from_strides[0] * element, to + i * to_strides[0] * element, sizes + 1, from_strides + 1,
         to_strides + 1, rank - 1);
}

void memrefCopy(int64_t element, Unranked *from, Unranked *to) {
  int64_t *f = from->descriptor, *t = to->descriptor, rank = from->rank;
  copy(element, ((char **)f)[1] + f[2] * element, ((char **)t)[1] + t[2] * element, f + 3, f + 3 + rank, t + 3 + rank,
       rank);
}

#ifdef __x86_64__
/* fp32 to bf16, rounded to the nearest even one: libgcc before 13 has no such function. Its result is in xmm0. */
__attribute__((visibility("default"))) float portattn_to_bf16(float value) {
  uint32_t bits, low;
  memcpy(&bits, &value, 4);
  low = (bits & 0x7fffffff) > 0x7f800000 ? (bits >> 16) | 0x40 : (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
  memcpy(&value, &low, 4);
  return value;
}
__asm__(".weak __truncsfbf2\n.set __truncsfbf2, portattn_to_bf16\n");
#endif
