/* SPDX-License-Identifier: Apache-2.0 */
/*
 * module.c: modules and libraries, their functions and their memory.
 *
 * Images are not looked at but for one line, with which a text image may begin:
 *
 *   // simgpu: bytes=4MiB lazy=2MiB global=table:64KiB managed=shared:1MiB
 *
 * `bytes` the module takes when it is loaded, `lazy` when the first of its functions is asked
 * for (or at once, with CUDA_MODULE_LOADING=EAGER). Variables lie in `bytes`; managed ones take
 * managed memory. Other images take what simgpud says. Every function is there, whatever its
 * name; one called sleep_<n>us or sleep_<n>ms runs so long. A library becomes a module of a
 * context when something of it is first used there, or when it is loaded, if that is eager.
 */
#include "internal.h"

#include <fcntl.h>
#include <sys/mman.h>

/* ---- images ------------------------------------------------------------------------------ */

struct variable {
	struct variable *next;
	size_t size;
	bool managed;
	char name[];
};

struct image {
	size_t bytes, lazy;
	bool marked;
	struct variable *variables;
};

static const char *const mark = "// simgpu:";

/* 4096, 64KiB, 4MiB, 1GiB; what follows is left in *end. */
static size_t parse_size(const char *s, const char **end)
{
	char *rest;
	unsigned long long n = strtoull(s, &rest, 10);
	unsigned int shift = strncmp(rest, "KiB", 3) == 0 ? 10 : strncmp(rest, "MiB", 3) == 0 ? 20 : strncmp(rest, "GiB", 3) == 0 ? 30 : 0;

	*end = shift ? rest + 3 : rest;
	return (size_t)n << shift;
}

static void forget_image(struct image *im)
{
	struct variable *v;

	while ((v = im->variables)) {
		im->variables = v->next;
		free(v);
	}
}

/* name:size */
static bool parse_variable(struct image *im, const char *s, bool managed, const char **end)
{
	size_t len = strcspn(s, ": \n");
	struct variable *v = calloc(1, sizeof(*v) + len + 1);

	if (!v)
		return false;
	memcpy(v->name, s, len);
	v->managed = managed;
	v->size = s[len] == ':' ? parse_size(s + len + 1, end) : 0;
	if (s[len] != ':')
		*end = s + len;
	v->next = im->variables;
	im->variables = v;
	return v->size > 0;
}

static CUresult parse_image(struct image *im, const char *text)
{
	const char *s = text;
	bool ok = true;

	memset(im, 0, sizeof(*im));
	if (strncmp(text, mark, strlen(mark)) != 0)
		return CUDA_SUCCESS;
	im->marked = true;
	for (s += strlen(mark); ok && *s && *s != '\n';) {
		if (*s == ' ')
			s++;
		else if (strncmp(s, "bytes=", 6) == 0)
			im->bytes = parse_size(s + 6, &s);
		else if (strncmp(s, "lazy=", 5) == 0)
			im->lazy = parse_size(s + 5, &s);
		else if (strncmp(s, "global=", 7) == 0)
			ok = parse_variable(im, s + 7, false, &s);
		else if (strncmp(s, "managed=", 8) == 0)
			ok = parse_variable(im, s + 8, true, &s);
		else
			ok = false;
	}
	if (!ok)
		forget_image(im);
	return ok ? CUDA_SUCCESS : CUDA_ERROR_INVALID_IMAGE;
}

static CUresult copy_image(struct image *to, const struct image *from)
{
	const struct variable *v;
	struct variable *c;

	*to = *from;
	to->variables = NULL;
	for (v = from->variables; v; v = v->next) {
		c = malloc(sizeof(*c) + strlen(v->name) + 1);
		if (!c) {
			forget_image(to);
			return CUDA_ERROR_OUT_OF_MEMORY;
		}
		memcpy(c, v, sizeof(*c) + strlen(v->name) + 1);
		c->next = to->variables;
		to->variables = c;
	}
	return CUDA_SUCCESS;
}

