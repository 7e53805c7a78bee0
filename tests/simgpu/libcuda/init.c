/* SPDX-License-Identifier: Apache-2.0 */
/* init.c: finding the GPUs, talking to simgpud, errors. */
#include "internal.h"

#include <ctype.h>
#include <stdatomic.h>
#include <strings.h>
#include <time.h>

pthread_mutex_t big = PTHREAD_MUTEX_INITIALIZER;
struct device *devices;
int device_count;

static pid_t owner; /* the process that initialised; 0: none did */
static atomic_int cuda_version; /* 0: not asked yet */

int64_t now_ns(void)
{
	struct timespec ts;

	clock_gettime(CLOCK_MONOTONIC, &ts);
	return (int64_t)ts.tv_sec * 1000000000 + ts.tv_nsec;
}

/* ---- which GPUs -------------------------------------------------------------------- */

/* Opens a device file into d, if this process has it and it can be allocated through. */
static bool open_one(struct device *d, const char *name)
{
	struct simgpu_req req = {.op = SIMGPU_OP_INFO};
	struct simgpu_rep rep;
	size_t len = sizeof(d->info);

	d->fd = simgpu_open(name);
	if (d->fd < 0)
		return false;
	if (simgpu_call(d->fd, &req, &rep, &d->info, &len) == 0 && rep.status == SIMGPU_OK && len == sizeof(d->info) &&
	    d->info.mig_instances == 0)
		return true;
	close(d->fd);
	return false;
}

/* Opens every GPU and MIG instance whose socket this process has, by minor number and index. */
static unsigned int open_all(struct device *found)
{
	unsigned int minor, index, n = 0;
	char name[32];

	for (minor = 0; minor < SIMGPU_GPUS_MAX; minor++) {
		snprintf(name, sizeof(name), SIMGPU_GPU_PREFIX "%u", minor);
		if (n < SIMGPU_GPUS_MAX && open_one(&found[n], name))
			n++;
		for (index = 0; index < SIMGPU_MIG_MAX; index++) {
			snprintf(name, sizeof(name), SIMGPU_GPU_PREFIX "%u" SIMGPU_MIG_INFIX "%u", minor, index);
			if (n < SIMGPU_GPUS_MAX && open_one(&found[n], name))
				n++;
		}
	}
	return n;
}

/* Which GPU a token of CUDA_VISIBLE_DEVICES means: an index, or the beginning of one UUID. */
static int pick(const struct device *found, unsigned int n, const char *token, size_t len)
{
	unsigned int i, matches = 0;
	int match = -1;
	char *end;
	long index;

	if (len > 4 && (strncasecmp(token, "GPU-", 4) == 0 || strncasecmp(token, "MIG-", 4) == 0)) {
		for (i = 0; i < n; i++) {
			if (strncasecmp(found[i].info.uuid_text, token, len) == 0) {
				match = (int)i;
				matches++;
			}
		}
		return matches == 1 ? match : -1;
	}
	index = strtol(token, &end, 10);
	if (end == token || (size_t)(end - token) != len || index < 0 || index >= (long)n)
		return -1;
	return (int)index;
}

/*
 * What is visible, in the order of CUDA_VISIBLE_DEVICES: the list ends at the first entry
 * that means nothing, and one that names a GPU twice makes none visible.
 */
static int visible(const struct device *found, unsigned int n, int *order)
{
	const char *list = getenv("CUDA_VISIBLE_DEVICES");
	int count = 0, i, at;
	size_t len;

	if (!list) {
		for (i = 0; i < (int)n; i++)
			order[i] = i;
		return (int)n;
	}
	for (;; list += len + 1) {
		while (isspace((unsigned char)*list))
			list++;
		len = strcspn(list, ",");
		while (len > 0 && isspace((unsigned char)list[len - 1]))
			len--;
		at = pick(found, n, list, len);
		if (at < 0)
			return count;
		for (i = 0; i < count; i++)
			if (order[i] == at)
				return 0;
		order[count++] = at;
		len = strcspn(list, ",");
		if (list[len] == 0)
			return count;
	}
}

