/* What goes through the whole heap, in C: the walk over its references, the lists in which the collector has it, and
 * what says that a dictionary or a descriptor has changed.
 *
 * It is written against the stable interface of Python 3.10, so that one build serves all later versions. Each function
 * has its equal in Python, which takes longer; what it rests on beyond that interface is said with it.
 */

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <dirent.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

/* What the caller says of a type, as `Manner` in walk.py. */
enum { HAS_READER = 1, HAS_STAND_IN = 2, LEADS_ON_UNTRACKED = 4, IS_PASSED_OVER = 8, HIDES_DICT = 16 };
/* What is found out here. */
enum { MAY_BE_TRACKED = 32 };
/* How many words before an instance the address of its dict is, where the interpreter manages that. */
enum { DICT_BEFORE = 3 };

/* What takes the time is to wait for memory: so the next few are asked for while one is worked on. */
enum { AHEAD = 16, TOGETHER = 128 };
#ifdef __GNUC__
#define PREFETCH(address) __builtin_prefetch(address)
#else
#define PREFETCH(address) ((void)(address))
#endif

#define UNKNOWN (-1)
#define FAILED (-2)

/* Numbers ------------------------------------------------------------------------------------------------------- */

typedef struct {
    char *items;
    size_t count, room, width;
} Array;

static int
array_widen(Array *array)
{
    size_t room = array->room ? array->room + array->room / 2 : 1024;
    char *items = realloc(array->items, room * array->width);
    if (items == NULL)
        return -1;
    array->items = items;
    array->room = room;
    return 0;
}

/* The width is one that the compiler knows wherever this is called for each reference. */
static inline int
push_wide(Array *array, const void *item, size_t width)
{
    if (array->count == array->room && array_widen(array) < 0)
        return -1;
    memcpy(array->items + array->count++ * width, item, width);
    return 0;
}

static int
array_push(Array *array, const void *item)
{
    return push_wide(array, item, array->width);
}

static PyObject *
array_take(Array *array)
{
    PyObject *taken = PyBytes_FromStringAndSize(array->items, (Py_ssize_t)(array->count * array->width));
    if (taken != NULL) {
        free(array->items);
        array->items = NULL;
        array->count = array->room = 0;
    }
    return taken;
}

/* Addresses and their places ------------------------------------------------------------------------------------ */

typedef struct {
    uintptr_t address;
    int32_t place;
} Slot;

typedef struct {
    Slot *slots;
    size_t count;
    int bits;
} Table;

/* 2**64 over the golden ratio: neighbouring addresses, multiples of 16, land far apart. */
static size_t
home_of(const Table *table, uintptr_t address)
{
    return (size_t)((uint64_t)(address >> 4) * 11400714819323198485ull >> (64 - table->bits));
}

static size_t
slot_of(const Table *table, uintptr_t address)
{
    size_t mask = ((size_t)1 << table->bits) - 1;
    size_t at = home_of(table, address);
    while (table->slots[at].address != 0 && table->slots[at].address != address)
        at = (at + 1) & mask;
    return at;
}

static int32_t
table_find(const Table *table, const void *address)
{
    if (table->count == 0)
        return UNKNOWN;
    const Slot *slot = &table->slots[slot_of(table, (uintptr_t)address)];
    return slot->address != 0 ? slot->place : UNKNOWN;
}

/* Makes room for as many addresses as there are to be: two of three slots are taken at most. */
static int
table_reserve(Table *table, size_t count)
{
    Table wider = {NULL, table->count, table->slots == NULL ? 10 : table->bits};
    while (3 * count > (size_t)2 << wider.bits)
        wider.bits++;
    if (table->slots != NULL && wider.bits == table->bits)
        return 0;
    wider.slots = calloc((size_t)1 << wider.bits, sizeof(Slot));
    if (wider.slots == NULL)
        return -1;
    for (size_t at = 0; table->slots != NULL && at < (size_t)1 << table->bits; at++) {
        if (table->slots[at].address != 0)
            wider.slots[slot_of(&wider, table->slots[at].address)] = table->slots[at];
    }
    free(table->slots);
    *table = wider;
    return 0;
}

static int
table_add(Table *table, const void *address, int32_t place)
{
    if (table_reserve(table, table->count + 1) < 0)
        return -1;
    Slot *slot = &table->slots[slot_of(table, (uintptr_t)address)];
    if (slot->address == 0) {
        *slot = (Slot){(uintptr_t)address, place};
        table->count++;
    }
    return 0;
}

static PyObject *
list_of(const Array *met)
{
    PyObject *list = PyList_New((Py_ssize_t)met->count);
    for (size_t at = 0; list != NULL && at < met->count; at++)
        PyList_SetItem(list, (Py_ssize_t)at, Py_NewRef(((PyObject **)met->items)[at]));
    return list;
}

static int
no_memory(void)
{
    PyErr_NoMemory();
    return -1;
}

/* Identities: int64, in bytes. */
static int
add_ids(Table *table, PyObject *ids)
{
    for (Py_ssize_t at = 0; at < PyBytes_Size(ids) / (Py_ssize_t)sizeof(int64_t); at++) {
        int64_t id;
        memcpy(&id, PyBytes_AsString(ids) + at * (Py_ssize_t)sizeof(id), sizeof(id));
        if (table_add(table, (void *)(uintptr_t)id, 0) < 0)
            return no_memory();
    }
    return 0;
}

/* The walk: what `probes/heap/walk.py` does in numpy.
 *
 * It looks at objects as `gc.get_referents` does, through the traversal that each type offers the collector, and keeps
 * of what it meets the addresses alone: who calls it keeps the objects alive in a list.
 */

typedef struct {
    traverseproc traverse;
    inquiry is_gc;
    int manner;
    PyTypeObject *type;
    int64_t objects; /* of it, where they are counted */
    int is_module;
} Kind;

typedef struct {
    PyObject_HEAD
    Table nodes, kinds;
    Array manners;      /* Kind, by its place */
    Array kind_places;  /* int32, by node */
    Array ends;         /* int64, by node: how many edges there are up to its last one */
    Array edges;        /* int32 */
    Array passed_over;  /* int32 */
    Array referents;    /* PyObject *, of the object that is being read */
    Py_ssize_t done;
    int64_t edge_count;
    int is_reading;
} Walk;

/* Notes how instances of a type show what they refer to; those without the collector's flag show nothing. */
static int
note_traversal(Kind *kind, PyTypeObject *type)
{
    if (!(PyType_GetFlags(type) & Py_TPFLAGS_HAVE_GC))
        return 0;
    kind->traverse = (traverseproc)PyType_GetSlot(type, Py_tp_traverse);
    kind->is_gc = (inquiry)PyType_GetSlot(type, Py_tp_is_gc);
    kind->is_module = PyType_IsSubtype(type, &PyModule_Type);
    return 1;
}

/* Gives what an object shows the collector. Of a module that is written in C its namespace alone: the state of CPython
 * 3.12's `_asyncio` shows dead objects that wait to be used again (`fi_freelist`). Whoever owned one of them for a moment
 * would have it die twice, and then follow itself in that list: the next walk, and the next collection, never end.
 */
static int
visit_shown(const Kind *kind, PyObject *item, visitproc visit, void *reading)
{
    if (kind->traverse == NULL || (kind->is_gc != NULL && !kind->is_gc(item)))
        return 0;
    if (kind->is_module && PyModule_GetDef(item) != NULL) {
        /* (None is left where the collector has cleared it.) */
        PyObject *namespace = PyModule_GetDict(item);
        return namespace == NULL ? 0 : visit(namespace, reading);
    }
    return kind->traverse(item, visit, reading);
}

/* What a reading asks its caller. */
typedef struct {
    PyObject *objects;   /* list: the object of each node */
    PyObject *classify;  /* type -> int: its manner; called once for each type */
    PyObject *stand_in;  /* frame -> object to be asked instead */
    PyObject *more;      /* object -> list: what it refers to that the collector does not see */
    int dicts_share;     /* whether a dict may have values that it does not show */
} Asked;