/* The beginning of a file, as much as the line can be. */
static CUresult read_image(struct image *im, const char *path)
{
	char text[4096];
	ssize_t n;
	int fd = open(path, O_RDONLY | O_CLOEXEC);

	if (fd < 0)
		return CUDA_ERROR_FILE_NOT_FOUND;
	n = read(fd, text, sizeof(text) - 1);
	close(fd);
	if (n < 0)
		return CUDA_ERROR_FILE_NOT_FOUND;
	text[n] = 0;
	return parse_image(im, text);
}

static bool eager(void)
{
	const char *mode = getenv("CUDA_MODULE_LOADING");

	return mode && strcmp(mode, "EAGER") == 0;
}

EXPORT CUresult cuModuleGetLoadingMode(CUmoduleLoadingMode *mode)
{
	if (!mode)
		return CUDA_ERROR_INVALID_VALUE;
	*mode = eager() ? CU_MODULE_EAGER_LOADING : CU_MODULE_LAZY_LOADING;
	return CUDA_SUCCESS;
}

/* ---- modules ----------------------------------------------------------------------------- */

struct CUfunc_st {
	struct CUfunc_st *next;
	CUmodule module;
	uint64_t time_ns;
	int dynamic_shared, carveout; /* as the program set them */
	char name[];
};

struct CUmod_st {
	struct CUmod_st *next;
	CUcontext ctx;
	CUlibrary library; /* that it is an instance of, or NULL */
	struct image image;
	uint64_t handle, lazy_handle; /* 0: takes nothing (yet) */
	bool functions_loaded;
	CUfunction functions;
	struct placed {
		struct placed *next;
		const struct variable *variable;
		struct range *range;
		uint64_t handle; /* of managed memory */
	} *placed;
};

static CUmodule modules;

static CUmodule *find_module(CUmodule module)
{
	CUmodule *at = &modules;

	while (*at && *at != module)
		at = &(*at)->next;
	return at;
}

/* Lets go of what the module is here; its memory only if `give`. */
static void drop_module(CUmodule *at, bool give)
{
	CUmodule m = *at;
	struct placed *p;
	CUfunction f;

	*at = m->next;
	while ((p = m->placed)) {
		m->placed = p->next;
		if (give) { /* else its range went with the context */
			if (p->handle)
				give_memory(m->ctx->dev, p->handle);
			range_unmap(p->range);
			range_remove(p->range);
		}
		free(p);
	}
	if (give && m->handle)
		give_memory(m->ctx->dev, m->handle);
	if (give && m->lazy_handle)
		give_memory(m->ctx->dev, m->lazy_handle);
	while ((f = m->functions)) {
		m->functions = f->next;
		free(f);
	}
	forget_image(&m->image);
	free(m);
}

/* simgpud has freed everything in ctx: so do we. */
void modules_drop(CUcontext ctx)
{
	CUmodule *at = &modules;

	while (*at) {
		if ((*at)->ctx == ctx)
			drop_module(at, false);
		else
			at = &(*at)->next;
	}
}

static CUresult place_variable(CUmodule m, const struct variable *v)
{
	struct simgpu_req req = {.op = SIMGPU_OP_ALLOC, .arg = {m->ctx->handle, v->size, SIMGPU_KIND_MANAGED}};
	size_t size = (v->size + PAGE - 1) / PAGE * PAGE;
	struct placed *p = calloc(1, sizeof(*p));
	struct simgpu_rep rep;
	uintptr_t start = 0;
	CUresult ret = p ? CUDA_SUCCESS : CUDA_ERROR_OUT_OF_MEMORY;

	if (ret == CUDA_SUCCESS && v->managed) {
		ret = call(m->ctx->dev, &req, &rep);
		if (ret == CUDA_SUCCESS)
			p->handle = rep.val[0];
	}
	if (ret == CUDA_SUCCESS) {
		start = (uintptr_t)map_device(size, false);
		if (start && v->managed && mprotect((void *)start, size, PROT_READ | PROT_WRITE) < 0) {
			unmap_device(start, size);
			start = 0;
		}
		if (start)
			p->range = range_add(start, v->size, v->managed ? RANGE_MANAGED : RANGE_GLOBAL);
		if (!p->range) {
			if (start)
				unmap_device(start, size);
			if (p->handle)
				give_memory(m->ctx->dev, p->handle);
			ret = CUDA_ERROR_OUT_OF_MEMORY;
		}
	}
	if (ret != CUDA_SUCCESS) {
		free(p);
		return ret;
	}
	p->range->mapped = size;
	p->range->dev = m->ctx->dev;
	p->range->ctx = m->ctx;
	p->range->handle = p->handle;
	p->variable = v;
	p->next = m->placed;
	m->placed = p;
	return CUDA_SUCCESS;
}

