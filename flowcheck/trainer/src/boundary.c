/* What a boundary looks at, of many tensors in one call: flowcheck/trainer/boundary.py says what each gives, and
 * flowcheck/trainer/changes.py and sample.py have the same in Python, which is the reference.
 *
 * Called with the GIL; nothing of torch's own is included. What torch says of a tensor is asked by the descriptors that
 * its class has (`begin`). Between two boundaries training goes through several times the caches, so the objects of the
 * next tensors are fetched ahead: an object's third word is taken for the address of torch's own part of it. That is
 * used for nothing but fetching, which a wrong address does not harm.
 */
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <stdint.h>
#include <string.h>

#include "outbox.h"

enum { AHEAD = 16, THEN = 10, LAST = 5, LINE = 64, LINES = 3, WORD = 8, PICKED = 8, NUMBERS = 3, HINTS = 2 };
enum { FOUND = NUMBERS + HINTS }; /* of a tensor that is sampled: address, elements, type; where its objects are */

static PyObject *version_of, *gradient_of, *requires_of, *dtype_of, *address_of, *elements_of; /* descriptors */
static PyObject *tensor_type, *name_of_members;
static int deep; /* an object's third word is known to be the address of torch's own part */

/* The second words of an object that was tried to be one of torch's: its own part. */
static const void *const *inner_of(PyObject *tensor)
{
    const void *const *inner;
    memcpy(&inner, (const char *)tensor + sizeof(PyObject), sizeof inner);
    return inner;
}

static void ahead(PyObject *const *tensors, Py_ssize_t at, Py_ssize_t count)
{
    if (at + AHEAD < count)
        __builtin_prefetch(tensors[at + AHEAD]);
    if (!deep)
        return;
    if (at + THEN < count && tensors[at + THEN] != Py_None)
        for (int line = 0; line < LINES; line++)
            __builtin_prefetch((const char *)inner_of(tensors[at + THEN]) + line * LINE);
    if (at + LAST < count && tensors[at + LAST] != Py_None) {
        const void *const *inner = inner_of(tensors[at + LAST]);
        for (int word = 2; word < 6; word++) /* storage, gradient, and count of writes are among them */
            __builtin_prefetch(inner[word]);
    }
}

static PyObject *get(PyObject *descriptor, PyObject *object)
{
    return Py_TYPE(descriptor)->tp_descr_get(descriptor, object, (PyObject *)Py_TYPE(object));
}

/* A whole number, and whether it was one. */
static int number(PyObject *found, int64_t *out)
{
    if (!found)
        return 0;
    *out = (int64_t)PyLong_AsUnsignedLongLongMask(found);
    Py_DECREF(found);
    return !PyErr_Occurred();
}

static int version(PyObject *tensor, int64_t *out)
{
    *out = -1;
    return tensor == Py_None || number(get(version_of, tensor), out);
}

static int called(PyObject *method, PyObject *tensor, int64_t *out)
{
    return number(PyObject_Vectorcall(method, &tensor, 1, NULL), out);
}

static int lists(PyObject *const *given, int count)
{
    for (int i = 0; i < count; i++)
        if (!PyList_Check(given[i])) {
            PyErr_SetString(PyExc_TypeError, "not a list");
            return 0;
        }
    return 1;
}

static int given_are(Py_ssize_t given, Py_ssize_t due)
{
    if (given != due)
        PyErr_Format(PyExc_TypeError, "%zd arguments, %zd are due", given, due);
    return given == due;
}

static PyObject *begin(PyObject *module, PyObject *const *given, Py_ssize_t count)
{
    PyObject **const kept[] = {&version_of, &gradient_of, &requires_of, &dtype_of, &address_of, &elements_of,
                               &tensor_type};
    if (!given_are(count, 1 + sizeof kept / sizeof *kept))
        return NULL;
    deep = given[--count] == Py_True;
    for (int i = 0; i < count; i++) {
        if (i < 4 && !Py_TYPE(given[i])->tp_descr_get)
            return PyErr_Format(PyExc_TypeError, "%d is no descriptor", i);
        Py_INCREF(given[i]);
        Py_XSETREF(*kept[i], given[i]);
    }
    Py_RETURN_NONE;
}

/* -- gradients ------------------------------------------------------------------------------------------------- */

