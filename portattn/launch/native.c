/* The hot path of a kept call, for CUDA: what fastpath.Entry.match, kept.Kept and cudadriver.Block do, without Python.

   Launches   a Block's kernels: writes a call's addresses, and calls cuLaunchKernelEx for each kernel
   Hit        a whole kept call: is this call like it? then allocate, and launch. It makes no decision that the Python
              functions do not make, and hands back what it does not handle (NotImplemented)

   Built by native.py at run time. Nothing of CUDA or torch is included: functions come as addresses and callables. */
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

enum { MOST = 64, MAP_BYTES = 128, INVALID_CONTEXT = 201 };

typedef int (*LaunchKernelEx)(const void *config, void *function, void **parameters, void **extra);
typedef struct { const void *config; void *function; void **parameters; uint64_t *stream; } Kernel;
typedef struct { void *place; Py_ssize_t role; PyObject *of_address; uint64_t seen; } Map;

/* ---------------------------------------------------------------------------------------------------------------- */

typedef struct {
  PyObject_HEAD
  PyObject *memory;     /* keeps what the addresses below point into */
  LaunchKernelEx launch;
  uint64_t *roles;      /* where a launch's addresses go */
  Py_ssize_t role_count, kernel_count, map_count;
  Kernel kernels[MOST];
  Map maps[MOST];
  int busy;             /* a thread is launching with it; guarded by the GIL */
} Launches;

static PyTypeObject LaunchesType;

static uint64_t number(PyObject *owner, Py_ssize_t index) {
  return PyLong_AsUnsignedLongLong(PyTuple_GET_ITEM(owner, index)); /* -1 with an exception: looked for once, at the end */
}

/* Launches(memory, function, roles, role_count, kernels, maps): kernels of (config, function, parameters, stream), all
   addresses; maps of (place, role, mapping from an address to the bytes of its tensor map) */
static PyObject *launches_new(PyTypeObject *type, PyObject *args, PyObject *names) {
  PyObject *memory, *kernels, *maps;
  unsigned long long launch, roles;
  Py_ssize_t count;
  if (!PyArg_ParseTuple(args, "OKKnO!O!", &memory, &launch, &roles, &count, &PyTuple_Type, &kernels, &PyTuple_Type, &maps))
    return NULL;
  if (count > MOST || PyTuple_GET_SIZE(kernels) > MOST || PyTuple_GET_SIZE(maps) > MOST)
    return PyErr_Format(PyExc_ValueError, "at most %d roles, kernels and maps", MOST);
  Launches *self = (Launches *)type->tp_alloc(type, 0);
  if (!self) return NULL;
  self->memory = Py_NewRef(memory);
  self->launch = (LaunchKernelEx)(uintptr_t)launch;
  self->roles = (uint64_t *)(uintptr_t)roles;
  self->role_count = count;
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(kernels); i++) {
    PyObject *one = PyTuple_GET_ITEM(kernels, i);
    self->kernels[self->kernel_count++] = (Kernel){(void *)number(one, 0), (void *)number(one, 1), (void **)number(one, 2),
                                                   (uint64_t *)number(one, 3)};
  }
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(maps); i++) {
    PyObject *one = PyTuple_GET_ITEM(maps, i);
    self->maps[self->map_count++] = (Map){(void *)number(one, 0), (Py_ssize_t)number(one, 1),
                                          Py_NewRef(PyTuple_GET_ITEM(one, 2)), 0};
  }
  if (PyErr_Occurred()) Py_CLEAR(self);
  return (PyObject *)self;
}

static void launches_free(Launches *self) {
  for (Py_ssize_t i = 0; i < self->map_count; i++) Py_XDECREF(self->maps[i].of_address);
  Py_XDECREF(self->memory);
  Py_TYPE(self)->tp_free((PyObject *)self);
}