/* A process that has a MIG instance has that one alone: the first that is visible. */
static int one_instance(const struct device *found, int *order, int count)
{
	int i;

	for (i = 0; i < count; i++) {
		if (found[order[i]].info.mig_instance > 0) {
			order[0] = order[i];
			return 1;
		}
	}
	return count;
}

static CUresult discover(void)
{
	struct device *found = calloc(SIMGPU_GPUS_MAX, sizeof(*found)), *chosen;
	int order[SIMGPU_GPUS_MAX], count, i;
	unsigned int n, j;

	if (!found)
		return CUDA_ERROR_OUT_OF_MEMORY;
	n = open_all(found);
	count = one_instance(found, order, visible(found, n, order));
	chosen = calloc((size_t)count + 1, sizeof(*chosen));
	for (i = 0; chosen && i < count; i++) {
		chosen[i] = found[order[i]];
		chosen[i].ordinal = i;
		found[order[i]].fd = -1;
	}
	for (j = 0; j < n; j++)
		if (found[j].fd >= 0)
			close(found[j].fd);
	free(found);
	if (!chosen)
		return CUDA_ERROR_OUT_OF_MEMORY;
	if (count == 0) {
		free(chosen);
		return CUDA_ERROR_NO_DEVICE;
	}
	for (i = 0; i < count; i++) {
		chosen[i].primary.dev = &chosen[i];
		chosen[i].primary.primary = true;
	}
	devices = chosen;
	device_count = count;
	return CUDA_SUCCESS;
}

EXPORT CUresult cuInit(unsigned int flags)
{
	CUresult ret = CUDA_SUCCESS;

	if (owner != 0 && owner != getpid())
		return CUDA_ERROR_NOT_INITIALIZED; /* a forked child */
	if (flags != 0)
		return CUDA_ERROR_INVALID_VALUE;
	pthread_mutex_lock(&big);
	if (owner == 0) {
		ret = discover();
		if (ret == CUDA_SUCCESS)
			owner = getpid();
	}
	pthread_mutex_unlock(&big);
	return ret;
}

/* What the driver says, without cuInit or a GPU. Without a driver: what the library is of. */
int driver_version(void)
{
	struct simgpu_req req = {.op = SIMGPU_OP_NODE};
	struct simgpu_node node;
	struct simgpu_rep rep;
	size_t len = sizeof(node);
	int version = atomic_load(&cuda_version), fd;

	if (version == 0) {
		fd = simgpu_open(SIMGPU_CTL);
		if (fd >= 0) {
			if (simgpu_call(fd, &req, &rep, &node, &len) == 0 && rep.status == SIMGPU_OK && len == sizeof(node))
				version = (int)node.cuda_version;
			close(fd);
		}
		atomic_store(&cuda_version, version);
	}
	return version ? version : 12080;
}

EXPORT CUresult cuDriverGetVersion(int *version)
{
	if (!version)
		return CUDA_ERROR_INVALID_VALUE;
	*version = driver_version();
	return CUDA_SUCCESS;
}

/* ---- around every call ------------------------------------------------------------- */

CUresult enter(void)
{
	if (owner == 0 || owner != getpid())
		return CUDA_ERROR_NOT_INITIALIZED;
	pthread_mutex_lock(&big);
	return CUDA_SUCCESS;
}

void leave(void)
{
	pthread_mutex_unlock(&big);
}

CUresult enter_context(CUcontext *ctx)
{
	CUresult ret = enter();

	if (ret != CUDA_SUCCESS)
		return ret;
	*ctx = current_context();
	if (!*ctx)
		ret = CUDA_ERROR_INVALID_CONTEXT;
	else if (!context_alive(*ctx))
		ret = CUDA_ERROR_CONTEXT_IS_DESTROYED;
	if (ret != CUDA_SUCCESS)
		leave();
	return ret;
}

