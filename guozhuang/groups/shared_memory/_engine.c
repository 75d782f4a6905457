/* The C engine as a Python module: takes programs (program.py) as they are, runs them without the GIL. Types and
   meanings: engine.py. Waiting and its reasoning: _barrier.c. Arithmetic: _reduce.c. */
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <stdlib.h>
#include <string.h>

#include "_barrier.h"
#include "_mail.h"
#include "_program.h"
#include "_reduce.h"
#include "_repeats.h"

#define LONGEST_WAIT_S 1e9

typedef struct {
    PyObject_HEAD
    gz_group group;
    gz_program program, next; /* of the current run */
    int running;
} engine;

/* Whether the ranks whose memory was read in a round still wait in this operation. One that gave up may have changed its memory
   meanwhile, and says that it gave up first. Before this rank's next arrival none can have gone on. */
static int is_read_whole(const gz_program *program, long long round, gz_group *group) {
    __atomic_thread_fence(__ATOMIC_ACQUIRE);
    for (size_t i = 0; i < program->num_streams; i++) {
        const gz_stream *s = &program->streams[i];
        if (s->kind != GZ_READ || !gz_has_chunk(s, round)) continue;
        if (gz_read(group, s->dtype, GZ_STATE_OFFSET) == GZ_ALIVE) continue;
        group->culprits[0] = s->dtype;
        group->num_culprits = 1;
        return 0;
    }
    return 1;
}

/* Without the GIL. */
static int run_program(engine *self, const gz_program *program, int begins, int64_t deadline_ns, int64_t spin_ns) {
    for (long long round = 0; round < program->num_rounds; round++) {
        const int unread = gz_program_work(program, round, self->group.pids, self->group.size);
        if (unread >= 0) return gz_why_unread(&self->group, unread);
        if (!is_read_whole(program, round, &self->group)) return GZ_BROKEN;
        if (round == program->num_rounds - 1 && !program->trailing_barrier) break;
        int status = gz_barrier(&self->group, deadline_ns, spin_ns);
        if (status == GZ_OK && begins && round == 0) status = gz_compare(&self->group);
        if (status != GZ_OK) return status;
    }
    return GZ_OK;
}

/* Called by a wait in the main thread, which holds no GIL: `context` is the thread state that it put aside. */
static int interrupted(void *context) {
    PyThreadState **aside = context;
    PyEval_RestoreThread(*aside);
    const int raised = PyErr_CheckSignals();
    *aside = PyEval_SaveThread();
    return raised;
}

static PyObject *outcome(const gz_group *group, int status) {
    PyObject *ranks = PyTuple_New(status == GZ_OK || status == GZ_UNEXPECTED ? 0 : group->num_culprits);
    if (ranks == NULL) return NULL;
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(ranks); i++) {
        PyObject *rank = PyLong_FromLong(group->culprits[i]);
        if (rank == NULL) {
            Py_DECREF(ranks);
            return NULL;
        }
        PyTuple_SET_ITEM(ranks, i, rank);
    }
    return Py_BuildValue("iN", status, ranks);
}

/* Whether what a run expects of the private bytes makes sense; None: nothing. */
static int check_expected(const engine *self, PyObject *expected) {
    if (expected == Py_None) return 0;
    int is_right = PyTuple_Check(expected) && PyTuple_GET_SIZE(expected) == self->group.size;
    for (int rank = 0; is_right && rank < self->group.size; rank++) {
        PyObject *bytes = PyTuple_GET_ITEM(expected, rank);
        is_right = PyBytes_Check(bytes) && PyBytes_GET_SIZE(bytes) == GZ_PRIVATE_BYTES;
    }
    return is_right ? 0 : gz_invalid("expected must be a tuple of 128 bytes for each rank");
}