/* The tensor map of an address, from the mapping, which makes it where it has none. */
static int set_map(Map *map, uint64_t address) {
  PyObject *key = PyLong_FromUnsignedLongLong(address);
  PyObject *data = key ? PyObject_GetItem(map->of_address, key) : NULL;
  Py_XDECREF(key);
  if (!data) return -1;
  if (!PyBytes_Check(data) || PyBytes_GET_SIZE(data) != MAP_BYTES) {
    PyErr_SetString(PyExc_TypeError, "a tensor map is 128 bytes");
    Py_DECREF(data);
    return -1;
  }
  memcpy(map->place, PyBytes_AS_STRING(data), MAP_BYTES);
  Py_DECREF(data);
  map->seen = address;
  return 0;
}

/* Launch from the kernel `first` on. 0 when all are launched; -1 with a Python exception; or the driver's error, and
   *first the kernel that it refused. The caller has set `busy`. */
static int launch_all(Launches *self, uint64_t stream, const uint64_t *addresses, Py_ssize_t *first) {
  for (Py_ssize_t i = 0; i < self->map_count; i++) /* first of all: it may run Python */
    if (self->maps[i].seen != addresses[self->maps[i].role] && set_map(&self->maps[i], addresses[self->maps[i].role]) < 0)
      return -1;
  memcpy(self->roles, addresses, self->role_count * sizeof *addresses);
  int error = 0;
  Py_BEGIN_ALLOW_THREADS /* the driver waits where its queue is full */
  for (; *first < self->kernel_count; ++*first) {
    Kernel *kernel = &self->kernels[*first];
    *kernel->stream = stream;
    error = self->launch(kernel->config, kernel->function, kernel->parameters, NULL);
    if (error) break;
  }
  Py_END_ALLOW_THREADS
  return error;
}

/* launches(stream, addresses, first) -> None, or (error, kernel) where the driver refused one. For one thread at a time. */
static PyObject *launches_call(Launches *self, PyObject *args, PyObject *names) {
  unsigned long long stream;
  PyObject *given;
  Py_ssize_t first = 0;
  if (!PyArg_ParseTuple(args, "KO|n", &stream, &given, &first)) return NULL;
  PyObject *list = PySequence_Fast(given, "addresses must be a sequence");
  if (!list) return NULL;
  uint64_t addresses[MOST];
  if (PySequence_Fast_GET_SIZE(list) != self->role_count) {
    PyErr_Format(PyExc_ValueError, "%zd addresses are needed, not %zd", self->role_count, PySequence_Fast_GET_SIZE(list));
  } else {
    for (Py_ssize_t i = 0; i < self->role_count; i++)
      addresses[i] = PyLong_AsUnsignedLongLong(PySequence_Fast_GET_ITEM(list, i));
  }
  Py_DECREF(list);
  if (PyErr_Occurred()) return NULL;
  if (self->busy) return PyErr_Format(PyExc_RuntimeError, "another thread is launching");
  self->busy = 1;
  int error = launch_all(self, stream, addresses, &first);
  self->busy = 0;
  if (error < 0) return NULL;
  if (error) return Py_BuildValue("(in)", error, first);
  Py_RETURN_NONE;
}

/* ---------------------------------------------------------------------------------------------------------------- */

/* What a Hit is made of, by the names that Python gives it: objects, and tuples of integers. */
#define OBJECTS(X) X(values) X(settings) X(guard) X(levels) X(level_name) X(index) X(current) X(stream) X(empty) X(hooked) \
  X(address) X(out) X(lse) X(memory) X(each) X(launches) X(noted) X(plan) X(refused)
#define INTEGERS(X) X(absent) X(given) X(twins) X(distinct) X(residues) X(offsets)
typedef struct { Py_ssize_t count; uint64_t at[MOST]; } Integers;
#define MEMBER(name) PyObject *name;
#define COUNTED(name) Integers name;
typedef struct { PyObject_HEAD vectorcallfunc call; uint64_t low_bits; OBJECTS(MEMBER) INTEGERS(COUNTED) } Hit;

