/* SPDX-License-Identifier: Apache-2.0 */
/*
 * nccl.c: what programs that link libnccl.so.2 need of it to be loaded. GPUs that are simulated do not talk to one
 * another: there is no communicator, and so nothing is ever sent.
 */
#include <stddef.h>

#define EXPORT __attribute__((visibility("default")))

typedef enum { ncclSuccess = 0, ncclSystemError = 2, ncclInvalidUsage = 5 } ncclResult_t;
typedef struct ncclComm *ncclComm_t;

EXPORT ncclResult_t ncclCommInitAll(ncclComm_t *comms, int count, const int *devices)
{
	(void)devices;
	for (int i = 0; i < count; i++)
		comms[i] = NULL;
	return ncclSystemError;
}

EXPORT ncclResult_t ncclCommDestroy(ncclComm_t comm)
{
	return comm ? ncclInvalidUsage : ncclSuccess;
}

EXPORT ncclResult_t ncclAllReduce(const void *from, void *to, size_t count, int type, int operation, ncclComm_t comm, void *stream)
{
	(void)from, (void)to, (void)count, (void)type, (void)operation, (void)comm, (void)stream;
	return ncclInvalidUsage;
}

EXPORT ncclResult_t ncclGroupStart(void)
{
	return ncclSuccess;
}

EXPORT ncclResult_t ncclGroupEnd(void)
{
	return ncclSuccess;
}

EXPORT const char *ncclGetErrorString(ncclResult_t result)
{
	switch (result) {
	case ncclSuccess:
		return "no error";
	case ncclSystemError:
		return "unhandled system error";
	case ncclInvalidUsage:
		return "invalid usage";
	}
	return "unknown result code";
}