/* Without the GIL; the caller holds references. */
static int is_as_expected(const engine *self, PyObject *expected) {
    for (int rank = 0; rank < self->group.size; rank++)
        if (memcmp(gz_description(&self->group, rank) + GZ_DESCRIPTOR_BYTES,
                   PyBytes_AS_STRING(PyTuple_GET_ITEM(expected, rank)), GZ_PRIVATE_BYTES) != 0)
            return 0;
    return 1;
}

/* Publish what this rank does. */
static void say_doing(gz_group *group, const char *text, size_t given) {
    const size_t num_bytes = given < GZ_DOING_BYTES ? given : GZ_DOING_BYTES;
    char *doing = (char *)group->controls[group->rank] + GZ_DOING_OFFSET;
    memcpy(doing, text, num_bytes);
    doing[num_bytes] = 0;
}

static PyObject *run_once(engine *self, PyObject *const *args, PyObject *expected, PyObject *then) {
    const int begins = args[1] != Py_None, goes_on = expected != Py_None;
    const double deadline_s = PyFloat_AsDouble(args[3]), spin_us = PyFloat_AsDouble(args[4]);
    if (PyErr_Occurred() || gz_program_read(&self->program, args[0]) < 0 || check_expected(self, expected) < 0) return NULL;
    if (goes_on && gz_program_read(&self->next, then) < 0) return NULL;
    if (deadline_s != deadline_s || !(spin_us >= 0 && spin_us <= 1e9)) {
        gz_invalid("deadline_s must be a number, spin_us must lie in [0, 1e9]");
        return NULL;
    }
    if (begins) {
        if (!PyBytes_Check(args[1]) || !PyBytes_Check(args[2]) || PyBytes_GET_SIZE(args[1]) > GZ_DESCRIPTOR_BYTES ||
            PyBytes_GET_SIZE(args[2]) > GZ_PRIVATE_BYTES) {
            gz_invalid("descriptor and private must be bytes, at most 256 and 128");
            return NULL;
        }
        if (self->program.num_rounds == 1 && !self->program.trailing_barrier) {
            gz_invalid("a run with a descriptor needs a barrier, to compare it");
            return NULL;
        }
        say_doing(&self->group, PyBytes_AS_STRING(args[1]), (size_t)PyBytes_GET_SIZE(args[1]));
        gz_describe(&self->group, PyBytes_AS_STRING(args[1]), (size_t)PyBytes_GET_SIZE(args[1]), PyBytes_AS_STRING(args[2]),
                    (size_t)PyBytes_GET_SIZE(args[2]));
    }
    const double limit_s = deadline_s < LONGEST_WAIT_S ? (deadline_s > 0 ? deadline_s : 0) : LONGEST_WAIT_S;
    const int64_t deadline_ns = gz_now_ns() + (int64_t)(limit_s * 1e9);
    PyThreadState *aside = PyEval_SaveThread();
    self->group.context = &aside;
    int status = run_program(self, &self->program, begins, deadline_ns, (int64_t)(spin_us * 1000));
    if (status == GZ_OK && goes_on)
        status = is_as_expected(self, expected) ? run_program(self, &self->next, 0, deadline_ns, (int64_t)(spin_us * 1000))
                                               : GZ_UNEXPECTED;
    PyEval_RestoreThread(aside);
    if (status == GZ_INTERRUPTED) {
        gz_set_state(&self->group, GZ_IS_BROKEN); /* the peers wait for a barrier at which this rank will not arrive */
        return NULL;
    }
    return outcome(&self->group, status);
}

static PyObject *engine_run(PyObject *object, PyObject *const *args, Py_ssize_t num_args) {
    engine *self = (engine *)object;
    if (num_args != 5 && num_args != 7)
        return PyErr_Format(PyExc_TypeError, "run takes 5 or 7 arguments by position (%zd given)", num_args);
    if (self->running) return PyErr_Format(PyExc_RuntimeError, "a run of this engine is under way in another thread");
    self->running = 1;
    PyObject *result = run_once(self, args, num_args == 7 ? args[5] : Py_None, num_args == 7 ? args[6] : Py_None);
    self->running = 0;
    return result;
}