static int
kind_place(Walk *walk, PyTypeObject *type, const Asked *asked)
{
    int32_t place = table_find(&walk->kinds, type);
    if (place != UNKNOWN)
        return place;
    PyObject *answer = PyObject_CallFunctionObjArgs(asked->classify, (PyObject *)type, NULL);
    if (answer == NULL)
        return FAILED;
    Kind kind = {.manner = (int)PyLong_AsLong(answer), .type = type};
    Py_DECREF(answer);
    if (PyErr_Occurred())
        return FAILED;
    if (note_traversal(&kind, type))
        kind.manner |= MAY_BE_TRACKED;
    place = (int32_t)walk->manners.count;
    if (array_push(&walk->manners, &kind) < 0 || table_add(&walk->kinds, type, place) < 0) {
        PyErr_NoMemory();
        return FAILED;
    }
    return place;
}

static const Kind *
kind_at(const Walk *walk, int place)
{
    return (const Kind *)walk->manners.items + place;
}

static int32_t
append(Walk *walk, PyObject *item, const Asked *asked)
{
    Py_ssize_t node = PyList_Size(asked->objects);
    if (node >= INT32_MAX || PyList_Append(asked->objects, item) < 0 || table_add(&walk->nodes, item, (int32_t)node) < 0) {
        if (!PyErr_Occurred())
            PyErr_NoMemory();
        return FAILED;
    }
    return (int32_t)node;
}

/* Makes a node of an object that has none, if it can lead further. */
static int32_t
node_of_new(Walk *walk, PyObject *item, int place, const Asked *asked)
{
    int manner = kind_at(walk, place)->manner, passed_over = 0;
    if (!(manner & MAY_BE_TRACKED) || !PyObject_GC_IsTracked(item)) {
        if (!(manner & (LEADS_ON_UNTRACKED | IS_PASSED_OVER | MAY_BE_TRACKED)))
            return UNKNOWN;
        passed_over = !(manner & LEADS_ON_UNTRACKED);
    }
    int32_t node = append(walk, item, asked);
    if (node >= 0 && passed_over && array_push(&walk->passed_over, &node) < 0) {
        PyErr_NoMemory();
        return FAILED;
    }
    return node;
}

/* Adds an edge to each of the referents that is a node or becomes one, and ends each of some nodes' edges.
 *
 * As long as nothing of Python's is called the objects cannot go. From the first call on, in which other threads may
 * run, those that are left are held.
 */
static int
add_edges(Walk *walk, const size_t *ends, size_t nodes, const Asked *asked)
{
    PyObject **items = (PyObject **)walk->referents.items;
    size_t count = walk->referents.count, held_from = count, at = 0, node = 0;
    int result = 0;
    for (; result == 0 && node < nodes; node++) {
        for (; result == 0 && at < ends[node]; at++) {
            if (at + AHEAD < count) {
                PREFETCH(&walk->nodes.slots[home_of(&walk->nodes, (uintptr_t)items[at + AHEAD])]);
                PREFETCH(items[at + AHEAD]);
            }
            PyObject *item = items[at];
            int32_t met = table_find(&walk->nodes, item);
            if (met == UNKNOWN) {
                int32_t place = table_find(&walk->kinds, Py_TYPE(item));
                if (place == UNKNOWN && held_from == count) {
                    for (held_from = at; count > held_from; count--)
                        Py_INCREF(items[count - 1]);
                    count = walk->referents.count;
                }
                if (place == UNKNOWN)
                    place = kind_place(walk, Py_TYPE(item), asked);
                met = place == FAILED ? FAILED : node_of_new(walk, item, place, asked);
            }
            if (met == FAILED)
                result = -1;
            else if (met != UNKNOWN) {
                walk->edge_count++;
                if (push_wide(&walk->edges, &met, sizeof(met)) < 0)
                    result = no_memory();
            }
        }
        if (result == 0 && push_wide(&walk->ends, &walk->edge_count, sizeof(walk->edge_count)) < 0)
            result = no_memory();
    }
    walk->referents.count = 0;
    for (; held_from < count; held_from++)
        Py_DECREF(items[held_from]);
    return result;
}

static int
note_referent(PyObject *item, void *walk)
{
    return push_wide(&((Walk *)walk)->referents, &item, sizeof(item));
}

/* Notes what the collector is shown of an object. */
static int
note_shown(Walk *walk, PyObject *item, int32_t place, const Asked *asked)
{
    const Kind *kind = kind_at(walk, place);
    size_t before = walk->referents.count;
    if (visit_shown(kind, item, note_referent, walk) != 0)
        return no_memory();
    if (asked->dicts_share && walk->referents.count == before && PyDict_CheckExact(item)) {
        PyObject *value;
        Py_ssize_t position = 0;
        while (PyDict_Next(item, &position, NULL, &value)) {
            if (note_referent(value, walk) < 0)
                return no_memory();
        }
    }
    PyObject *dict = kind->manner & HIDES_DICT ? ((PyObject **)item)[-DICT_BEFORE] : NULL;
    if (dict != NULL) {
        PyObject **shown = (PyObject **)walk->referents.items;
        while (before < walk->referents.count && shown[before] != dict)
            before++;
        if (before == walk->referents.count && note_referent(dict, walk) < 0)
            return no_memory();
    }
    return 0;
}

static int
note_all(Walk *walk, PyObject *items)
{
    for (Py_ssize_t at = 0; at < PyList_Size(items); at++) {
        if (note_referent(PyList_GetItem(items, at), walk) < 0)
            return no_memory();
    }
    return 0;
}

/* Reads one node of which Python is asked, too. */
static int
read_asking(Walk *walk, PyObject *item, int32_t place, PyObject *also, const Asked *asked)
{
    int manner = kind_at(walk, place)->manner, result = 0;
    PyObject *stand_in = manner & HAS_STAND_IN ? PyObject_CallFunctionObjArgs(asked->stand_in, item, NULL) : Py_NewRef(item);
    PyObject *more = manner & HAS_READER ? PyObject_CallFunctionObjArgs(asked->more, item, NULL) : PyList_New(0);
    if (stand_in == NULL || more == NULL)
        result = -1;
    if (result == 0 && (place = kind_place(walk, Py_TYPE(stand_in), asked)) < 0)
        result = -1;
    if (result == 0)
        result = note_shown(walk, stand_in, place, asked);
    if (result == 0)
        result = note_all(walk, more);
    if (result == 0 && also != NULL)
        result = note_all(walk, also);
    if (result == 0)
        result = add_edges(walk, &walk->referents.count, 1, asked);
    Py_XDECREF(stand_in);
    Py_XDECREF(more);
    return result;
}

/* Reads the next nodes: as many as can be read without asking Python, or one. */
static int
read_some(Walk *walk, PyObject *also, const Asked *asked)
{
    PyObject *items[TOGETHER];
    int32_t places[TOGETHER];
    size_t ends[TOGETHER], found = 0, read = 0;
    Py_ssize_t left = PyList_Size(asked->objects) - walk->done;
    for (; found < TOGETHER && (Py_ssize_t)found < left; found++)
        PREFETCH(items[found] = PyList_GetItem(asked->objects, walk->done + (Py_ssize_t)found));
    for (size_t at = 0; at < found; at++) {
        if ((places[at] = kind_place(walk, Py_TYPE(items[at]), asked)) < 0)
            return -1;
    }
    walk->referents.count = 0;
    for (; read < found; read++) {
        Py_ssize_t node = walk->done + (Py_ssize_t)read;
        PyObject *own = node < PyList_Size(also) ? PyList_GetItem(also, node) : NULL;
        if (own != NULL || kind_at(walk, places[read])->manner & (HAS_READER | HAS_STAND_IN)) {
            if (read == 0 && read_asking(walk, items[0], places[0], own, asked) < 0)
                return -1;
            break;
        }
        if (note_shown(walk, items[read], places[read], asked) < 0)
            return -1;
        ends[read] = walk->referents.count;
    }
    size_t done = read == 0 ? 1 : read;
    if (read > 0 && add_edges(walk, ends, read, asked) < 0)
        return -1;
    for (size_t at = 0; at < done; at++) {
        if (push_wide(&walk->kind_places, &places[at], sizeof(places[at])) < 0)
            return no_memory();
    }
    walk->done += (Py_ssize_t)done;
    return 0;
}

