#include "textflag.h"

// func wrongClock() uintptr
TEXT ·wrongClock(SB), NOSPLIT, $0-8
	LEAQ	offClock<>(SB), AX
	MOVQ	AX, ret+0(FP)
	RET

// int clock_gettime(clockid_t DI, struct timespec *SI), as C calls it.
TEXT offClock<>(SB), NOSPLIT|NOFRAME, $0
	PUSHQ	DI
	PUSHQ	SI
	SUBQ	$8, SP
	MOVQ	·realClock(SB), AX
	CALL	AX
	ADDQ	$8, SP
	POPQ	SI
	POPQ	DI
	CMPL	DI, $0 // CLOCK_REALTIME
	JNE	done
	MOVQ	·offBy(SB), CX
	MOVQ	(CX), CX
	ADDQ	CX, 0(SI)
done:
	RET
