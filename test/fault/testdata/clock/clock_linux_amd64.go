package main

import (
	"os"
	"syscall"
	"unsafe"
)

// The tests of faults build this into the program: its clock on the wall, and only
// that one, is off by as many seconds as the file FAULT_CLOCK says, which may change
// at any time. It is the function of the kernel's that Go's runtime calls, with
// another around it.

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