struct device *device_at(CUdevice dev)
{
	return dev >= 0 && dev < device_count ? &devices[dev] : NULL;
}

CUresult call_with(struct device *dev, struct simgpu_req *req, struct simgpu_rep *rep, const int *pass, int *got)
{
	if (simgpu_exchange(dev->fd, req, rep, NULL, NULL, pass, got) < 0)
		return CUDA_ERROR_UNKNOWN; /* the driver is gone */
	switch (rep->status) {
	case SIMGPU_OK:
		return CUDA_SUCCESS;
	case SIMGPU_E_NO_MEMORY:
		return CUDA_ERROR_OUT_OF_MEMORY;
	case SIMGPU_E_INVALID:
		return CUDA_ERROR_INVALID_VALUE;
	case SIMGPU_E_NOT_FOUND:
		return CUDA_ERROR_INVALID_HANDLE;
	case SIMGPU_E_BUSY:
		return CUDA_ERROR_DEVICE_UNAVAILABLE;
	case SIMGPU_E_ELSEWHERE:
		return CUDA_ERROR_INVALID_DEVICE;
	default:
		return CUDA_ERROR_UNKNOWN;
	}
}

CUresult call(struct device *dev, struct simgpu_req *req, struct simgpu_rep *rep)
{
	return call_with(dev, req, rep, NULL, NULL);
}

void give_memory(struct device *dev, uint64_t handle)
{
	struct simgpu_req req = {.op = SIMGPU_OP_FREE, .arg = {handle}};
	struct simgpu_rep rep;

	/* Nothing to be done about a driver that has gone: the memory went with it. */
	(void)call(dev, &req, &rep);
}

void settings(struct device *dev, size_t *pool_step, size_t *module_bytes)
{
	struct simgpu_req req = {.op = SIMGPU_OP_SETTINGS};
	struct simgpu_rep rep;
	bool ok = call(dev, &req, &rep) == CUDA_SUCCESS;

	/* Without a driver the next request fails, and says so. */
	if (pool_step)
		*pool_step = ok ? rep.val[0] : PAGE;
	if (module_bytes)
		*module_bytes = ok ? rep.val[1] : 0;
}

/* ---- errors ------------------------------------------------------------------------ */