/* What waits for the first use of a function. */
static CUresult load_functions(CUmodule m)
{
	CUresult ret = CUDA_SUCCESS;

	if (!m->functions_loaded && m->image.lazy > 0)
		ret = allocate_bytes(m->ctx, m->image.lazy, &m->lazy_handle);
	if (ret == CUDA_SUCCESS)
		m->functions_loaded = true;
	return ret;
}

/* A module of ctx. The image is taken over if that succeeds. */
static CUresult load_into(CUcontext ctx, struct image *im, CUmodule *out)
{
	CUmodule m = calloc(1, sizeof(*m));
	const struct variable *v;
	bool managed = false;
	CUresult ret = m ? CUDA_SUCCESS : CUDA_ERROR_OUT_OF_MEMORY;

	if (ret != CUDA_SUCCESS)
		return ret;
	m->ctx = ctx;
	m->next = modules;
	modules = m;
	if (!im->marked)
		settings(ctx->dev, NULL, &im->bytes);
	if (im->bytes > 0)
		ret = allocate_bytes(ctx, im->bytes, &m->handle);
	m->image.lazy = im->lazy;
	for (v = im->variables; v && ret == CUDA_SUCCESS; v = v->next) {
		managed = managed || v->managed;
		ret = place_variable(m, v);
	}
	if (ret == CUDA_SUCCESS && (managed || eager()))
		ret = load_functions(m); /* managed variables do not wait, in any mode */
	if (ret != CUDA_SUCCESS) {
		drop_module(&modules, true);
		return ret;
	}
	m->image = *im;
	memset(im, 0, sizeof(*im));
	*out = m;
	return CUDA_SUCCESS;
}

static CUresult load(CUmodule *module, const void *data, const char *path)
{
	struct image im;
	CUcontext ctx;
	CUresult ret = enter_context(&ctx);

	if (ret != CUDA_SUCCESS)
		return ret;
	if (!module || (!data && !path))
		ret = CUDA_ERROR_INVALID_VALUE;
	else
		ret = path ? read_image(&im, path) : parse_image(&im, data);
	if (ret == CUDA_SUCCESS) {
		ret = load_into(ctx, &im, module);
		forget_image(&im);
	}
	leave();
	return ret;
}

EXPORT CUresult cuModuleLoadData(CUmodule *module, const void *image)
{
	return load(module, image, NULL);
}

EXPORT CUresult cuModuleLoadDataEx(CUmodule *module, const void *image, unsigned int count, CUjit_option *options, void **values)
{
	if (count > 0 && (!options || !values))
		return CUDA_ERROR_INVALID_VALUE;
	return load(module, image, NULL);
}

EXPORT CUresult cuModuleLoadFatBinary(CUmodule *module, const void *image)
{
	return load(module, image, NULL);
}

EXPORT CUresult cuModuleLoad(CUmodule *module, const char *path)
{
	return load(module, NULL, path);
}

EXPORT CUresult cuModuleUnload(CUmodule module)
{
	CUmodule *at;
	CUresult ret = enter();

	if (ret != CUDA_SUCCESS)
		return ret;
	at = find_module(module);
	if (!*at)
		ret = CUDA_ERROR_INVALID_HANDLE;
	else if (module->library)
		ret = CUDA_ERROR_INVALID_VALUE; /* goes with its library */
	else
		drop_module(at, true);
	leave();
	return ret;
}

