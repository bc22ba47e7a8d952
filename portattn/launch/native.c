/* The hot path of a cached call, for CUDA: what cache.Kind, cached_launch.CachedLaunch and cudadriver.Block do,
   without Python.

   Launches   a Block's kernels: writes a call's addresses and sizes, and calls cuLaunchKernelEx for each kernel
   Sized      a class of sizes (cached_launch.CachedLaunch): a program (portattn/schema/symbolic_int.py) says whether sizes
              belong to it, and what its launches take of them
   Kind       a kind of call (cache.Kind): is this call of it? Then the class of its sizes allocates, and launches
   Finder     the kinds of an operation (cache.kinds), asked one after the other
   Backward   the backward pass of a training call: memory for its gradients, and their operation by its kinds

   Nothing is decided here that the Python functions do not decide; what is not handled is handed back
   (NotImplemented). Built by native.py at run time. Nothing of CUDA or torch is included: functions come as addresses
   and callables. */
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#if PY_VERSION_HEX >= 0x030D0000
#define FINALIZING Py_IsFinalizing
#else
#define FINALIZING _Py_IsFinalizing
#endif

enum { MOST = 64, MAP_BYTES = 128, RANK = 5, INVALID_CONTEXT = 201, REGISTERS = 2048, INPUTS = 256, OUTPUTS = 512 };

typedef int (*LaunchKernelEx)(const void *config, void *function, void **parameters, void **extra);
typedef int (*EncodeTiled)(void *map, int type, uint32_t rank, void *address, const uint64_t *dims,
                           const uint64_t *strides, const uint32_t *box, const uint32_t *steps, int interleave,
                           int swizzle, int promotion, int fill);
typedef struct { const void *config; void *function; void **parameters; uint64_t *stream; } Kernel;
/* CUDA_KERNEL_NODE_PARAMS_v2, whose first seven numbers are those of a configuration */
typedef struct {
  void *function;
  uint32_t sizes[7];
  void **parameters, **extra;
  void *kernel, *context;
} Node;
typedef struct { void *place; Py_ssize_t bytes, output; } Write; /* a size in the kernels' memory */

/* How cuTensorMapEncodeTiled makes a map of an address, sizes and strides (in elements), innermost axis last. */
typedef struct { EncodeTiled encode; int type, rank, element, swizzle, promotion, fill; uint32_t box[RANK]; } Encoding;

typedef struct {
  void *place;
  Py_ssize_t role, count;
  Py_ssize_t outputs[2 * RANK]; /* its sizes and strides among the program's outputs */
  int64_t seen[2 * RANK];
  uint64_t address;
  int made;
  PyObject *of_key;             /* mapping from (address, sizes and strides) to the map's bytes */
  Encoding how;                 /* where it can be made here */
} Map;

/* ------------------------------------------------------------------------------------------------ Programs: symbolic_int.py */

static const char *const OPERATIONS[] = {"eq", "ne", "lt", "ge", "le", "gt", "add", "sub", "mul", "floordiv", "mod",
                                         "least", "most", "pow2", "split_evenly", "split_cheapest", NULL};
enum { EQ, NE, LT, GE, LE, GT, ADD, SUB, MUL, FLOORDIV, MOD, LEAST, GREATEST, POW2, SPLIT_EVENLY, SPLIT_CHEAPEST, KINDS };
static const int ARGUMENTS[KINDS] = {2, 2, 2, 2, 2, 2, 2, 2, 2, 2, 2, 2, 2, 1, 4, 7};
enum { NEARLY = 85 }; /* as in kernel_specs/base.py */

static int64_t floor_div(int64_t a, int64_t b) { return a / b - (a % b != 0 && (a < 0) != (b < 0)); }

/* Of numbers below 2^26 (see `moderate`): 32-bit division takes a third of the time of 64-bit division. */
static uint32_t up(uint32_t a, uint32_t b) { return (a + b - 1) / b; }

static int64_t split_evenly(uint32_t programs, uint32_t tiles, uint32_t slots, uint32_t limit) {
  enum { SPLITS = 1024 };
  uint32_t most = slots / programs > 1 ? slots / programs : 1;
  uint64_t costs[SPLITS], best = UINT64_MAX;
  most = most > limit / 2 ? limit : 2 * most;
  if (most > tiles) most = tiles;
  if (most > SPLITS || (uint64_t)programs * most > INT32_MAX) return 0;
  for (uint32_t splits = 1; splits <= most; splits++) {
    costs[splits - 1] = (uint64_t)up(programs * splits, slots) * up(tiles, splits);
    if (costs[splits - 1] < best) best = costs[splits - 1];
  }
  for (uint32_t splits = 1; splits <= most; splits++)
    if (100 * best >= NEARLY * costs[splits - 1]) return splits;
  return 0;
}

static int64_t split_cheapest(uint32_t programs, uint32_t tiles, uint32_t cores, uint32_t limit, uint32_t ends,
                              uint32_t once, uint32_t each) {
  uint64_t best = UINT64_MAX;
  uint32_t found = 0;
  if ((uint64_t)programs * limit > INT32_MAX) return 0;
  for (uint32_t splits = 1; splits <= limit; splits++) {
    uint64_t cost = (uint64_t)up(programs * splits, cores) * (up(tiles, splits) + ends + (splits > 1 ? each : 0)) +
                    (splits > 1 ? once : 0);
    if (cost < best) { best = cost; found = splits; }
  }
  return found;
}

/* Numbers in which nothing above overflows: 2^26 is far beyond any count of programs or tiles. */
static int moderate(const int64_t *r, const int32_t *a, int count) {
  for (int i = 0; i < count; i++)
    if (r[a[i]] < 0 || r[a[i]] > (int64_t)1 << 26) return 0;
  return 1;
}

/* Run code over the registers r, inputs and constants in place, `next` the first free one: 1 where every comparison
   holds, 0 where one does not, or a number is beyond what is computed here. */
static int run(const int32_t *code, Py_ssize_t length, int64_t *r, Py_ssize_t next) {
  for (const int32_t *at = code, *end = code + length; at < end; at += 1 + ARGUMENTS[*at]) {
    const int32_t *a = at + 1;
    int64_t x = r[a[0]], y = ARGUMENTS[*at] > 1 ? r[a[1]] : 0, *to = &r[next];
    switch (*at) {
      case EQ: if (x != y) return 0; continue;
      case NE: if (x == y) return 0; continue;
      case LT: if (x >= y) return 0; continue;
      case GE: if (x < y) return 0; continue;
      case LE: if (x > y) return 0; continue;
      case GT: if (x <= y) return 0; continue;
      case ADD: if (__builtin_add_overflow(x, y, to)) return 0; break;
      case SUB: if (__builtin_sub_overflow(x, y, to)) return 0; break;
      case MUL: if (__builtin_mul_overflow(x, y, to)) return 0; break;
      case FLOORDIV: case MOD:
        if (y == 0 || (y == -1 && x == INT64_MIN)) return 0;
        if (*at == FLOORDIV) *to = floor_div(x, y);
        else *to = x % y + (x % y != 0 && (x < 0) != (y < 0) ? y : 0);
        break;
      case LEAST: *to = x < y ? x : y; break;
      case GREATEST: *to = x > y ? x : y; break;
      case POW2:
        if (x > (int64_t)1 << 62) return 0;
        for (*to = 1; *to < x;) *to *= 2;
        break;
      case SPLIT_EVENLY:
        if (!moderate(r, a, 4) || x < 1 || r[a[2]] < 1) return 0;
        if (!(*to = split_evenly((uint32_t)x, (uint32_t)y, (uint32_t)r[a[2]], (uint32_t)r[a[3]]))) return 0;
        break;
      case SPLIT_CHEAPEST:
        if (!moderate(r, a, 7) || r[a[2]] < 1) return 0;
        if (!(*to = split_cheapest((uint32_t)x, (uint32_t)y, (uint32_t)r[a[2]], (uint32_t)r[a[3]], (uint32_t)r[a[4]],
                                   (uint32_t)r[a[5]], (uint32_t)r[a[6]])))
          return 0;
        break;
    }
    next++;
  }
  return 1;
}

/* --------------------------------------------------------------------------------------------------------- Launches */

/* Graphs: the driver takes 1.6 µs to give a graph's two kernels other parameters and to launch it, and 5 to 6 for the two
   by themselves. So launches of several kernels that are repeated are made a graph of, which is launched wherever no
   capture is under way. Of one kernel it saves 1.5 of 7 µs, and the device may take 0.4 longer: no graph.
   Later parameters leave launches that are enqueued alone. The driver runs one launch of a graph after the other, also
   on other streams, which would wait for each other: a graph is launched on one stream, and moves to another where
   launches are repeated there alone. */
enum { AFTER = 16, NODES = 4, MOST_GRAPHS = 512, RELAXED = 2, NON_BLOCKING = 1, NO_GRAPH = -1 };
static struct {
  int (*exchange)(int *mode);
  int (*stream)(void **stream, unsigned flags), (*end_stream)(void *stream);
  int (*begin)(void *stream, int mode), (*end)(void *stream, void **graph);
  int (*nodes)(void *graph, void **nodes, size_t *count), (*node)(void *node, Node *params);
  int (*instantiate)(void **runs, void *graph, unsigned long long flags), (*set)(void *runs, void *node, const Node *params);
  int (*launch)(void *runs, void *stream), (*capturing)(void *stream, int *status);
  int (*end_runs)(void *runs), (*end_graph)(void *graph);
  int (*green)(void *stream, void **context); /* NULL before CUDA 12.4 */
} graphs;
enum { GRAPH_FUNCTIONS = sizeof graphs / sizeof(void *) };
static int graphs_usable = 0, graph_count = 0; /* guarded by the GIL */

