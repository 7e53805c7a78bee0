// SPDX-License-Identifier: Apache-2.0

// Package cdi looks after the CDI specifications of a node's GPUs: whether the ones that are there
// can be used, where the driver lies that a new one has to name, and the one file that is ours.
//
// What it promises:
//   - A specification that names what is not there any more (files of a driver that was replaced,
//     a device node with another number) is never used; the reason is one sentence.
//   - Our file has a kind of its own ([plan.KindGPU]), so that it cannot make a device name of
//     another file ambiguous, and is replaced by a rename. A file that does not carry our mark, or
//     is no regular file, is neither written nor removed, whatever its name.
//   - Our file is removed when it would be wrong: the driver is gone or another one, or another
//     specification does the job.
//
// It links neither NVML nor nvcdi: who generates is a function that [Refresher] is given.
package cdi
