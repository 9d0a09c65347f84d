/* Reads and writes of a queue from Python, each one call of C.
 *
 * SPDX-License-Identifier: Apache-2.0
 *
 * cffi takes pointers, and to make one of an array costs many times what the queue itself takes. So the module has a
 * function queue_calls, which makes `read` and `write` of one queue. They take what is common (arrays of the queue's own
 * type, bytes, a count) and answer NotImplemented to all else and to failures: the long way by cffi is still there, and
 * says what is wrong. They keep the interpreter lock, as it does.
 */
#ifndef NNB_QUEUE_H
#define NNB_QUEUE_H

#include <Python.h>
#include <errno.h>

/* An array, as NumPy's own header has had it since 1.7, for others to read: asking for its buffer takes longer than the
 * queue does. queue_calls compares it with an array that it is given. */
typedef struct nnb_py_array {
    PyObject ob_base;
    char *data;
    int nd;
    Py_ssize_t *dimensions, *strides;
    PyObject *base, *descr;
    int flags;
} nnb_py_array;

#define NNB_PY_CONTIGUOUS 0x1
#define NNB_PY_WRITEABLE 0x400

/* What `read` and `write` are bound to: a tuple of these. */
enum { NNB_PY_ADDRESS, NNB_PY_OWNER, NNB_PY_DTYPE, NNB_PY_NDARRAY, NNB_PY_EMPTY };

/* The queue stays open: whoever calls holds the tuple, and this the owner. */
static nnb_mq *nnb_py_queue(PyObject *self) { return PyLong_AsVoidPtr(PyTuple_GetItem(self, NNB_PY_ADDRESS)); }

static PyObject *nnb_py_ref(PyObject *object)
{
    Py_INCREF(object);
    return object;
}

/* Where the elements of an array are, if it has all the flags and is of the queue's type; else NULL. */
static char *nnb_py_elements(PyObject *self, PyObject *object, int flags, uint64_t *count)
{
    const nnb_py_array *array = (const nnb_py_array *)(void *)object;
    if ((PyObject *)Py_TYPE(object) != PyTuple_GetItem(self, NNB_PY_NDARRAY) || (array->flags & flags) != flags)
        return NULL;
    PyObject *dtype = PyTuple_GetItem(self, NNB_PY_DTYPE);
    if (array->descr != dtype && PyObject_RichCompareBool(array->descr, dtype, Py_EQ) != 1) {
        PyErr_Clear();
        return NULL;
    }
    *count = 1;
    for (int i = 0; i < array->nd; i++)
        *count *= (uint64_t)array->dimensions[i];
    return array->data;
}

/* write(data) -> True; False: no room. */
static PyObject *nnb_py_queue_write(PyObject *self, PyObject *data)
{
    nnb_mq *q = nnb_py_queue(self);
    uint64_t count = 0;
    const char *from = nnb_py_elements(self, data, NNB_PY_CONTIGUOUS, &count);
    if (!from && PyBytes_CheckExact(data) && PyBytes_Size(data) % nnb_mq_quantum(q) == 0) {
        from = PyBytes_AsString(data);
        count = (uint64_t)PyBytes_Size(data) / nnb_mq_quantum(q);
    }
    int rc = from ? nnb_mq_write(q, from, count) : -EINVAL;
    return nnb_py_ref(rc == 0 ? Py_True : rc == -EAGAIN ? Py_False : Py_NotImplemented);
}

/* read(target) -> the target, or a new array if it is a count; None: not so many there; False: overtaken. */
static PyObject *nnb_py_queue_read(PyObject *self, PyObject *target)
{
    nnb_mq *q = nnb_py_queue(self);
    uint64_t count;
    PyObject *array;
    if (PyLong_CheckExact(target)) {
        count = PyLong_AsUnsignedLongLong(target);
        if (PyErr_Occurred() || count > nnb_mq_capacity(q)) {
            PyErr_Clear();
            return nnb_py_ref(Py_NotImplemented);
        }
        int64_t ready = nnb_mq_available_to_read(q);
        if (ready >= 0 && (uint64_t)ready < count)
            return nnb_py_ref(Py_None);
        array = PyObject_CallFunctionObjArgs(PyTuple_GetItem(self, NNB_PY_EMPTY), target,
                                             PyTuple_GetItem(self, NNB_PY_DTYPE), NULL);
        if (!array)
            return NULL;
    } else {
        array = nnb_py_ref(target);
    }
    char *to = nnb_py_elements(self, array, NNB_PY_CONTIGUOUS | NNB_PY_WRITEABLE, &count);
    int rc = to ? nnb_mq_read(q, to, count) : -EINVAL;
    if (rc == 0)
        return array;
    Py_DECREF(array);
    return nnb_py_ref(rc == -EAGAIN ? Py_None : rc == -EOVERFLOW ? Py_False : Py_NotImplemented);
}

/* queue_calls(bound, probe, address) -> (read, write). `probe` is an array of two elements of the queue's type, and
 * `address` that of its data; None if it does not look as declared above. */
static PyObject *nnb_py_queue_calls(PyObject *module, PyObject *arguments)
{
    static PyMethodDef read = {"read", nnb_py_queue_read, METH_O, NULL};
    static PyMethodDef write = {"write", nnb_py_queue_write, METH_O, NULL};
    PyObject *bound, *probe;
    unsigned long long address;
    if (!PyArg_ParseTuple(arguments, "OOK", &bound, &probe, &address))
        return NULL;
    const nnb_py_array *array = (const nnb_py_array *)(void *)probe;
    int flags = NNB_PY_CONTIGUOUS | NNB_PY_WRITEABLE;
    if ((uintptr_t)array->data != address || array->nd != 1 || array->dimensions[0] != 2 ||
        array->descr != PyTuple_GetItem(bound, NNB_PY_DTYPE) || (array->flags & flags) != flags)
        return nnb_py_ref(Py_None);
    return Py_BuildValue("NN", PyCFunction_New(&read, bound), PyCFunction_New(&write, bound));
}

#endif
