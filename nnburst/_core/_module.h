/* What the module has beside cffi's functions of the core: steps of Python objects that nothing may come between.
 *
 * SPDX-License-Identifier: Apache-2.0
 *
 * A signal handler runs between two bytecodes, and so may another thread; a lock that the interrupted one holds would
 * stay held for as long as its handler waits. So these are one step each, under the interpreter lock.
 */
#ifndef NNB_MODULE_H
#define NNB_MODULE_H

#include "_queue.h"
#include "_run.h"

/* drop_plans(server, slot, plans, first, stand_in, gated, leaving) -> what was dropped. nnb_server_free_slot, and its
 * plans in Python with it: `stand_in` takes their places in the list, their ids are no keys of `gated` any more, and the
 * one that runs at the moment is put into `leaving`. */
static PyObject *nnb_py_drop_plans(PyObject *module, PyObject *arguments)
{
    PyObject *plans, *stand_in, *gated, *leaving;
    unsigned long long server;
    int slot;
    Py_ssize_t first;
    uint32_t ids[NNB_MAX_PLANS];
    if (!PyArg_ParseTuple(arguments, "KiOnOOO", &server, &slot, &plans, &first, &stand_in, &gated, &leaving))
        return NULL;
    PyObject *dropped = PyList_New(0);
    int n = dropped ? nnb_server_free_slot((nnb_server *)(uintptr_t)server, slot, ids) : 0;
    for (int i = 0; i < n; i++) {
        Py_ssize_t id = ids[i] & ~(uint32_t)NNB_PLAN_KERNEL;
        PyObject *plan = PyList_GetItem(plans, first + id), *key = PyLong_FromSsize_t(id);
        PyObject *entry = plan && key ? PyDict_GetItemWithError(gated, key) : NULL;
        if (!plan || !key || PyList_Append(dropped, plan) < 0 || (entry && PyList_Append(dropped, entry) < 0) ||
            (ids[i] & NNB_PLAN_KERNEL && PyList_Append(leaving, plan) < 0) ||
            (entry && PyDict_DelItem(gated, key) < 0) || PyList_SetItem(plans, first + id, nnb_py_ref(stand_in)) < 0)
            Py_CLEAR(dropped);
        Py_XDECREF(key);
        if (!dropped)
            break;
    }
    return dropped;
}

/* What makes the module: cffi's own, these functions and a type more. */
static PyObject *nnb_py_init(const char *name, Py_ssize_t version, const struct _cffi_type_context_s *context)
{
    static PyMethodDef functions[] = {{"queue_calls", nnb_py_queue_calls, METH_VARARGS, NULL},
                                      {"drop_plans", nnb_py_drop_plans, METH_VARARGS, NULL},
                                      {NULL, NULL, 0, NULL}};
    PyObject *module = _cffi_init(name, version, context);
    PyObject *runnable = module ? nnb_py_runnable_type() : NULL;
    if (module && (!runnable || PyModule_AddFunctions(module, functions) < 0 ||
                   PyObject_SetAttrString(module, "Runnable", runnable) < 0))
        Py_CLEAR(module);
    Py_XDECREF(runnable);
    return module;
}
#define _cffi_init nnb_py_init

#endif
