/* SPDX-License-Identifier: Apache-2.0 */
#ifndef GPUFENCE_CRC32C_H
#define GPUFENCE_CRC32C_H

#include <stdint.h>

/* Castagnoli's checksum, continued word by word (little-endian): begin with CRC32C_BEGIN, end
 * with crc32c_end. */
#define CRC32C_BEGIN UINT32_MAX
uint32_t crc32c_word(uint32_t crc, uint64_t word);
static inline uint32_t crc32c_end(uint32_t crc) { return ~crc; }

#endif
