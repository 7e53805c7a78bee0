// SPDX-License-Identifier: GPL-2.0-only OR Apache-2.0

// What the gate's door costs, on a tracepoint: kernels that refuse security module programs take it. Nothing can be
// refused from there, so what is measured is the code alone. It takes every ioctl for one of the benchmark's device; who
// is in no managed cgroup pays for that what anybody would.

#define ELSEWHERE
#include "../../../../bpf/src/gate.bpf.c"

#define IOCTL 16	/* of x86-64 */
#define RDEV 0x100003	/* /dev/null */

SEC("tp_btf/sys_enter")
int empty(__u64 *ctx)
{
	(void)ctx;
	return 0;
}

SEC("tp_btf/sys_enter")
int door_on_enter(__u64 *ctx)
{
	struct pt_regs *regs = (struct pt_regs *)ctx[0];
	if (ctx[1] == IOCTL)
		weigh(0, 0, 1, RDEV, (__u32)regs->si, regs->dx);
	return 0;
}