static PyObject *
walk_read(PyObject *self, PyObject *args)
{
    Walk *walk = (Walk *)self;
    Asked asked;
    PyObject *also;
    if (!PyArg_ParseTuple(args, "OOOOOp:read", &asked.objects, &also, &asked.classify, &asked.stand_in, &asked.more,
                          &asked.dicts_share))
        return NULL;
    if (!PyList_Check(asked.objects) || !PyList_Check(also)) {
        PyErr_SetString(PyExc_TypeError, "objects and also are lists");
        return NULL;
    }
    if (walk->is_reading) {
        PyErr_SetString(PyExc_RuntimeError, "this walk is being read already");
        return NULL;
    }
    walk->is_reading = 1;
    int result = 0;
    while (result == 0 && walk->done < PyList_Size(asked.objects))
        result = read_some(walk, also, &asked);
    walk->is_reading = 0;
    if (result < 0)
        return NULL;
    Py_RETURN_NONE;
}

static PyObject *
walk_add(PyObject *self, PyObject *args)
{
    Walk *walk = (Walk *)self;
    Asked asked = {0};
    PyObject *items;
    if (!PyArg_ParseTuple(args, "O!O!:add", &PyList_Type, &asked.objects, &PyList_Type, &items))
        return NULL;
    /* What it meets later are a third as many again. */
    if (table_reserve(&walk->nodes, walk->nodes.count + (size_t)PyList_Size(items) / 3 * 4) < 0)
        return PyErr_NoMemory();
    for (Py_ssize_t at = 0; at < PyList_Size(items); at++) {
        PyObject *item = PyList_GetItem(items, at);
        if (at + AHEAD < PyList_Size(items)) {
            PyObject *next = PyList_GetItem(items, at + AHEAD);
            PREFETCH(next);
            PREFETCH(&walk->nodes.slots[home_of(&walk->nodes, (uintptr_t)next)]);
        }
        if (table_find(&walk->nodes, item) == UNKNOWN && append(walk, item, &asked) == FAILED)
            return NULL;
    }
    Py_RETURN_NONE;
}

static PyObject *
walk_add_roots(PyObject *self, PyObject *items)
{
    Walk *walk = (Walk *)self;
    if (!PyList_Check(items)) {
        PyErr_SetString(PyExc_TypeError, "roots are a list");
        return NULL;
    }
    for (Py_ssize_t at = 0; at < PyList_Size(items); at++) {
        if (table_add(&walk->nodes, PyList_GetItem(items, at), (int32_t)at) < 0)
            return PyErr_NoMemory();
    }
    Py_RETURN_NONE;
}

static PyObject *
walk_find(PyObject *self, PyObject *ids)
{
    char *from;
    Py_ssize_t size;
    if (PyBytes_AsStringAndSize(ids, &from, &size) < 0)
        return NULL;
    Py_ssize_t count = size / (Py_ssize_t)sizeof(int64_t);
    PyObject *found = PyBytes_FromStringAndSize(NULL, count * (Py_ssize_t)sizeof(int32_t));
    if (found == NULL)
        return NULL;
    char *to = PyBytes_AsString(found);
    for (Py_ssize_t at = 0; at < count; at++) {
        int64_t id;
        memcpy(&id, from + at * (Py_ssize_t)sizeof(id), sizeof(id));
        int32_t place = table_find(&((Walk *)self)->nodes, (void *)(uintptr_t)id);
        memcpy(to + at * (Py_ssize_t)sizeof(place), &place, sizeof(place));
    }
    return found;
}

static PyObject *
walk_take(PyObject *self, PyObject *Py_UNUSED(ignored))
{
    Walk *walk = (Walk *)self;
    Array *arrays[] = {&walk->kind_places, &walk->ends, &walk->edges, &walk->passed_over};
    PyObject *taken = PyTuple_New(4);
    for (Py_ssize_t at = 0; taken != NULL && at < 4; at++) {
        PyObject *numbers = array_take(arrays[at]);
        if (numbers == NULL || PyTuple_SetItem(taken, at, numbers) < 0)
            Py_CLEAR(taken);
    }
    return taken;
}

static void
begin(Walk *walk)
{
    walk->manners.width = sizeof(Kind);
    walk->kind_places.width = walk->edges.width = walk->passed_over.width = sizeof(int32_t);
    walk->ends.width = sizeof(int64_t);
    walk->referents.width = sizeof(PyObject *);
}

static void
end(Walk *walk)
{
    Array *arrays[] = {&walk->manners, &walk->kind_places, &walk->ends, &walk->edges, &walk->passed_over,
                       &walk->referents};
    for (size_t at = 0; at < sizeof(arrays) / sizeof(*arrays); at++)
        free(arrays[at]->items);
    free(walk->nodes.slots);
    free(walk->kinds.slots);
}

static PyObject *
walk_new(PyTypeObject *type, PyObject *Py_UNUSED(args), PyObject *Py_UNUSED(kwargs))
{
    allocfunc alloc = (allocfunc)PyType_GetSlot(type, Py_tp_alloc);
    Walk *walk = (Walk *)alloc(type, 0);
    if (walk != NULL)
        begin(walk);
    return (PyObject *)walk;
}

static void
walk_dealloc(PyObject *self)
{
    end((Walk *)self);
    PyTypeObject *type = Py_TYPE(self);
    ((freefunc)PyType_GetSlot(type, Py_tp_free))(self);
    Py_DECREF(type);
}

static PyMethodDef walk_methods[] = {
    {"add_roots", walk_add_roots, METH_O, "Make nodes of the first objects, in their order."},
    {"add", walk_add, METH_VARARGS, "Append those items to objects that are no nodes yet."},
    {"read", walk_read, METH_VARARGS, "Read what all objects refer to that were not read yet, appending what is met."},
    {"find", walk_find, METH_O, "Return the nodes (int32) of objects by their identities (int64); -1 for none."},
    {"take", walk_take, METH_NOARGS,
     "Hand over what was read since the last time: kind places (int32), ends of edges (int64), edges (int32), nodes "
     "that are passed over (int32)."},
    {NULL, NULL, 0, NULL},
};

static PyType_Slot walk_slots[] = {
    {Py_tp_doc, "A walk over the heap; it keeps addresses, and no object alive."},
    {Py_tp_new, walk_new},
    {Py_tp_dealloc, walk_dealloc},
    {Py_tp_methods, walk_methods},
    {0, NULL},
};

static PyType_Spec walk_spec = {"lowtide.probes.native.heap.Walk", sizeof(Walk), 0, Py_TPFLAGS_DEFAULT, walk_slots};

/* Referents ------------------------------------------------------------------------------------------------------ */

static int
note_in_array(PyObject *item, void *array)
{
    return push_wide(array, &item, sizeof(item));
}

static PyObject *
referents(PyObject *Py_UNUSED(module), PyObject *items)
{
    Array met = {.width = sizeof(PyObject *)};
    int failed = 0;
    for (Py_ssize_t at = 0; at < PyTuple_Size(items) && !failed; at++) {
        PyObject *item = PyTuple_GetItem(items, at);
        Kind kind = {0};
        note_traversal(&kind, Py_TYPE(item));
        failed = visit_shown(&kind, item, note_in_array, &met);
    }
    PyObject *found = failed ? PyErr_NoMemory() : list_of(&met);
    free(met.items);
    return found;
}

/* Lengths -------------------------------------------------------------------------------------------------------- */

