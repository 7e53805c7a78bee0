/* SPDX-License-Identifier: Apache-2.0 */
/*
 * dlsym.c: what dlsym and dlvsym answer. The entry points are in thunk.S: they ask here, then
 * return the answer, or jump to the true function as if the program had called it. The true
 * one looks at its return address to know what "next" and "default" mean, so it must be reached
 * by a jump, whatever the compiler does with tail calls.
 *
 * This runs in every process that looks up a symbol. No allocation, no lock, no output, nothing
 * thread-local, nothing to undo.
 */
#include <dlfcn.h>
#include <stdbool.h>

#include "objects.h"
#include "real.h"
#include "text.h"

struct decision {
	void *answer;
	void *jump; /* not NULL: jump there instead */
};

struct decision gpufence_decide_dlsym(void *handle, const char *name, void *caller);
struct decision gpufence_decide_dlvsym(void *handle, const char *name, const char *version, void *caller);

typedef void *fn_dlsym(void *, const char *);
typedef void *fn_dlvsym(void *, const char *, const char *);
extern fn_dlsym gpufence_dlsym;
extern fn_dlvsym gpufence_dlvsym;

static uintptr_t next_dlsym, next_dlvsym;

static uintptr_t next(uintptr_t *known, const char *name)
{
	uintptr_t address = __atomic_load_n(known, __ATOMIC_RELAXED);
	if (address == 0) {
		address = objects_next(name);
		__atomic_store_n(known, address, __ATOMIC_RELAXED);
	}
	return address;
}

struct question {
	const char *name;
	const char *version; /* NULL: dlsym */
	uintptr_t function;  /* the true dlsym or dlvsym */
};

static uintptr_t ask(const struct question *q, void *handle)
{
	void *answer = q->version == NULL ? ((fn_dlsym *)q->function)(handle, q->name)
					  : ((fn_dlvsym *)q->function)(handle, q->name, q->version);
	return (uintptr_t)answer;
}

/* What the loader says of a failed question must not stay behind a successful answer. */
static void forget_error(void) { ((fn_dlsym *)next(&next_dlsym, "dlsym"))(RTLD_NEXT, "dlsym"); }

static struct decision give(uintptr_t answer) { return (struct decision){ (void *)answer, NULL }; }
static struct decision jump(const struct question *q) { return (struct decision){ NULL, (void *)q->function }; }

/*
 * A hook is the answer where the true one lies in a library of the driver. What stands in the way:
 * our own exported names are found too, in their place in the order, and must not become an
 * answer where without us there would be none or another.
 */
static __attribute__((noinline)) struct decision decide(const struct question *q, int row, void *handle, void *caller)
{
	uintptr_t at = (uintptr_t)caller, hook = (uintptr_t)table[row].hook, answer;
	bool searches = handle == RTLD_NEXT || handle == RTLD_DEFAULT;

	/* The driver looks up its own functions. */
	if (objects_library_at(at) >= 0)
		return jump(q);
	/* Somebody else's wrapper, between the one who asks and us, is next. */
	if (handle == RTLD_NEXT && objects_define_between(at, q->name))
		return jump(q);

	answer = ask(q, handle);
	if (answer == hook)
		answer = ask(q, RTLD_NEXT);
	if (answer != 0 && real_note((enum table_id)row, answer))
		return give(hook);
	/* Objects that were loaded with RTLD_LOCAL see what they need, and we do not. */
	if (answer == 0 && searches && objects_need(at, table[row].library)) {
		real_refresh(table[row].library);
		if (real_function((enum table_id)row) == NULL)
			return give(0);
		forget_error();
		return give(hook);
	}
	/* Somebody else's, after us. From there, "next" is not what it is from here. */
	if (answer != 0 && handle == RTLD_NEXT && !objects_before_us(at)) {
		if (objects_next_library(at, q->name) != table[row].library)
			return jump(q);
		real_refresh(table[row].library);
		return give(hook);
	}
	return give(answer);
}

/*
 * A wrapper of dlsym that was loaded in front of us finds the next one by the version of the C
 * library's, and we have none. Without this it would go past us.
 */
static __attribute__((noinline)) struct decision decide_next(const struct question *q, uintptr_t ours, uintptr_t next_one, void *handle, void *caller)
{
	if (!objects_before_us((uintptr_t)caller) || ask(q, handle) != next_one)
		return jump(q);
	return give(ours);
}

struct decision gpufence_decide_dlsym(void *handle, const char *name, void *caller)
{
	struct question q = { name, NULL, next(&next_dlsym, "dlsym") };
	int row;
	if (__builtin_expect(q.function == 0 || name == NULL || (row = table_find(name)) < 0, 1))
		return jump(&q);
	return decide(&q, row, handle, caller);
}

struct decision gpufence_decide_dlvsym(void *handle, const char *name, const char *version, void *caller)
{
	struct question q = { name, version, next(&next_dlvsym, "dlvsym") };
	int row;
	if (q.function == 0 || name == NULL || version == NULL)
		return jump(&q);
	if (text_equal(name, "dlsym"))
		return decide_next(&q, (uintptr_t)&gpufence_dlsym, next(&next_dlsym, name), handle, caller);
	if (text_equal(name, "dlvsym"))
		return decide_next(&q, (uintptr_t)&gpufence_dlvsym, q.function, handle, caller);
	if ((row = table_find(name)) < 0)
		return jump(&q);
	return decide(&q, row, handle, caller);
}