static PyObject *gradients(PyObject *module, PyObject *parameters)
{
    if (!lists(&parameters, 1))
        return NULL;
    Py_ssize_t count = PyList_GET_SIZE(parameters), there = 0;
    PyObject *held = PyList_New(count), *versions = PyBytes_FromStringAndSize(NULL, count * WORD);
    PyObject *const *all = ((PyListObject *)parameters)->ob_item;
    int good = held && versions;
    for (Py_ssize_t i = 0; good && i < count; i++) {
        int64_t counted = -1;
        ahead(all, i, count);
        PyObject *one = get(gradient_of, all[i]);
        good = one && version(one, &counted);
        there += one != Py_None;
        PyList_SET_ITEM(held, i, one);
        memcpy(PyBytes_AS_STRING(versions) + i * WORD, &counted, WORD);
    }
    PyObject *out = good ? PyTuple_Pack(3, held, versions, there == count ? Py_True : Py_False) : NULL;
    Py_XDECREF(held);
    Py_XDECREF(versions);
    return out;
}

static PyObject *same_gradients(PyObject *module, PyObject *const *given, Py_ssize_t count)
{
    if (!given_are(count, 3) || !lists(given, 2) || !PyBytes_Check(given[2]))
        return PyErr_Occurred() ? NULL : PyErr_Format(PyExc_TypeError, "versions are no bytes");
    Py_ssize_t all = PyList_GET_SIZE(given[0]);
    if (PyList_GET_SIZE(given[1]) != all || PyBytes_GET_SIZE(given[2]) != all * WORD)
        Py_RETURN_FALSE;
    PyObject *const *parameters = ((PyListObject *)given[0])->ob_item, *const *held = ((PyListObject *)given[1])->ob_item;
    for (Py_ssize_t i = 0; i < all; i++) {
        int64_t before, now;
        ahead(parameters, i, all);
        ahead(held, i, all);
        PyObject *one = get(gradient_of, parameters[i]);
        if (!one)
            return NULL;
        int same = one == held[i];
        Py_DECREF(one); /* held has it, if it is the same */
        if (!same)
            Py_RETURN_FALSE;
        if (!version(one, &now))
            return NULL;
        memcpy(&before, PyBytes_AS_STRING(given[2]) + i * WORD, WORD);
        if (now != before)
            Py_RETURN_FALSE;
    }
    Py_RETURN_TRUE;
}

/* -- parameters ------------------------------------------------------------------------------------------------ */

static PyObject *versions(PyObject *module, PyObject *tensors)
{
    if (!lists(&tensors, 1))
        return NULL;
    Py_ssize_t count = PyList_GET_SIZE(tensors);
    PyObject *out = PyBytes_FromStringAndSize(NULL, count * WORD);
    for (Py_ssize_t i = 0; out && i < count; i++) {
        int64_t one;
        ahead(((PyListObject *)tensors)->ob_item, i, count);
        if (!version(PyList_GET_ITEM(tensors, i), &one))
            Py_CLEAR(out);
        else
            memcpy(PyBytes_AS_STRING(out) + i * WORD, &one, WORD);
    }
    return out;
}

static PyObject *look(PyObject *module, PyObject *const *given, Py_ssize_t count)
{
    if (!given_are(count, 2) || !lists(given + 1, 1))
        return NULL;
    if (!PyList_Check(given[0]))
        Py_RETURN_NONE;
    Py_ssize_t groups = PyList_GET_SIZE(given[0]), all = 0;
    if (PyList_GET_SIZE(given[1]) != groups)
        Py_RETURN_NONE;
    for (Py_ssize_t g = 0; g < groups; g++) {
        PyObject *group = PyList_GET_ITEM(given[0], g), *due = PyList_GET_ITEM(given[1], g);
        PyObject *members = PyDict_Check(group) ? PyDict_GetItemWithError(group, name_of_members) : NULL;
        if (!members || !PyList_Check(members) || !PyList_Check(due)) {
            if (PyErr_Occurred())
                return NULL;
            Py_RETURN_NONE;
        }
        Py_ssize_t mine = PyList_GET_SIZE(members);
        if (mine != PyList_GET_SIZE(due) ||
            memcmp(((PyListObject *)members)->ob_item, ((PyListObject *)due)->ob_item, (size_t)mine * sizeof(void *)))
            Py_RETURN_NONE;
        all += mine;
    }
    int64_t written = 0;
    PyObject *stepped = PyBytes_FromStringAndSize(NULL, all);
    char *flag = stepped ? PyBytes_AS_STRING(stepped) : NULL;
    for (Py_ssize_t g = 0; stepped && g < groups; g++) {
        PyListObject *members = (PyListObject *)PyList_GET_ITEM(given[1], g);
        Py_ssize_t mine = PyList_GET_SIZE(members);
        for (Py_ssize_t i = 0; i < mine; i++) {
            int64_t one;
            ahead(members->ob_item, i, mine);
            PyObject *requires = get(requires_of, members->ob_item[i]);
            if (!requires || !version(members->ob_item[i], &one)) {
                Py_XDECREF(requires);
                Py_DECREF(stepped);
                return NULL;
            }
            *flag++ = (char)(requires == Py_True);
            Py_DECREF(requires);
            written += one;
        }
    }
    return stepped ? Py_BuildValue("LN", (long long)written, stepped) : NULL;
}

