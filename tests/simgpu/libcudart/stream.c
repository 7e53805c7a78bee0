/* SPDX-License-Identifier: Apache-2.0 */
/* stream.c: streams, events, capture and graphs. */
#include "internal.h"

/* Defines a function that takes a stream, for both meanings of the null stream. */
#define BOTH(name, parameters, call)                         \
	EXPORT cudaError_t name parameters                   \
	{                                                    \
		const enum variant v = LEGACY;               \
		IN_CONTEXT(call);                            \
	}                                                    \
	EXPORT cudaError_t name##_ptsz parameters            \
	{                                                    \
		const enum variant v = PER_THREAD;           \
		IN_CONTEXT(call);                            \
	}

BOTH(cudaStreamSynchronize, (cudaStream_t stream), CALL(v, cuStreamSynchronize, stream))
BOTH(cudaStreamQuery, (cudaStream_t stream), CALL(v, cuStreamQuery, stream))
BOTH(cudaStreamWaitEvent, (cudaStream_t stream, cudaEvent_t event, unsigned int flags), CALL(v, cuStreamWaitEvent, stream, event, flags))
BOTH(cudaStreamBeginCapture, (cudaStream_t stream, enum cudaStreamCaptureMode mode),
     CALL(v, cuStreamBeginCapture, stream, (CUstreamCaptureMode)mode))
BOTH(cudaStreamEndCapture, (cudaStream_t stream, cudaGraph_t *graph), CALL(v, cuStreamEndCapture, stream, graph))
BOTH(cudaEventRecord, (cudaEvent_t event, cudaStream_t stream), CALL(v, cuEventRecord, event, stream))
BOTH(cudaGraphLaunch, (cudaGraphExec_t exec, cudaStream_t stream), CALL(v, cuGraphLaunch, exec, stream))

static cudaError_t is_capturing(enum variant v, cudaStream_t stream, enum cudaStreamCaptureStatus *status)
{
	CUstreamCaptureStatus s;
	cudaError_t e = status ? CALL(v, cuStreamIsCapturing, stream, &s) : cudaErrorInvalidValue;

	if (e == cudaSuccess)
		*status = (enum cudaStreamCaptureStatus)s;
	return e;
}

BOTH(cudaStreamIsCapturing, (cudaStream_t stream, enum cudaStreamCaptureStatus *status), is_capturing(v, stream, status))

EXPORT cudaError_t cudaStreamCreateWithFlags(cudaStream_t *stream, unsigned int flags)
{
	IN_CONTEXT(CALL(LEGACY, cuStreamCreate, stream, flags));
}

EXPORT cudaError_t cudaStreamCreate(cudaStream_t *stream)
{
	IN_CONTEXT(CALL(LEGACY, cuStreamCreate, stream, 0));
}

EXPORT cudaError_t cudaStreamDestroy(cudaStream_t stream)
{
	IN_CONTEXT(CALL(LEGACY, cuStreamDestroy, stream));
}

EXPORT cudaError_t cudaEventCreateWithFlags(cudaEvent_t *event, unsigned int flags)
{
	IN_CONTEXT(CALL(LEGACY, cuEventCreate, event, flags));
}

EXPORT cudaError_t cudaEventCreate(cudaEvent_t *event)
{
	IN_CONTEXT(CALL(LEGACY, cuEventCreate, event, 0));
}

EXPORT cudaError_t cudaEventDestroy(cudaEvent_t event)
{
	IN_CONTEXT(CALL(LEGACY, cuEventDestroy, event));
}

EXPORT cudaError_t cudaEventQuery(cudaEvent_t event)
{
	IN_CONTEXT(CALL(LEGACY, cuEventQuery, event));
}

EXPORT cudaError_t cudaEventSynchronize(cudaEvent_t event)
{
	IN_CONTEXT(CALL(LEGACY, cuEventSynchronize, event));
}

EXPORT cudaError_t cudaEventElapsedTime(float *ms, cudaEvent_t from, cudaEvent_t to)
{
	IN_CONTEXT(CALL(LEGACY, cuEventElapsedTime, ms, from, to));
}

EXPORT cudaError_t cudaGraphInstantiate(cudaGraphExec_t *exec, cudaGraph_t graph, unsigned long long flags)
{
	IN_CONTEXT(CALL(LEGACY, cuGraphInstantiateWithFlags, exec, graph, flags));
}

EXPORT cudaError_t cudaGraphExecUpdate(cudaGraphExec_t exec, cudaGraph_t graph, cudaGraphExecUpdateResultInfo *info)
{
	IN_CONTEXT(CALL(LEGACY, cuGraphExecUpdate, exec, graph, (CUgraphExecUpdateResultInfo *)info));
}

EXPORT cudaError_t cudaGraphExecDestroy(cudaGraphExec_t exec)
{
	IN_CONTEXT(CALL(LEGACY, cuGraphExecDestroy, exec));
}

EXPORT cudaError_t cudaGraphDestroy(cudaGraph_t graph)
{
	IN_CONTEXT(CALL(LEGACY, cuGraphDestroy, graph));
}