static CUresult find_variable(CUmodule m, const char *name, bool managed, CUdeviceptr *dptr, size_t *bytes)
{
	struct placed *p;

	for (p = m->placed; p; p = p->next) {
		if (strcmp(p->variable->name, name) == 0 && (!managed || p->variable->managed)) {
			if (dptr)
				*dptr = p->range->start;
			if (bytes)
				*bytes = p->variable->size;
			return CUDA_SUCCESS;
		}
	}
	return CUDA_ERROR_NOT_FOUND;
}

EXPORT CUresult cuModuleGetGlobal_v2(CUdeviceptr *dptr, size_t *bytes, CUmodule module, const char *name)
{
	CUresult ret = enter();

	if (ret != CUDA_SUCCESS)
		return ret;
	if (!name || (!dptr && !bytes))
		ret = CUDA_ERROR_INVALID_VALUE;
	else if (!*find_module(module))
		ret = CUDA_ERROR_INVALID_HANDLE;
	else
		ret = find_variable(module, name, false, dptr, bytes);
	leave();
	return ret;
}

EXPORT CUresult cuModuleGetGlobal(CUdeviceptr_v1 *dptr, unsigned int *bytes, CUmodule module, const char *name)
{
	CUdeviceptr wide;
	size_t size;
	CUresult ret = cuModuleGetGlobal_v2(&wide, &size, module, name);

	if (ret == CUDA_SUCCESS && dptr && wide > UINT32_MAX)
		ret = CUDA_ERROR_INVALID_VALUE; /* it does not fit */
	if (ret == CUDA_SUCCESS && dptr)
		*dptr = (CUdeviceptr_v1)wide;
	if (ret == CUDA_SUCCESS && bytes)
		*bytes = (unsigned int)size;
	return ret;
}

/* ---- functions ---------------------------------------------------------------------------- */

static uint64_t time_in(const char *name)
{
	unsigned long n;
	char unit[3] = "";

	if (sscanf(name, "sleep_%lu%2s", &n, unit) != 2 || n > 3600000000)
		return SIMGPU_KERNEL_DEFAULT;
	if (strcmp(unit, "us") == 0)
		return n * 1000;
	if (strcmp(unit, "ms") == 0)
		return n * 1000000;
	return SIMGPU_KERNEL_DEFAULT;
}

/* What every function has on a device: it uses nothing, and was compiled for that one. */
static int attribute_on(const struct simgpu_device *info, unsigned int attribute)
{
	switch (attribute) {
	case CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK:
		return 1024;
	case CU_FUNC_ATTRIBUTE_PTX_VERSION:
	case CU_FUNC_ATTRIBUTE_BINARY_VERSION:
		return (int)(info->cc_major * 10 + info->cc_minor);
	case CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES:
		return device_attribute(info, SIM_ATTR_SHARED_PER_BLOCK);
	case CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT:
		return -1;
	default:
		return 0;
	}
}

static CUresult get_function(CUmodule m, const char *name, CUfunction *function)
{
	CUfunction f;
	CUresult ret = load_functions(m);

	if (ret != CUDA_SUCCESS)
		return ret;
	for (f = m->functions; f && strcmp(f->name, name) != 0; f = f->next)
		;
	if (!f) {
		f = calloc(1, sizeof(*f) + strlen(name) + 1);
		if (!f)
			return CUDA_ERROR_OUT_OF_MEMORY;
		memcpy(f->name, name, strlen(name));
		f->module = m;
		f->time_ns = time_in(name);
		f->dynamic_shared = attribute_on(&m->ctx->dev->info, CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES);
		f->carveout = attribute_on(&m->ctx->dev->info, CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT);
		f->next = m->functions;
		m->functions = f;
	}
	*function = f;
	return CUDA_SUCCESS;
}