static PyObject *same_options(PyObject *module, PyObject *const *given, Py_ssize_t count)
{
    if (!given_are(count, 2) || !lists(given + 1, 1))
        return NULL;
    if (!PyList_Check(given[0]))
        Py_RETURN_FALSE;
    Py_ssize_t at = 0, due = PyList_GET_SIZE(given[1]);
    for (Py_ssize_t g = 0; g < PyList_GET_SIZE(given[0]); g++) {
        PyObject *group = PyList_GET_ITEM(given[0], g), *key, *value;
        if (!PyDict_Check(group))
            Py_RETURN_FALSE;
        for (Py_ssize_t place = 0; PyDict_Next(group, &place, &key, &value);) {
            if (key == name_of_members || (PyUnicode_Check(key) && !PyUnicode_Compare(key, name_of_members)))
                continue;
            if (at + 2 > due || PyList_GET_ITEM(given[1], at) != key || PyList_GET_ITEM(given[1], at + 1) != value)
                Py_RETURN_FALSE;
            at += 2;
        }
    }
    return PyBool_FromLong(at == due);
}

/* -- the optimizer's state ------------------------------------------------------------------------------------- */

/* What a dict has of a key that is compared by identity. place: where PyDict_Next found it last, so that the key's hash,
 * a function of Python's for a tensor, is asked for where it is no longer there alone. Borrowed. */
static PyObject *kept_of(PyObject *state, PyObject *key, Py_ssize_t *place)
{
    PyObject *found, *value;
    Py_ssize_t at = *place;
    if (at >= 0 && PyDict_Next(state, &at, &found, &value) && found == key)
        return value;
    *place = -1;
    value = PyDict_GetItemWithError(state, key);
    for (Py_ssize_t before = at = 0; value && PyDict_Next(state, &at, &found, NULL); before = at)
        if (found == key) {
            *place = before;
            break;
        }
    return value;
}

static int is_tensor(PyObject *value)
{
    return (PyObject *)Py_TYPE(value) == tensor_type ? 1 : PyObject_IsInstance(value, tensor_type);
}

enum { SAME, MOVED, OTHERS, WRITTEN, ROOM = 64 };

/* window(state, parameters, places): objects and numbers. same_window(state, parameters, places, objects, numbers). */
typedef struct {
    PyObject *objects, *numbers; /* list, bytearray: filled, or compared with */
    Py_ssize_t object, number;
    int compares, odd;
} window_walk;

static void odder(window_walk *walk, int odd) { walk->odd = !walk->odd || odd < walk->odd ? odd : walk->odd; }

static int next_object(window_walk *walk, PyObject *object)
{
    if (!walk->compares)
        return !PyList_Append(walk->objects, object);
    if (walk->object >= PyList_GET_SIZE(walk->objects) || PyList_GET_ITEM(walk->objects, walk->object) != object)
        odder(walk, OTHERS);
    walk->object++;
    return 1;
}

