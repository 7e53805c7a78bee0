/* SPDX-License-Identifier: Apache-2.0 */
/*
 * vmm.h: physical memory apart from its addresses. It lives from cuMemCreate until its last handle
 * is released and its last use is undone: mappings, parts of multicast objects, tiles of sparse
 * arrays. So it is an object here, that each of these refers to, and is uncharged with the last
 * one. What is not charged (imported, on the host, a multicast object) is an object of 0 bytes,
 * so that addresses can be told apart.
 *
 * A hook pins what its call works on before the driver does it, and takes what the call ends out of
 * the table before the driver ends it: afterwards handle and address may already be another's. It
 * goes back if the driver refuses. A number of an object or list is never used again by another
 * while it is held; 0 is none.
 *
 * The table's lock is held for its own operations only, never over a driver call. Where there is
 * no memory for an entry, or the lock is not to be had, what it would have held stays charged
 * until the process ends. After fork the child starts empty.
 */
#ifndef GPUFENCE_VMM_H
#define GPUFENCE_VMM_H

#include <stdbool.h>
#include <stdint.h>

#include "account.h"

typedef uint64_t vmm_object;

/* A new object, pinned once. 0: it stays charged. */
vmm_object vmm_new(int gpu, enum account_counter counter, uint64_t bytes);

/* The object that a handle, or a mapping at that address, refers to, pinned. */
vmm_object vmm_pin_handle(uint64_t handle);
vmm_object vmm_pin_address(uint64_t address);
/* Lets go; the last one uncharges. */
void vmm_unpin(vmm_object object);

/* One more release is owed for handle; the pin becomes the handle's. A handle that was another
 * object's was given out again. */
void vmm_handle_add(uint64_t handle, vmm_object object);
/* The same for what was imported: if the handle is known, the driver has given out its own. */
void vmm_handle_import(uint64_t handle);
/* One release less; the pin becomes the caller's, who drops it or gives it back. */
vmm_object vmm_handle_take(uint64_t handle);

/* Uses: a list of them, taken out of the table. */
typedef uint32_t vmm_list;
void vmm_drop(vmm_list list);

/* [start, start + bytes) shows object from now on; the pin becomes the mapping's. */
void vmm_map_add(uint64_t start, uint64_t bytes, vmm_object object);
/* The mappings that begin in the range. */
vmm_list vmm_map_take(uint64_t start, uint64_t bytes);
void vmm_map_restore(vmm_list list);

/* A part of a multicast object refers to memory, whose pin becomes the part's. */
void vmm_bind_add(vmm_object multicast, int device, uint64_t offset, uint64_t bytes, vmm_object memory);
/* The parts that lie in the range. */
vmm_list vmm_bind_take(vmm_object multicast, int device, uint64_t offset, uint64_t bytes);
void vmm_bind_restore(vmm_object multicast, vmm_list list);

/*
 * A sparse array refers to memory, whose pin becomes the array's. Which of its tiles do is not
 * followed: when one is unmapped, the stream decides when the driver lets go. So it refers to it
 * until the array is gone.
 */
void vmm_array_add(uint64_t array, vmm_object memory);
vmm_list vmm_array_take(uint64_t array);
void vmm_array_restore(vmm_list list);

#endif