EXPORT CUresult cuModuleGetFunction(CUfunction *function, CUmodule module, const char *name)
{
	CUresult ret = enter();

	if (ret != CUDA_SUCCESS)
		return ret;
	if (!function || !name)
		ret = CUDA_ERROR_INVALID_VALUE;
	else if (!*find_module(module))
		ret = CUDA_ERROR_INVALID_HANDLE;
	else
		ret = get_function(module, name, function);
	leave();
	return ret;
}

/* ---- libraries ----------------------------------------------------------------------------- */

struct CUkern_st {
	struct CUkern_st *next;
	CUlibrary library;
	char name[];
};

struct CUlib_st {
	struct CUlib_st *next;
	struct image image;
	CUkernel kernels;
};

static CUlibrary libraries;

static CUlibrary *find_library(CUlibrary library)
{
	CUlibrary *at = &libraries;

	while (*at && *at != library)
		at = &(*at)->next;
	return at;
}

static CUkernel find_kernel(const void *kernel)
{
	CUlibrary l;
	CUkernel k;

	for (l = libraries; l; l = l->next)
		for (k = l->kernels; k; k = k->next)
			if (k == kernel)
				return k;
	return NULL;
}

/* The library's module in ctx, loaded if it is not there yet. */
static CUresult instance(CUlibrary library, CUcontext ctx, CUmodule *out)
{
	struct image im;
	CUmodule m;
	CUresult ret;

	for (m = modules; m; m = m->next) {
		if (m->library == library && m->ctx == ctx) {
			*out = m;
			return CUDA_SUCCESS;
		}
	}
	ret = copy_image(&im, &library->image);
	if (ret != CUDA_SUCCESS)
		return ret;
	ret = load_into(ctx, &im, out);
	forget_image(&im);
	if (ret == CUDA_SUCCESS)
		(*out)->library = library;
	return ret;
}

static void drop_library(CUlibrary *at)
{
	CUlibrary l = *at;
	CUmodule *m = &modules;
	CUkernel k;

	while (*m) {
		if ((*m)->library == l)
			drop_module(m, true);
		else
			m = &(*m)->next;
	}
	*at = l->next;
	while ((k = l->kernels)) {
		l->kernels = k->next;
		free(k);
	}
	forget_image(&l->image);
	free(l);
}

static CUresult load_library(CUlibrary *library, const void *data, const char *path)
{
	CUcontext ctx;
	CUlibrary l;
	CUmodule m;
	CUresult ret = enter(); /* it needs no context */

	if (ret != CUDA_SUCCESS)
		return ret;
	l = library && (data || path) ? calloc(1, sizeof(*l)) : NULL;
	if (!library || (!data && !path))
		ret = CUDA_ERROR_INVALID_VALUE;
	else if (!l)
		ret = CUDA_ERROR_OUT_OF_MEMORY;
	else
		ret = path ? read_image(&l->image, path) : parse_image(&l->image, data);
	if (ret == CUDA_SUCCESS) {
		l->next = libraries;
		libraries = l;
		ctx = current_context();
		if (eager() && ctx && context_alive(ctx))
			ret = instance(l, ctx, &m);
		if (ret == CUDA_SUCCESS)
			*library = l;
		else
			drop_library(&libraries);
	} else {
		free(l);
	}
	leave();
	return ret;
}

EXPORT CUresult cuLibraryLoadData(CUlibrary *library, const void *code, CUjit_option *jit, void **jit_values, unsigned int jit_count,
				  CUlibraryOption *options, void **values, unsigned int count)
{
	if ((jit_count > 0 && (!jit || !jit_values)) || (count > 0 && !options))
		return CUDA_ERROR_INVALID_VALUE;
	(void)values;
	return load_library(library, code, NULL);
}

EXPORT CUresult cuLibraryLoadFromFile(CUlibrary *library, const char *path, CUjit_option *jit, void **jit_values, unsigned int jit_count,
				      CUlibraryOption *options, void **values, unsigned int count)
{
	if ((jit_count > 0 && (!jit || !jit_values)) || (count > 0 && !options))
		return CUDA_ERROR_INVALID_VALUE;
	(void)values;
	return load_library(library, NULL, path);
}

