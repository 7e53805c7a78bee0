/* SPDX-License-Identifier: Apache-2.0 */
/*
 * peer.h: a second process of the same program, to share memory with. It has a context of its own,
 * does what it is asked, and ends with the one that started it.
 */
#ifndef COVERAGE_PEER_H
#define COVERAGE_PEER_H

#include <errno.h>
#include <sys/socket.h>

#include "rows.h"

enum peer_kind { PEER_LINEAR, PEER_PHYSICAL, PEER_POOLED };
enum peer_op {
	PEER_HELLO, /* answered once there is a context */
	PEER_OFFER, /* allocates bytes: a, and what it is opened by */
	PEER_DROP,  /* frees a */
	PEER_OPEN,  /* opens what was offered: a, b */
	PEER_CLOSE, /* lets go of a, b */
};

struct message {
	enum peer_op op;
	enum peer_kind kind;
	CUresult result;
	uint64_t a, b, bytes;
	char data[64];
};

static int peer_socket = -1;

static bool tell(int to, const struct message *m, int fd)
{
	union {
		struct cmsghdr align;
		char room[CMSG_SPACE(sizeof(int))];
	} control;
	struct iovec iov = { (void *)(uintptr_t)m, sizeof(*m) };
	struct msghdr msg = { .msg_iov = &iov, .msg_iovlen = 1 };
	if (fd >= 0) {
		memset(&control, 0, sizeof(control));
		msg.msg_control = control.room;
		msg.msg_controllen = sizeof(control.room);
		CMSG_FIRSTHDR(&msg)->cmsg_level = SOL_SOCKET;
		CMSG_FIRSTHDR(&msg)->cmsg_type = SCM_RIGHTS;
		CMSG_FIRSTHDR(&msg)->cmsg_len = CMSG_LEN(sizeof(int));
		memcpy(CMSG_DATA(CMSG_FIRSTHDR(&msg)), &fd, sizeof(int));
	}
	return sendmsg(to, &msg, MSG_NOSIGNAL) == sizeof(*m);
}

static bool hear(int from, struct message *m, int *fd)
{
	union {
		struct cmsghdr align;
		char room[CMSG_SPACE(sizeof(int))];
	} control;
	struct iovec iov = { m, sizeof(*m) };
	struct msghdr msg = { .msg_iov = &iov, .msg_iovlen = 1, .msg_control = control.room, .msg_controllen = sizeof(control.room) };
	*fd = -1;
	if (recvmsg(from, &msg, MSG_CMSG_CLOEXEC) != sizeof(*m))
		return false;
	if (msg.msg_controllen > 0 && CMSG_FIRSTHDR(&msg))
		memcpy(fd, CMSG_DATA(CMSG_FIRSTHDR(&msg)), sizeof(int));
	return true;
}

/* Asks the other process; what it says is its call's result. */
static CUresult peer_ask(struct message *m, int fd, int *got)
{
	int unwanted = -1;
	if (!tell(peer_socket, m, fd) || !hear(peer_socket, m, got ? got : &unwanted))
		return CUDA_ERROR_UNKNOWN; /* it has gone */
	if (!got && unwanted >= 0)
		close(unwanted);
	return m->result;
}

/* Starts it, if there is none. */
static CUresult peer_start(void)
{
	struct message m = { .op = PEER_HELLO };
	int pair[2];
	if (peer_socket >= 0)
		return CUDA_SUCCESS;
	if (socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, pair) < 0)
		return CUDA_ERROR_UNKNOWN;
	pid_t pid = fork();
	if (pid == 0) {
		if (dup2(pair[1], 0) == 0)
			execl("/proc/self/exe", "coverage", "peer", (char *)NULL);
		_exit(127);
	}
	close(pair[1]);
	peer_socket = pair[0];
	return pid > 0 ? peer_ask(&m, -1, NULL) : CUDA_ERROR_UNKNOWN;
}

/* ---- the other process's side ------------------------------------------------------------------ */

static CUresult peer_pool(CUmemoryPool *own)
{
	CUmemPoolProps props = { .allocType = CU_MEM_ALLOCATION_TYPE_PINNED,
				 .handleTypes = CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR,
				 .location = { CU_MEM_LOCATION_TYPE_DEVICE, device } };
	return *own ? CUDA_SUCCESS : ASK(cuMemPoolCreate, (CUmemoryPool *, const CUmemPoolProps *), own, &props);
}

