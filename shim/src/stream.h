/* SPDX-License-Identifier: Apache-2.0 */
/* stream.h: what the hooks want to know of the stream that a call is ordered in. */
#ifndef GPUFENCE_STREAM_H
#define GPUFENCE_STREAM_H

#include <stdbool.h>
#include <stdint.h>

#include "driver_api.h"

/* per_thread: it was given to the variant whose default stream is each thread's own. */

/* Whether calls become nodes of a graph instead of being done. */
bool stream_captures(CUstream stream, bool per_thread);

/* The device that it is on; -1 if the driver does not say: the call will fail. */
CUdevice stream_device(CUstream stream);

/* Tells streams apart, also the default streams of threads. */
uintptr_t stream_id(CUstream stream, bool per_thread);

#endif
