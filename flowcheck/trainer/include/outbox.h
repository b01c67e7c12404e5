/* What a boundary has to send to a node, from memory, by a thread that never needs the GIL: the thread that trains copies
 * some kilobytes and goes on, instead of doing the network's work for them.
 *
 *     open_outbox(descriptor) -> outbox       a thread begins; it sends on a duplicate of this socket
 *     outbox_put(outbox, pieces) -> 1         taken, all of them, to be sent in order. 0: no room. -errno: nothing more
 *                                             can be sent
 *     outbox_flush(outbox, seconds) -> 1      all that was put is sent. 0: not within the time. -errno: as above
 *     outbox_idle(outbox) -> bool             nothing is left to be sent, or nothing can be any more
 *     close_outbox(outbox)                    the thread ends after what it is sending, as it does when the outbox is let
 *                                             go of
 *
 * A node that takes nothing for OUTBOX_PATIENCE seconds is given up: ETIMEDOUT. The thread calls nothing of Python's, so
 * it does not matter when the interpreter ends. After fork() a child has no such thread.
 */
#ifndef FLOWCHECK_OUTBOX_H
#define FLOWCHECK_OUTBOX_H

#include <errno.h>
#include <poll.h>
#include <pthread.h>
#include <signal.h>
#include <stdbool.h>
#include <stdlib.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

enum { OUTBOX_BYTES = 1 << 20, OUTBOX_PATIENCE = 10 };
#define OUTBOX_NAME "flowcheck.outbox"

typedef struct {
    pthread_mutex_t lock;
    pthread_cond_t more, done; /* by the monotonic clock */
    int descriptor, error, owners;
    pid_t process; /* in which its thread is */
    bool stop, waits;
    size_t begin, end; /* of data: to be sent */
    char data[OUTBOX_BYTES];
} outbox;

/* With the lock, which is gone then. */
static void outbox_leave(outbox *box)
{
    bool last = !--box->owners;
    pthread_mutex_unlock(&box->lock);
    if (last) {
        pthread_cond_destroy(&box->more);
        pthread_cond_destroy(&box->done);
        pthread_mutex_destroy(&box->lock);
        free(box);
    }
}

/* Some of these bytes, or -errno. */
static ssize_t outbox_send(int descriptor, const char *from, size_t count)
{
    for (;;) {
        ssize_t sent = send(descriptor, from, count, MSG_NOSIGNAL | MSG_DONTWAIT);
        if (sent >= 0)
            return sent;
        if (errno == EINTR)
            continue;
        if (errno != EAGAIN && errno != EWOULDBLOCK)
            return -errno;
        struct pollfd room = {descriptor, POLLOUT, 0};
        int ready = poll(&room, 1, OUTBOX_PATIENCE * 1000);
        if (!ready)
            return -ETIMEDOUT;
        if (ready < 0 && errno != EINTR)
            return -errno;
    }
}

static void *outbox_main(void *given)
{
    outbox *box = given;
    pthread_mutex_lock(&box->lock);
    while (!box->stop && !box->error) {
        if (box->begin == box->end) {
            box->waits = true;
            pthread_cond_wait(&box->more, &box->lock);
            box->waits = false;
            continue;
        }
        size_t begin = box->begin, count = box->end - begin;
        pthread_mutex_unlock(&box->lock); /* what is appended meanwhile lies behind these */
        ssize_t sent = outbox_send(box->descriptor, box->data + begin, count);
        pthread_mutex_lock(&box->lock);
        if (sent < 0)
            box->error = (int)-sent;
        else if ((box->begin += (size_t)sent) == box->end)
            box->begin = box->end = 0;
        if (sent < 0 || !box->end)
            pthread_cond_broadcast(&box->done);
    }
    if (!box->error)
        box->error = ESHUTDOWN;
    pthread_cond_broadcast(&box->done);
    close(box->descriptor);
    outbox_leave(box);
    return NULL;
}

/* Not in a child of that process, where whoever had the lock may be gone. */
static void outbox_stop(outbox *box)
{
    pthread_mutex_lock(&box->lock);
    box->stop = true;
    pthread_cond_signal(&box->more);
    pthread_mutex_unlock(&box->lock);
}

static void outbox_freed(PyObject *capsule)
{
    outbox *box = PyCapsule_GetPointer(capsule, OUTBOX_NAME);
    if (box->process != getpid())
        return;
    outbox_stop(box);
    pthread_mutex_lock(&box->lock);
    outbox_leave(box);
}