/* What a type is, as in container_lengths.py. */
enum { IS_LIST = 1, IS_DICT, IS_SET, IS_DEQUE };

typedef struct {
    Array ids, lengths, kinds; /* int64 */
    Array met;                 /* PyObject *, of those that are wanted */
    Table untracked;           /* the dicts among them that the collector does not track */
    Table wanted;
    PyTypeObject *deque;
    Py_ssize_t most, objects;
} Lengths;

/* Not what a class that derives from it says of itself. */
static int64_t
length_of(PyObject *container, int kind)
{
    switch (kind) {
    case IS_DICT:
        return PyDict_Size(container);
    case IS_SET:
        return PySet_Size(container);
    default:
        return Py_SIZE(container);
    }
}

static int
note_length(Lengths *found, PyObject *container, int64_t length)
{
    int64_t id = (int64_t)(uintptr_t)container, kind = (int64_t)(uintptr_t)Py_TYPE(container);
    int failed = array_push(&found->ids, &id) < 0 || array_push(&found->lengths, &length) < 0 ||
                 array_push(&found->kinds, &kind) < 0;
    if (table_find(&found->wanted, container) != UNKNOWN)
        failed = failed || array_push(&found->met, &container) < 0;
    return failed ? no_memory() : 0;
}

/* Notes the dicts among the referents that the collector does not track. */
static int
note_untracked(Walk *walk, Lengths *found)
{
    PyObject **items = (PyObject **)walk->referents.items;
    for (size_t at = 0; at < walk->referents.count; at++) {
        PyObject *item = items[at];
        if (at + AHEAD < walk->referents.count)
            PREFETCH(items[at + AHEAD]);
        if (!PyDict_CheckExact(item) || PyObject_GC_IsTracked(item) || table_find(&found->untracked, item) != UNKNOWN)
            continue;
        if (table_add(&found->untracked, item, 0) < 0)
            return no_memory();
        found->objects++;
        if (note_length(found, item, PyDict_Size(item)) < 0)
            return -1;
    }
    walk->referents.count = 0;
    return 0;
}

static int
manner_of(PyTypeObject *type, PyTypeObject *deque)
{
    PyTypeObject *containers[] = {&PyList_Type, &PyDict_Type, &PySet_Type, deque};
    int manner = 0;
    while (manner < IS_DEQUE && !PyType_IsSubtype(type, containers[manner]))
        manner++;
    return manner < IS_DEQUE ? manner + 1 : 0;
}

static int32_t
noted_kind(Walk *walk, PyTypeObject *type, PyTypeObject *deque)
{
    int32_t place = table_find(&walk->kinds, type);
    if (place != UNKNOWN)
        return place;
    Kind kind = {.manner = manner_of(type, deque), .type = type};
    note_traversal(&kind, type);
    place = (int32_t)walk->manners.count;
    if (array_push(&walk->manners, &kind) < 0 || table_add(&walk->kinds, type, place) < 0)
        return no_memory();
    return place;
}

static int
note_object(Walk *walk, Lengths *found, PyObject *item)
{
    static const Asked nothing = {0};
    found->objects++;
    int32_t place = noted_kind(walk, Py_TYPE(item), found->deque);
    if (place < 0)
        return -1;
    ((Kind *)walk->manners.items)[place].objects++;
    int kind = kind_at(walk, place)->manner;
    int64_t length = kind ? length_of(item, kind) : 0;
    if (kind && note_length(found, item, length) < 0)
        return -1;
    if (length > found->most)
        return 0;
    return note_shown(walk, item, place, &nothing) < 0 ? -1 : note_untracked(walk, found);
}

/* Notes how many objects there are of each type, as if that held them. */
static int
note_types(const Walk *walk, Lengths *found)
{
    for (size_t place = 0; place < walk->manners.count; place++) {
        const Kind *kind = kind_at(walk, (int)place);
        if (note_length(found, (PyObject *)kind->type, kind->objects) < 0)
            return -1;
    }
    return 0;
}

/* The collector's lists ----------------------------------------------------------------------------------------- */

/* Each object that the collector tracks is in a ring, with the head of its generation; its links lie before it, in
 * whose lowest bits later versions of Python keep marks. Of what is in the ring nothing is looked at but its address, or
 * the one where an object has its type, so that the head does no harm: behind it lie the heads of other generations.
 */
static uintptr_t *
next_in_ring(const uintptr_t *link)
{
    return (uintptr_t *)(*link & ~(uintptr_t)3);
}

static PyObject *
followers_among(PyObject *Py_UNUSED(module), PyObject *args)
{
    PyObject *first, *ids, *found = NULL;
    Py_ssize_t most;
    if (!PyArg_ParseTuple(args, "OSn:followers_among", &first, &ids, &most))
        return NULL;
    if (!PyObject_GC_IsTracked(first)) {
        PyErr_SetString(PyExc_ValueError, "the collector does not track the first object");
        return NULL;
    }
    Table wanted = {0};
    Array met = {.width = sizeof(PyObject *)};
    int failed = add_ids(&wanted, ids) < 0;
    uintptr_t *begin = (uintptr_t *)first - 2, *link = next_in_ring(begin);
    for (Py_ssize_t at = 0; !failed && link != begin && at < most; at++, link = next_in_ring(link)) {
        PREFETCH(next_in_ring(link));
        PyObject *item = (PyObject *)(link + 2);
        if (table_find(&wanted, item) != UNKNOWN)
            failed = array_push(&met, &item) < 0 && no_memory() < 0;
    }
    /* (Made only now: it is young itself, and may be where one of them was that died.) */
    if (!failed)
        found = list_of(&met);
    free(met.items);
    free(wanted.slots);
    return found;
}

/* The head of the ring of what is frozen, or NULL where the collector's state is not laid out as from Python 3.8 on: the
 * heads of three generations with two numbers each, a pointer to the first of them, and behind it this one. The newest
 * object of all comes before the first head.
 */
enum { OLDEST = 2, WORDS_OF_GENERATION = 3, GENERATIONS_WORDS = (OLDEST + 1) * WORDS_OF_GENERATION };

static uintptr_t *
ring_of_frozen(void)
{
    PyObject *newest = PyList_New(0);
    if (newest == NULL)
        return NULL;
    uintptr_t *link = (uintptr_t *)newest - 2, *youngest = next_in_ring(link), *head = NULL;
    if (next_in_ring(youngest + 1) == link && (uintptr_t *)youngest[GENERATIONS_WORDS] == youngest)
        head = youngest + GENERATIONS_WORDS + 1;
    if (head != NULL && (next_in_ring(next_in_ring(head) + 1) != head || next_in_ring(next_in_ring(head + 1)) != head))
        head = NULL;
    Py_DECREF(newest);
    return head;
}

static uintptr_t *
known_ring_of_frozen(void)
{
    uintptr_t *head = ring_of_frozen();
    if (head == NULL && !PyErr_Occurred())
        PyErr_SetString(PyExc_NotImplementedError, "this interpreter's collector has its objects in other lists");
    return head;
}

static PyObject *
frozen(PyObject *Py_UNUSED(module), PyObject *most)
{
    Py_ssize_t limit = PyLong_AsSsize_t(most), count = 0;
    if (limit == -1 && PyErr_Occurred())
        return NULL;
    uintptr_t *head = known_ring_of_frozen();
    if (head == NULL)
        return NULL;
    for (uintptr_t *link = next_in_ring(head); link != head && (limit < 0 || count < limit); link = next_in_ring(link))
        count++;
    unsigned long long first = *head & ~(uintptr_t)3, last = head[1] & ~(uintptr_t)3;
    return Py_BuildValue("nKK", count, first, last);
}

static uintptr_t *
ring_of_generation(uintptr_t *of_frozen, int generation)
{
    return of_frozen - 1 - GENERATIONS_WORDS + WORDS_OF_GENERATION * generation;
}

