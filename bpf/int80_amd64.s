// SPDX-License-Identifier: Apache-2.0

#include "textflag.h"

// func call32(number, a, b, c uint32) int32
// The kernel takes the call as a 32-bit program's.
TEXT ·call32(SB), NOSPLIT, $0-20
	MOVL number+0(FP), AX
	MOVL a+4(FP), BX
	MOVL b+8(FP), CX
	MOVL c+12(FP), DX
	BYTE $0xcd; BYTE $0x80
	MOVL AX, ret+16(FP)
	RET