static CUresult peer_offers(struct message *m, CUmemoryPool *own, int *fd)
{
	CUmemGenericAllocationHandle h = 0;
	CUmemPoolPtrExportData data;
	CUipcMemHandle handle;
	CUdeviceptr p = 0;
	CUresult ret;
	switch (m->kind) {
	case PEER_LINEAR:
		ret = ASK(cuMemAlloc_v2, (CUdeviceptr *, size_t), &p, m->bytes);
		if (ret != CUDA_SUCCESS)
			return ret;
		CALL(cuIpcGetMemHandle, (CUipcMemHandle *, CUdeviceptr), &handle, p);
		memcpy(m->data, &handle, sizeof(handle));
		m->a = p;
		return ret;
	case PEER_PHYSICAL:
		ret = create((create_function *)(uintptr_t)symbol("cuMemCreate"), m->bytes, &h);
		if (ret != CUDA_SUCCESS)
			return ret;
		CALL(cuMemExportToShareableHandle, (void *, CUmemGenericAllocationHandle, CUmemAllocationHandleType, unsigned long long), fd, h,
		     CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, 0);
		m->a = h;
		return ret;
	case PEER_POOLED:
		ret = peer_pool(own);
		if (ret == CUDA_SUCCESS)
			ret = ASK(cuMemAllocFromPoolAsync, (CUdeviceptr *, size_t, CUmemoryPool, CUstream), &p, m->bytes, *own, NULL);
		if (ret != CUDA_SUCCESS)
			return ret;
		CALL(cuMemPoolExportToShareableHandle, (void *, CUmemoryPool, CUmemAllocationHandleType, unsigned long long), fd, *own,
		     CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, 0);
		CALL(cuMemPoolExportPointer, (CUmemPoolPtrExportData *, CUdeviceptr), &data, p);
		memcpy(m->data, &data, sizeof(data));
		m->a = p;
		return ret;
	}
	return CUDA_ERROR_INVALID_VALUE;
}

static CUresult peer_drops(const struct message *m, CUmemoryPool own)
{
	CUresult ret;
	if (m->kind == PEER_LINEAR)
		return ASK(cuMemFree_v2, (CUdeviceptr), m->a);
	if (m->kind == PEER_PHYSICAL)
		return ASK(cuMemRelease, (CUmemGenericAllocationHandle), m->a);
	ret = ASK(cuMemFreeAsync, (CUdeviceptr, CUstream), m->a, NULL);
	CALL(cuCtxSynchronize, (void));
	CALL(cuMemPoolTrimTo, (CUmemoryPool, size_t), own, 0);
	return ret;
}

static CUresult peer_opens(struct message *m, int fd)
{
	CUmemGenericAllocationHandle h = 0;
	CUmemPoolPtrExportData data;
	CUmemoryPool imported = NULL;
	CUipcMemHandle handle;
	CUdeviceptr p = 0;
	CUresult ret;
	switch (m->kind) {
	case PEER_LINEAR:
		memcpy(&handle, m->data, sizeof(handle));
		ret = ASK(cuIpcOpenMemHandle_v2, (CUdeviceptr *, CUipcMemHandle, unsigned int), &p, handle, 1);
		m->a = p;
		return ret;
	case PEER_PHYSICAL:
		ret = ASK(cuMemImportFromShareableHandle, (CUmemGenericAllocationHandle *, void *, CUmemAllocationHandleType), &h, (void *)(intptr_t)fd,
			  CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR);
		m->a = h;
		return ret;
	case PEER_POOLED:
		ret = ASK(cuMemPoolImportFromShareableHandle, (CUmemoryPool *, void *, CUmemAllocationHandleType, unsigned long long), &imported,
			  (void *)(intptr_t)fd, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, 0);
		if (ret != CUDA_SUCCESS)
			return ret;
		memcpy(&data, m->data, sizeof(data));
		ret = ASK(cuMemPoolImportPointer, (CUdeviceptr *, CUmemoryPool, CUmemPoolPtrExportData *), &p, imported, &data);
		m->a = p;
		m->b = (uintptr_t)imported;
		return ret;
	}
	return CUDA_ERROR_INVALID_VALUE;
}

static CUresult peer_closes(const struct message *m)
{
	CUresult ret;
	if (m->kind == PEER_LINEAR)
		return ASK(cuIpcCloseMemHandle, (CUdeviceptr), m->a);
	if (m->kind == PEER_PHYSICAL)
		return ASK(cuMemRelease, (CUmemGenericAllocationHandle), m->a);
	ret = ASK(cuMemFreeAsync, (CUdeviceptr, CUstream), m->a, NULL);
	CALL(cuCtxSynchronize, (void));
	CALL(cuMemPoolDestroy, (CUmemoryPool), (CUmemoryPool)(uintptr_t)m->b);
	return ret;
}

/* Until the first process goes. */
static int peer_serve(void)
{
	CUmemoryPool own = NULL;
	struct message m;
	int fd, answer;
	while (hear(0, &m, &fd)) {
		answer = -1;
		failure[0] = 0;
		switch (m.op) {
		case PEER_HELLO:
			CALL(cuInit, (unsigned int), 0);
			CALL(cuDeviceGet, (CUdevice *, int), &device, 0);
			m.result = ASK(cuCtxCreate_v2, (CUcontext *, unsigned int, CUdevice), &context, 0, device);
			break;
		case PEER_OFFER:
			m.result = peer_offers(&m, &own, &answer);
			break;
		case PEER_DROP:
			m.result = peer_drops(&m, own);
			break;
		case PEER_OPEN:
			m.result = peer_opens(&m, fd);
			break;
		case PEER_CLOSE:
			m.result = peer_closes(&m);
			break;
		}
		if (failure[0])
			m.result = CUDA_ERROR_UNKNOWN;
		if (fd >= 0)
			close(fd);
		if (!tell(0, &m, answer))
			return 1;
		if (answer >= 0)
			close(answer);
	}
	return 0;
}

#endif