/* The order in which an old ring was last gone through. Where an object lies is known only from the one before it, so
 * that to go on is to wait for memory. But few of the old ones come and go between two times, and nothing but a full
 * collection changes their order: so what came next then is asked for. Nothing else is done with these addresses, since
 * what was there may be gone.
 */
typedef struct {
    uintptr_t **links;
    size_t count, room;
} Trail;

static Trail trail_of_frozen, trail_of_oldest;

enum { STRETCH = 16, MOST_GONE = 256 };

static void
note_on_trail(Trail *trail, size_t at, uintptr_t *link)
{
    if (at == trail->room) {
        size_t room = at + at / 8 + 1024;
        uintptr_t **links = realloc(trail->links, room * sizeof(*links));
        if (links == NULL)
            return; /* (Slower, and no error.) */
        trail->links = links;
        trail->room = room;
    }
    /* (Not written where it is so already: the memory may be shared with the process that has forked this one.) */
    if (at < trail->room && (at >= trail->count || trail->links[at] != link))
        trail->links[at] = link;
}

/* How many that were there last time are gone before an object; 0 also where it is not among the next ones. */
static size_t
gone_before(const Trail *trail, size_t at, const uintptr_t *link)
{
    for (size_t gone = 0; gone < MOST_GONE && at + gone < trail->count; gone++) {
        if (trail->links[at + gone] == link)
            return gone;
    }
    return 0;
}

static int
for_ring(uintptr_t *head, Trail *trail, int (*each)(PyObject *, void *), void *reading)
{
    size_t at = 0, gone = 0;
    for (uintptr_t *link = next_in_ring(head); link != head; link = next_in_ring(link), at++) {
        if (trail != NULL) {
            if (at % STRETCH == 0)
                gone += gone_before(trail, at + gone, link);
            if (at + gone + AHEAD < trail->count) {
                PREFETCH(trail->links[at + gone + AHEAD]);
                /* (Where the type is.) */
                PREFETCH(trail->links[at + gone + AHEAD] + 3);
            }
            note_on_trail(trail, at, link);
        }
        if (each((PyObject *)(link + 2), reading) < 0)
            return -1;
    }
    if (trail != NULL)
        trail->count = at < trail->room ? at : trail->room;
    return 0;
}

static int
for_generation(uintptr_t *of_frozen, int generation, int (*each)(PyObject *, void *), void *reading)
{
    Trail *trail = generation == OLDEST ? &trail_of_oldest : NULL;
    return for_ring(ring_of_generation(of_frozen, generation), trail, each, reading);
}

/* Does something for each object that the collector has, or each frozen one.
 *
 * No list of them is made, no Python code runs and the interpreter's lock is kept: no other thread sees that one of its
 * objects has one owner more, as one would that resizes a buffer when nobody shows it any longer; and no page of a
 * process that was forked is written to.
 */
static int
for_all(int only_frozen, int (*each)(PyObject *, void *), void *reading)
{
    uintptr_t *of_frozen = known_ring_of_frozen();
    if (of_frozen == NULL)
        return -1;
    if (for_ring(of_frozen, &trail_of_frozen, each, reading) < 0)
        return -1;
    for (int generation = 0; !only_frozen && generation <= OLDEST; generation++) {
        if (for_generation(of_frozen, generation, each, reading) < 0)
            return -1;
    }
    return 0;
}

typedef struct {
    Table wanted; /* addresses */
    Array met;    /* PyObject * */
} Addressed;

static int
note_addressed(PyObject *item, void *reading)
{
    Addressed *found = reading;
    return table_find(&found->wanted, item) != UNKNOWN && array_push(&found->met, &item) < 0 ? no_memory() : 0;
}

static PyObject *
old_among(PyObject *Py_UNUSED(module), PyObject *ids)
{
    Addressed found = {.met = {.width = sizeof(PyObject *)}};
    PyObject *taken = NULL;
    if (!PyBytes_Check(ids)) {
        PyErr_SetString(PyExc_TypeError, "identities are bytes");
        return NULL;
    }
    uintptr_t *of_frozen = known_ring_of_frozen();
    /* (The list is made last, as in `followers_among`.) */
    if (of_frozen != NULL && add_ids(&found.wanted, ids) == 0 &&
        for_generation(of_frozen, OLDEST, note_addressed, &found) == 0)
        taken = list_of(&found.met);
    free(found.met.items);
    free(found.wanted.slots);
    return taken;
}

static int
are_classes(PyObject *tuple)
{
    for (Py_ssize_t at = 0; at < PyTuple_Size(tuple); at++) {
        if (!PyType_Check(PyTuple_GetItem(tuple, at))) {
            PyErr_SetString(PyExc_TypeError, "classes only");
            return -1;
        }
    }
    return 0;
}

/* Whether a type derives from one of some classes; each type is asked for once. */
static int
is_wanted(Table *kinds, PyTypeObject *type, PyObject *classes)
{
    int32_t answer = table_find(kinds, type);
    if (answer == UNKNOWN) {
        answer = 0;
        for (Py_ssize_t at = 0; !answer && at < PyTuple_Size(classes); at++)
            answer = PyType_IsSubtype(type, (PyTypeObject *)PyTuple_GetItem(classes, at));
        if (table_add(kinds, type, answer) < 0)
            return no_memory();
    }
    return answer;
}

typedef struct {
    PyObject *classes; /* tuple */
    Table kinds;       /* by type, whether it derives from one of them */
    Array met;         /* PyObject * */
} Instances;

static int
note_instance(PyObject *item, void *reading)
{
    Instances *found = reading;
    int wanted = is_wanted(&found->kinds, Py_TYPE(item), found->classes);
    return wanted < 0 || (wanted && array_push(&found->met, &item) < 0 && no_memory() < 0) ? -1 : 0;
}

static PyObject *
all_instances(PyObject *Py_UNUSED(module), PyObject *args)
{
    Instances found = {.met = {.width = sizeof(PyObject *)}};
    int only_frozen;
    if (!PyArg_ParseTuple(args, "O!p:all_instances", &PyTuple_Type, &found.classes, &only_frozen))
        return NULL;
    if (are_classes(found.classes) < 0)
        return NULL;
    /* (The list is made last: it is young itself.) */
    PyObject *taken = for_all(only_frozen, note_instance, &found) == 0 ? list_of(&found.met) : NULL;
    free(found.met.items);
    free(found.kinds.slots);
    return taken;
}

static PyObject *
taken_lengths(Lengths *found)
{
    PyObject *met = list_of(&found->met);
    PyObject *ids = array_take(&found->ids), *lengths = array_take(&found->lengths), *kinds = array_take(&found->kinds);
    PyObject *taken = NULL;
    if (met != NULL && ids != NULL && lengths != NULL && kinds != NULL)
        taken = Py_BuildValue("(OOOnO)", ids, lengths, kinds, found->objects, met);
    Py_XDECREF(ids);
    Py_XDECREF(lengths);
    Py_XDECREF(kinds);
    Py_XDECREF(met);
    return taken;
}

typedef struct {
    Walk walk;
    Lengths lengths;
} Reading;

static int
read_length(PyObject *item, void *reading)
{
    return note_object(&((Reading *)reading)->walk, &((Reading *)reading)->lengths, item);
}

static PyObject *
lengths_of_all(PyObject *Py_UNUSED(module), PyObject *args)
{
    PyObject *wanted, *taken = NULL;
    Reading reading = {.lengths = {.ids = {.width = sizeof(int64_t)}, .lengths = {.width = sizeof(int64_t)},
                                   .kinds = {.width = sizeof(int64_t)}, .met = {.width = sizeof(PyObject *)}}};
    Lengths *found = &reading.lengths;
    if (!PyArg_ParseTuple(args, "O!Sn:lengths_of_all", &PyType_Type, &found->deque, &wanted, &found->most))
        return NULL;
    begin(&reading.walk);
    if (add_ids(&found->wanted, wanted) == 0 && for_all(0, read_length, &reading) == 0 &&
        note_types(&reading.walk, found) == 0)
        taken = taken_lengths(found);
    Array *arrays[] = {&found->ids, &found->lengths, &found->kinds, &found->met};
    for (size_t at = 0; at < sizeof(arrays) / sizeof(*arrays); at++)
        free(arrays[at]->items);
    free(found->untracked.slots);
    free(found->wanted.slots);
    end(&reading.walk);
    return taken;
}

