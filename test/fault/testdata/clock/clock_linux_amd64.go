package main

import (
	"os"
	"syscall"
	"unsafe"
)

// The fault tests build this into the program. Only the program's wall clock is then
// off by as many seconds as the file FAULT_CLOCK says, which may change at any time.
// It wraps the kernel's function that Go's runtime calls.

//go:linkname vdsoClockgettimeSym runtime.vdsoClockgettimeSym
var vdsoClockgettimeSym uintptr

var (
	realClock uintptr // the kernel's function
	offBy     *int64  // seconds, in the file
)

func wrongClock() uintptr

func init() {
	path := os.Getenv("FAULT_CLOCK")
	if path == "" {
		return
	}
	f, err := os.OpenFile(path, os.O_RDWR, 0)
	if err != nil {
		panic(err)
	}
	defer f.Close()
	page, err := syscall.Mmap(int(f.Fd()), 0, 8, syscall.PROT_READ, syscall.MAP_SHARED)
	if err != nil {
		panic(err)
	}
	if vdsoClockgettimeSym == 0 {
		panic("there is no clock of the kernel's to be wrong")
	}
	offBy, realClock = (*int64)(unsafe.Pointer(&page[0])), vdsoClockgettimeSym
	vdsoClockgettimeSym = wrongClock()
}