static int next_number(window_walk *walk, int64_t value, int odd)
{
    Py_ssize_t at = walk->number++ * WORD;
    if (!walk->compares) {
        if (at + WORD > PyByteArray_GET_SIZE(walk->numbers) && PyByteArray_Resize(walk->numbers, 2 * (at + WORD)))
            return 0;
        memcpy(PyByteArray_AS_STRING(walk->numbers) + at, &value, WORD);
    } else if (at + WORD > PyByteArray_GET_SIZE(walk->numbers) ||
               memcmp(PyByteArray_AS_STRING(walk->numbers) + at, &value, WORD))
        odder(walk, odd);
    return 1;
}

static int walk_entry(window_walk *walk, PyObject *entry)
{
    PyObject *key, *value;
    if (!next_number(walk, PyDict_GET_SIZE(entry), OTHERS) || !next_object(walk, entry))
        return 0;
    for (Py_ssize_t at = 0; PyDict_Next(entry, &at, &key, &value);) {
        int64_t counted;
        Py_INCREF(value);
        int tensor = is_tensor(value), good = tensor >= 0 && next_object(walk, value);
        if (good && tensor && walk->odd != OTHERS)
            good = version(value, &counted) && next_number(walk, counted, WRITTEN);
        Py_DECREF(value);
        if (!good)
            return 0;
    }
    return 1;
}

static int walk_window(window_walk *walk, PyObject *state, PyListObject *parameters, PyObject *places)
{
    Py_ssize_t *place = (Py_ssize_t *)PyByteArray_AS_STRING(places), all = PyList_GET_SIZE(parameters);
    for (Py_ssize_t i = 0; i < all; i++) {
        int64_t address;
        if (!called(address_of, parameters->ob_item[i], &address) || !next_number(walk, address, MOVED))
            return 0;
    }
    for (Py_ssize_t i = 0; i < all; i++) {
        int absent = walk->compares && (walk->object >= PyList_GET_SIZE(walk->objects) ||
                                        PyList_GET_ITEM(walk->objects, walk->object) == Py_None);
        if (absent) { /* it had no state: whatever it has now is looked at after the next step */
            walk->object++;
            continue;
        }
        PyObject *entry = kept_of(state, parameters->ob_item[i], place + i);
        if (!entry && PyErr_Occurred())
            return 0;
        if (!entry || !PyDict_Check(entry) || !PyDict_GET_SIZE(entry)) {
            if (walk->compares)
                odder(walk, OTHERS);
            else if (!next_object(walk, Py_None))
                return 0;
        } else if (!walk_entry(walk, entry))
            return 0;
        if (walk->odd == OTHERS) /* numbers are no longer in step, and no worse can come */
            break;
    }
    return 1;
}

static int are_state(PyObject *state, PyObject *parameters, PyObject *places)
{
    int good = PyDict_Check(state) && PyList_Check(parameters) && PyByteArray_Check(places) &&
               PyByteArray_GET_SIZE(places) == PyList_GET_SIZE(parameters) * (Py_ssize_t)sizeof(Py_ssize_t);
    if (!good)
        PyErr_SetString(PyExc_TypeError, "not a state, a list, and a place for each");
    return good;
}

static PyObject *window(PyObject *module, PyObject *const *given, Py_ssize_t count)
{
    if (!given_are(count, 3) || !are_state(given[0], given[1], given[2]))
        return NULL;
    window_walk walk = {PyList_New(0), PyByteArray_FromStringAndSize(NULL, ROOM * WORD), 0, 0, 0, SAME};
    PyObject *out = NULL;
    if (walk.objects && walk.numbers && walk_window(&walk, given[0], (PyListObject *)given[1], given[2]) &&
        !PyByteArray_Resize(walk.numbers, walk.number * WORD))
        out = PyTuple_Pack(2, walk.objects, walk.numbers);
    Py_XDECREF(walk.objects);
    Py_XDECREF(walk.numbers);
    return out;
}

static PyObject *same_window(PyObject *module, PyObject *const *given, Py_ssize_t count)
{
    if (!given_are(count, 5) || !are_state(given[0], given[1], given[2]))
        return NULL;
    if (!PyList_Check(given[3]) || !PyByteArray_Check(given[4]))
        return PyErr_Format(PyExc_TypeError, "no window");
    window_walk walk = {given[3], given[4], 0, 0, 1, SAME};
    return walk_window(&walk, given[0], (PyListObject *)given[1], given[2]) ? PyLong_FromLong(walk.odd) : NULL;
}

/* -- the sample ------------------------------------------------------------------------------------------------ */