typedef struct {
  PyObject_HEAD
  PyObject *memory;     /* keeps what the addresses below point into */
  LaunchKernelEx launch;
  uint64_t *roles;      /* where a launch's addresses go */
  Py_ssize_t role_count, kernel_count, map_count, write_count;
  int64_t output_count; /* outputs that maps and writes name: a program must have as many */
  Kernel *kernels;
  Map *maps;
  Write *writes;
  int busy;             /* a thread is launching with it; guarded by the GIL */
  int launched;         /* how often, up to AFTER */
  void *graph, *runs, *nodes[NODES]; /* the kernels as a graph, what runs it, and its nodes in the kernels' order */
  uint64_t stream;      /* of the graph's launches, or of those before it */
  int elsewhere;        /* launches on others since */
} Launches;

static PyTypeObject LaunchesType, SizedType, KindType, FinderType;

static uint64_t number(PyObject *owner, Py_ssize_t index) {
  return PyLong_AsUnsignedLongLong(PyTuple_GET_ITEM(owner, index)); /* -1 with an exception: looked for once, at the end */
}

static int64_t integer(PyObject *owner, Py_ssize_t index) { return PyLong_AsLongLong(PyTuple_GET_ITEM(owner, index)); }

/* (function, type, element bytes, swizzle, promotion, fill, box): 0, or -1 with an exception */
static int take_encoding(Encoding *how, PyObject *given) {
  if (!PyTuple_Check(given) || PyTuple_GET_SIZE(given) != 7 || !PyTuple_Check(PyTuple_GET_ITEM(given, 6)) ||
      PyTuple_GET_SIZE(PyTuple_GET_ITEM(given, 6)) > RANK) {
    PyErr_SetString(PyExc_TypeError, "a tensor map is made of seven values, with a box of at most five axes");
    return -1;
  }
  PyObject *box = PyTuple_GET_ITEM(given, 6);
  how->encode = (EncodeTiled)(uintptr_t)number(given, 0);
  how->type = (int)integer(given, 1), how->element = (int)integer(given, 2), how->swizzle = (int)integer(given, 3);
  how->promotion = (int)integer(given, 4), how->fill = (int)integer(given, 5), how->rank = (int)PyTuple_GET_SIZE(box);
  for (int i = 0; i < how->rank; i++) how->box[how->rank - 1 - i] = (uint32_t)integer(box, i);
  return PyErr_Occurred() ? -1 : 0;
}

static int encode(const Encoding *how, void *place, uint64_t address, const int64_t *numbers) {
  uint64_t dims[RANK], strides[RANK];
  uint32_t steps[RANK] = {1, 1, 1, 1, 1};
  for (int i = 0; i < how->rank; i++) dims[how->rank - 1 - i] = (uint64_t)numbers[i];
  for (int i = 0; i + 1 < how->rank; i++) /* the innermost one is 1, and not given */
    strides[how->rank - 2 - i] = (uint64_t)how->element * (uint64_t)numbers[how->rank + i];
  return how->encode(place, how->type, (uint32_t)how->rank, (void *)(uintptr_t)address, dims, strides, how->box, steps,
                     0, how->swizzle, how->promotion, how->fill);
}

/* tensor_map(encoding, address, numbers) -> the map's bytes, or the driver's error as an integer */
static PyObject *tensor_map(PyObject *module, PyObject *args) {
  PyObject *given, *numbers;
  unsigned long long address;
  Encoding how;
  char place[2 * MAP_BYTES], *aligned = place + MAP_BYTES - (uintptr_t)place % MAP_BYTES;
  int64_t values[2 * RANK];
  if (!PyArg_ParseTuple(args, "OKO!", &given, &address, &PyTuple_Type, &numbers) || take_encoding(&how, given) < 0)
    return NULL;
  if (PyTuple_GET_SIZE(numbers) != 2 * how.rank)
    return PyErr_Format(PyExc_ValueError, "%d sizes and strides are needed", 2 * how.rank);
  for (Py_ssize_t i = 0; i < 2 * how.rank; i++) values[i] = integer(numbers, i);
  if (PyErr_Occurred()) return NULL;
  int error = encode(&how, aligned, address, values);
  return error ? PyLong_FromLong(error) : PyBytes_FromStringAndSize(aligned, MAP_BYTES);
}

/* Whether an output can be one; an exception where not. */
static int names_output(Launches *self, int64_t output) {
  if (PyErr_Occurred()) return 0;
  if (output < 0 || output >= OUTPUTS) {
    PyErr_Format(PyExc_ValueError, "output %lld is none of %d", (long long)output, OUTPUTS);
    return 0;
  }
  if (output >= self->output_count) self->output_count = output + 1;
  return 1;
}

/* Launches(memory, function, roles, role_count, kernels, maps, writes): kernels of (config, function, parameters,
   stream), all addresses; maps of (place, role, outputs, mapping, encoding or None); writes of (place, bytes, output) */
static PyObject *launches_new(PyTypeObject *type, PyObject *args, PyObject *names) {
  PyObject *memory, *kernels, *maps, *writes;
  unsigned long long launch, roles;
  Py_ssize_t count;
  int as_graph = 1;
  if (!PyArg_ParseTuple(args, "OKKnO!O!O!|p", &memory, &launch, &roles, &count, &PyTuple_Type, &kernels, &PyTuple_Type,
                        &maps, &PyTuple_Type, &writes, &as_graph))
    return NULL;
  Py_ssize_t length = PyTuple_GET_SIZE(writes), kernels_length = PyTuple_GET_SIZE(kernels),
             maps_length = PyTuple_GET_SIZE(maps);
  if (count < 0 || count > MOST || kernels_length > MOST || maps_length > MOST)
    return PyErr_Format(PyExc_ValueError, "at most %d roles, kernels and maps", MOST);
  Launches *self = (Launches *)type->tp_alloc(type, 0);
  if (!self) return NULL;
  self->memory = Py_NewRef(memory);
  self->launch = (LaunchKernelEx)(uintptr_t)launch;
  self->roles = (uint64_t *)(uintptr_t)roles;
  self->role_count = count;
  self->launched = as_graph ? 0 : AFTER + 1;
  self->kernels = PyMem_Calloc(kernels_length + 1, sizeof *self->kernels);
  self->maps = PyMem_Calloc(maps_length + 1, sizeof *self->maps);
  self->writes = PyMem_Calloc(length + 1, sizeof *self->writes);
  if (!self->kernels || !self->maps || !self->writes) PyErr_NoMemory();
  for (Py_ssize_t i = 0; i < kernels_length && !PyErr_Occurred(); i++) {
    PyObject *one = PyTuple_GET_ITEM(kernels, i);
    self->kernels[self->kernel_count++] = (Kernel){(void *)number(one, 0), (void *)number(one, 1), (void **)number(one, 2),
                                                   (uint64_t *)number(one, 3)};
  }
  for (Py_ssize_t i = 0; i < maps_length && !PyErr_Occurred(); i++) {
    PyObject *one = PyTuple_GET_ITEM(maps, i), *outputs = PyTuple_GET_ITEM(one, 2), *how = PyTuple_GET_ITEM(one, 4);
    Map *map = &self->maps[self->map_count];
    if (!PyTuple_Check(outputs) || PyTuple_GET_SIZE(outputs) > 2 * RANK) {
      PyErr_SetString(PyExc_ValueError, "a tensor map has at most ten sizes and strides");
      break;
    }
    map->place = (void *)number(one, 0), map->role = (Py_ssize_t)integer(one, 1);
    for (; map->count < PyTuple_GET_SIZE(outputs); map->count++) {
      map->outputs[map->count] = integer(outputs, map->count);
      if (!names_output(self, map->outputs[map->count])) break;
    }
    if (!PyErr_Occurred() && (map->role < 0 || map->role >= count))
      PyErr_Format(PyExc_ValueError, "a tensor map is of role %zd, and there are %zd", map->role, count);
    if (how != Py_None && take_encoding(&map->how, how) < 0) break;
    map->of_key = Py_NewRef(PyTuple_GET_ITEM(one, 3));
    self->map_count++;
  }
  for (Py_ssize_t i = 0; i < length && !PyErr_Occurred(); i++) {
    PyObject *one = PyTuple_GET_ITEM(writes, i);
    Write write = {(void *)number(one, 0), integer(one, 1), integer(one, 2)};
    if (!names_output(self, write.output)) break;
    if (write.bytes < 1 || write.bytes > (Py_ssize_t)sizeof(int64_t)) {
      PyErr_Format(PyExc_ValueError, "a size of %zd bytes is none", write.bytes);
      break;
    }
    self->writes[self->write_count++] = write;
  }
  if (PyErr_Occurred()) Py_CLEAR(self);
  return (PyObject *)self;
}

/* graph_functions(addresses): let repeated launches be graphs; (): no more. The addresses are of cuThreadExchangeStreamCaptureMode
   and so on, in the order of `graphs`. */
static PyObject *graph_functions(PyObject *module, PyObject *given) {
  void *found[GRAPH_FUNCTIONS];
  if (!PyTuple_Check(given) || (PyTuple_GET_SIZE(given) && PyTuple_GET_SIZE(given) != GRAPH_FUNCTIONS))
    return PyErr_Format(PyExc_TypeError, "%d addresses, or none", GRAPH_FUNCTIONS);
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(given); i++) found[i] = (void *)number(given, i);
  if (PyErr_Occurred()) return NULL;
  graphs_usable = PyTuple_GET_SIZE(given) > 0;
  if (graphs_usable) memcpy(&graphs, found, sizeof found);
  return PyLong_FromLong(graph_count);
}

static void end_graph(Launches *self) {
  if (!self->runs && !self->graph) return;
  int mode = RELAXED, changed = !graphs.exchange(&mode); /* or the driver ends a capture that is under way */
  if (self->runs) graphs.end_runs(self->runs);
  if (self->graph) graphs.end_graph(self->graph);
  self->runs = self->graph = NULL;
  if (changed) graphs.exchange(&mode);
}