/* Values --------------------------------------------------------------------------------------------------------- */

typedef struct {
    Walk walk;
    Table kinds;   /* the types of values */
    Table seen;    /* what the collector does not track */
    Array waiting; /* PyObject *, what of it is still to be looked into */
    Array owners;  /* int64, with the lowest bit where it is a container */
    Array types;   /* int64, theirs: who reads them later may find an owner gone */
    Array met;     /* PyObject *, the values */
    PyTypeObject *deque;
    int in_container;
    Py_ssize_t least, many, count, objects;
} Values;

/* What is said of others' sizes by them alone is asked in Python. */
static int
may_be_large(Py_ssize_t least, PyObject *value)
{
    if (PyUnicode_CheckExact(value))
        return PyUnicode_GetLength(value) >= least;
    if (PyBytes_CheckExact(value) || PyByteArray_CheckExact(value))
        return Py_SIZE(value) >= least;
    return 1;
}

static int
note_owned(Values *found, PyObject *owner, PyObject *value)
{
    int64_t id = (int64_t)(uintptr_t)owner | found->in_container, type = (int64_t)(uintptr_t)Py_TYPE(owner);
    return array_push(&found->owners, &id) < 0 || array_push(&found->types, &type) < 0 ||
           array_push(&found->met, &value) < 0;
}

/* Whether the collector does not track something that was not met before, and that may refer to others. */
static int
is_to_be_looked_into(const Table *seen, PyObject *item)
{
    return (PyType_GetFlags(Py_TYPE(item)) & Py_TPFLAGS_HAVE_GC) && !PyObject_GC_IsTracked(item) &&
           table_find(seen, item) == UNKNOWN;
}

static int
note_value(void *reading, PyObject *owner, PyObject *value)
{
    Values *found = reading;
    found->count++;
    if (table_find(&found->kinds, Py_TYPE(value)) != UNKNOWN && may_be_large(found->least, value) &&
        note_owned(found, owner, value))
        return -1;
    if (!is_to_be_looked_into(&found->seen, value))
        return 0;
    return table_add(&found->seen, value, 0) < 0 || array_push(&found->waiting, &value) < 0;
}

/* Does something for each thing that the collector is shown of an object. */
static int
for_shown(Walk *walk, PyObject *owner, int (*each)(void *, PyObject *, PyObject *), void *reading)
{
    static const Asked nothing = {0};
    int32_t place = noted_kind(walk, Py_TYPE(owner), &PyList_Type);
    if (place < 0 || note_shown(walk, owner, place, &nothing) < 0)
        return -1;
    PyObject **items = (PyObject **)walk->referents.items;
    int failed = 0;
    for (size_t at = 0; at < walk->referents.count && !failed; at++) {
        if (at + AHEAD < walk->referents.count)
            PREFETCH(items[at + AHEAD]);
        failed = each(reading, owner, items[at]);
    }
    walk->referents.count = 0;
    return failed ? no_memory() : 0;
}

static int
read_values_of(Values *found, PyObject *item)
{
    int32_t place = noted_kind(&found->walk, Py_TYPE(item), found->deque);
    if (place < 0)
        return -1;
    found->in_container = kind_at(&found->walk, place)->manner != 0;
    found->count = 0;
    return for_shown(&found->walk, item, note_value, found);
}

static int
read_values(PyObject *item, void *reading)
{
    Values *found = reading;
    found->objects++;
    int failed = read_values_of(found, item);
    int may_take = !found->in_container && !PyTuple_Check(item) && !PyAnySet_Check(item);
    if (!failed && may_take && found->count >= found->many && note_owned(found, item, item))
        return no_memory();
    while (!failed && found->waiting.count > 0)
        failed = read_values_of(found, ((PyObject **)found->waiting.items)[--found->waiting.count]);
    return failed;
}

static PyObject *
values_of_all(PyObject *Py_UNUSED(module), PyObject *args)
{
    PyObject *kinds, *taken = NULL;
    Values found = {.waiting = {.width = sizeof(PyObject *)}, .owners = {.width = sizeof(int64_t)},
                    .types = {.width = sizeof(int64_t)}, .met = {.width = sizeof(PyObject *)}};
    if (!PyArg_ParseTuple(args, "O!O!nn:values_of_all", &PyTuple_Type, &kinds, &PyType_Type, &found.deque, &found.least,
                          &found.many) ||
        are_classes(kinds) < 0)
        return NULL;
    begin(&found.walk);
    int failed = 0;
    for (Py_ssize_t at = 0; at < PyTuple_Size(kinds) && !failed; at++)
        failed = table_add(&found.kinds, PyTuple_GetItem(kinds, at), 0) < 0 ? no_memory() : 0;
    if (!failed && for_all(0, read_values, &found) == 0) {
        /* (The list is made last: it is young itself.) */
        PyObject *values = list_of(&found.met), *owners = array_take(&found.owners), *types = array_take(&found.types);
        if (values != NULL && owners != NULL && types != NULL)
            taken = Py_BuildValue("(OOOn)", owners, types, values, found.objects);
        Py_XDECREF(values);
        Py_XDECREF(types);
        Py_XDECREF(owners);
    }
    Array *arrays[] = {&found.waiting, &found.owners, &found.types, &found.met};
    for (size_t at = 0; at < sizeof(arrays) / sizeof(*arrays); at++)
        free(arrays[at]->items);
    free(found.kinds.slots);
    free(found.seen.slots);
    end(&found.walk);
    return taken;
}

/* What the collector has, what that refers to, and what lies in such of that as it does not track. */
typedef struct {
    Walk walk;
    Table kinds;   /* the types that are wanted */
    Table seen;    /* what is not tracked and was looked into */
    Array waiting; /* PyObject *, what of it is still to be looked into */
    Array met;     /* PyObject * */
    Py_ssize_t least;
} Everything;

static int
meet(void *reading, PyObject *Py_UNUSED(owner), PyObject *item)
{
    Everything *found = reading;
    PyTypeObject *type = Py_TYPE(item);
    if (table_find(&found->kinds, type) != UNKNOWN && may_be_large(found->least, item) &&
        array_push(&found->met, &item) < 0)
        return -1;
    if (!is_to_be_looked_into(&found->seen, item))
        return 0;
    return table_add(&found->seen, item, 0) < 0 || array_push(&found->waiting, &item) < 0;
}

static int
meet_all(PyObject *item, void *reading)
{
    Everything *found = reading;
    if (meet(found, NULL, item) != 0)
        return no_memory();
    int failed = for_shown(&found->walk, item, meet, found);
    while (!failed && found->waiting.count > 0) {
        PyObject *untracked = ((PyObject **)found->waiting.items)[--found->waiting.count];
        failed = for_shown(&found->walk, untracked, meet, found);
    }
    return failed;
}

static PyObject *
owned_by_all(PyObject *Py_UNUSED(module), PyObject *args)
{
    PyObject *kinds, *taken = NULL;
    Everything found = {.waiting = {.width = sizeof(PyObject *)}, .met = {.width = sizeof(PyObject *)}};
    if (!PyArg_ParseTuple(args, "O!n:owned_by_all", &PyTuple_Type, &kinds, &found.least) || are_classes(kinds) < 0)
        return NULL;
    begin(&found.walk);
    int failed = 0;
    for (Py_ssize_t at = 0; at < PyTuple_Size(kinds) && !failed; at++)
        failed = table_add(&found.kinds, PyTuple_GetItem(kinds, at), 0) < 0 ? no_memory() : 0;
    /* (The list is made last: it is young itself.) */
    if (!failed && for_all(0, meet_all, &found) == 0)
        taken = list_of(&found.met);
    free(found.waiting.items);
    free(found.met.items);
    free(found.kinds.slots);
    free(found.seen.slots);
    end(&found.walk);
    return taken;
}