/* ---- looking at control pages ---- */

static int rank_of(const engine *self, PyObject *object) {
    const long rank = PyLong_AsLong(object);
    if (rank == -1 && PyErr_Occurred()) return -1;
    return rank >= 0 && rank < self->group.size ? (int)rank : gz_invalid("no such rank");
}

static PyObject *parts(const engine *self, int offset, int num_bytes) {
    PyObject *list = PyList_New(self->group.size);
    for (int rank = 0; list != NULL && rank < self->group.size; rank++) {
        PyObject *part = PyBytes_FromStringAndSize((const char *)gz_description(&self->group, rank) + offset, num_bytes);
        if (part == NULL) Py_CLEAR(list);
        else PyList_SET_ITEM(list, rank, part);
    }
    return list;
}

static PyObject *engine_descriptors(PyObject *self, PyObject *unused) {
    (void)unused;
    return parts((engine *)self, 0, GZ_DESCRIPTOR_BYTES);
}

static PyObject *engine_privates(PyObject *self, PyObject *unused) {
    (void)unused;
    return parts((engine *)self, GZ_DESCRIPTOR_BYTES, GZ_PRIVATE_BYTES);
}

static PyObject *engine_doing(PyObject *object, PyObject *argument) {
    engine *self = (engine *)object;
    const int rank = rank_of(self, argument);
    if (rank < 0) return NULL;
    const char *text = (const char *)self->group.controls[rank] + GZ_DOING_OFFSET;
    return PyUnicode_DecodeASCII(text, (Py_ssize_t)strnlen(text, GZ_DOING_BYTES), "replace");
}

static PyObject *engine_set_doing(PyObject *object, PyObject *text) {
    engine *self = (engine *)object;
    if (!PyBytes_Check(text)) return PyErr_Format(PyExc_TypeError, "bytes are needed");
    say_doing(&self->group, PyBytes_AS_STRING(text), (size_t)PyBytes_GET_SIZE(text));
    Py_RETURN_NONE;
}

static PyObject *engine_set_state(PyObject *self, PyObject *argument) {
    const unsigned long state = PyLong_AsUnsignedLong(argument);
    if (PyErr_Occurred()) return NULL;
    gz_set_state(&((engine *)self)->group, (uint32_t)state);
    Py_RETURN_NONE;
}

static PyObject *word_of(engine *self, PyObject *argument, int offset) {
    const int rank = rank_of(self, argument);
    return rank < 0 ? NULL : PyLong_FromUnsignedLong(gz_read(&self->group, rank, offset));
}

static PyObject *engine_state_of(PyObject *self, PyObject *rank) {
    return word_of((engine *)self, rank, GZ_STATE_OFFSET);
}

static PyObject *engine_arrived_of(PyObject *self, PyObject *rank) {
    return word_of((engine *)self, rank, GZ_ARRIVED_OFFSET);
}

/* ---- making and ending ---- */

static void engine_dealloc(PyObject *object) {
    engine *self = (engine *)object;
    PyTypeObject *type = Py_TYPE(object);
    free(self->group.controls);
    free(self->group.ends);
    free(self->group.pids);
    free(self->group.culprits);
    gz_program_free(&self->program);
    gz_program_free(&self->next);
    type->tp_free(object);
    Py_DECREF(type);
}

static int fill_ranks(engine *self, PyObject *controls, PyObject *pidfds, PyObject *pids) {
    for (int rank = 0; rank < self->group.size; rank++) {
        long long address, descriptor, pid;
        if (gz_integer(PyList_GET_ITEM(controls, rank), &address) < 0 ||
            gz_integer(PyList_GET_ITEM(pidfds, rank), &descriptor) < 0 || gz_integer(PyList_GET_ITEM(pids, rank), &pid) < 0)
            return -1;
        self->group.pids[rank] = (pid_t)pid;
        if (address == 0 || address % 64) return gz_invalid("control pages must lie at multiples of 64");
        self->group.controls[rank] = (unsigned char *)(uintptr_t)address;
        self->group.ends[rank].fd = descriptor < 0 ? -1 : (int)descriptor;
    }
    return 0;
}