/* A graph of the kernels, whose parameters are there: self->runs, or NULL where there is none. In a stream of its own,
   and so that no capture of another stream or thread minds. */
static int make_graph(Launches *self) {
  int mode = RELAXED, error;
  void *stream = NULL, *nodes[NODES];
  size_t count = NODES;
  if (self->kernel_count > NODES || graphs.exchange(&mode)) return NO_GRAPH;
  if (!(error = graphs.stream(&stream, NON_BLOCKING))) {
    if (!(error = graphs.begin(stream, RELAXED))) {
      for (Py_ssize_t i = 0; i < self->kernel_count && !error; i++) {
        *self->kernels[i].stream = (uint64_t)(uintptr_t)stream;
        error = self->launch(self->kernels[i].config, self->kernels[i].function, self->kernels[i].parameters, NULL);
      }
      int ended = graphs.end(stream, &self->graph); /* whatever came before: no capture is left */
      if (!error) error = ended;
    }
    graphs.end_stream(stream);
  }
  if (!error) error = graphs.nodes(self->graph, nodes, &count);
  if (!error && count != (size_t)self->kernel_count) error = NO_GRAPH;
  for (Py_ssize_t i = 0; i < self->kernel_count && !error; i++) { /* nodes come in any order */
    self->nodes[i] = NULL;
    for (size_t j = 0; j < count && !error; j++) {
      Node node;
      memset(&node, 0, sizeof node);
      error = graphs.node(nodes[j], &node);
      if (error || node.function != self->kernels[i].function) continue;
      if (self->nodes[i]) error = NO_GRAPH; /* the same kernel twice */
      self->nodes[i] = nodes[j];
    }
    if (!self->nodes[i]) error = NO_GRAPH;
  }
  if (!error) error = graphs.instantiate(&self->runs, self->graph, 0);
  if (error) end_graph(self);
  graphs.exchange(&mode);
  return error;
}

/* Whether the kernels were launched as a graph; else they must be launched by themselves, which also says what an error
   is. For lost contexts see `launch_all`. */
static int launch_graph(Launches *self, uint64_t stream, int *error) {
  for (Py_ssize_t i = 0; i < self->kernel_count; i++) {
    const Kernel *kernel = &self->kernels[i];
    Node node = {.function = kernel->function, .parameters = kernel->parameters};
    memcpy(node.sizes, kernel->config, sizeof node.sizes);
    *error = graphs.set(self->runs, self->nodes[i], &node);
    if (*error) return *error == INVALID_CONTEXT || (*error = 0);
  }
  *error = graphs.launch(self->runs, (void *)(uintptr_t)stream);
  if (!*error || *error == INVALID_CONTEXT) return 1;
  *error = 0;
  return 0;
}

static int captured(uint64_t stream) { /* or nobody can tell */
  int status = 0;
  return graphs.capturing((void *)(uintptr_t)stream, &status) || status;
}

static int green(uint64_t stream) { /* has a part of the multiprocessors, which a graph's kernels would not keep to */
  void *context = NULL;
  return graphs.green && !graphs.green((void *)(uintptr_t)stream, &context) && context;
}

static void launches_free(Launches *self) {
  if (self->runs && !FINALIZING()) { /* later the driver may be gone */
    end_graph(self);
    graph_count--;
  }
  for (Py_ssize_t i = 0; i < self->map_count; i++) Py_XDECREF(self->maps[i].of_key);
  PyMem_Free(self->kernels);
  PyMem_Free(self->maps);
  PyMem_Free(self->writes);
  Py_XDECREF(self->memory);
  Py_TYPE(self)->tp_free((PyObject *)self);
}

/* The tensor map of an address and sizes: made here, or by the mapping. 0; -1 with a Python exception; or the driver's
   error where the thread has no context. */
static int set_map(Map *map, uint64_t address, const int64_t *outputs) {
  int64_t numbers[2 * RANK];
  for (Py_ssize_t i = 0; i < map->count; i++) numbers[i] = outputs[map->outputs[i]];
  if (map->made && map->address == address && !memcmp(numbers, map->seen, map->count * sizeof *numbers)) return 0;
  map->made = 0;
  if (map->how.encode) {
    int error = encode(&map->how, map->place, address, numbers);
    if (error == INVALID_CONTEXT) return error;
    if (error) {
      PyErr_Format(PyExc_RuntimeError, "CUDA's driver refused a tensor map: error %d", error);
      return -1;
    }
  } else {
    PyObject *key = PyTuple_New(1 + map->count), *data;
    if (!key) return -1;
    for (Py_ssize_t i = 0; i <= map->count; i++) {
      PyObject *item = i ? PyLong_FromLongLong(numbers[i - 1]) : PyLong_FromUnsignedLongLong(address);
      if (!item) { Py_DECREF(key); return -1; }
      PyTuple_SET_ITEM(key, i, item);
    }
    data = PyObject_GetItem(map->of_key, key);
    Py_DECREF(key);
    if (!data) return -1;
    if (!PyBytes_Check(data) || PyBytes_GET_SIZE(data) != MAP_BYTES) {
      PyErr_SetString(PyExc_TypeError, "a tensor map is 128 bytes");
      Py_DECREF(data);
      return -1;
    }
    memcpy(map->place, PyBytes_AS_STRING(data), MAP_BYTES);
    Py_DECREF(data);
  }
  memcpy(map->seen, numbers, map->count * sizeof *numbers);
  map->address = address, map->made = 1;
  return 0;
}

/* Launch from the kernel `first` on, with the sizes that a program's outputs say. 0 when all are launched; -1 with a
   Python exception; or the driver's error, and *first the kernel that it refused. The caller has set `busy`. */
static int launch_all(Launches *self, uint64_t stream, const uint64_t *addresses, const int64_t *outputs,
                      Py_ssize_t *first) {
  int error = 0;
  for (Py_ssize_t i = 0; i < self->map_count; i++) { /* first of all: it may run Python */
    error = set_map(&self->maps[i], addresses[self->maps[i].role], outputs);
    if (error) return error;
  }
  memcpy(self->roles, addresses, self->role_count * sizeof *addresses);
  for (Py_ssize_t i = 0; i < self->write_count; i++) /* of a little-endian number the first bytes are the low ones */
    memcpy(self->writes[i].place, &outputs[self->writes[i].output], self->writes[i].bytes);
  const int repeated = graphs_usable && !*first && self->launched >= AFTER, had = self->runs != NULL;
  const int makes = repeated && self->launched == AFTER && self->kernel_count > 1 && graph_count < MOST_GRAPHS;
  int tried = 0, whole = 0;
  if (stream == self->stream) self->elsewhere = 0;
  else if (++self->elsewhere >= AFTER) self->stream = stream, self->elsewhere = 0;
  const int here = stream == self->stream;
  Py_BEGIN_ALLOW_THREADS /* the driver waits where its queue is full */
  if (repeated && here && (had || makes) && !captured(stream) && !green(stream)) {
    int mode = RELAXED, changed = !graphs.exchange(&mode); /* captures of other streams and threads go on */
    if (makes) tried = make_graph(self) != INVALID_CONTEXT;
    whole = self->runs && launch_graph(self, stream, &error);
    if (self->runs && !whole) end_graph(self); /* it takes no such parameters, or is not launched */
    if (changed) graphs.exchange(&mode);
  }
  for (; !whole && *first < self->kernel_count; ++*first) {
    Kernel *kernel = &self->kernels[*first];
    *kernel->stream = stream;
    error = self->launch(kernel->config, kernel->function, kernel->parameters, NULL);
    if (error) break;
  }
  Py_END_ALLOW_THREADS
  if (whole && !error) *first = self->kernel_count;
  graph_count += (self->runs != NULL) - had;
  if (tried || (self->launched < AFTER && !error)) self->launched++;
  return error;
}

/* launches(stream, addresses, outputs, first) -> None, or (error, kernel) where the driver refused one. For one thread
   at a time. */
static PyObject *launches_call(Launches *self, PyObject *args, PyObject *names) {
  unsigned long long stream;
  PyObject *given, *sizes;
  Py_ssize_t first = 0, count;
  uint64_t addresses[MOST];
  int64_t outputs[OUTPUTS];
  if (!PyArg_ParseTuple(args, "KOO|n", &stream, &given, &sizes, &first)) return NULL;
  PyObject *list = PySequence_Fast(given, "addresses must be a sequence"), *values = NULL;
  if (list) values = PySequence_Fast(sizes, "outputs must be a sequence");
  if (!values) { Py_XDECREF(list); return NULL; }
  count = PySequence_Fast_GET_SIZE(values);
  if (PySequence_Fast_GET_SIZE(list) != self->role_count || count > OUTPUTS) {
    PyErr_Format(PyExc_ValueError, "%zd addresses are needed, not %zd, and at most %d outputs", self->role_count,
                 PySequence_Fast_GET_SIZE(list), OUTPUTS);
  } else {
    for (Py_ssize_t i = 0; i < self->role_count; i++)
      addresses[i] = PyLong_AsUnsignedLongLong(PySequence_Fast_GET_ITEM(list, i));
    for (Py_ssize_t i = 0; i < count; i++) outputs[i] = PyLong_AsLongLong(PySequence_Fast_GET_ITEM(values, i));
    if (!PyErr_Occurred() && count < self->output_count) PyErr_SetString(PyExc_ValueError, "outputs are missing");
  }
  Py_DECREF(list);
  Py_DECREF(values);
  if (PyErr_Occurred()) return NULL;
  if (self->busy) return PyErr_Format(PyExc_RuntimeError, "another thread is launching");
  self->busy = 1;
  int error = launch_all(self, stream, addresses, outputs, &first);
  self->busy = 0;
  if (error < 0) return NULL;
  if (error) return Py_BuildValue("(in)", error, first);
  Py_RETURN_NONE;
}