/* Enters, with a library that is one. */
static CUresult enter_library(CUlibrary library)
{
	CUresult ret = enter();

	if (ret == CUDA_SUCCESS && !*find_library(library)) {
		ret = CUDA_ERROR_INVALID_HANDLE;
		leave();
	}
	return ret;
}

EXPORT CUresult cuLibraryUnload(CUlibrary library)
{
	CUresult ret = enter_library(library);

	if (ret != CUDA_SUCCESS)
		return ret;
	drop_library(find_library(library));
	leave();
	return CUDA_SUCCESS;
}

EXPORT CUresult cuLibraryGetKernel(CUkernel *kernel, CUlibrary library, const char *name)
{
	CUkernel k;
	CUresult ret = enter_library(library);

	if (ret != CUDA_SUCCESS)
		return ret;
	if (!kernel || !name) {
		leave();
		return CUDA_ERROR_INVALID_VALUE;
	}
	for (k = library->kernels; k && strcmp(k->name, name) != 0; k = k->next)
		;
	if (!k) {
		k = calloc(1, sizeof(*k) + strlen(name) + 1);
		if (k) {
			memcpy(k->name, name, strlen(name));
			k->library = library;
			k->next = library->kernels;
			library->kernels = k;
		} else {
			ret = CUDA_ERROR_OUT_OF_MEMORY;
		}
	}
	if (k)
		*kernel = k;
	leave();
	return ret;
}

/* The module of the current context. Called after enter_library; leaves. */
static CUresult in_current(CUlibrary library, CUmodule *out)
{
	CUcontext ctx = current_context();

	if (!ctx)
		return CUDA_ERROR_INVALID_CONTEXT;
	if (!context_alive(ctx))
		return CUDA_ERROR_CONTEXT_IS_DESTROYED;
	return instance(library, ctx, out);
}

EXPORT CUresult cuLibraryGetModule(CUmodule *module, CUlibrary library)
{
	CUresult ret = enter_library(library);

	if (ret != CUDA_SUCCESS)
		return ret;
	ret = module ? in_current(library, module) : CUDA_ERROR_INVALID_VALUE;
	leave();
	return ret;
}

static CUresult library_variable(CUdeviceptr *dptr, size_t *bytes, CUlibrary library, const char *name, bool managed)
{
	CUmodule m;
	CUresult ret = enter_library(library);

	if (ret != CUDA_SUCCESS)
		return ret;
	ret = name && (dptr || bytes) ? in_current(library, &m) : CUDA_ERROR_INVALID_VALUE;
	if (ret == CUDA_SUCCESS)
		ret = find_variable(m, name, managed, dptr, bytes);
	leave();
	return ret;
}

EXPORT CUresult cuLibraryGetGlobal(CUdeviceptr *dptr, size_t *bytes, CUlibrary library, const char *name)
{
	return library_variable(dptr, bytes, library, name, false);
}

EXPORT CUresult cuLibraryGetManaged(CUdeviceptr *dptr, size_t *bytes, CUlibrary library, const char *name)
{
	return library_variable(dptr, bytes, library, name, true);
}

EXPORT CUresult cuKernelGetFunction(CUfunction *function, CUkernel kernel)
{
	CUmodule m;
	CUkernel k;
	CUresult ret = enter();

	if (ret != CUDA_SUCCESS)
		return ret;
	k = find_kernel(kernel);
	if (!k)
		ret = CUDA_ERROR_INVALID_HANDLE;
	else
		ret = function ? in_current(k->library, &m) : CUDA_ERROR_INVALID_VALUE;
	if (ret == CUDA_SUCCESS)
		ret = get_function(m, k->name, function);
	leave();
	return ret;
}

EXPORT CUresult cuKernelGetLibrary(CUlibrary *library, CUkernel kernel)
{
	CUkernel k;
	CUresult ret = enter();

	if (ret != CUDA_SUCCESS)
		return ret;
	k = find_kernel(kernel);
	if (!library || !k)
		ret = library ? CUDA_ERROR_INVALID_HANDLE : CUDA_ERROR_INVALID_VALUE;
	else
		*library = k->library;
	leave();
	return ret;
}

