/* SPDX-License-Identifier: Apache-2.0 */
#include "stub.h"

#include <stddef.h>

#ifdef GPUFENCE_STUB_DIR
const char *const stub_dir = GPUFENCE_STUB_DIR;
#else
const char *const stub_dir = NULL;
#endif