/* ------------------------------------------------------------------------------------------------------------ Sized */

#define MEMBER(name) PyObject *name;
#define DROP(name) Py_XDECREF(self->name);
#define FREE(name) PyMem_Free(self->name.at);
#define TAKE(name) \
  if (right && (right = (item = PyDict_GetItemString(named, #name)) != NULL)) self->name = Py_NewRef(item);

typedef struct { Py_ssize_t count; int64_t *at; } Integers;

/* dtype of out; launches; each: callables that give a launch's own memory; plan, of `inputs`; planner: what gives the
   plan of other inputs */
#define SIZED(X) X(dtype) X(lse_dtype) X(memory_dtype) X(each) X(launches) X(plan) X(planner)
typedef struct {
  PyObject_HEAD
  SIZED(MEMBER)
  int32_t *code;
  Py_ssize_t code_length, inputs, constant_count;
  int64_t *constants;
  Integers registers;                                   /* of the outputs */
  Integers out, lse, memory, offsets;                   /* places among the outputs: sizes and then strides; bytes */
  Integers codes;                                       /* torch's numbers of the dtypes of out and the LSE */
  int64_t *planned, *seen;                              /* inputs: of `plan`, and of the last call */
  int64_t *outputs;                                     /* of the last call */
  int used;
  PyObject *noted;                                      /* what says the plan of the last call */
  PyObject *ask_out, *ask_lse, *ask_memory;             /* arguments that allocate for the last call; NULL: to be made */
} Sized;

static int take_integers(Integers *to, PyObject *from) {
  if (!PyTuple_Check(from) || PyTuple_GET_SIZE(from) > OUTPUTS) return -1;
  to->at = PyMem_Calloc(PyTuple_GET_SIZE(from) + 1, sizeof *to->at);
  if (!to->at) return -1;
  for (; to->count < PyTuple_GET_SIZE(from); to->count++) to->at[to->count] = integer(from, to->count);
  return PyErr_Occurred() ? -1 : 0;
}

static int64_t *take_array(PyObject *from, Py_ssize_t *count) {
  if (!from || !PyTuple_Check(from)) return NULL;
  *count = PyTuple_GET_SIZE(from);
  int64_t *found = PyMem_Calloc(*count + 1, sizeof *found);
  for (Py_ssize_t i = 0; found && i < *count; i++) found[i] = integer(from, i);
  return found;
}

/* All registers that the code names are there, and the places of outputs are outputs. */
static int sized_fits(Sized *self) {
  Py_ssize_t next = self->inputs + self->constant_count;
  for (Py_ssize_t at = 0; at < self->code_length;) {
    int32_t operation = self->code[at];
    if (operation < 0 || operation >= KINDS || at + ARGUMENTS[operation] >= self->code_length) return 0;
    for (int i = 1; i <= ARGUMENTS[operation]; i++)
      if (self->code[at + i] < 0 || self->code[at + i] >= next) return 0;
    at += 1 + ARGUMENTS[operation];
    next += operation > GT;
  }
  if (self->inputs > INPUTS || next > REGISTERS) return 0;
  for (Py_ssize_t i = 0; i < self->registers.count; i++)
    if (self->registers.at[i] < 0 || self->registers.at[i] >= next) return 0;
  const Integers *all[] = {&self->out, &self->lse, &self->memory, &self->offsets};
  for (int k = 0; k < 4; k++)
    for (Py_ssize_t i = 0; i < all[k]->count; i++)
      if (all[k]->at[i] < 0 || all[k]->at[i] >= self->registers.count) return 0;
  if (((Launches *)self->launches)->output_count > self->registers.count) return 0;
  return self->codes.count == 2 && self->out.count % 2 == 0 && self->lse.count % 2 == 0 && self->memory.count <= 1;
}

/* Sized(inputs=…, constants=…, code=…, registers=…, out=…, lse=…, memory=…, offsets=…, codes=…, and the names of SIZED) */
static PyObject *sized_new(PyTypeObject *type, PyObject *args, PyObject *named) {
  Sized *self = (Sized *)type->tp_alloc(type, 0);
  PyObject *item = NULL;
  int right = self && named;
  SIZED(TAKE)
#define TAKE_INTEGERS(name) \
  right = right && (item = PyDict_GetItemString(named, #name)) && !take_integers(&self->name, item);
  TAKE_INTEGERS(registers) TAKE_INTEGERS(out) TAKE_INTEGERS(lse) TAKE_INTEGERS(memory) TAKE_INTEGERS(offsets)
  TAKE_INTEGERS(codes)
  right = right && (self->planned = take_array(PyDict_GetItemString(named, "inputs"), &self->inputs));
  right = right && (self->constants = take_array(PyDict_GetItemString(named, "constants"), &self->constant_count));
  right = right && (self->seen = PyMem_Calloc(self->inputs + 1, sizeof *self->seen));
  right = right && (self->outputs = PyMem_Calloc(self->registers.count + 1, sizeof *self->outputs));
  item = right ? PyDict_GetItemString(named, "code") : NULL;
  right = right && item && PyBytes_Check(item) && PyBytes_GET_SIZE(item) % sizeof(int32_t) == 0;
  if (right && (right = (self->code = PyMem_Malloc(PyBytes_GET_SIZE(item) + 1)) != NULL)) {
    memcpy(self->code, PyBytes_AS_STRING(item), PyBytes_GET_SIZE(item));
    self->code_length = PyBytes_GET_SIZE(item) / sizeof(int32_t);
  }
  right = right && !PyErr_Occurred() && PyTuple_Check(self->each) && Py_IS_TYPE(self->launches, &LaunchesType) &&
    sized_fits(self);
  if (!right) {
    if (!PyErr_Occurred()) PyErr_SetString(PyExc_TypeError, "the fields of a Sized are not all there, or do not fit");
    Py_XDECREF(self);
    return NULL;
  }
  return (PyObject *)self;
}

static void sized_free(Sized *self) {
  SIZED(DROP)
  Py_XDECREF(self->noted);
  Py_XDECREF(self->ask_out);
  Py_XDECREF(self->ask_lse);
  Py_XDECREF(self->ask_memory);
  PyMem_Free(self->code);
  PyMem_Free(self->constants);
  PyMem_Free(self->planned);
  PyMem_Free(self->seen);
  PyMem_Free(self->outputs);
  FREE(registers) FREE(out) FREE(lse) FREE(memory) FREE(offsets) FREE(codes)
  Py_TYPE(self)->tp_free((PyObject *)self);
}

/* Whether the sizes belong to the class: then its outputs are of them. */
static int sized_takes(Sized *self, const int64_t *inputs, Py_ssize_t count) {
  int64_t r[REGISTERS];
  if (count != self->inputs) return 0;
  memcpy(r, inputs, count * sizeof *r);
  memcpy(r + count, self->constants, self->constant_count * sizeof *r);
  if (!run(self->code, self->code_length, r, count + self->constant_count)) return 0;
  for (Py_ssize_t i = 0; i < self->registers.count; i++) self->outputs[i] = r[self->registers.at[i]];
  memcpy(self->seen, inputs, count * sizeof *inputs);
  Py_CLEAR(self->noted);
  Py_CLEAR(self->ask_out);
  Py_CLEAR(self->ask_lse);
  Py_CLEAR(self->ask_memory);
  self->used = 1;
  return 1;
}

/* sized(inputs) -> its outputs as a tuple; None where the inputs are not of the class. For tests and tools. */
static PyObject *sized_call(Sized *self, PyObject *args, PyObject *names) {
  PyObject *given;
  if (!PyArg_ParseTuple(args, "O!", &PyTuple_Type, &given)) return NULL;
  Py_ssize_t count = PyTuple_GET_SIZE(given);
  int64_t inputs[INPUTS];
  if (count > INPUTS) Py_RETURN_NONE;
  for (Py_ssize_t i = 0; i < count; i++) inputs[i] = integer(given, i);
  if (PyErr_Occurred()) return NULL;
  if (!sized_takes(self, inputs, count)) Py_RETURN_NONE;
  PyObject *found = PyTuple_New(self->registers.count);
  for (Py_ssize_t i = 0; found && i < self->registers.count; i++) {
    PyObject *item = PyLong_FromLongLong(self->outputs[i]);
    if (!item) Py_CLEAR(found); else PyTuple_SET_ITEM(found, i, item);
  }
  return found;
}

/* What says the plan of the last call: the plan itself, or (planner, inputs as int64). Borrowed. */
static PyObject *sized_note(Sized *self) {
  if (!memcmp(self->seen, self->planned, self->inputs * sizeof *self->seen)) return self->plan;
  if (!self->noted)
    self->noted = Py_BuildValue("(Oy#)", self->planner, (char *)self->seen, (Py_ssize_t)(self->inputs * sizeof *self->seen));
  return self->noted;
}

/* ------------------------------------------------------------------------------------------------------------- Kind */

/* What a Kind is made of, by the names that Python gives it: objects, and tuples of integers.
   classes: a list of Sized; apply: apply((record, lengths, results), *tensors) makes the results of a training call a
   node of autograd's graph, record and apply are None of another call; recording: what recorded() was, which says
   whether gradients are recorded, None where no tensor requires any; fixed: the only inputs that it takes, as int64, or None; take, give: of a
   launch's memory, None where `empty` makes it */
#define OBJECTS(X) X(values) X(settings) X(guard) X(levels) X(level_name) X(modes) X(index) X(current) X(stream) X(empty) X(take) X(give) X(hooked) \
  X(address) X(types) X(shape) X(strides) X(lengths) X(classes) X(record) X(apply) X(recorded) X(recording) X(fixed) X(noted) X(refused) X(reader)
#define INTEGERS(X) X(absent) X(given) X(twins) X(distinct) X(residues)
#define COUNTED(name) Integers name;
/* How tensors of exactly the types of a Kind, and `type`, are read without Python: launch/native.py. */
typedef int (*Ask)(void *tensor, void *answer);
typedef struct { PyObject *type; Py_ssize_t offset; uint64_t plain; Ask dim, sizes, strides, address, dtype, device, index; } Reader;
typedef struct { PyObject_HEAD vectorcallfunc call; uint64_t low_bits; Reader reads; OBJECTS(MEMBER) INTEGERS(COUNTED) } Kind;

static PyObject *kind_call(PyObject *callable, PyObject *const *args, size_t flags, PyObject *names);

/* None, or (type, offset, plain, and the functions in the order of Reader): 1, or 0 where it is neither */
static int take_reader(Reader *reads, PyObject *given) {
  if (given == Py_None) return 1;
  if (!PyTuple_Check(given) || PyTuple_GET_SIZE(given) != 10) return 0;
  reads->type = PyTuple_GET_ITEM(given, 0); /* kept by the Kind */
  reads->offset = (Py_ssize_t)integer(given, 1), reads->plain = number(given, 2);
  reads->dim = (Ask)(uintptr_t)number(given, 3), reads->sizes = (Ask)(uintptr_t)number(given, 4);
  reads->strides = (Ask)(uintptr_t)number(given, 5), reads->address = (Ask)(uintptr_t)number(given, 6);
  reads->dtype = (Ask)(uintptr_t)number(given, 7), reads->device = (Ask)(uintptr_t)number(given, 8);
  reads->index = (Ask)(uintptr_t)number(given, 9);
  return !PyErr_Occurred() && reads->offset > 0;
}

/* Kind(low_bits=…, and every name of OBJECTS and INTEGERS) */
static PyObject *kind_new(PyTypeObject *type, PyObject *args, PyObject *named) {
  Kind *self = (Kind *)type->tp_alloc(type, 0);
  PyObject *item = NULL;
  int right = self && named;
  OBJECTS(TAKE)
  INTEGERS(TAKE_INTEGERS)
  if (right && (right = (item = PyDict_GetItemString(named, "low_bits")) != NULL)) self->low_bits = PyLong_AsUnsignedLongLong(item);
  right = right && !PyErr_Occurred() && PyTuple_Check(self->values) && PyTuple_Check(self->lengths) && PyTuple_Check(self->types) &&
    PyDict_Check(self->levels) && PyList_Check(self->classes) && PyContextVar_CheckExact(self->noted) &&
    (self->fixed == Py_None || PyBytes_Check(self->fixed)) && self->residues.count == self->given.count &&
    self->given.count <= MOST && self->distinct.count <= self->given.count &&
    PyTuple_GET_SIZE(self->types) == self->distinct.count && take_reader(&self->reads, self->reader);
  if (!right) {
    if (!PyErr_Occurred()) PyErr_SetString(PyExc_TypeError, "the fields of a Kind are not all there, or do not fit");
    Py_XDECREF(self);
    return NULL;
  }
  self->call = kind_call;
  return (PyObject *)self;
}

static void kind_free(Kind *self) {
  OBJECTS(DROP)
  INTEGERS(FREE)
  Py_TYPE(self)->tp_free((PyObject *)self);
}

static int equal(PyObject *a, PyObject *b) { /* a value that does not compare is not equal: validation will name it */
  if (a == b) return 1;
  int same = PyObject_RichCompareBool(a, b, Py_EQ);
  if (same < 0 && PyErr_ExceptionMatches(PyExc_Exception)) { PyErr_Clear(); return 0; }
  return same;
}

/* Equal, and of the same types, also inside tuples. 1 == True == 1.0, and validation tells them apart. */
static int identical(PyObject *a, PyObject *b) {
  if (a == b) return 1;
  if (Py_TYPE(a) != Py_TYPE(b)) return 0;
  if (!PyTuple_CheckExact(a)) return equal(a, b);
  if (PyTuple_GET_SIZE(a) != PyTuple_GET_SIZE(b)) return 0;
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(a); i++) {
    int same = identical(PyTuple_GET_ITEM(a, i), PyTuple_GET_ITEM(b, i));
    if (same <= 0) return same;
  }
  return 1;
}

static int truth(PyObject *found) { /* of a new reference */
  int result = found ? PyObject_IsTrue(found) : -1;
  Py_XDECREF(found);
  return result;
}

/* The at::Tensor of a tensor of one of the known types; NULL where it must be asked in Python. */
static void *inside(const Reader *reads, PyObject *tensor) {
  if (!reads->offset) return NULL;
  uint64_t **found = (uint64_t **)((char *)tensor + reads->offset);
  return *found && **found == reads->plain ? found : NULL;
}

/* known: it is of the type that the first call's had */
static int address_of(Kind *self, PyObject *tensor, uint64_t *address, int known) {
  void *at = known || (PyObject *)Py_TYPE(tensor) == self->reads.type ? inside(&self->reads, tensor) : NULL;
  if (at && !self->reads.address(at, address)) return 0;
  PyObject *found = PyObject_Vectorcall(self->address, &tensor, 1, NULL);
  if (!found) return -1;
  *address = PyLong_AsUnsignedLongLong(found);
  Py_DECREF(found);
  return *address == (uint64_t)-1 && PyErr_Occurred() ? -1 : 0;
}

/* Integers of a tuple after those that are there: 1; 0 where it is none of integers alone (a tracer's are tensors), or
   they are more than there is room for, or where there is none, as nested and sparse tensors have no sizes or strides. */
static int add_numbers(PyObject *found, int64_t *inputs, Py_ssize_t *count) {
  if (!found) {
    if (!PyErr_ExceptionMatches(PyExc_Exception)) return -1;
    PyErr_Clear();
    return 0;
  }
  int right = PyTuple_Check(found) && *count + PyTuple_GET_SIZE(found) <= INPUTS;
  for (Py_ssize_t i = 0; right && i < PyTuple_GET_SIZE(found); i++) {
    int overflow = 0;
    if ((right = PyLong_CheckExact(PyTuple_GET_ITEM(found, i))))
      inputs[(*count)++] = PyLong_AsLongLongAndOverflow(PyTuple_GET_ITEM(found, i), &overflow);
    right = right && !overflow;
  }
  Py_DECREF(found);
  return right;
}

/* Sizes and strides of each tensor, then the integers among `lengths`: 1; 0 where one is of another type, or
   a tensor has not both. */
static int inputs_of(Kind *self, PyObject *const *given, PyObject *lengths, int64_t *inputs, Py_ssize_t *count) {
  for (Py_ssize_t i = 0; i < self->distinct.count; i++) {
    PyObject *tensor = given[self->distinct.at[i]];
    void *at = inside(&self->reads, tensor);
    const int64_t *sizes, *strides;
    int64_t rank;
    if (at && !self->reads.dim(at, &rank) && !self->reads.sizes(at, &sizes) && !self->reads.strides(at, &strides)) {
      if (*count + 2 * rank > INPUTS) return 0;
      memcpy(inputs + *count, sizes, rank * sizeof *inputs);
      memcpy(inputs + *count + rank, strides, rank * sizeof *inputs);
      *count += 2 * rank;
      continue;
    }
    int added = add_numbers(PyObject_GetAttr(tensor, self->shape), inputs, count);
    if (added > 0) added = add_numbers(PyObject_Vectorcall(self->strides, &tensor, 1, NULL), inputs, count);
    if (added <= 0) return added;
  }
  if (!PyTuple_Check(lengths) || PyTuple_GET_SIZE(lengths) != PyTuple_GET_SIZE(self->lengths)) return 0;
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(lengths); i++) {
    PyObject *expected = PyTuple_GET_ITEM(self->lengths, i), *found = PyTuple_GET_ITEM(lengths, i);
    if (expected != Py_None) {
      int overflow = 0;
      if (!PyLong_CheckExact(found) || *count >= INPUTS) return 0;
      inputs[(*count)++] = PyLong_AsLongLongAndOverflow(found, &overflow);
      if (overflow) return 0;
    } else if (found != Py_None) return 0;
  }
  return 1;
}

/* The tensors that are given, borrowed, their addresses, and all sizes: 1 where all is as in the kind, 0 where not.
   Sizes come before torch's guards, which end the process at a tensor that has none. */
static int same_tensors(Kind *self, PyObject *tensors, PyObject *lengths, PyObject **given, uint64_t *addresses,
                        int64_t *inputs, Py_ssize_t *count) {
  for (Py_ssize_t i = 0; i < self->absent.count; i++)
    if (PyTuple_GET_ITEM(tensors, self->absent.at[i]) != Py_None) return 0;
  for (Py_ssize_t i = 0; i < self->given.count; i++) given[i] = PyTuple_GET_ITEM(tensors, self->given.at[i]);
  for (Py_ssize_t i = 0; i + 1 < self->twins.count; i += 2)
    if (given[self->twins.at[i]] != given[self->twins.at[i + 1]]) return 0;
  PyObject *once[MOST];
  for (Py_ssize_t i = 0; i < self->distinct.count; i++) {
    once[i] = given[self->distinct.at[i]];
    if ((PyObject *)Py_TYPE(once[i]) != PyTuple_GET_ITEM(self->types, i)) return 0;
  }
  PyObject *level = PyDict_GetItem(self->levels, self->level_name); /* of forward-mode differentiation; -1 outside */
  if (!level || PyLong_AsLong(level) >= 0) return 0;
  int modes = truth(PyObject_CallNoArgs(self->modes)); /* that see every operator, as a launch is none */
  if (modes) return modes < 0 ? -1 : 0;
  int recorded = self->recording == Py_None ? 0 : truth(PyObject_CallNoArgs(self->recorded));
  if (recorded != (self->recording == Py_True)) return recorded < 0 ? -1 : 0;
  int sized = inputs_of(self, given, lengths, inputs, count);
  if (sized <= 0) return sized;
  int alike = truth(PyObject_Vectorcall(self->guard, once, self->distinct.count, NULL));
  if (alike <= 0) return alike;
  for (Py_ssize_t i = 0; i < self->given.count; i++) {
    if (address_of(self, given[i], &addresses[i], 1) < 0) return -1;
    if (!addresses[i]) return 0; /* its memory was freed, or it has no element */
    if ((addresses[i] & self->low_bits) != (uint64_t)self->residues.at[i]) return 0;
  }
  return 1;
}

/* The class of these sizes, borrowed, with its outputs set; NULL where there is none. The latest is looked at first. */
static Sized *class_of(Kind *self, const int64_t *inputs, Py_ssize_t count) {
  if (self->fixed != Py_None && ((Py_ssize_t)(count * sizeof *inputs) != PyBytes_GET_SIZE(self->fixed) ||
      memcmp(PyBytes_AS_STRING(self->fixed), inputs, count * sizeof *inputs)))
    return NULL;
  for (int evaluated = 0; evaluated < 2; evaluated++) {
    for (Py_ssize_t i = 0; i < PyList_GET_SIZE(self->classes); i++) {
      PyObject **items = ((PyListObject *)self->classes)->ob_item, *one = items[i];
      if (!Py_IS_TYPE(one, &SizedType)) continue;
      Sized *sized = (Sized *)one;
      if (((Launches *)sized->launches)->busy) continue; /* its outputs are being read */
      int takes = evaluated ? sized_takes(sized, inputs, count) :
        sized->used && sized->inputs == count && !memcmp(sized->seen, inputs, count * sizeof *inputs);
      if (!takes) continue;
      if (i) memmove(items + 1, items, i * sizeof *items), items[0] = one;
      return sized;
    }
  }
  return NULL;
}

/* A tuple of some of the outputs. */
static PyObject *some(const Sized *sized, const Integers *places, Py_ssize_t first, Py_ssize_t count) {
  PyObject *found = PyTuple_New(count);
  for (Py_ssize_t i = 0; found && i < count; i++) {
    PyObject *item = PyLong_FromLongLong(sized->outputs[places->at[first + i]]);
    if (!item) Py_CLEAR(found); else PyTuple_SET_ITEM(found, i, item);
  }
  return found;
}

/* Whether a caller's tensor is a place for a result as it would be allocated: plain, of its sizes, dtype and device,
   contiguous and aligned. 0 also where that cannot be read here. like: a tensor of the call */
static int fits(const Kind *self, const Sized *sized, const Integers *places, int64_t code, PyObject *tensor,
                PyObject *like) {
  if ((PyObject *)Py_TYPE(tensor) != self->reads.type) return 0;
  void *at = inside(&self->reads, tensor), *other = inside(&self->reads, like);
  const int64_t *sizes, *strides;
  int64_t rank, step = 1;
  int32_t dtype, device[2], index[2];
  uint64_t address;
  if (!at || !other || self->reads.dim(at, &rank) || 2 * rank != places->count || self->reads.sizes(at, &sizes) ||
      self->reads.strides(at, &strides) || self->reads.address(at, &address) || self->reads.dtype(at, &dtype) ||
      self->reads.device(at, &device[0]) || self->reads.device(other, &device[1]) ||
      self->reads.index(at, &index[0]) || self->reads.index(other, &index[1]))
    return 0;
  if (dtype != code || device[0] != device[1] || index[0] != index[1] || !address || address & self->low_bits) return 0;
  for (int64_t i = rank - 1; i >= 0; i--) {
    if (sizes[i] != sized->outputs[places->at[i]] || (sizes[i] != 1 && strides[i] != step)) return 0;
    step *= sizes[i];
  }
  return step > 0;
}

/* A result's or a buffer's memory: `place` where the caller gives it, else allocated. *ask: the arguments, kept while
   sizes stay the same. */
static PyObject *memory_for(Kind *self, const Sized *sized, const Integers *places, PyObject *dtype, PyObject *place,
                            PyObject **ask) {
  if (place != Py_None) return Py_NewRef(place);
  if (!*ask) {
    Py_ssize_t rank = places->count / 2;
    PyObject *sizes = places->count > 1 ? some(sized, places, 0, rank) : some(sized, places, 0, 1);
    PyObject *strides = places->count > 1 ? some(sized, places, rank, rank) : Py_BuildValue("(i)", 1);
    if (sizes && strides) *ask = PyTuple_Pack(3, sizes, strides, dtype);
    Py_XDECREF(sizes);
    Py_XDECREF(strides);
    if (!*ask) return NULL;
  }
  return PyObject_Call(self->empty, *ask, NULL);
}

/* Note what says the plan of a call: 0, or -1 with an exception. Repeated calls find their own note there. */
static int note(Kind *self, PyObject *what) {
  PyObject *there = NULL, *token;
  if (PyContextVar_Get(self->noted, NULL, &there) < 0) return -1;
  Py_XDECREF(there); /* only compared */
  if (there == what) return 0;
  if (!(token = PyContextVar_Set(self->noted, what))) return -1;
  Py_DECREF(token);
  return 0;
}

/* Give memory back: also where an exception is on its way, which stays. */
static void give_back(Kind *self, PyObject *taken) {
  PyObject *type, *value, *trace;
  PyErr_Fetch(&type, &value, &trace);
  PyObject *done = PyObject_Vectorcall(self->give, &taken, 1, NULL);
  if (!done) PyErr_WriteUnraisable(self->give);
  Py_XDECREF(done);
  Py_DECREF(taken);
  PyErr_Restore(type, value, trace);
}

/* kind(tensors, values, lengths, settings, out, lse, memory): the results; None where the call is of another kind;
   NotImplemented where it must go by Python: no class has its sizes, another device is current, a hook of Triton's is
   set, another thread is in here, or the thread has no context; and where out or lse, as far as tensors can be read
   here, is not as it would be allocated. The last three arguments are None where they are to be allocated, as a
   training call's results always are. what: where what says the plan goes, a new reference; NULL to note it. */
static PyObject *kind_run(Kind *self, PyObject *const *args, PyObject **what) {
  PyObject *given[MOST], *kept[1 + MOST], *result = NULL;
  uint64_t addresses[2 * MOST];
  int64_t inputs[INPUTS];
  Py_ssize_t count = 0;
  if (PyTuple_GET_SIZE(args[0]) != self->absent.count + self->given.count) Py_RETURN_NONE;
  if (self->record != Py_None && args[4] != Py_None) Py_RETURN_NONE;
  int same = identical(self->values, args[1]);
  if (same > 0) same = equal(self->settings, args[3]);
  if (same > 0) same = same_tensors(self, args[0], args[2], given, addresses, inputs, &count);
  if (same < 0) return NULL;
  if (!same) Py_RETURN_NONE;

  PyObject *found = PyObject_CallNoArgs(self->current);
  int here = found ? equal(found, self->index) : -1;
  Py_XDECREF(found);
  int hooked = here > 0 ? truth(PyObject_CallNoArgs(self->hooked)) : 0;
  if (here < 0 || hooked < 0) return NULL;
  if (!here || hooked) Py_RETURN_NOTIMPLEMENTED;
  Sized *sized = class_of(self, inputs, count);
  if (!sized) Py_RETURN_NOTIMPLEMENTED;
  if (self->reads.offset && self->given.count) {
    if (args[4] != Py_None && !fits(self, sized, &sized->out, sized->codes.at[0], args[4], given[0])) Py_RETURN_NOTIMPLEMENTED;
    if (args[5] != Py_None && !fits(self, sized, &sized->lse, sized->codes.at[1], args[5], given[0])) Py_RETURN_NOTIMPLEMENTED;
  }
  Launches *launches = (Launches *)sized->launches;
  const Py_ssize_t own_count = PyTuple_GET_SIZE(sized->each);
  if (launches->role_count != self->given.count + 1 + !!sized->lse.count + sized->offsets.count + own_count ||
      own_count + 3 > MOST)
    return PyErr_Format(PyExc_RuntimeError, "a class of sizes has other roles than its kind");
  launches->busy = 1; /* until the end: what is called below may let other threads run */
  Py_INCREF(sized);   /* which could be forgotten meanwhile */

  Py_ssize_t place = self->given.count, own = 0;
  PyObject *taken = NULL, *stream_of = PyObject_Vectorcall(self->stream, &self->index, 1, NULL);
  if (!stream_of) goto end;
  uint64_t stream = PyLong_AsUnsignedLongLong(stream_of);
  if (stream == (uint64_t)-1 && PyErr_Occurred()) goto end;
  PyObject *out = memory_for(self, sized, &sized->out, sized->dtype, args[4], &sized->ask_out), *lse = NULL;
  if (!out) goto end;
  kept[own++] = out;
  if (address_of(self, out, &addresses[place++], 0) < 0) goto end;
  if (sized->lse.count) {
    if (!(lse = memory_for(self, sized, &sized->lse, sized->lse_dtype, args[5], &sized->ask_lse))) goto end;
    kept[own++] = lse;
    if (address_of(self, lse, &addresses[place++], 0) < 0) goto end;
  }
  uint64_t base = 0;
  if (sized->memory.count && sized->outputs[sized->memory.at[0]] > 0) {
    if (args[6] == Py_None && self->take != Py_None) { /* no tensor: an address, given back below */
      if (!sized->ask_memory) sized->ask_memory = PyLong_FromLongLong(sized->outputs[sized->memory.at[0]]);
      PyObject *asked[] = {sized->ask_memory, stream_of};
      if (!sized->ask_memory || !(taken = PyObject_Vectorcall(self->take, asked, 2, NULL))) goto end;
      base = PyLong_AsUnsignedLongLong(taken);
      if (base == (uint64_t)-1 && PyErr_Occurred()) goto end;
    } else {
      kept[own] = memory_for(self, sized, &sized->memory, sized->memory_dtype, args[6], &sized->ask_memory);
      if (!kept[own]) goto end;
      if (address_of(self, kept[own++], &base, 0) < 0) goto end;
    }
  }
  for (Py_ssize_t i = 0; i < sized->offsets.count; i++)
    addresses[place++] = base + (uint64_t)sized->outputs[sized->offsets.at[i]];
  for (Py_ssize_t i = 0; i < own_count; i++) {
    if (!(kept[own] = PyObject_CallNoArgs(PyTuple_GET_ITEM(sized->each, i)))) goto end;
    if (address_of(self, kept[own++], &addresses[place++], 0) < 0) goto end;
  }

  Py_ssize_t first = 0;
  int error = launch_all(launches, stream, addresses, sized->outputs, &first);
  if (error == INVALID_CONTEXT && first == 0) { /* nothing is launched: the Python way makes a context */
    result = Py_NewRef(Py_NotImplemented);
    goto end;
  }
  if (error > 0) {
    found = PyObject_CallFunction(self->refused, "i", error); /* raises */
    Py_XDECREF(found);
  }
  PyObject *plan = error ? NULL : sized_note(sized);
  if (!plan || (!what && note(self, plan) < 0)) goto end;
  if (what) *what = Py_NewRef(plan);
  result = lse ? PyTuple_Pack(2, out, lse) : Py_NewRef(out);
end:
  launches->busy = 0;
  Py_DECREF(sized);
  for (Py_ssize_t i = 0; i < own; i++) Py_DECREF(kept[i]);
  Py_XDECREF(stream_of);
  if (taken) give_back(self, taken);
  if (result && result != Py_NotImplemented && self->record != Py_None) { /* at last: hooks of autograd run Python */
    kept[0] = PyTuple_Pack(3, self->record, args[2], result);
    Py_DECREF(result);
    if (!kept[0]) return NULL;
    memcpy(kept + 1, given, self->given.count * sizeof *given);
    result = PyObject_Vectorcall(self->apply, kept, 1 + self->given.count, NULL);
    Py_DECREF(kept[0]);
    return result;
  }
  if (!result && !PyErr_Occurred()) PyErr_SetString(PyExc_RuntimeError, "CUDA's driver refused a launch");
  return result;
}

static PyObject *kind_call(PyObject *callable, PyObject *const *args, size_t flags, PyObject *names) {
  if (PyVectorcall_NARGS(flags) != 7 || !PyTuple_Check(args[0])) return PyErr_Format(PyExc_TypeError, "a Kind takes seven");
  return kind_run((Kind *)callable, args, NULL);
}

/* ----------------------------------------------------------------------------------------------------------- Finder */

/* table: kinds by operation and by values; block: the settings in force, None where they are what `outside` gives;
   state, ends: where it is said when something that is kept holds no longer; hit: a kind's attribute with its Kind */
#define FOUND(X) X(table) X(block) X(outside) X(state) X(ends) X(hit)
typedef struct { PyObject_HEAD vectorcallfunc call; FOUND(MEMBER) } Finder;

/* The kinds of an operation and values, a new reference: a tuple; None where nothing is known; NotImplemented where Python
   must look. */
static PyObject *kinds_of(Finder *self, PyObject *op, PyObject *values) {
  PyObject *ends = PyDict_GetItemWithError(self->state, self->ends);
  if (!ends) return PyErr_Occurred() ? NULL : Py_NewRef(Py_NotImplemented);
  if (ends != Py_None) Py_RETURN_NOTIMPLEMENTED;
  PyObject *of_values = PyDict_GetItemWithError(self->table, op), *kinds;
  if (!of_values) { if (PyErr_Occurred()) return NULL; Py_RETURN_NONE; }
  if (!PyDict_Check(of_values)) Py_RETURN_NOTIMPLEMENTED;
  Py_INCREF(of_values); /* comparing values may run Python */
  kinds = PyDict_GetItemWithError(of_values, values);
  Py_XINCREF(kinds);
  Py_DECREF(of_values);
  if (kinds && !PyTuple_Check(kinds)) Py_SETREF(kinds, Py_NewRef(Py_NotImplemented));
  if (kinds) return kinds;
  if (!PyErr_Occurred()) Py_RETURN_NONE;
  if (!PyErr_ExceptionMatches(PyExc_Exception)) return NULL;
  PyErr_Clear(); /* an unhashable argument, which validation will name */
  Py_RETURN_NOTIMPLEMENTED;
}

/* The results by the first of the kinds that the call is of, or as kinds_of. asked: the arguments of a Kind; what: as of
   kind_run */
static PyObject *by_kinds(Finder *self, PyObject *kinds, PyObject *const *asked, PyObject **what) {
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(kinds); i++) {
    PyObject *kind = PyObject_GetAttr(PyTuple_GET_ITEM(kinds, i), self->hit), *result;
    if (!kind) return NULL;
    if (!Py_IS_TYPE(kind, &KindType)) result = Py_NewRef(Py_NotImplemented);
    else result = kind_run((Kind *)kind, asked, what);
    Py_DECREF(kind);
    if (result != Py_None) return result; /* an exception, too */
    Py_DECREF(result);
  }
  Py_RETURN_NONE;
}

/* finder(op, tensors, values, lengths, place): the results; None where nothing is known of such a call; NotImplemented
   where Python must look. place: None, or where out goes */
static PyObject *finder_call(PyObject *callable, PyObject *const *args, size_t flags, PyObject *names) {
  Finder *self = (Finder *)callable;
  if (PyVectorcall_NARGS(flags) != 5 || !PyTuple_Check(args[1])) return PyErr_Format(PyExc_TypeError, "a Finder takes five");
  PyObject *kinds = kinds_of(self, args[0], args[2]), *settings = NULL, *result = NULL;
  if (!kinds || !PyTuple_Check(kinds)) return kinds;
  if (PyContextVar_Get(self->block, NULL, &settings) < 0) goto end;
  if (!settings || settings == Py_None) {
    Py_XDECREF(settings);
    if (!(settings = PyObject_CallNoArgs(self->outside))) goto end;
  }
  PyObject *asked[] = {args[1], args[2], args[3], settings, args[4], Py_None, Py_None};
  result = by_kinds(self, kinds, asked, NULL);
end:
  Py_XDECREF(settings);
  Py_DECREF(kinds);
  return result;
}

static void finder_free(Finder *self) {
  FOUND(DROP)
  Py_TYPE(self)->tp_free((PyObject *)self);
}

/* Finder(table=…, block=…, outside=…, state=…, ends=…, hit=…) */
static PyObject *finder_new(PyTypeObject *type, PyObject *args, PyObject *named) {
  Finder *self = (Finder *)type->tp_alloc(type, 0);
  PyObject *item = NULL;
  int right = self && named;
  FOUND(TAKE)
  if (!right || !PyDict_Check(self->table) || !PyDict_Check(self->state) || !PyContextVar_CheckExact(self->block)) {
    if (!PyErr_Occurred()) PyErr_SetString(PyExc_TypeError, "the fields of a Finder are not all there, or do not fit");
    Py_XDECREF(self);
    return NULL;
  }
  self->call = finder_call;
  return (PyObject *)self;
}

/* --------------------------------------------------------------------------------------------------------- Backward */

/* op, values, settings: of the gradients' operation; empty: a Kind's, empty_like: torch's; plans, last: where the plan of the
   last backward pass is said; order: for each tensor of the operation its place among the saved ones, the result's gradient,
   and the gradients of q, k and v, -1 of an absent one; results: for each argument of the node whose gradient is its own,
   -1 where it has none here */
#define PASS(X) X(finder) X(op) X(values) X(settings) X(modes) X(empty) X(empty_like) X(dtype) X(plans) X(last) X(reader)
#define PLACES(X) X(order) X(results)
enum { MADE = 3 };
typedef struct {
  PyObject_HEAD vectorcallfunc call;
  Reader reads;
  PASS(MEMBER) PLACES(COUNTED)
  Py_ssize_t like[MADE];                                /* q, k and v among the saved tensors */
  int64_t seen[MADE][2 * RANK], ranks[MADE];            /* sizes and strides of the last call's */
  PyObject *ask[MADE];                                  /* arguments that allocate for it; NULL: to be made */
} Backward;

/* A tuple of integers, or NULL. */
static PyObject *tuple_of(const int64_t *from, int64_t count) {
  PyObject *made = PyTuple_New(count);
  for (int64_t i = 0; made && i < count; i++) {
    PyObject *item = PyLong_FromLongLong(from[i]);
    if (!item) Py_CLEAR(made); else PyTuple_SET_ITEM(made, i, item);
  }
  return made;
}

/* Memory for the gradient of a tensor, as torch.empty_like makes it, and NotImplemented where its rows are not contiguous.
   As before if sizes and strides are: that dtype and device are as well is seen by the kind that it is given to. */
static PyObject *memory_like(Backward *self, int which, PyObject *tensor) {
  const int64_t *sizes, *strides;
  int64_t rank;
  void *at = PyObject_TypeCheck(tensor, (PyTypeObject *)self->reads.type) ? inside(&self->reads, tensor) : NULL;
  if (!at || self->reads.dim(at, &rank) || rank < 1 || rank > RANK || self->reads.sizes(at, &sizes) ||
      self->reads.strides(at, &strides))
    Py_RETURN_NOTIMPLEMENTED;
  int64_t *seen = self->seen[which];
  const size_t bytes = rank * sizeof *seen;
  if (self->ask[which] && self->ranks[which] == rank && !memcmp(seen, sizes, bytes) && !memcmp(seen + rank, strides, bytes)) {
    PyObject *ask = Py_NewRef(self->ask[which]), *found = PyObject_Call(self->empty, ask, NULL);
    Py_DECREF(ask);
    return found;
  }
  int64_t now[2 * RANK];
  memcpy(now, sizes, bytes), memcpy(now + rank, strides, bytes);
  PyObject *found = PyObject_Vectorcall(self->empty_like, &tensor, 1, NULL);
  if (!found) return NULL;
  if (!(at = inside(&self->reads, found)) || self->reads.strides(at, &strides) || strides[rank - 1] != 1) {
    Py_DECREF(found);
    Py_RETURN_NOTIMPLEMENTED;
  }
  PyObject *shape = tuple_of(now, rank), *steps = tuple_of(strides, rank), *dtype = PyObject_GetAttr(found, self->dtype);
  PyObject *ask = shape && steps && dtype ? PyTuple_Pack(3, shape, steps, dtype) : NULL;
  Py_XDECREF(shape);
  Py_XDECREF(steps);
  Py_XDECREF(dtype);
  if (!ask) { Py_DECREF(found); return NULL; }
  memcpy(seen, now, 2 * bytes);
  self->ranks[which] = rank;
  Py_XSETREF(self->ask[which], ask);
  return found;
}

/* Whether a result's gradient has contiguous rows and no stride of 0 (api/backward.py: _rows), and can be read here. */
static int has_rows(const Reader *reads, PyObject *gradient) {
  void *at = (PyObject *)Py_TYPE(gradient) == reads->type ? inside(reads, gradient) : NULL;
  const int64_t *strides;
  int64_t rank;
  if (!at || reads->dim(at, &rank) || rank < 1 || reads->strides(at, &strides)) return 0;
  for (int64_t i = 0; i < rank; i++)
    if (!strides[i]) return 0;
  return strides[rank - 1] == 1;
}

/* backward(saved, lengths, wanted, gradient): the gradients, one for each argument of the node; NotImplemented where
   Python must compute them. saved: the given tensors, out and the LSE; wanted: whether an argument's gradient is asked for;
   gradient: out's */
static PyObject *backward_call(PyObject *callable, PyObject *const *args, size_t flags, PyObject *names) {
  Backward *self = (Backward *)callable;
  if (PyVectorcall_NARGS(flags) != 4 || !PyTuple_Check(args[0]) || !PyTuple_Check(args[2]))
    return PyErr_Format(PyExc_TypeError, "a Backward takes four");
  const Py_ssize_t saved = PyTuple_GET_SIZE(args[0]), count = self->results.count;
  if (saved != count + 1 || PyTuple_GET_SIZE(args[2]) != count || !has_rows(&self->reads, args[3])) Py_RETURN_NOTIMPLEMENTED;
  for (Py_ssize_t i = 0; i < count; i++)
    if (self->results.at[i] < 0 && PyTuple_GET_ITEM(args[2], i) != Py_False) Py_RETURN_NOTIMPLEMENTED;
  int modes = truth(PyObject_CallNoArgs(self->modes)); /* would see the memory */
  if (modes) { if (modes < 0) return NULL; Py_RETURN_NOTIMPLEMENTED; }
  PyObject *kinds = kinds_of((Finder *)self->finder, self->op, self->values);
  if (!kinds) return NULL;

  PyObject *made[MADE] = {NULL}, *tensors = NULL, *delta = NULL, *plan = NULL, *result = NULL;
  int known = PyTuple_Check(kinds);
  for (int i = 0; known && i < MADE; i++) {
    if (!(made[i] = memory_like(self, i, PyTuple_GET_ITEM(args[0], self->like[i])))) goto end;
    known = made[i] != Py_NotImplemented;
  }
  if (known) {
    if (!(tensors = PyTuple_New(self->order.count))) goto end;
    for (Py_ssize_t i = 0; i < self->order.count; i++) {
      const int64_t place = self->order.at[i];
      PyObject *tensor = place < 0 ? Py_None : place < saved ? PyTuple_GET_ITEM(args[0], place) :
        place == saved ? args[3] : made[place - saved - 1];
      PyTuple_SET_ITEM(tensors, i, Py_NewRef(tensor));
    }
    PyObject *asked[] = {tensors, self->values, args[1], self->settings, Py_None, Py_None, Py_None};
    if (!(delta = by_kinds((Finder *)self->finder, kinds, asked, &plan))) goto end;
    known = delta != Py_None && delta != Py_NotImplemented;
  }
  if (!known) { result = Py_NewRef(Py_NotImplemented); goto end; }
  if (PyDict_SetItem(self->plans, self->last, plan) < 0 || !(result = PyTuple_New(count))) goto end;
  for (Py_ssize_t i = 0; i < count; i++)
    PyTuple_SET_ITEM(result, i, Py_NewRef(PyTuple_GET_ITEM(args[2], i) == Py_True ? made[self->results.at[i]] : Py_None));
end:
  Py_DECREF(kinds);
  for (int i = 0; i < MADE; i++) Py_XDECREF(made[i]);
  Py_XDECREF(tensors);
  Py_XDECREF(delta);
  Py_XDECREF(plan);
  return result;
}

static void backward_free(Backward *self) {
  PASS(DROP)
  PLACES(FREE)
  for (int i = 0; i < MADE; i++) Py_XDECREF(self->ask[i]);
  Py_TYPE(self)->tp_free((PyObject *)self);
}

/* Backward(every name of PASS and PLACES) */
static PyObject *backward_new(PyTypeObject *type, PyObject *args, PyObject *named) {
  Backward *self = (Backward *)type->tp_alloc(type, 0);
  PyObject *item = NULL;
  int right = self && named;
  PASS(TAKE)
  PLACES(TAKE_INTEGERS)
  right = right && Py_IS_TYPE(self->finder, &FinderType) && PyDict_Check(self->plans) && take_reader(&self->reads, self->reader) &&
    self->reads.offset && self->order.count >= MADE;
  const int64_t saved = right ? self->results.count + 1 : 0;
  for (Py_ssize_t i = 0; right && i < self->order.count; i++) right = self->order.at[i] <= saved + MADE;
  for (Py_ssize_t i = 0; right && i < self->results.count; i++) right = self->results.at[i] < MADE;
  for (int i = 0; right && i < MADE; i++) /* q, k and v are the first tensors of each operation */
    right = (self->like[i] = self->order.at[i]) >= 0 && self->like[i] < saved;
  if (!right) {
    if (!PyErr_Occurred()) PyErr_SetString(PyExc_TypeError, "the fields of a Backward are not all there, or do not fit");
    Py_XDECREF(self);
    return NULL;
  }
  self->call = backward_call;
  return (PyObject *)self;
}

/* ---------------------------------------------------------------------------------------------------------------- */

static PyTypeObject BackwardType = {
  PyVarObject_HEAD_INIT(NULL, 0).tp_name = "Backward", .tp_basicsize = sizeof(Backward),
  .tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_VECTORCALL, .tp_vectorcall_offset = offsetof(Backward, call),
  .tp_call = PyVectorcall_Call, .tp_new = backward_new, .tp_dealloc = (destructor)backward_free,
};

static PyTypeObject FinderType = {
  PyVarObject_HEAD_INIT(NULL, 0).tp_name = "Finder", .tp_basicsize = sizeof(Finder),
  .tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_VECTORCALL, .tp_vectorcall_offset = offsetof(Finder, call),
  .tp_call = PyVectorcall_Call, .tp_new = finder_new, .tp_dealloc = (destructor)finder_free,
};

static PyTypeObject LaunchesType = {
  PyVarObject_HEAD_INIT(NULL, 0).tp_name = "Launches", .tp_basicsize = sizeof(Launches), .tp_flags = Py_TPFLAGS_DEFAULT,
  .tp_new = launches_new, .tp_dealloc = (destructor)launches_free, .tp_call = (ternaryfunc)launches_call,
};

static PyTypeObject SizedType = {
  PyVarObject_HEAD_INIT(NULL, 0).tp_name = "Sized", .tp_basicsize = sizeof(Sized), .tp_flags = Py_TPFLAGS_DEFAULT,
  .tp_new = sized_new, .tp_dealloc = (destructor)sized_free, .tp_call = (ternaryfunc)sized_call,
};

static PyTypeObject KindType = {
  PyVarObject_HEAD_INIT(NULL, 0).tp_name = "Kind", .tp_basicsize = sizeof(Kind),
  .tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_VECTORCALL, .tp_vectorcall_offset = offsetof(Kind, call),
  .tp_call = PyVectorcall_Call, .tp_new = kind_new, .tp_dealloc = (destructor)kind_free,
};

static PyMethodDef methods[] = {
  {"tensor_map", tensor_map, METH_VARARGS, "tensor_map(encoding, address, sizes and strides)"},
  {"graph_functions", graph_functions, METH_O, "graph_functions(addresses)"}, {NULL, NULL, 0, NULL},
};

static struct PyModuleDef module = {PyModuleDef_HEAD_INIT, "portattn_native", NULL, -1, methods};

PyMODINIT_FUNC PyInit_portattn_native(void) {
  PyTypeObject *types[] = {&LaunchesType, &SizedType, &KindType, &FinderType, &BackwardType};
  PyObject *names = PyTuple_New(KINDS), *made = names ? PyModule_Create(&module) : NULL;
  for (int i = 0; made && i < KINDS; i++) {
    PyObject *name = PyUnicode_FromString(OPERATIONS[i]);
    if (!name) Py_CLEAR(made); else PyTuple_SET_ITEM(names, i, name);
  }
  if (made && PyModule_AddObject(made, "OPERATIONS", names) < 0) Py_CLEAR(made);
  for (size_t i = 0; made && i < sizeof types / sizeof *types; i++) {
    if (PyType_Ready(types[i]) < 0) { Py_CLEAR(made); break; }
    Py_INCREF(types[i]);
    if (PyModule_AddObject(made, types[i]->tp_name, (PyObject *)types[i]) < 0) Py_CLEAR(made);
  }
  return made;
}
