/* The type Repeats of the module _engine: see _repeats.c. */
#ifndef GUOZHUANG_REPEATS_H
#define GUOZHUANG_REPEATS_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>

extern PyType_Spec gz_repeats_spec;

#endif
