/* The call that a client repeats, `run`, as one call of C.
 *
 * SPDX-License-Identifier: Apache-2.0
 *
 * A bound request has one of these for its base. A run that ends well never enters the interpreter; any other outcome
 * is told to `_conclude`, and a run with arguments, or of what is not bound, is `_run_at_length`'s.
 */
#ifndef NNB_RUN_H
#define NNB_RUN_H

#include <Python.h>
#include <structmember.h>

typedef struct nnb_py_runnable {
    PyObject ob_base;
    nnb_execution *execution; /* or NULL: not to be run here */
    PyObject *pointer;        /* the same for cffi, and its owner; or NULL */
} nnb_py_runnable;

/* _attach(pointer, address): what `run` runs from now on; address 0: nothing. */
static PyObject *nnb_py_attach(PyObject *self, PyObject *arguments)
{
    nnb_py_runnable *r = (nnb_py_runnable *)(void *)self;
    PyObject *pointer, *before = r->pointer;
    unsigned long long address;
    if (!PyArg_ParseTuple(arguments, "OK", &pointer, &address))
        return NULL;
    r->execution = (nnb_execution *)(uintptr_t)address;
    r->pointer = nnb_py_ref(pointer);
    Py_XDECREF(before);
    return nnb_py_ref(Py_None);
}

static PyObject *nnb_py_run(PyObject *self, PyObject *arguments, PyObject *named)
{
    nnb_py_runnable *r = (nnb_py_runnable *)(void *)self;
    nnb_execution *e = r->execution;
    PyObject *result;
    if (PyTuple_Size(arguments) || named || !e) {
        PyObject *method = PyObject_GetAttrString(self, "_run_at_length");
        result = method ? PyObject_Call(method, arguments, named) : NULL;
        Py_XDECREF(method);
        return result;
    }
    PyObject *owner = nnb_py_ref(r->pointer); /* another thread may bind anew while this one waits */
    int rc = nnb_execution_run(e);
    result = rc ? PyObject_CallMethod(self, "_conclude", "i", rc) : nnb_py_ref(Py_None);
    if (!result && rc == -ERESTART) /* a signal handler may have raised before the first line of `_conclude` */
        nnb_execution_abandon(e);
    Py_DECREF(owner);
    return result;
}

static void nnb_py_runnable_dealloc(PyObject *self)
{
    PyTypeObject *type = Py_TYPE(self);
    Py_XDECREF(((nnb_py_runnable *)(void *)self)->pointer);
    ((freefunc)PyType_GetSlot(type, Py_tp_free))(self);
    Py_DECREF(type);
}

/* The type `Runnable`, a base of Python's classes. */
static PyObject *nnb_py_runnable_type(void)
{
    static PyMethodDef methods[] = {
        {"run", (PyCFunction)(void (*)(void))nnb_py_run, METH_VARARGS | METH_KEYWORDS,
         "run($self, /, timeout=...)\n--\n\n"
         "Run once and wait for the end; the outputs are then in their memory, until the next run writes there.\n\n"
         "Args:\n"
         "    timeout: Seconds that this run may take; None for no limit. By default those that it was bound with.\n\n"
         "Raises:\n"
         "    DeadObject: The service died, or the burst was closed meanwhile.\n"
         "    MissedDeadline: The time was over. The service may still be writing outputs.\n"
         "    BadState: The burst is closed, or runs another execution now.\n"
         "    OutputInsufficientSize: An output region is too small.\n"
         "    NNBurstError: The service answered another error status."},
        {"_attach", nnb_py_attach, METH_VARARGS, NULL},
        {NULL, NULL, 0, NULL}};
    static PyMemberDef members[] = {{"pointer", T_OBJECT_EX, offsetof(nnb_py_runnable, pointer), READONLY, NULL},
                                    {NULL, 0, 0, 0, NULL}};
    static PyType_Slot slots[] = {{Py_tp_dealloc, nnb_py_runnable_dealloc},
                                  {Py_tp_methods, methods},
                                  {Py_tp_members, members},
                                  {Py_tp_doc, "What has a `run`. Base of `BoundRequest`."},
                                  {0, NULL}};
    static PyType_Spec spec = {"nnburst._core._nnburst.Runnable", sizeof(nnb_py_runnable), 0,
                               Py_TPFLAGS_DEFAULT | Py_TPFLAGS_BASETYPE, slots};
    return PyType_FromSpec(&spec);
}

#endif