typedef struct {
    const PyObject *but;
    Array *met; /* PyObject * */
} Addresses;

static int
note_address(PyObject *item, void *reading)
{
    Addresses *found = reading;
    return item != found->but && array_push(found->met, &item) < 0 ? no_memory() : 0;
}

/* Notes the addresses of what is in a generation and in all younger ones, the oldest generation first. */
static int
note_addresses(int oldest, const PyObject *but, Array *met)
{
    Addresses found = {but, met};
    uintptr_t *of_frozen = known_ring_of_frozen();
    if (of_frozen == NULL)
        return -1;
    for (; oldest >= 0; oldest--) {
        if (for_generation(of_frozen, oldest, note_address, &found) < 0)
            return -1;
    }
    return 0;
}

/* As `all_instances`; the classes are no positional arguments of a tuple, which would be young itself. */
static PyObject *
of_generations(PyObject *Py_UNUSED(module), PyObject *const *args, Py_ssize_t count)
{
    if (count != 2 || !PyTuple_Check(args[1])) {
        PyErr_SetString(PyExc_TypeError, "a number and a tuple of classes");
        return NULL;
    }
    long oldest = PyLong_AsLong(args[0]);
    if ((oldest == -1 && PyErr_Occurred()) || are_classes(args[1]) < 0)
        return NULL;
    if (oldest < 0 || oldest > OLDEST) {
        PyErr_SetString(PyExc_ValueError, "generations are 0, 1 and 2");
        return NULL;
    }
    Table kinds = {0};
    Array ids = {.width = sizeof(PyObject *)}, places = {.width = sizeof(int64_t)}, met = {.width = sizeof(PyObject *)};
    int failed = note_addresses((int)oldest, args[1], &ids) < 0;
    for (int64_t at = 0; !failed && PyTuple_Size(args[1]) > 0 && at < (int64_t)ids.count; at++) {
        PyObject **item = (PyObject **)ids.items + at;
        if (at + AHEAD < (int64_t)ids.count)
            PREFETCH(item[AHEAD]);
        int wanted = is_wanted(&kinds, Py_TYPE(*item), args[1]);
        failed = wanted < 0;
        if (wanted > 0 && (array_push(&met, item) < 0 || array_push(&places, &at) < 0))
            failed = no_memory() < 0;
    }
    /* (Made only now, the list first: from then on what is wanted cannot go.) */
    PyObject *items = failed ? NULL : list_of(&met);
    PyObject *found = items == NULL ? NULL : Py_BuildValue("(NNN)", array_take(&ids), array_take(&places), items);
    free(ids.items);
    free(places.items);
    free(met.items);
    free(kinds.slots);
    return found;
}

/* That of an object, and then of all that is young. A collection calls it, before it begins. */
static PyObject *
young_with_types(PyObject *Py_UNUSED(module), PyObject *first)
{
    Array words = {.width = sizeof(PyObject *)};
    int failed = array_push(&words, &first) < 0 && no_memory() < 0;
    failed = failed || note_addresses(1, NULL, &words) < 0;
    for (size_t at = 0, count = words.count; !failed && at < count; at++) {
        PyObject **item = (PyObject **)words.items + at;
        if (at + AHEAD < count)
            PREFETCH(item[AHEAD]);
        PyTypeObject *type = Py_TYPE(*item);
        failed = array_push(&words, &type) < 0 && no_memory() < 0;
    }
    PyObject *found = failed ? NULL : array_take(&words);
    free(words.items);
    return found;
}

/* Dictionaries --------------------------------------------------------------------------------------------------- */

/* Until Python 3.13 a dictionary has a number behind its head and its size that is another one after each change of it:
 * whether that is so is tried when the module is loaded. Where it is not, the values themselves are gone through.
 */
enum { TAG = 3 };
static int has_tags = 0;

static uint64_t
tag_of(PyObject *dict)
{
    uint64_t tag;
    memcpy(&tag, (uint64_t *)dict + TAG, sizeof(tag));
    return tag;
}

static int
try_tags(void)
{
    PyObject *dict = PyDict_New(), *first = PyLong_FromLong(1), *second = PyLong_FromLong(2);
    uint64_t tags[5] = {0};
    int failed = dict == NULL || first == NULL || second == NULL || sizeof(void *) != sizeof(uint64_t);
    for (int turn = 0; !failed && turn < 5; turn++) {
        if (turn == 1 || turn == 2 || turn == 4)
            failed = PyDict_SetItem(dict, first, turn == 1 ? first : second) < 0;
        else if (turn == 3)
            failed = PyDict_DelItem(dict, first) < 0;
        if (!failed)
            tags[turn] = tag_of(dict);
    }
    has_tags = !failed && tags[4] == tag_of(dict);
    for (int turn = 1; turn < 5; turn++)
        has_tags = has_tags && tags[turn] != tags[turn - 1];
    Py_XDECREF(dict);
    Py_XDECREF(first);
    Py_XDECREF(second);
    return PyErr_Occurred() ? -1 : 0;
}

static uint64_t
mark_of(PyObject *dict)
{
    if (has_tags)
        return tag_of(dict);
    PyObject *key, *value;
    uint64_t mark = 0;
    for (Py_ssize_t at = 0; PyDict_Next(dict, &at, &key, &value);) {
        mark = (mark ^ (uint64_t)(uintptr_t)value) * 0x9E3779B97F4A7C15u;
        mark ^= mark >> 29;
    }
    return mark;
}

static PyObject *
marks_of(PyObject *Py_UNUSED(module), PyObject *dicts)
{
    Py_ssize_t count = PyTuple_Size(dicts);
    if (count < 0)
        return NULL;
    PyObject *marks = PyBytes_FromStringAndSize(NULL, count * (Py_ssize_t)sizeof(uint64_t));
    char *place = marks == NULL ? NULL : PyBytes_AsString(marks);
    for (Py_ssize_t at = 0; place != NULL && at < count; at++, place += sizeof(uint64_t)) {
        PyObject *dict = PyTuple_GetItem(dicts, at);
        if (at + AHEAD < count)
            PREFETCH((uint64_t *)PyTuple_GetItem(dicts, at + AHEAD) + TAG);
        if (!PyDict_Check(dict)) {
            PyErr_SetString(PyExc_TypeError, "dictionaries only");
            Py_CLEAR(marks);
            break;
        }
        uint64_t mark = mark_of(dict);
        memcpy(place, &mark, sizeof(mark));
    }
    return marks;
}

/* Modules and caches ----------------------------------------------------------------------------------------------- */

static PyObject *
namespace_sizes(PyObject *Py_UNUSED(module), PyObject *modules)
{
    if (!PyList_Check(modules)) {
        PyErr_SetString(PyExc_TypeError, "modules are a list");
        return NULL;
    }
    Array spaces = {.width = sizeof(PyObject *)}, sizes = {.width = sizeof(int64_t)};
    PyObject *found = NULL;
    Py_ssize_t count = PyList_Size(modules);
    int failed = 0;
    for (Py_ssize_t at = 0; !failed && at < count; at++) {
        PyObject *item = PyList_GetItem(modules, at);
        if (at + AHEAD < count)
            PREFETCH(PyList_GetItem(modules, at + AHEAD));
        /* One that the collector has cleared, and somebody has kept all the same, has none any more. */
        PyObject *space = PyModule_Check(item) ? PyModule_GetDict(item) : NULL;
        failed = array_push(&spaces, &space) < 0;
    }
    for (Py_ssize_t at = 0; !failed && at < count; at++) {
        PyObject **space = (PyObject **)spaces.items + at;
        if (at + AHEAD < count)
            PREFETCH(space[AHEAD]);
        int64_t size = *space == NULL ? 0 : PyDict_Size(*space);
        failed = array_push(&sizes, &size) < 0;
    }
    if (failed)
        PyErr_NoMemory();
    else
        found = Py_BuildValue("(NN)", array_take(&spaces), array_take(&sizes));
    free(spaces.items);
    free(sizes.items);
    return found;
}

