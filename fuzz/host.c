/* The libFuzzer program of the targets that live in Python modules (Cython, built with coverage and sanitizers).
 *
 *   fuzz_host (libFuzzer, ASan, UBSan, libpython)
 *     |- LLVMFuzzerInitialize     starts Python, imports targets.<FUZZ_TARGET> before any input runs, so that
 *     |                           the coverage counters of every extension are registered with libFuzzer
 *     `- LLVMFuzzerTestOneInput   targets.<FUZZ_TARGET>.one(bytes)
 *
 * An exception that leaves one() is a find like any other: the traceback is printed and the process aborts,
 * so libFuzzer keeps the input. FUZZ_PATH is the module search path (fuzz/build.py lays it out).
 * One thread. Python is never finalised: numpy cannot be, and the process ends anyway.
 */
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>

static PyObject *one;

static void give_up(const char *where)
{
    fprintf(stderr, "fuzz_host: %s\n", where);
    if (PyErr_Occurred())
        PyErr_Print();
    fflush(NULL);
    abort();
}

int LLVMFuzzerInitialize(int *argc, char ***argv)
{
    const char *target = getenv("FUZZ_TARGET"), *path = getenv("FUZZ_PATH"), *python = getenv("FUZZ_PYTHON");
    char name[64];
    PyConfig config;
    PyObject *module;

    if (!target || !path || !python || snprintf(name, sizeof name, "targets.%s", target) >= (int)sizeof name)
        give_up("FUZZ_TARGET, FUZZ_PATH and FUZZ_PYTHON say what to run; use fuzz/run.py");
    PyConfig_InitPythonConfig(&config);
    config.install_signal_handlers = 0; /* they are libFuzzer's */
    config.parse_argv = 0;
    /* the virtual environment's interpreter: site-packages are found beside it */
    if (PyStatus_Exception(PyConfig_SetBytesString(&config, &config.program_name, python)) ||
        PyStatus_Exception(Py_InitializeFromConfig(&config)))
        give_up("Python does not start");
    PyConfig_Clear(&config);

    PyObject *sys_path = PySys_GetObject("path");
    char *copy = strdup(path), *rest = copy;
    for (Py_ssize_t at = 0; rest; at++) {
        PyObject *entry = PyUnicode_DecodeFSDefault(strsep(&rest, ":"));
        if (!entry || PyList_Insert(sys_path, at, entry))
            give_up("module search path");
        Py_DECREF(entry);
    }
    free(copy);
    module = PyImport_ImportModule(name);
    one = module ? PyObject_GetAttrString(module, "one") : NULL;
    if (!one)
        give_up("the target cannot be imported");
    return 0;
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    PyObject *result = PyObject_CallFunction(one, "y#", (const char *)data, (Py_ssize_t)size);

    if (!result)
        give_up("the target raised");
    Py_DECREF(result);
    return 0;
}