typedef struct { /* of one tensor that is looked at, in the order of the sample's sections */
    uint64_t from; /* its number among those that are found */
    uint64_t width, taken, elements; /* elements 0: all, from the first one on */
    uint64_t words[PICKED];
} piece;

static char *base64(const uint8_t *from, size_t count, char *to)
{
    static const char letters[] = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
    for (; count >= 3; count -= 3, from += 3) {
        uint32_t bits = (uint32_t)from[0] << 16 | (uint32_t)from[1] << 8 | from[2];
        for (int place = 18; place >= 0; place -= 6)
            *to++ = letters[bits >> place & 63];
    }
    if (count) {
        uint32_t bits = (uint32_t)from[0] << 16 | (count > 1 ? (uint32_t)from[1] << 8 : 0);
        *to++ = letters[bits >> 18];
        *to++ = letters[bits >> 12 & 63];
        *to++ = count > 1 ? letters[bits >> 6 & 63] : '=';
        *to++ = '=';
    }
    return to;
}

static const char *place_of(const piece *p, const int64_t *found, uint64_t word, uint64_t i)
{
    uint64_t place = p->elements ? (p->words[i] ^ word) % p->elements : i;
    return (const char *)found[FOUND * p->from] + place * p->width;
}

static PyObject *gathered(const int64_t *found, const Py_buffer *pieces, uint64_t word, const Py_buffer *head)
{
    const piece *first = pieces->buf, *end = first + pieces->len / (Py_ssize_t)sizeof *first;
    size_t length = (size_t)head->len;
    for (const piece *p = first; p < end; p++)
        length += p->width * p->taken;
    uint8_t *bytes = PyMem_Malloc(length + 1), *to = bytes;
    PyObject *out = bytes ? PyUnicode_New((Py_ssize_t)((length + 2) / 3 * 4), 127) : PyErr_NoMemory();
    if (out) {
        memcpy(to, head->buf, (size_t)head->len);
        to += head->len;
        for (const piece *p = first; p < end; p++)
            for (uint64_t i = 0; i < p->taken; i++, to += p->width)
                memcpy(to, place_of(p, found, word, i), p->width);
        base64(bytes, length, (char *)PyUnicode_1BYTE_DATA(out));
    }
    PyMem_Free(bytes);
    return out;
}

static void fetch_hints(const int64_t *found)
{
    __builtin_prefetch((const void *)(intptr_t)found[NUMBERS]);
    for (int line = 0; line < LINES; line++)
        __builtin_prefetch((const char *)(intptr_t)found[NUMBERS + 1] + line * LINE);
}

/* Of what is looked at next: (address, elements, type) of each tensor, and a mask of each entry. 0: an error; then none
 * is set where something is otherwise than `found` and `masks` say. */
static int as_before(PyObject *state, PyListObject *held, const char *optimized, PyObject *keys, Py_ssize_t *places,
                     const int64_t *found, Py_ssize_t most, const char *masks)
{
    Py_ssize_t at = 0, all = PyList_GET_SIZE(held), bits = PyTuple_GET_SIZE(keys);
    for (Py_ssize_t i = 0; i < all; i++) {
        char mask = 0;
        PyObject *entry = NULL;
        if (optimized[i] && !(entry = kept_of(state, held->ob_item[i], places + i)) && PyErr_Occurred())
            return 0;
        for (Py_ssize_t bit = -1; bit < (entry && PyDict_Check(entry) ? bits : 0); bit++) {
            int64_t now[NUMBERS];
            PyObject *pair = bit < 0 ? NULL : PyTuple_GET_ITEM(keys, bit);
            PyObject *one = bit < 0 ? held->ob_item[i] : PyDict_GetItemWithError(entry, PyTuple_GET_ITEM(pair, 1));
            if (!one && PyErr_Occurred())
                return 0;
            if (!one || (bit >= 0 && (PyObject *)Py_TYPE(one) != tensor_type)) {
                if (one && is_tensor(one))
                    return 0; /* of a kind that Python knows */
                continue;
            }
            if (bit >= 0)
                mask |= (char)PyLong_AsLong(PyTuple_GET_ITEM(pair, 0));
            if (at + THEN < most)
                fetch_hints(found + FOUND * (at + THEN));
            Py_INCREF(one);
            PyObject *dtype = get(dtype_of, one);
            int good = dtype && at < most && called(address_of, one, now) && called(elements_of, one, now + 1);
            Py_DECREF(one);
            now[2] = (int64_t)(intptr_t)dtype; /* torch has one object of each */
            Py_XDECREF(dtype);
            if (!good || memcmp(now, found + FOUND * at++, sizeof now))
                return 0;
        }
        if (mask != masks[i])
            return 0;
    }
    return at == most;
}