static PyObject *hit_call(PyObject *callable, PyObject *const *args, size_t flags, PyObject *names);

static int take_integers(Integers *to, PyObject *from) {
  if (!PyTuple_Check(from) || PyTuple_GET_SIZE(from) > MOST) return -1;
  for (; to->count < PyTuple_GET_SIZE(from); to->count++) to->at[to->count] = number(from, to->count);
  return PyErr_Occurred() ? -1 : 0;
}

/* Hit(low_bits=…, and every name of OBJECTS and INTEGERS) */
static PyObject *hit_new(PyTypeObject *type, PyObject *args, PyObject *named) {
  Hit *self = (Hit *)type->tp_alloc(type, 0);
  PyObject *item = NULL;
  int right = self && named;
#define TAKE(name) \
  if (right && (right = (item = PyDict_GetItemString(named, #name)) != NULL)) self->name = Py_NewRef(item);
#define TAKE_INTEGERS(name) \
  right = right && (item = PyDict_GetItemString(named, #name)) && !take_integers(&self->name, item);
  OBJECTS(TAKE)
  INTEGERS(TAKE_INTEGERS)
  if (right && (right = (item = PyDict_GetItemString(named, "low_bits")) != NULL)) self->low_bits = PyLong_AsUnsignedLongLong(item);
  right = right && PyTuple_Check(self->values) && PyDict_Check(self->levels) && PyTuple_Check(self->out) &&
    PyTuple_Check(self->lse) && PyTuple_Check(self->memory) && PyTuple_Check(self->each) &&
    PyContextVar_CheckExact(self->noted) && Py_IS_TYPE(self->launches, &LaunchesType) &&
    self->residues.count == self->given.count && ((Launches *)self->launches)->role_count ==
    self->given.count + 1 + !!PyTuple_GET_SIZE(self->lse) + self->offsets.count + PyTuple_GET_SIZE(self->each);
  if (!right) {
    if (!PyErr_Occurred()) PyErr_SetString(PyExc_TypeError, "a Hit's fields are not all there, or do not fit");
    Py_XDECREF(self);
    return NULL;
  }
  self->call = hit_call;
  return (PyObject *)self;
}

static void hit_free(Hit *self) {
#define DROP(name) Py_XDECREF(self->name);
  OBJECTS(DROP)
  Py_TYPE(self)->tp_free((PyObject *)self);
}

static int equal(PyObject *a, PyObject *b) { /* a value that does not compare is not equal: validation will name it */
  if (a == b) return 1;
  int same = PyObject_RichCompareBool(a, b, Py_EQ);
  if (same < 0 && PyErr_ExceptionMatches(PyExc_Exception)) { PyErr_Clear(); return 0; }
  return same;
}

static int truth(PyObject *found) { /* of a new reference */
  int result = found ? PyObject_IsTrue(found) : -1;
  Py_XDECREF(found);
  return result;
}

static int address_of(Hit *self, PyObject *tensor, uint64_t *address) {
  PyObject *found = PyObject_Vectorcall(self->address, &tensor, 1, NULL);
  if (!found) return -1;
  *address = PyLong_AsUnsignedLongLong(found);
  Py_DECREF(found);
  return *address == (uint64_t)-1 && PyErr_Occurred() ? -1 : 0;
}

/* The other arguments: equal, and of the same types. 1 == True == 1.0, and validation tells them apart. */
static int same_values(Hit *self, PyObject *values, PyObject *settings) {
  Py_ssize_t count = PyTuple_GET_SIZE(self->values);
  if (!PyTuple_Check(values) || PyTuple_GET_SIZE(values) != count) return 0;
  for (Py_ssize_t i = 0; i < count; i++) {
    PyObject *expected = PyTuple_GET_ITEM(self->values, i), *found = PyTuple_GET_ITEM(values, i);
    if (expected == found) continue;
    if (Py_TYPE(expected) != Py_TYPE(found)) return 0;
    int same = equal(expected, found);
    if (same <= 0) return same;
  }
  return equal(self->settings, settings);
}

/* The tensors that are given, borrowed, and their addresses: 1 where all is as in the kept call, 0 where not. */
static int same_tensors(Hit *self, PyObject *tensors, PyObject **given, uint64_t *addresses) {
  for (Py_ssize_t i = 0; i < self->absent.count; i++)
    if (PyTuple_GET_ITEM(tensors, self->absent.at[i]) != Py_None) return 0;
  for (Py_ssize_t i = 0; i < self->given.count; i++) given[i] = PyTuple_GET_ITEM(tensors, self->given.at[i]);
  for (Py_ssize_t i = 0; i + 1 < self->twins.count; i += 2)
    if (given[self->twins.at[i]] != given[self->twins.at[i + 1]]) return 0;
  PyObject *once[MOST];
  for (Py_ssize_t i = 0; i < self->distinct.count; i++) once[i] = given[self->distinct.at[i]];
  int alike = truth(PyObject_Vectorcall(self->guard, once, self->distinct.count, NULL));
  if (alike <= 0) return alike;
  PyObject *level = PyDict_GetItem(self->levels, self->level_name); /* of forward-mode differentiation; -1 outside */
  if (!level || PyLong_AsLong(level) >= 0) return 0;
  for (Py_ssize_t i = 0; i < self->given.count; i++) {
    if (address_of(self, given[i], &addresses[i]) < 0) return -1;
    if ((addresses[i] & self->low_bits) != self->residues.at[i]) return 0;
  }
  return 1;
}

/* A result's or a buffer's memory: `place` where the caller gives it, else allocated by (shape, strides, dtype). */
static PyObject *memory_for(Hit *self, PyObject *like, PyObject *place) {
  if (place != Py_None) return Py_NewRef(place);
  PyObject *arguments[] = {PyTuple_GET_ITEM(like, 0), PyTuple_GET_ITEM(like, 1), PyTuple_GET_ITEM(like, 2)};
  return PyObject_Vectorcall(self->empty, arguments, 3, NULL);
}

/* hit(tensors, values, settings, out, lse, memory): the results; None where the call is another one; NotImplemented
   where it must go by Python: another device is current, a hook of Triton's is set, another thread is in here, or the
   thread has no context. The last three arguments are None where they are to be allocated. */
static PyObject *hit_call(PyObject *callable, PyObject *const *args, size_t flags, PyObject *names) {
  Hit *self = (Hit *)callable;
  Launches *launches = (Launches *)self->launches;
  PyObject *given[MOST], *kept[MOST], *result = NULL;
  uint64_t addresses[MOST];
  if (PyVectorcall_NARGS(flags) != 6 || !PyTuple_Check(args[0])) return PyErr_Format(PyExc_TypeError, "a Hit takes six");
  if (PyTuple_GET_SIZE(args[0]) != self->absent.count + self->given.count) Py_RETURN_NONE;
  int same = same_values(self, args[1], args[2]);
  if (same > 0) same = same_tensors(self, args[0], given, addresses);
  if (same < 0) return NULL;
  if (!same) Py_RETURN_NONE;

  PyObject *found = PyObject_CallNoArgs(self->current);
  int here = found ? equal(found, self->index) : -1;
  Py_XDECREF(found);
  int hooked = here > 0 ? truth(PyObject_CallNoArgs(self->hooked)) : 0;
  if (here < 0 || hooked < 0) return NULL;
  if (!here || hooked || launches->busy) Py_RETURN_NOTIMPLEMENTED;
  launches->busy = 1; /* until the end: what is called below may let other threads run */

  Py_ssize_t place = self->given.count, own = 0;
  const int with_lse = PyTuple_GET_SIZE(self->lse) > 0, with_memory = PyTuple_GET_SIZE(self->memory) > 0;
  PyObject *out = memory_for(self, self->out, args[3]), *lse = NULL;
  if (!out) goto end;
  kept[own++] = out;
  if (address_of(self, out, &addresses[place++]) < 0) goto end;
  if (with_lse) {
    if (!(lse = memory_for(self, self->lse, args[4]))) goto end;
    kept[own++] = lse;
    if (address_of(self, lse, &addresses[place++]) < 0) goto end;
  }
  uint64_t base = 0;
  if (with_memory) {
    if (!(kept[own] = memory_for(self, self->memory, args[5]))) goto end;
    if (address_of(self, kept[own++], &base) < 0) goto end;
  }
  for (Py_ssize_t i = 0; i < self->offsets.count; i++) addresses[place++] = base + self->offsets.at[i];
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(self->each); i++) {
    if (!(kept[own] = PyObject_CallNoArgs(PyTuple_GET_ITEM(self->each, i)))) goto end;
    if (address_of(self, kept[own++], &addresses[place++]) < 0) goto end;
  }
  if (!(found = PyObject_Vectorcall(self->stream, &self->index, 1, NULL))) goto end;
  uint64_t stream = PyLong_AsUnsignedLongLong(found);
  Py_DECREF(found);
  if (stream == (uint64_t)-1 && PyErr_Occurred()) goto end;

  Py_ssize_t first = 0;
  int error = launch_all(launches, stream, addresses, &first);
  if (error == INVALID_CONTEXT && first == 0) { /* nothing is launched: the Python way makes a context */
    result = Py_NewRef(Py_NotImplemented);
    goto end;
  }
  if (error > 0) {
    found = PyObject_CallFunction(self->refused, "i", error); /* raises */
    Py_XDECREF(found);
  }
  if (error || !(found = PyContextVar_Set(self->noted, self->plan))) goto end;
  Py_DECREF(found);
  result = with_lse ? PyTuple_Pack(2, out, lse) : Py_NewRef(out);
end:
  launches->busy = 0;
  for (Py_ssize_t i = 0; i < own; i++) Py_DECREF(kept[i]);
  if (!result && !PyErr_Occurred()) PyErr_SetString(PyExc_RuntimeError, "CUDA's driver refused a launch");
  return result;
}

/* ---------------------------------------------------------------------------------------------------------------- */

static PyTypeObject LaunchesType = {
  PyVarObject_HEAD_INIT(NULL, 0).tp_name = "Launches", .tp_basicsize = sizeof(Launches), .tp_flags = Py_TPFLAGS_DEFAULT,
  .tp_new = launches_new, .tp_dealloc = (destructor)launches_free, .tp_call = (ternaryfunc)launches_call,
};

static PyTypeObject HitType = {
  PyVarObject_HEAD_INIT(NULL, 0).tp_name = "Hit", .tp_basicsize = sizeof(Hit),
  .tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_VECTORCALL, .tp_vectorcall_offset = offsetof(Hit, call),
  .tp_call = PyVectorcall_Call, .tp_new = hit_new, .tp_dealloc = (destructor)hit_free,
};

static struct PyModuleDef module = {PyModuleDef_HEAD_INIT, "portattn_native", NULL, -1, NULL};

PyMODINIT_FUNC PyInit_portattn_native(void) {
  PyObject *made;
  if (PyType_Ready(&LaunchesType) < 0 || PyType_Ready(&HitType) < 0 || !(made = PyModule_Create(&module))) return NULL;
  Py_INCREF(&LaunchesType);
  Py_INCREF(&HitType);
  if (PyModule_AddObject(made, "Launches", (PyObject *)&LaunchesType) < 0 ||
      PyModule_AddObject(made, "Hit", (PyObject *)&HitType) < 0) {
    Py_DECREF(made);
    return NULL;
  }
  return made;
}
