/* SPDX-License-Identifier: Apache-2.0 */
/*
 * thunk.S: the entry points dlsym and dlvsym. Each asks its gpufence_decide_* (dlsym.c) with the
 * caller's return address as last argument and gets two words: jump there, if the second is not
 * 0, with arguments, stack and return address as they came; else return the first. gpufence_dlsym
 * and gpufence_dlvsym are the same by names that no other library can take.
 */
#if defined(__CET__) && defined(__x86_64__)
#include <cet.h>
#else
#define _CET_ENDBR
#endif

	.hidden	gpufence_decide_dlsym
	.hidden	gpufence_decide_dlvsym
	.text

#if defined(__x86_64__)

	.macro THUNK name, decide, last
	.globl	\name
	.type	\name, @function
	.p2align 4
\name:
	.cfi_startproc
	_CET_ENDBR
	pushq	%rdi
	.cfi_adjust_cfa_offset 8
	pushq	%rsi
	.cfi_adjust_cfa_offset 8
	pushq	%rdx
	.cfi_adjust_cfa_offset 8
	movq	24(%rsp), %\last
	call	\decide
	movq	%rdx, %r11
	popq	%rdx
	.cfi_adjust_cfa_offset -8
	popq	%rsi
	.cfi_adjust_cfa_offset -8
	popq	%rdi
	.cfi_adjust_cfa_offset -8
	testq	%r11, %r11
	jz	1f
	jmp	*%r11
1:	ret
	.cfi_endproc
	.size	\name, .-\name
	.globl	gpufence_\name
	.hidden	gpufence_\name
	.set	gpufence_\name, \name
	.endm

	THUNK dlsym, gpufence_decide_dlsym, rdx
	THUNK dlvsym, gpufence_decide_dlvsym, rcx

#elif defined(__aarch64__)

	.macro THUNK name, decide, last
	.globl	\name
	.type	\name, %function
	.p2align 4
\name:
	.cfi_startproc
	hint	#34	/* bti c */
	stp	x29, x30, [sp, #-48]!
	.cfi_def_cfa_offset 48
	.cfi_offset x29, -48
	.cfi_offset x30, -40
	mov	x29, sp
	stp	x0, x1, [sp, #16]
	str	x2, [sp, #32]
	mov	\last, x30
	bl	\decide
	mov	x16, x1
	cbz	x16, 1f
	ldp	x0, x1, [sp, #16]
	ldr	x2, [sp, #32]
	ldp	x29, x30, [sp], #48
	.cfi_remember_state
	.cfi_restore x29
	.cfi_restore x30
	.cfi_def_cfa_offset 0
	br	x16
	.cfi_restore_state
1:	ldp	x29, x30, [sp], #48
	.cfi_restore x29
	.cfi_restore x30
	.cfi_def_cfa_offset 0
	ret
	.cfi_endproc
	.size	\name, .-\name
	.globl	gpufence_\name
	.hidden	gpufence_\name
	.set	gpufence_\name, \name
	.endm

	THUNK dlsym, gpufence_decide_dlsym, x2
	THUNK dlvsym, gpufence_decide_dlvsym, x3

#else
#error "no thunk for this machine"
#endif

	.section .note.GNU-stack,"",%progbits