EXPORT CUresult cuKernelGetName(const char **name, CUkernel kernel)
{
	CUkernel k;
	CUresult ret = enter();

	if (ret != CUDA_SUCCESS)
		return ret;
	k = find_kernel(kernel);
	if (!name || !k)
		ret = name ? CUDA_ERROR_INVALID_HANDLE : CUDA_ERROR_INVALID_VALUE;
	else
		*name = k->name;
	leave();
	return ret;
}

/* ---- what launches need of them ------------------------------------------------------------ */

static CUfunction find_function(const void *function)
{
	CUfunction f;
	CUmodule m;

	for (m = modules; m; m = m->next)
		for (f = m->functions; f; f = f->next)
			if (f == function)
				return f;
	return NULL;
}

/*
 * The function behind a handle, loaded if it is a library's kernel that ctx does not have yet:
 * a kernel may stand where a function is asked for.
 */
CUresult function_resolve(CUfunction handle, CUcontext ctx, CUfunction *out)
{
	CUkernel k;
	CUmodule m;
	CUresult ret;

	*out = find_function(handle);
	if (*out)
		return CUDA_SUCCESS;
	k = find_kernel(handle);
	if (!k)
		return CUDA_ERROR_INVALID_HANDLE;
	ret = instance(k->library, ctx, &m);
	return ret == CUDA_SUCCESS ? get_function(m, k->name, out) : ret;
}

uint64_t function_time(CUfunction f)
{
	return f->time_ns;
}

static int function_attribute(const struct CUfunc_st *f, unsigned int attribute)
{
	switch (attribute) {
	case CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES:
		return f->dynamic_shared;
	case CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT:
		return f->carveout;
	default:
		return attribute_on(&f->module->ctx->dev->info, attribute);
	}
}

/* Needs no context: a library may be loaded before there is one. */
EXPORT CUresult cuKernelGetAttribute(int *value, CUfunction_attribute attribute, CUkernel kernel, CUdevice dev)
{
	CUresult ret = enter();

	if (ret != CUDA_SUCCESS)
		return ret;
	if (!value || (unsigned int)attribute >= SIM_FUNCTION_ATTR_MAX)
		ret = CUDA_ERROR_INVALID_VALUE;
	else if (!find_kernel(kernel))
		ret = CUDA_ERROR_INVALID_HANDLE;
	else if (!device_at(dev))
		ret = CUDA_ERROR_INVALID_DEVICE;
	else
		*value = attribute_on(&device_at(dev)->info, (unsigned int)attribute);
	leave();
	return ret;
}

/* A kernel stands for its function in the current context. */
static CUresult resolve_in_current(CUfunction handle, CUfunction *f)
{
	CUcontext ctx = current_context();

	*f = find_function(handle);
	if (*f)
		return CUDA_SUCCESS;
	return ctx && context_alive(ctx) ? function_resolve(handle, ctx, f) : CUDA_ERROR_INVALID_HANDLE;
}

EXPORT CUresult cuFuncGetAttribute(int *value, CUfunction_attribute attribute, CUfunction function)
{
	CUfunction f;
	CUresult ret = enter();

	if (ret != CUDA_SUCCESS)
		return ret;
	ret = value && (unsigned int)attribute < SIM_FUNCTION_ATTR_MAX ? resolve_in_current(function, &f) : CUDA_ERROR_INVALID_VALUE;
	if (ret == CUDA_SUCCESS)
		*value = function_attribute(f, (unsigned int)attribute);
	leave();
	return ret;
}