static PyObject *open_outbox(PyObject *module, PyObject *given)
{
    int descriptor = (int)PyLong_AsLong(given);
    if (PyErr_Occurred())
        return NULL;
    outbox *box = calloc(1, sizeof *box);
    if (!box)
        return PyErr_NoMemory();
    pthread_condattr_t clock;
    pthread_condattr_init(&clock);
    pthread_condattr_setclock(&clock, CLOCK_MONOTONIC);
    pthread_mutex_init(&box->lock, NULL);
    pthread_cond_init(&box->more, &clock);
    pthread_cond_init(&box->done, &clock);
    pthread_condattr_destroy(&clock);
    box->owners = 1;
    box->descriptor = dup(descriptor);
    box->process = getpid();
    sigset_t none, before;
    pthread_attr_t small;
    pthread_t thread;
    int error = box->descriptor < 0 ? errno : 0;
    if (!error) {
        sigfillset(&none);
        pthread_attr_init(&small);
        pthread_attr_setstacksize(&small, 64 << 10);
        pthread_attr_setdetachstate(&small, PTHREAD_CREATE_DETACHED);
        pthread_sigmask(SIG_SETMASK, &none, &before); /* signals are for those who handle them */
        box->owners = 2;
        error = pthread_create(&thread, &small, outbox_main, box);
        pthread_sigmask(SIG_SETMASK, &before, NULL);
        pthread_attr_destroy(&small);
    }
    PyObject *out = error ? NULL : PyCapsule_New(box, OUTBOX_NAME, outbox_freed);
    if (error) {
        if (box->descriptor >= 0)
            close(box->descriptor);
        box->owners = 1;
        pthread_mutex_lock(&box->lock);
        outbox_leave(box);
        errno = error;
        return PyErr_SetFromErrno(PyExc_OSError);
    }
    return out;
}

static PyObject *outbox_put(PyObject *module, PyObject *const *given, Py_ssize_t count)
{
    outbox *box = count == 2 ? PyCapsule_GetPointer(given[0], OUTBOX_NAME) : NULL;
    if (!box || !PyList_Check(given[1]))
        return PyErr_Occurred() ? NULL : PyErr_Format(PyExc_TypeError, "an outbox and a list of bytes");
    size_t length = 0;
    for (Py_ssize_t i = 0; i < PyList_GET_SIZE(given[1]); i++) {
        if (!PyBytes_Check(PyList_GET_ITEM(given[1], i)))
            return PyErr_Format(PyExc_TypeError, "no bytes");
        length += (size_t)PyBytes_GET_SIZE(PyList_GET_ITEM(given[1], i));
    }
    pthread_mutex_lock(&box->lock); /* which nobody has for longer than it takes to copy */
    long said = box->error ? -box->error : box->stop ? -ESHUTDOWN : length <= OUTBOX_BYTES - box->end;
    bool wakes = false;
    for (Py_ssize_t i = 0; said > 0 && i < PyList_GET_SIZE(given[1]); i++) {
        PyObject *piece = PyList_GET_ITEM(given[1], i);
        memcpy(box->data + box->end, PyBytes_AS_STRING(piece), (size_t)PyBytes_GET_SIZE(piece));
        box->end += (size_t)PyBytes_GET_SIZE(piece);
        wakes = box->waits;
    }
    pthread_mutex_unlock(&box->lock);
    if (wakes)
        pthread_cond_signal(&box->more);
    return PyLong_FromLong(said);
}

static PyObject *outbox_flush(PyObject *module, PyObject *const *given, Py_ssize_t count)
{
    outbox *box = count == 2 ? PyCapsule_GetPointer(given[0], OUTBOX_NAME) : NULL;
    double seconds = box ? PyFloat_AsDouble(given[1]) : 0;
    if (!box || PyErr_Occurred())
        return PyErr_Occurred() ? NULL : PyErr_Format(PyExc_TypeError, "an outbox and seconds");
    long said;
    Py_BEGIN_ALLOW_THREADS;
    struct timespec until;
    clock_gettime(CLOCK_MONOTONIC, &until);
    until.tv_sec += (time_t)seconds;
    until.tv_nsec += (long)((seconds - (double)(time_t)seconds) * 1e9);
    until.tv_sec += until.tv_nsec / 1000000000;
    until.tv_nsec %= 1000000000;
    pthread_mutex_lock(&box->lock);
    int waited = 0;
    while (box->end && !box->error && !waited)
        waited = pthread_cond_timedwait(&box->done, &box->lock, &until);
    said = box->error ? -box->error : !box->end;
    pthread_mutex_unlock(&box->lock);
    Py_END_ALLOW_THREADS;
    return PyLong_FromLong(said);
}

static PyObject *outbox_idle(PyObject *module, PyObject *given)
{
    outbox *box = PyCapsule_GetPointer(given, OUTBOX_NAME);
    if (!box)
        return NULL;
    pthread_mutex_lock(&box->lock);
    bool idle = !box->end || box->error;
    pthread_mutex_unlock(&box->lock);
    return PyBool_FromLong(idle);
}

static PyObject *close_outbox(PyObject *module, PyObject *given)
{
    outbox *box = PyCapsule_GetPointer(given, OUTBOX_NAME);
    if (!box)
        return NULL;
    outbox_stop(box);
    Py_RETURN_NONE;
}

#define OUTBOX_FUNCTIONS                                                                           \
    {"open_outbox", open_outbox, METH_O, NULL}, FAST(outbox_put), FAST(outbox_flush),              \
        {"outbox_idle", outbox_idle, METH_O, NULL}, {"close_outbox", close_outbox, METH_O, NULL},

#endif