static PyObject *engine_new(PyTypeObject *type, PyObject *args, PyObject *keywords) {
    int rank, size;
    double busy_us;
    PyObject *controls, *pidfds, *pids;
    static char *names[] = {"rank", "size", "controls", "pidfds", "pids", "busy_us", NULL};
    if (!PyArg_ParseTupleAndKeywords(args, keywords, "iiO!O!O!d:Engine", names, &rank, &size, &PyList_Type, &controls,
                                     &PyList_Type, &pidfds, &PyList_Type, &pids, &busy_us))
        return NULL;
    if (size < 1 || rank < 0 || rank >= size || PyList_GET_SIZE(controls) != size || PyList_GET_SIZE(pidfds) != size ||
        PyList_GET_SIZE(pids) != size) {
        gz_invalid("rank must lie in [0, size), and there must be a control page, a descriptor and a pid for each rank");
        return NULL;
    }
    engine *self = (engine *)type->tp_alloc(type, 0);
    if (self == NULL) return NULL;
    self->group = (gz_group){.rank = rank, .size = size, .interrupted = interrupted, .busy_ns = (int64_t)(busy_us * 1000)};
    self->group.controls = calloc((size_t)size, sizeof *self->group.controls);
    self->group.ends = calloc((size_t)size, sizeof *self->group.ends);
    self->group.culprits = calloc((size_t)size, sizeof *self->group.culprits);
    self->group.pids = calloc((size_t)size, sizeof *self->group.pids);
    if (!self->group.controls || !self->group.ends || !self->group.culprits || !self->group.pids) PyErr_NoMemory();
    else if (fill_ranks(self, controls, pidfds, pids) == 0) gz_prepare(&self->group);
    if (!PyErr_Occurred()) return (PyObject *)self;
    Py_DECREF(self);
    return NULL;
}

static PyMethodDef engine_methods[] = {
    {"run", (PyCFunction)(void (*)(void))engine_run, METH_FASTCALL, NULL},
    {"descriptors", engine_descriptors, METH_NOARGS, NULL},
    {"privates", engine_privates, METH_NOARGS, NULL},
    {"doing", engine_doing, METH_O, NULL},
    {"set_doing", engine_set_doing, METH_O, NULL},
    {"set_state", engine_set_state, METH_O, NULL},
    {"state_of", engine_state_of, METH_O, NULL},
    {"arrived_of", engine_arrived_of, METH_O, NULL},
    {NULL, NULL, 0, NULL},
};

static PyType_Slot engine_slots[] = {
    {Py_tp_new, engine_new},
    {Py_tp_dealloc, engine_dealloc},
    {Py_tp_methods, engine_methods},
    {0, NULL},
};

static PyType_Spec engine_spec = {
    .name = "guozhuang.groups.shared_memory._engine.Engine",
    .basicsize = sizeof(engine),
    .flags = Py_TPFLAGS_DEFAULT,
    .slots = engine_slots,
};

/* ---- plain functions ---- */

static PyObject *plain_copy(PyObject *module, PyObject *const *args, Py_ssize_t num_args) {
    (void)module;
    long long dst, src, num_bytes;
    if (num_args != 3) return PyErr_Format(PyExc_TypeError, "copy takes 3 arguments by position (%zd given)", num_args);
    if (gz_integer(args[0], &dst) < 0 || gz_integer(args[1], &src) < 0 || gz_integer(args[2], &num_bytes) < 0) return NULL;
    if (num_bytes < 0) return gz_invalid("num_bytes must not be negative"), NULL;
    Py_BEGIN_ALLOW_THREADS
    if (dst != src) memcpy((void *)(uintptr_t)dst, (const void *)(uintptr_t)src, (size_t)num_bytes);
    Py_END_ALLOW_THREADS
    Py_RETURN_NONE;
}