static PyObject *sample(PyObject *module, PyObject *const *given, Py_ssize_t count)
{
    if (!given_are(count, 10))
        return NULL;
    PyObject *state = given[0], *held = given[1], *optimized = given[2], *keys = given[3], *places = given[4];
    uint64_t word = PyLong_AsUnsignedLongLong(given[8]);
    if (PyErr_Occurred() || !are_state(state, held, places))
        return NULL;
    if (!PyTuple_Check(keys) || !PyBytes_Check(optimized) || PyBytes_GET_SIZE(optimized) != PyList_GET_SIZE(held))
        return PyErr_Format(PyExc_TypeError, "no entries");
    Py_buffer found, masks = {0}, pieces = {0}, head = {0}, *all[] = {&found, &masks, &pieces, &head};
    PyObject *from[] = {given[5], given[6], given[7], given[9]}, *out = NULL;
    int here = 0;
    while (here < 4 && !PyObject_GetBuffer(from[here], all[here], PyBUF_SIMPLE))
        here++;
    if (here == 4 && masks.len == PyList_GET_SIZE(held)) {
        Py_ssize_t tensors = found.len / (Py_ssize_t)(FOUND * WORD);
        const piece *p = pieces.buf, *end = p + pieces.len / (Py_ssize_t)sizeof *p;
        while (p < end && p->from < (uint64_t)tensors && p->taken <= (p->elements ? PICKED : 16) && p->width <= WORD) {
            for (uint64_t i = 0; i < (p->elements ? p->taken : 1); i++)
                __builtin_prefetch(place_of(p, found.buf, word, i)); /* where it was */
            p++;
        }
        if (p < end)
            PyErr_SetString(PyExc_ValueError, "pieces of no tensor");
        else if (as_before(state, (PyListObject *)held, PyBytes_AS_STRING(optimized), keys,
                           (Py_ssize_t *)PyByteArray_AS_STRING(places), found.buf, tensors, masks.buf))
            out = gathered(found.buf, &pieces, word, &head);
        else if (!PyErr_Occurred()) {
            Py_INCREF(Py_None);
            out = Py_None;
        }
    } else if (here == 4)
        PyErr_SetString(PyExc_TypeError, "not a mask for each entry");
    while (here--)
        PyBuffer_Release(all[here]);
    return out;
}

/* -- memory ---------------------------------------------------------------------------------------------------- */

static PyObject *same_memory(PyObject *module, PyObject *const *given, Py_ssize_t count)
{
    for (Py_ssize_t i = 0; i + 1 < count; i += 2) {
        const void *address = PyLong_AsVoidPtr(given[i]);
        if (PyErr_Occurred())
            return NULL;
        if (!PyBytes_Check(given[i + 1]))
            return PyErr_Format(PyExc_TypeError, "no bytes");
        if (memcmp(address, PyBytes_AS_STRING(given[i + 1]), (size_t)PyBytes_GET_SIZE(given[i + 1])))
            Py_RETURN_FALSE;
    }
    Py_RETURN_TRUE;
}

#define FAST(name) {#name, (PyCFunction)(void (*)(void))name, METH_FASTCALL, NULL}
static PyMethodDef functions[] = {
    FAST(begin), {"gradients", gradients, METH_O, NULL}, FAST(same_gradients), {"versions", versions, METH_O, NULL},
    FAST(look), FAST(same_options), FAST(window), FAST(same_window), FAST(sample), FAST(same_memory),
    OUTBOX_FUNCTIONS {NULL, NULL, 0, NULL},
};
static struct PyModuleDef definition = {PyModuleDef_HEAD_INIT, "boundary", NULL, -1, functions, NULL, NULL, NULL, NULL};

PyMODINIT_FUNC PyInit_boundary(void)
{
    name_of_members = PyUnicode_InternFromString("params");
    return name_of_members ? PyModule_Create(&definition) : NULL;
}