/* Sizes of clusters are taken and not kept: nothing launches by them. */
EXPORT CUresult cuFuncSetAttribute(CUfunction function, CUfunction_attribute attribute, int value)
{
	CUfunction f;
	CUresult ret = enter();

	if (ret != CUDA_SUCCESS)
		return ret;
	ret = (unsigned int)attribute < SIM_FUNCTION_ATTR_MAX ? resolve_in_current(function, &f) : CUDA_ERROR_INVALID_VALUE;
	if (ret == CUDA_SUCCESS) {
		switch ((unsigned int)attribute) {
		case CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES:
			if (value < 0 || value > device_attribute(&f->module->ctx->dev->info, SIM_ATTR_SHARED_ON_REQUEST))
				ret = CUDA_ERROR_INVALID_VALUE;
			else
				f->dynamic_shared = value;
			break;
		case CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT:
			if (value < -1 || value > 100)
				ret = CUDA_ERROR_INVALID_VALUE;
			else
				f->carveout = value;
			break;
		default:
			if ((unsigned int)attribute < CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES)
				ret = CUDA_ERROR_INVALID_VALUE; /* for reading only */
		}
	}
	leave();
	return ret;
}

/* By threads, blocks and shared memory; no function uses registers. */
EXPORT CUresult cuOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int *blocks, CUfunction function, int size, size_t shared,
								     unsigned int flags)
{
	const struct simgpu_device *info;
	size_t most, each;
	CUfunction f;
	CUresult ret = enter();

	if (ret != CUDA_SUCCESS)
		return ret;
	ret = blocks && size > 0 && flags <= 1 ? resolve_in_current(function, &f) : CUDA_ERROR_INVALID_VALUE;
	if (ret == CUDA_SUCCESS) {
		info = &f->module->ctx->dev->info;
		most = (size_t)device_attribute(info, SIM_ATTR_BLOCKS_PER_SM);
		if (info->threads_per_sm / (unsigned int)size < most)
			most = info->threads_per_sm / (unsigned int)size;
		each = shared + (size_t)device_attribute(info, SIM_ATTR_RESERVED_SHARED);
		if (each > 0 && (size_t)device_attribute(info, SIM_ATTR_SHARED_PER_SM) / each < most)
			most = (size_t)device_attribute(info, SIM_ATTR_SHARED_PER_SM) / each;
		*blocks = size > 1024 || shared > (size_t)f->dynamic_shared ? 0 : (int)most;
	}
	leave();
	return ret;
}

EXPORT CUresult cuOccupancyMaxActiveBlocksPerMultiprocessor(int *blocks, CUfunction function, int size, size_t shared)
{
	return cuOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(blocks, function, size, shared, 0);
}

EXPORT CUresult cuFuncGetName(const char **name, CUfunction function)
{
	CUfunction f;
	CUresult ret = enter();

	if (ret != CUDA_SUCCESS)
		return ret;
	f = find_function(function);
	if (!name || !f)
		ret = name ? CUDA_ERROR_INVALID_HANDLE : CUDA_ERROR_INVALID_VALUE;
	else
		*name = f->name;
	leave();
	return ret;
}

EXPORT CUresult cuFuncGetModule(CUmodule *module, CUfunction function)
{
	CUfunction f;
	CUresult ret = enter();

	if (ret != CUDA_SUCCESS)
		return ret;
	f = find_function(function);
	if (!module || !f)
		ret = module ? CUDA_ERROR_INVALID_HANDLE : CUDA_ERROR_INVALID_VALUE;
	else
		*module = f->module;
	leave();
	return ret;
}

/* A function that there is, is loaded. */
EXPORT CUresult cuFuncIsLoaded(CUfunctionLoadingState *state, CUfunction function)
{
	CUresult ret = enter();

	if (ret != CUDA_SUCCESS)
		return ret;
	if (!state || !find_function(function))
		ret = state ? CUDA_ERROR_INVALID_HANDLE : CUDA_ERROR_INVALID_VALUE;
	else
		*state = 1;
	leave();
	return ret;
}

EXPORT CUresult cuFuncLoad(CUfunction function)
{
	CUresult ret = enter();

	if (ret != CUDA_SUCCESS)
		return ret;
	if (!find_function(function))
		ret = CUDA_ERROR_INVALID_HANDLE;
	leave();
	return ret;
}