/* read_process(pid, dst, src, num_bytes) -> whether it could be read */
static PyObject *plain_read(PyObject *module, PyObject *const *args, Py_ssize_t num_args) {
    (void)module;
    long long given[4];
    int failed;
    if (num_args != 4) return PyErr_Format(PyExc_TypeError, "read_process takes 4 arguments by position (%zd given)", num_args);
    for (int i = 0; i < 4; i++)
        if (gz_integer(args[i], &given[i]) < 0) return NULL;
    if (given[3] < 0) return gz_invalid("num_bytes must not be negative"), NULL;
    Py_BEGIN_ALLOW_THREADS
    failed = gz_read_process((pid_t)given[0], (void *)(uintptr_t)given[1], (uint64_t)given[2], (size_t)given[3]);
    Py_END_ALLOW_THREADS
    return PyBool_FromLong(!failed);
}

/* A stream with everything in one chunk, at stage 0: reuses what reads and checks a program. */
static PyObject *plain_run(PyObject *module, PyObject *tuple) {
    (void)module;
    gz_program program = {0};
    const int read = gz_program_read(&program, tuple);
    if (read == 0) {
        Py_BEGIN_ALLOW_THREADS
        for (long long round = 0; round < program.num_rounds; round++) gz_program_work(&program, round, NULL, 0);
        Py_END_ALLOW_THREADS
    }
    gz_program_free(&program);
    if (read < 0) return NULL;
    Py_RETURN_NONE;
}

static PyMethodDef module_methods[] = {
    {"copy", (PyCFunction)(void (*)(void))plain_copy, METH_FASTCALL, NULL},
    {"read_process", (PyCFunction)(void (*)(void))plain_read, METH_FASTCALL, NULL},
    {"work", plain_run, METH_O, NULL},
    {NULL, NULL, 0, NULL},
};

static int module_exec(PyObject *module) {
    static const struct {
        const char *name;
        PyType_Spec *spec;
    } types[] = {{"Engine", &engine_spec}, {"Mail", &gz_mail_spec}, {"Repeats", &gz_repeats_spec}};
    for (size_t i = 0; i < sizeof types / sizeof *types; i++) {
        PyObject *type = PyType_FromSpec(types[i].spec);
        const int added = type == NULL ? -1 : PyModule_AddObjectRef(module, types[i].name, type);
        Py_XDECREF(type);
        if (added < 0) return -1;
    }
    /* For the test that this and engine.py agree. */
    PyObject *layout = Py_BuildValue("(Iiiiiiiiiii)", GZ_MAGIC, GZ_MAGIC_OFFSET, GZ_ARRIVED_OFFSET, GZ_ASLEEP_OFFSET,
                                     GZ_STATE_OFFSET, GZ_DOING_OFFSET, GZ_DOING_BYTES, GZ_FIRST_DESCRIPTOR_OFFSET,
                                     GZ_SECOND_DESCRIPTOR_OFFSET, GZ_DESCRIPTOR_BYTES, GZ_PRIVATE_BYTES);
    if (layout == NULL) return -1;
    const int added = PyModule_AddObjectRef(module, "LAYOUT", layout);
    Py_DECREF(layout);
    return added;
}

static PyModuleDef_Slot module_slots[] = {{Py_mod_exec, module_exec}, {0, NULL}};

static struct PyModuleDef module_definition = {
    PyModuleDef_HEAD_INIT,
    .m_name = "_engine",
    .m_doc = "Runs programs of the shared-memory group without the GIL; see engine.py.",
    .m_methods = module_methods,
    .m_slots = module_slots,
};

PyMODINIT_FUNC PyInit__engine(void) { return PyModuleDef_Init(&module_definition); }
