/* SPDX-License-Identifier: Apache-2.0 */
/*
 * simgpu_client.h: the few lines every client of simgpud needs. Header only, so that a
 * static program that speaks to the "device" itself can use it without a library.
 */
#ifndef SIMGPU_CLIENT_H
#define SIMGPU_CLIENT_H

#ifndef _GNU_SOURCE
#error "define _GNU_SOURCE before the first include"
#endif

#include "simgpu.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/uio.h>
#include <sys/un.h>
#include <unistd.h>

static inline const char *simgpu_dir(void)
{
	const char *dir = secure_getenv(SIMGPU_DIR_ENV);

	return dir && *dir ? dir : SIMGPU_DIR_DEFAULT;
}

/* Path of socket `name` ("ctl", "gpu0") into `path`; -1 with ENAMETOOLONG if it does not fit. */
static inline int simgpu_path(char *path, size_t size, const char *name)
{
	int n = snprintf(path, size, "%s/%s", simgpu_dir(), name);

	if (n < 0 || (size_t)n >= size) {
		errno = ENAMETOOLONG;
		return -1;
	}
	return 0;
}

/* Opens socket `name`. Returns a close-on-exec descriptor, or -1 with errno. */
static inline int simgpu_open(const char *name)
{
	struct sockaddr_un addr;
	int fd, saved;

	memset(&addr, 0, sizeof(addr));
	addr.sun_family = AF_UNIX;
	if (simgpu_path(addr.sun_path, sizeof(addr.sun_path), name) < 0)
		return -1;
	fd = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0);
	if (fd < 0)
		return -1;
	while (connect(fd, (struct sockaddr *)&addr, sizeof(addr)) < 0) {
		if (errno == EINTR)
			continue;
		saved = errno;
		close(fd);
		errno = saved;
		return -1;
	}
	return fd;
}

/*
 * Sends `req` (magic is filled in), with descriptor `*pass` if that is one, and waits for the
 * answer. `payload` takes up to `*payload_len` bytes and `*payload_len` becomes what came; `*got`
 * becomes the descriptor that came with it, or -1. All of them may be NULL. Returns 0 if an
 * answer came, whatever its status says, and -1 with errno if none did: the driver is gone.
 */
static inline int simgpu_exchange(int fd, struct simgpu_req *req, struct simgpu_rep *rep, void *payload,
				  size_t *payload_len, const int *pass, int *got)
{
	union {
		struct cmsghdr align;
		char room[CMSG_SPACE(sizeof(int))];
	} control;
	struct cmsghdr *c;
	struct iovec iov[2];
	struct msghdr msg;
	ssize_t n;

	req->magic = SIMGPU_MAGIC;
	memset(&msg, 0, sizeof(msg));
	memset(&control, 0, sizeof(control));
	iov[0].iov_base = req;
	iov[0].iov_len = sizeof(*req);
	msg.msg_iov = iov;
	msg.msg_iovlen = 1;
	if (pass && *pass >= 0) {
		msg.msg_control = control.room;
		msg.msg_controllen = sizeof(control.room);
		c = CMSG_FIRSTHDR(&msg);
		c->cmsg_level = SOL_SOCKET;
		c->cmsg_type = SCM_RIGHTS;
		c->cmsg_len = CMSG_LEN(sizeof(int));
		memcpy(CMSG_DATA(c), pass, sizeof(int));
	}
	do
		n = sendmsg(fd, &msg, MSG_NOSIGNAL);
	while (n < 0 && errno == EINTR);
	if (n < 0)
		return -1;

	memset(&msg, 0, sizeof(msg));
	memset(rep, 0, sizeof(*rep));
	iov[0].iov_base = rep;
	iov[0].iov_len = sizeof(*rep);
	iov[1].iov_base = payload;
	iov[1].iov_len = payload_len ? *payload_len : 0;
	msg.msg_iov = iov;
	msg.msg_iovlen = payload_len ? 2 : 1;
	if (got) {
		*got = -1;
		msg.msg_control = control.room;
		msg.msg_controllen = sizeof(control.room);
	}
	do
		n = recvmsg(fd, &msg, MSG_CMSG_CLOEXEC);
	while (n < 0 && errno == EINTR);
	if (n < 0)
		return -1;
	c = got ? CMSG_FIRSTHDR(&msg) : NULL;
	if (c && c->cmsg_level == SOL_SOCKET && c->cmsg_type == SCM_RIGHTS && c->cmsg_len == CMSG_LEN(sizeof(int)))
		memcpy(got, CMSG_DATA(c), sizeof(int));
	if (n == 0 || (size_t)n < sizeof(*rep) || rep->magic != SIMGPU_MAGIC || (msg.msg_flags & MSG_TRUNC)) {
		if (got && *got >= 0)
			close(*got);
		errno = n == 0 ? ECONNRESET : EPROTO;
		return -1;
	}
	if (payload_len)
		*payload_len = (size_t)n - sizeof(*rep);
	return 0;
}

/* The same without descriptors. */
static inline int simgpu_call(int fd, struct simgpu_req *req, struct simgpu_rep *rep, void *payload,
			      size_t *payload_len)
{
	return simgpu_exchange(fd, req, rep, payload, payload_len, NULL, NULL);
}

#endif /* SIMGPU_CLIENT_H */
