/* The type Mail of the module _engine: see _mail.c. */
#ifndef GUOZHUANG_MAIL_H
#define GUOZHUANG_MAIL_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>

extern PyType_Spec gz_mail_spec;

#endif