/* Descriptors ---------------------------------------------------------------------------------------------------- */

/* The kernel's name of what is no file: by mode, inode and device all of these are one. */
static uint64_t
named(int number)
{
    char path[sizeof("/proc/self/fd/") + 3 * sizeof(int)], target[256];
    snprintf(path, sizeof(path), "/proc/self/fd/%d", number);
    ssize_t length = readlink(path, target, sizeof(target));
    uint64_t name = 0;
    for (ssize_t at = 0; at < length; at++)
        name = (name ^ (unsigned char)target[at]) * 0x100000001B3u;
    return name;
}

enum { FACTS = 5 };

/* Number, mode, inode and device of what a descriptor is open on, and its name if it is no file; 0 where it is closed. */
static int
facts_of(int number, uint64_t *facts)
{
    struct stat file;
    if (fstat(number, &file) != 0)
        return 0;
    facts[0] = (uint64_t)number;
    facts[1] = file.st_mode;
    facts[2] = file.st_ino;
    facts[3] = file.st_dev;
    facts[4] = file.st_mode & S_IFMT ? 0 : named(number);
    return 1;
}

/* Whether there are as many as there were, since Linux 6.2 the size of their folder, and all those that there were. A
 * thread that waits in `accept` has one that nobody sees: then there are never as many.
 */
static int
are_the_same(const char *before, Py_ssize_t count)
{
    struct stat folder;
    if (stat("/proc/self/fd", &folder) != 0 || folder.st_size != count)
        return 0;
    for (Py_ssize_t at = 0; at < count; at++) {
        uint64_t then[FACTS], now[FACTS];
        memcpy(then, before + at * (Py_ssize_t)sizeof(then), sizeof(then));
        if (!facts_of((int)then[0], now) || memcmp(then, now, sizeof(then)) != 0)
            return 0;
    }
    return 1;
}

static PyObject *
files_open(PyObject *Py_UNUSED(module), PyObject *before)
{
    Array files = {.width = FACTS * sizeof(uint64_t)};
    if (!PyBytes_Check(before)) {
        PyErr_SetString(PyExc_TypeError, "what was returned before is bytes");
        return NULL;
    }
    if (are_the_same(PyBytes_AsString(before), PyBytes_Size(before) / (Py_ssize_t)files.width)) {
        Py_INCREF(before);
        return before;
    }
    DIR *folder = opendir("/proc/self/fd");
    if (folder == NULL)
        return PyErr_SetFromErrno(PyExc_OSError);
    int failed = 0;
    for (struct dirent *entry; !failed && (entry = readdir(folder)) != NULL;) {
        int number = entry->d_name[0] == '.' ? -1 : atoi(entry->d_name);
        uint64_t facts[FACTS];
        if (number >= 0 && number != dirfd(folder) && facts_of(number, facts))
            failed = array_push(&files, facts) < 0 && no_memory() < 0;
    }
    closedir(folder);
    PyObject *found = failed ? NULL : array_take(&files);
    free(files.items);
    return found;
}

/* The number at so many bytes in each object that weak references refer to; -1 for what is gone. */
static PyObject *
numbers_in(PyObject *Py_UNUSED(module), PyObject *const *args, Py_ssize_t count)
{
    if (count != 2 || !PyList_Check(args[0])) {
        PyErr_SetString(PyExc_TypeError, "a list of weak references and a number");
        return NULL;
    }
    Py_ssize_t offset = PyLong_AsSsize_t(args[1]);
    if (offset == -1 && PyErr_Occurred())
        return NULL;
    PyObject *numbers = PyBytes_FromStringAndSize(NULL, PyList_Size(args[0]) * (Py_ssize_t)sizeof(int64_t));
    char *place = numbers == NULL ? NULL : PyBytes_AsString(numbers);
    for (Py_ssize_t at = 0; place != NULL && at < PyList_Size(args[0]); at++, place += sizeof(int64_t)) {
        PyObject *item = PyWeakref_GetObject(PyList_GetItem(args[0], at));
        int64_t number = -1;
        if (item == NULL) {
            Py_CLEAR(numbers);
            break;
        }
        if (item != Py_None)
            memcpy(&number, (char *)item + offset, sizeof(number));
        memcpy(place, &number, sizeof(number));
    }
    return numbers;
}

static PyMethodDef functions[] = {
    {"referents", referents, METH_VARARGS,
     "Return what the collector is shown of some objects, as `gc.get_referents`; of a module in C its namespace alone."},
    {"marks_of", marks_of, METH_O,
     "Return a number (uint64) for each dictionary of a tuple, which is another one once a value in it is another."},
    {"lengths_of_all", lengths_of_all, METH_VARARGS,
     "Return the identities (int64) of all containers, of the dicts that objects hold and that the collector does not "
     "track, and of all types, how many things each holds, or how many objects there are of it, and its type's identity "
     "(int64), how many objects there are, and the wanted ones."},
    {"values_of_all", values_of_all, METH_VARARGS,
     "Return the identity (int64) of who refers to each value of some types, which may be of so many bytes, the values, "
     "and how many objects there are; what refers to so many things and is no container, as a value of its own."},
    {"owned_by_all", owned_by_all, METH_VARARGS,
     "Return of all objects, of what they refer to, and of what lies in that without being tracked those of some types "
     "which may be of so many bytes; some more than once."},
    {"followers_among", followers_among, METH_VARARGS,
     "Return those of the objects with these identities (int64) that come behind the first one in the collector's list, "
     "at most so many places. Nothing may be collected meanwhile."},
    {"old_among", old_among, METH_O, "Return those of the objects with these identities (int64) that are old."},
    {"all_instances", all_instances, METH_VARARGS,
     "Return the objects that the collector has, frozen ones too or those alone, whose types derive from one of a tuple "
     "of classes."},
    {"of_generations", (PyCFunction)(void (*)(void))of_generations, METH_FASTCALL,
     "Return the identities (int64) of the objects of a generation and all younger ones, the oldest generation first, and "
     "the places (int64) of those whose types derive from one of a tuple of classes, and these."},
    {"young_with_types", young_with_types, METH_O,
     "Return the identities (int64) of an object and of all that is young, and then those of their types."},
    {"namespace_sizes", namespace_sizes, METH_O,
     "Return the identity (int64) of the namespace of each module of a list, and how many names (int64) are in it; 0 for "
     "what is no module."},
    {"files_open", files_open, METH_O,
     "Return what is another one than before where a descriptor was opened, closed, or is open on another file."},
    {"numbers_in", (PyCFunction)(void (*)(void))numbers_in, METH_FASTCALL,
     "Return the number (int64) at so many bytes in what each of a list of weak references refers to; -1 for what is "
     "gone."},
    {"frozen", frozen, METH_O,
     "Return how many objects are frozen, counted up to a number (-1: all), and what says which are the first and the "
     "last."},
    {NULL, NULL, 0, NULL},
};

static int
add_types(PyObject *module)
{
    PyObject *type = PyType_FromSpec(&walk_spec);
    int result = type == NULL ? -1 : PyModule_AddObjectRef(module, "Walk", type);
    Py_XDECREF(type);
    return result < 0 ? result : try_tags();
}

static PyModuleDef_Slot module_slots[] = {{Py_mod_exec, add_types}, {0, NULL}};

static struct PyModuleDef module = {
    PyModuleDef_HEAD_INIT, "heap", "What goes through the whole heap.", 0, functions, module_slots, NULL, NULL, NULL,
};

PyMODINIT_FUNC
PyInit_heap(void)
{
    return PyModuleDef_Init(&module);
}