static const struct {
	CUresult code;
	const char *name, *text;
} errors[] = {
	{CUDA_SUCCESS, "CUDA_SUCCESS", "no error"},
	{CUDA_ERROR_INVALID_VALUE, "CUDA_ERROR_INVALID_VALUE", "invalid argument"},
	{CUDA_ERROR_OUT_OF_MEMORY, "CUDA_ERROR_OUT_OF_MEMORY", "out of memory"},
	{CUDA_ERROR_NOT_INITIALIZED, "CUDA_ERROR_NOT_INITIALIZED", "initialization error"},
	{CUDA_ERROR_DEVICE_UNAVAILABLE, "CUDA_ERROR_DEVICE_UNAVAILABLE", "CUDA-capable device(s) is/are busy or unavailable"},
	{CUDA_ERROR_NO_DEVICE, "CUDA_ERROR_NO_DEVICE", "no CUDA-capable device is detected"},
	{CUDA_ERROR_INVALID_DEVICE, "CUDA_ERROR_INVALID_DEVICE", "invalid device ordinal"},
	{CUDA_ERROR_INVALID_IMAGE, "CUDA_ERROR_INVALID_IMAGE", "device kernel image is invalid"},
	{CUDA_ERROR_INVALID_CONTEXT, "CUDA_ERROR_INVALID_CONTEXT", "invalid device context"},
	{CUDA_ERROR_ALREADY_MAPPED, "CUDA_ERROR_ALREADY_MAPPED", "resource already mapped"},
	{CUDA_ERROR_ILLEGAL_STATE, "CUDA_ERROR_ILLEGAL_STATE", "the operation cannot be performed in the present state"},
	{CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED, "CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED", "operation not permitted when stream is capturing"},
	{CUDA_ERROR_STREAM_CAPTURE_INVALIDATED, "CUDA_ERROR_STREAM_CAPTURE_INVALIDATED",
	 "operation failed due to a previous error during capture"},
	{CUDA_ERROR_STREAM_CAPTURE_UNMATCHED, "CUDA_ERROR_STREAM_CAPTURE_UNMATCHED", "capture was not ended in the same stream as it began"},
	{CUDA_ERROR_STREAM_CAPTURE_IMPLICIT, "CUDA_ERROR_STREAM_CAPTURE_IMPLICIT",
	 "operation would make the legacy stream depend on a capturing blocking stream"},
	{CUDA_ERROR_STREAM_CAPTURE_WRONG_THREAD, "CUDA_ERROR_STREAM_CAPTURE_WRONG_THREAD",
	 "attempt to terminate a thread-local capture sequence from another thread"},
	{CUDA_ERROR_GRAPH_EXEC_UPDATE_FAILURE, "CUDA_ERROR_GRAPH_EXEC_UPDATE_FAILURE",
	 "the graph update was not performed because it included changes which violated constraints"},
	{CUDA_ERROR_INVALID_RESOURCE_TYPE, "CUDA_ERROR_INVALID_RESOURCE_TYPE", "invalid resource type"},
	{CUDA_ERROR_INVALID_RESOURCE_CONFIGURATION, "CUDA_ERROR_INVALID_RESOURCE_CONFIGURATION", "invalid resource configuration"},
	{CUDA_ERROR_FILE_NOT_FOUND, "CUDA_ERROR_FILE_NOT_FOUND", "file not found"},
	{CUDA_ERROR_INVALID_HANDLE, "CUDA_ERROR_INVALID_HANDLE", "invalid resource handle"},
	{CUDA_ERROR_NOT_FOUND, "CUDA_ERROR_NOT_FOUND", "named symbol not found"},
	{CUDA_ERROR_NOT_READY, "CUDA_ERROR_NOT_READY", "device not ready"},
	{CUDA_ERROR_PRIMARY_CONTEXT_ACTIVE, "CUDA_ERROR_PRIMARY_CONTEXT_ACTIVE", "cannot set while device is active in this process"},
	{CUDA_ERROR_CONTEXT_IS_DESTROYED, "CUDA_ERROR_CONTEXT_IS_DESTROYED", "context is destroyed"},
	{CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED, "CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED",
	 "part or all of the requested memory range is already mapped"},
	{CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED, "CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED",
	 "pointer does not correspond to a registered memory region"},
	{CUDA_ERROR_NOT_SUPPORTED, "CUDA_ERROR_NOT_SUPPORTED", "operation not supported"},
	{CUDA_ERROR_UNKNOWN, "CUDA_ERROR_UNKNOWN", "unknown error"},
};

EXPORT CUresult cuGetErrorName(CUresult error, const char **name)
{
	size_t i;

	if (!name)
		return CUDA_ERROR_INVALID_VALUE;
	for (i = 0; i < sizeof(errors) / sizeof(errors[0]); i++) {
		if (errors[i].code == error) {
			*name = errors[i].name;
			return CUDA_SUCCESS;
		}
	}
	*name = NULL;
	return CUDA_ERROR_INVALID_VALUE;
}

EXPORT CUresult cuGetErrorString(CUresult error, const char **text)
{
	size_t i;

	if (!text)
		return CUDA_ERROR_INVALID_VALUE;
	for (i = 0; i < sizeof(errors) / sizeof(errors[0]); i++) {
		if (errors[i].code == error) {
			*text = errors[i].text;
			return CUDA_SUCCESS;
		}
	}
	*text = NULL;
	return CUDA_ERROR_INVALID_VALUE;
}
